"""Constraints compiled for a vocabulary: what they allow, what is refused and why, and that nothing harms."""

import json
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence

import pytest

from kvatlas.constraints.compiler import Compiled, Compiler, TokenTable
from kvatlas.constraints.text import MAX_CONSTRAINT_BYTES, ConstraintError, ConstraintText
from kvatlas.constraints.threads import DeepThreads
from kvatlas.models.text_vocabulary import toy_vocabulary

SIZE, EOS = 512, 257
TABLE = TokenTable.of(toy_vocabulary(SIZE), {EOS})
COMPILER = Compiler(lambda: TABLE, SIZE)

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
GBNF = 'root ::= "a" tail*\ntail ::= [x-z] | "(" root ")"'
LARK = 'start: "a" tail*\ntail: /[x-z]/ | "(" start ")"'
SEVEN = ("yes", 'a "b" \\', "\x01\n/", "😀é", "", "//", "%json")


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1}


def accepts(compiled: Compiled, text: str | bytes) -> bool:
    """Whether a text may be the whole output; every token is looked for in the mask before it."""
    progress = compiled.begin()
    for token in text.encode() if isinstance(text, str) else text:
        if token not in allowed(progress.mask()):
            return False
        progress.take((token,))
    return EOS in allowed(progress.mask()) and progress.dead_end is None


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (
            ConstraintText("json_schema", PERSON),
            ['{"name": "Bob", "age": 42}'],
            ['{"name": "Bob"}', '{"age": 42, "name": "Bob"}', '{"name": "Bob", "age": -1}', "{}", ""],
        ),
        (ConstraintText("json_schema", "true"), ["null", '"x"', "[1, 2.5, {}]"], ["", "nul", "[1,"]),
        (ConstraintText("json_schema", "{}"), ["null", '{"a": [true]}'], ["x"]),
        (ConstraintText("regex", r"\d{3}-[a-z]+"), ["123-abc"], ["123-", "12-abc", "123-abcD"]),
        (ConstraintText("regex", 'a/b"\\\\\n|^c$'), ['a/b"\\\n', "c"], ["a", "a/b"]),
        (ConstraintText("grammar", GBNF), ["a", "axyz(a)"], ["", "b", "a(", "a()"]),
        (ConstraintText("grammar", LARK), ["a", "axyz(a)"], ["", "b", "a(", "a()"]),
        (ConstraintText("choices", choices=SEVEN), SEVEN, ["y", "yess", "no", "\x02", "é"]),
    ],
    ids=lambda value: value.kind if isinstance(value, ConstraintText) else "",
)
def test_exactly_the_language_is_allowed(
    constraint: ConstraintText, good: Iterable[str], bad: Iterable[str]
) -> None:
    compiled = COMPILER.compile(constraint)
    assert [text for text in good if not accepts(compiled, text)] == []
    assert [text for text in bad if accepts(compiled, text)] == []


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        (ConstraintText("json_schema", "{"), "is not JSON"),
        (ConstraintText("json_schema", "[]"), "must be a JSON object or a boolean"),
        (ConstraintText("json_schema", '{"type": "objekt"}'), "Invalid type: objekt"),
        (ConstraintText("json_schema", '{"properties": []}'), "properties must be an object"),
        (ConstraintText("json_schema", '{"not": {"type": "string"}}'), 'Unimplemented keys: ["not"]'),
        (ConstraintText("json_schema", '{"$ref": "https://example.com/a"}'), "does not fetch"),
        (ConstraintText("json_schema", '{"$ref": "#/$defs/nope"}'), "does not exist"),
        (ConstraintText("json_schema", "false"), "Unsatisfiable"),
        (ConstraintText("json_schema", '{"allOf": [{"$ref": "#"}]}'), "no output can satisfy it"),
        (ConstraintText("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'), "is not taken"),
        (ConstraintText("json_schema", '{"items": ' * 3000 + "{}" + "}" * 3000), "nested too deeply"),
        (ConstraintText("regex", "("), "unclosed group"),
        (ConstraintText("regex", r"(a)\1"), "backreferences are not supported"),
        (ConstraintText("regex", r"[^\s\S]"), "no output can satisfy it"),
        (ConstraintText("grammar", 'root ::= "a" b'), "Rule 'b' not found"),
        (ConstraintText("grammar", "hello"), "Expected ::="),
        (ConstraintText("grammar", 'start: "a" b'), 'unknown name: "b"'),
        (ConstraintText("grammar", 'start: start "a"'), "no output can satisfy it"),
        (ConstraintText("grammar", '%llguidance {}\nstart: "a"'), "is not taken"),
        (ConstraintText("grammar", "root ::= " + "(" * 5000), "nested too deeply"),
        (ConstraintText("grammar", "\n".join(f"r{i} ::= r{i + 1}" for i in range(300))), "256 rules"),
        (ConstraintText("regex", "a" * (MAX_CONSTRAINT_BYTES + 1)), "longer than 65536 bytes"),
        (ConstraintText("color", "red"), "no kind of constraint"),
    ],
    ids=lambda value: None if isinstance(value, ConstraintText) else value[:24],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(constraint: ConstraintText, why: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        COMPILER.compile(constraint)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "no_forcing" not in str(caught.value), "shows what only we wrote"


def test_eos_is_allowed_only_where_the_constraint_is_satisfied() -> None:
    progress = COMPILER.compile(ConstraintText("regex", "ab?")).begin()
    assert EOS not in allowed(progress.mask())
    progress.take(b"a")
    assert {ord("b"), EOS} <= allowed(progress.mask())
    progress.take(b"b")
    assert allowed(progress.mask()) == {EOS}


def test_every_token_that_continues_the_text_is_allowed_not_only_the_longest() -> None:
    """Ids past 258 of the byte vocabulary are other tokens of the same bytes: none of them is left out."""
    mask = allowed(COMPILER.compile(ConstraintText("choices", choices=("yes",))).begin().mask())
    assert {TABLE.tokens[token] for token in mask} == {b"y"}
    assert len(mask) == sum(token == b"y" for token in TABLE.tokens)


def test_an_output_goes_on_where_another_run_of_it_ended() -> None:
    compiled = COMPILER.compile(ConstraintText("json_schema", PERSON))
    text = b'{"name": "Bob", "age": 42}'
    for cut in range(len(text) + 1):
        resumed, whole = compiled.begin(text[:cut]), compiled.begin()
        for token in text[:cut]:
            whole.take((token,))
        assert resumed.mask() == whole.mask()
        assert resumed.num_tokens == whole.num_tokens == cut


def test_tokens_that_are_taken_back_never_were() -> None:
    compiled = COMPILER.compile(ConstraintText("json_schema", PERSON))
    progress = compiled.begin(b'{"name": "B')
    before = progress.mask()
    progress.take(b"ob")
    progress.take_back(2)
    assert (progress.mask(), progress.num_tokens) == (before, 11)


def test_samples_of_one_constraint_do_not_meet() -> None:
    compiled = COMPILER.compile(ConstraintText("choices", choices=("ab", "cd")))
    first, second = compiled.begin(), compiled.begin()
    first.take(b"a")
    assert ord("b") in allowed(first.mask())
    assert {ord("a"), ord("c")} <= allowed(second.mask())


def test_a_token_outside_of_the_language_leaves_nothing() -> None:
    progress = COMPILER.compile(ConstraintText("regex", r"\d+")).begin(b"x")
    progress.mask()
    assert "x" in (progress.dead_end or "")


def test_a_regular_rule_of_a_grammar_takes_as_much_as_it_can() -> None:
    """As a lexer does; docs/structured-output.md says so. What is put out is of the grammar all the same."""
    greedy = COMPILER.compile(ConstraintText("grammar", 'root ::= num "5"\nnum ::= [0-9]+'))
    assert not accepts(greedy, "125")
    inline = COMPILER.compile(ConstraintText("grammar", 'root ::= [a-z]+ "x" root | "."'))
    assert accepts(inline, "abx.")


def test_a_kept_constraint_is_not_compiled_again_and_the_oldest_goes_first() -> None:
    seconds: list[float] = []
    hits: list[None] = []
    compiler = Compiler(
        lambda: TABLE, SIZE, max_kept=2, on_compiled=seconds.append, on_hit=lambda: hits.append(None)
    )
    one, two, three = (ConstraintText("regex", text) for text in "abc")
    first = compiler.compile(one)
    assert compiler.compile(one) is first
    compiler.compile(two)
    compiler.known(one)
    compiler.compile(three)
    assert compiler.known(two) is None
    assert compiler.known(one) is first
    assert (len(seconds), len(hits)) == (3, 3)


def test_a_vocabulary_padded_past_its_tokens_masks_the_padding() -> None:
    padded = Compiler(lambda: TABLE, SIZE + 100)
    mask = padded.compile(ConstraintText("regex", r"(?s).*")).begin().mask()
    assert len(mask) == -(-(SIZE + 100) // 32) * 4
    assert max(allowed(mask)) < SIZE


def in_deep_thread(work: Callable[[], object]) -> object:
    threads, found, done = DeepThreads("test"), [], threading.Event()

    def run() -> None:
        try:
            found.append(work())
        except ConstraintError as error:
            found.append(error)
        done.set()

    assert threads.submit(run)
    done.wait()
    threads.close()
    return found[0]


def test_the_end_of_the_process_waits_for_what_runs() -> None:
    """A thread that came back from the library afterwards ended the process by SIGSEGV."""
    script = """
import threading, time
from kvatlas.constraints.threads import DeepThreads
begun = threading.Event()
def work():
    begun.set()
    time.sleep(0.5)
    print("done", flush=True)
threads = DeepThreads("test", num_threads=2)
threads.submit(work)
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_close_beside_threads_that_take_the_last_work_comes_back() -> None:
    """It waited for work that a thread had taken since it looked: a service that drained never ended."""
    script = """
import sys
from kvatlas.constraints.threads import DeepThreads
sys.setswitchinterval(1e-6)
for _ in range(200):
    threads = DeepThreads("test", num_threads=2, max_waiting=64)
    for _ in range(30):
        threads.submit(lambda: None)
    threads.close()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def chain(rule: Callable[[int], str], last: str) -> str:
    """As many rules in a row as the limit of bytes takes."""
    lines, size = [], len(last) + 16
    while size < MAX_CONSTRAINT_BYTES:
        lines.append(rule(len(lines)))
        size += len(lines[-1].encode()) + 1
    lines.pop()
    return "\n".join([*lines, last.format(len(lines))])


def refs(entry: Callable[[int], object], count: int) -> str:
    entries = {f"a{number}": entry(number) for number in range(count)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": entries | {f"a{count}": {"type": "integer"}}})


@pytest.mark.parametrize(
    "constraint",
    [
        ConstraintText("grammar", "start: r0\n" + chain(lambda i: f'r{i}: "x" r{i + 1}', 'r{}: "a"')),
        ConstraintText("grammar", "start: R0\n" + chain(lambda i: f"R{i}: R{i + 1}", 'R{}: "a"')),
        ConstraintText("json_schema", refs(lambda i: {"$ref": f"#/$defs/a{i + 1}"}, 1700)),
        ConstraintText("json_schema", refs(lambda i: {"items": {"$ref": f"#/$defs/a{i + 1}"}}, 1300)),
        ConstraintText("json_schema", refs(lambda i: {"allOf": [{}, {"$ref": f"#/$defs/a{i + 1}"}]}, 1100)),
    ],
    ids=["rules", "terminals", "refs", "items", "all-of"],
)
def test_the_longest_chain_of_rules_ends_no_process(constraint: ConstraintText) -> None:
    """On a stack of the usual 8 MB about 3,000 rules were the end of it: no exception, a crash."""
    assert constraint.num_bytes <= MAX_CONSTRAINT_BYTES
    outcome = in_deep_thread(lambda: COMPILER.compile(constraint).begin().mask())
    assert isinstance(outcome, bytes | ConstraintError)


def branches(letter: str, count: int) -> dict[str, Sequence[object]]:
    return {"anyOf": [{"properties": {f"{letter}{i}": {"type": "integer"}}} for i in range(count)]}


def test_a_schema_that_explodes_is_refused_for_its_size() -> None:
    """60 times 60 alternatives: without our limits compiling and the first mask took 1.7 s of CPU."""
    schema = {
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": branches("k", 60), "b": branches("j", 60)},
    }
    outcome = in_deep_thread(lambda: COMPILER.compile(ConstraintText("json_schema", json.dumps(schema))))
    assert isinstance(outcome, ConstraintError), outcome


def test_work_that_finds_no_room_is_refused_and_a_closed_pool_takes_none() -> None:
    threads, gate, ran = DeepThreads("test", max_waiting=1), threading.Event(), threading.Semaphore(0)
    assert threads.submit(lambda: (ran.release(), gate.wait(), None)[-1])
    ran.acquire()  # it runs, the queue is empty
    assert threads.submit(ran.release)
    assert not threads.submit(ran.release)
    gate.set()
    ran.acquire()
    threads.close()
    assert not threads.submit(ran.release)


def test_an_end_waits_for_no_work_that_a_thread_takes_before_it() -> None:
    """What stood in the queue at one look may be gone at the next: one of a few dozen ends never came."""
    interval = sys.getswitchinterval()
    closer = threading.Thread(target=_open_and_close, args=(500,), daemon=True)
    sys.setswitchinterval(1e-6)  # threads change places wherever they can
    try:
        closer.start()
        closer.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not closer.is_alive()


def _open_and_close(times: int) -> None:
    for _ in range(times):
        threads = DeepThreads("test", num_threads=4)
        for _ in range(20):
            threads.submit(lambda: None)
        threads.close()


def test_behind_output_that_breaks_the_constraint_nothing_is_allowed_not_even_the_end() -> None:
    """A client goes on with tokens of its own saying: the library would allow EOS, as if all were well."""
    words = array("I", [0xFFFFFFFF] * (SIZE // 32))
    address, size = words.buffer_info()
    progress = COMPILER.compile(ConstraintText("regex", "[a-f]{3,9}")).begin(b"0123")
    assert progress.write_mask(address, size * words.itemsize) is not None
    assert allowed(words.tobytes()) == set()
