"""Constraints through the whole stack: service, seam, worker on the CPU, real tokens of the real model."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from benchmarks.json_schemas import Schema, schemas
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc, server_pb2, server_pb2_grpc
from service.testing import Refusal
from service.testing_fleet import Fleet, running_fleet, wait_for

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "structured-output.md"
CALL_SECONDS = 600.0  # ends a call that hangs
POINT = json.dumps(
    {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["x"],
        "additionalProperties": False,
    }
)
EOS, CUT = pb.FINISH_REASON_EOS, pb.FINISH_REASON_MAX_TOKENS


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), "--num-pages", "400", count=1) as made:
        yield made


def spec_of(
    text: str = "go on", *, temperature: float = 0.0, max_tokens: int = 120, **more: Any
) -> pb.GenerationSpec:
    return pb.GenerationSpec(
        text="go on",
        sampling=pb.SamplingParams(temperature=temperature, seed=7, n=more.pop("n", 1)),
        stop=pb.StopCriteria(max_tokens=max_tokens, **more.pop("stop", {})),
        **more,
    )


def answer(fleet: Fleet, spec: pb.GenerationSpec) -> pb.GenerateResponse:
    response = fleet.generation.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    assert isinstance(response, pb.GenerateResponse)
    return response


def refusal(fleet: Fleet, spec: pb.GenerationSpec) -> Refusal:
    with pytest.raises(grpc.RpcError) as caught:
        answer(fleet, spec)
    return Refusal.of(caught.value)


def is_idle(fleet: Fleet) -> bool:
    return all(fleet.active_pages(worker.worker_id) == 0 for worker in fleet.workers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"json_schema": POINT}, r'\{"x": \d{1,2}\}'),
        ({"regex": r"\d{3}-[a-z]{2,4}"}, r"\d{3}-[a-z]{2,4}"),
        ({"grammar": 'root ::= "<" item ("," item)? ">"\nitem ::= [a-f] [a-f]'}, "<[a-f]{2}(,[a-f]{2})?>"),
        ({"grammar": 'start: "(" /[0-9]/ ("+" /[0-9]/)~0..2 ")"'}, r"\(\d(\+\d){0,2}\)"),
        ({"choices": pb.ChoiceConstraint(choices=["yes", "no", "ünsure"])}, "yes|no|ünsure"),
    ],
    ids=["json", "regex", "gbnf", "lark", "choices"],
)
def test_each_kind_gives_an_answer_that_satisfies_it(
    fleet: Fleet, constraint: dict[str, Any], pattern: str, temperature: float
) -> None:
    spec = spec_of(temperature=temperature, n=2, **constraint)
    whole = answer(fleet, spec)
    for choice in whole.choices:
        assert (choice.finish_reason, bool(re.fullmatch(pattern, choice.text))) == (EOS, True), choice
    texts = ["", ""]
    for message in fleet.stream(spec):
        if message.WhichOneof("event") == "delta":
            texts[message.delta.index] += message.delta.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize(
    ("constraint", "path", "why"),
    [
        ({"json_schema": '{"type": "objekt"}'}, "spec.json_schema", "Invalid type: objekt"),
        ({"json_schema": '{"not": {}}'}, "spec.json_schema", "Unimplemented keys"),
        ({"json_schema": "{"}, "spec.json_schema", "is not JSON"),
        ({"regex": "("}, "spec.regex", "unclosed group"),
        ({"regex": "x" * 70_000}, "spec.regex", "longer than 65536 bytes"),
        ({"grammar": 'root ::= "a" b'}, "spec.grammar", "Rule 'b' not found"),
        ({"choices": pb.ChoiceConstraint()}, "spec.choices.choices", "not 1 to 64"),
        ({"choices": pb.ChoiceConstraint(choices=["a", "a"])}, "spec.choices.choices", "must differ"),
        ({"regex": "a", "stop": {"ignore_eos": True}}, "spec.stop.ignore_eos", "ends with EOS"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_that_cannot_be_meant_names_its_field_before_anything_runs(
    fleet: Fleet, constraint: dict[str, Any], path: str, why: str
) -> None:
    found = refusal(fleet, spec_of(**constraint))
    assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert list(found.paths) == [path]
    assert why in found.message
    wait_for(lambda: is_idle(fleet), "no pages in use", fleet.workers)


def test_an_output_that_is_cut_off_says_so_and_was_on_its_way(fleet: Fleet) -> None:
    (choice,) = answer(fleet, spec_of(json_schema=POINT, max_tokens=4)).choices
    assert (choice.finish_reason, choice.text) == (CUT, '{"x"')


def test_a_stop_string_ends_it_earlier(fleet: Fleet) -> None:
    spec = spec_of(json_schema=POINT, stop={"stop_strings": ['"x"']})
    (choice,) = answer(fleet, spec).choices
    assert (choice.finish_reason, choice.text) == (pb.FINISH_REASON_STOP_STRING, "{")


def test_a_dead_end_has_its_reason_and_harms_nobody(fleet: Fleet) -> None:
    dead = spec_of(regex="abc", stop={"min_tokens": 8})
    with ThreadPoolExecutor(2) as threads:
        neighbour = threads.submit(answer, fleet, spec_of(json_schema=POINT))
        found = refusal(fleet, dead)
        assert neighbour.result().choices[0].finish_reason == EOS
    assert (found.code, found.reason) == ("INVALID_ARGUMENT", "CONSTRAINT_DEAD_END")
    assert "after 3 tokens" in found.message
    assert found.metadata["tokens_sent"] == "0"  # an answer that is sent whole was not
    wait_for(lambda: is_idle(fleet), "the pages of the dead end", fleet.workers)


def test_a_dead_end_within_a_stream_says_how_much_of_it_was_sent(fleet: Fleet) -> None:
    spec = spec_of(regex="abc", stop={"min_tokens": 8}, n=2)
    spec.output.format = pb.OUTPUT_FORMAT_TOKEN_IDS
    messages: list[pb.StreamGenerateResponse] = []  # keeps what came before the end
    with pytest.raises(grpc.RpcError) as caught:
        messages.extend(fleet.generation.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=60))
    received = sum(len(message.delta.token_ids) for message in messages)
    found = Refusal.of(caught.value)
    assert (found.reason, found.metadata["tokens_sent"]) == ("CONSTRAINT_DEAD_END", str(received))


def test_the_feature_is_told(fleet: Fleet) -> None:
    make: Any = server_pb2_grpc.ServerServiceStub
    with grpc.insecure_channel(fleet.running.address) as channel:
        info = make(channel).GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=60)
    assert "constraints" in info.features


def test_without_the_library_the_feature_is_off(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    from service.handlers.backstage import Backstage

    monkeypatch.setattr(Backstage, "features_of", lambda self, facts: frozenset[str]())
    found = refusal(fleet, spec_of(regex="a"))
    assert (found.code, found.reason) == ("FAILED_PRECONDITION", "FEATURE_DISABLED")
    assert found.metadata["feature"] == "constraints"


@pytest.mark.slow
def test_an_output_goes_on_within_its_constraint_when_its_worker_is_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The next worker reads the output so far into the constraint, and ends as the first would have."""
    constraint = r"([0-9]{4} ){24}end"
    with running_fleet(
        tmp_path_factory.mktemp("killed"), "--num-pages", "400", "--debug-faults", "requests"
    ) as fleet:
        spec = spec_of(temperature=1.0, max_tokens=200, regex=constraint)
        expected = answer(fleet, spec).choices[0].text
        slow = [fleet.slow() for _ in range(2)]
        stream = fleet.stream(spec)
        text, worker_id, was_killed, resumes = "", "", False, 0
        for message in stream:
            kind = message.WhichOneof("event")
            if kind == "started":
                worker_id = message.started.worker_id
            if kind == "delta":
                text += message.delta.text
                if len(text) > 20 and not was_killed:
                    was_killed = True
                    next(w for w in fleet.workers if w.worker_id == worker_id).signal(signal.SIGKILL)
            if kind == "summary":
                resumes = message.summary.usage.resumes
        for call in slow:
            call.cancel()
    assert re.fullmatch(constraint, text)
    assert (text, was_killed, resumes) == (expected, True, 1)


def test_the_examples_of_the_document_run(fleet: Fleet) -> None:
    text = DOCUMENT.read_text().replace("127.0.0.1:50051", fleet.running.address)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert names["chat"].tools_json
    (choice,) = answer(fleet, spec_of(grammar=names["grammar"], max_tokens=300)).choices
    name, arguments = json.loads(
        choice.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    ).values()
    assert (name, list(arguments)) == ("rain", ["city"])


# Schemas, on the real model.


def ask(stub: Any, schema: Schema, temperature: float) -> pb.Choice:
    prompt = f"Give a JSON value that satisfies this schema: {json.dumps(schema)}"
    turn = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content=prompt)
    spec = pb.GenerationSpec(
        chat=pb.ChatPrompt(messages=[turn]),
        sampling=pb.SamplingParams(temperature=temperature, seed=3),
        stop=pb.StopCriteria(max_tokens=300),
        json_schema=json.dumps(schema),
    )
    limit = time.monotonic() + CALL_SECONDS
    while True:
        try:
            response: pb.GenerateResponse = stub.Generate(pb.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
        except (
            grpc.RpcError
        ) as error:  # a worker whose step lasts half a minute gets nothing new until it ends
            call: Any = error
            if call.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > limit:
                raise
            threading.Event().wait(0.5)
        else:
            return response.choices[0]


def unsatisfied(schema: Schema, choice: pb.Choice) -> str | None:
    """What is wrong with an answer that says it is complete."""
    if choice.finish_reason != EOS:
        return None
    # Formats of this draft: those of all drafts together have times without an offset.
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        jsonschema.Draft202012Validator(schema, format_checker=formats).validate(json.loads(choice.text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{json.dumps(schema)}: {choice.text}: {error}"
    return None


def check_all(address: str, wanted: Sequence[Schema], at_once: int) -> tuple[int, int]:
    """Asks for each greedily and sampled; how many answers came, and how many were complete."""
    make: Any = generation_pb2_grpc.GenerationServiceStub
    # All greedily before all sampled: the second prompts are then in the cache.
    cases = [(schema, temperature) for temperature in (0.0, 1.0) for schema in wanted]
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(at_once) as threads:
        stub = make(channel)
        answers = list(threads.map(lambda case: ask(stub, *case), cases))
    faults = [unsatisfied(schema, choice) for (schema, _), choice in zip(cases, answers, strict=True)]
    assert [fault for fault in faults if fault] == []
    return len(answers), sum(choice.finish_reason == EOS for choice in answers)


@pytest.mark.model
def test_answers_of_the_real_model_satisfy_a_schema_of_each_kind(real_server: Any) -> None:
    """A pattern, a format, an array, alternatives, an object of all, annotations, a range, references."""
    every = schemas(200)
    wanted = [every[index] for index in (7, 12, 17, 27, 32, 37, 117, 145)]
    total, complete = check_all(real_server.address, wanted, 8)
    assert (total, complete) == (16, 16)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3000)
def test_answers_of_the_real_model_satisfy_two_hundred_schemas(real_server: Any) -> None:
    total, complete = check_all(real_server.address, schemas(200), 32)
    assert total == 400
    assert complete >= 0.98 * total, f"{complete} of {total} were complete"
