"""What a step holds: spans, pages, table writes; chunks of prompts beside running sequences."""

from array import array

import pytest

from tests.toy_scheduler import BOTH, MODEL, make, request
from worker.execution.fake_runner import FakeModel, answer_alone
from worker.execution.testing import Harness, small_config
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult


def alone(spec: RequestSpec, context: int = 64) -> list[int]:
    return answer_alone(MODEL, spec.prompt_token_ids, spec.params, 0, frozenset(), context)


def pages_of(harness: Harness) -> list[int]:
    return [len(view.page_ids) for view in harness.scheduler.sequence_views()]


def launched(harness: Harness) -> Step:
    step = harness.launch()
    assert step is not None
    return step


@BOTH
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("new_tokens", [1, 2, 5, 18])
def test_pages_held_are_those_of_stored_tokens(page_size: int, new_tokens: int, overlap: bool) -> None:
    """B008, S1-19, S1-20: ceil(stored / P) after each step; nothing is allocated inside a page."""
    edges = {page_size - 1, page_size, page_size + 1, 2 * page_size - 1, 2 * page_size, 2 * page_size + 1}
    for length in sorted(edges - {0}):
        harness = make(overlap, num_pages=64 // page_size + 4, page_size=page_size)
        harness.add(request(1, range(length), new_tokens))
        stored = 0
        while harness.scheduler.has_work(harness.now):
            step = harness.launch()
            if step is None:
                harness.settle()
                continue
            assert step.starts[0] == stored
            before, stored = stored, step.ends[0]
            new_pages = -(-stored // page_size) - -(-before // page_size)
            assert len(step.new_page_ids) == new_pages
            held = harness.scheduler.cache.pool.num_active
            assert held == -(-stored // page_size), f"{length} prompt tokens, {stored} stored"
            if not overlap:
                harness.settle()
            elif harness.scheduler.num_in_flight > 1:
                harness.commit()
        harness.settle()
        assert stored == length + new_tokens - 1
        assert len(harness.answers[1].tokens) == new_tokens


def test_a_pool_of_exactly_the_need_is_enough_and_one_page_less_is_refused() -> None:
    """B008, B033, H15."""
    spec = request(1, range(5), max_tokens=8)  # 13 tokens: 4 pages of 4
    exact = make(num_pages=4)
    assert exact.add(spec).status == AddStatus.ACCEPTED
    exact.run()
    assert exact.answers[1].tokens == alone(spec)
    outcome = make(num_pages=3).add(spec)
    assert (outcome.status, outcome.needed_pages, outcome.total_pages) == (AddStatus.NEVER_FITS, 4, 3)


def test_a_step_mixes_decode_with_prompts() -> None:
    """M-01, M-02: mini-sglang has two kinds of batches; ours is one mixed batch, decode first."""
    harness = make(max_running=4, max_step_tokens=16)
    harness.add(request(1, range(4), max_tokens=20))
    harness.turn()
    harness.add(request(2, range(100, 140), max_tokens=2))
    step = launched(harness)
    assert list(step.sequence_ids) == [1, 2]
    assert step.num_decode == 1
    assert (list(step.starts), list(step.ends)) == ([4, 0], [5, 15])
    assert list(step.sampled) == [0]
    assert step.num_tokens == 16
    for start, end, row in zip(step.starts, step.ends, step.rows, strict=True):
        assert 0 <= start < end <= 64
        assert 0 <= row < 4
    harness.settle()


def test_the_batch_allocates_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-21, S1-24: one pool allocation a step for all sequences, its length what is written to rows."""
    harness = make(num_pages=40)
    cache = harness.scheduler.cache
    calls: list[int] = []
    allocate = cache.allocate

    def counted(owners: "array[int]") -> list[int] | None:
        calls.append(len(owners))
        return allocate(owners)

    monkeypatch.setattr(cache, "allocate", counted)
    for number in range(1, 5):
        harness.add(request(number, range(100 * number, 100 * number + 7), max_tokens=12))
    steps = 0
    while harness.scheduler.has_work(harness.now):
        step = launched(harness)
        steps += 1
        assert len(calls) == steps
        assert calls[-1] == len(step.new_page_ids)
        harness.settle()
    assert 0 in calls
    assert harness.runner.num_table_writes <= steps


def test_the_row_is_written_for_whole_pages() -> None:
    """S1-25, S1-17: slots behind the last token, up to the end of its page, are valid."""
    harness = make()
    harness.add(request(1, range(6), max_tokens=2))
    step = launched(harness)
    harness.settle()
    assert len(step.new_page_ids) == 2
    (span,) = harness.scheduler.row_spans(8, 1000)
    slots = span.slots
    assert len(slots) == 8
    assert [slot % 4 for slot in slots] == [0, 1, 2, 3] * 2
    harness.audit_rows()


def test_no_row_ever_names_the_dummy_page_and_nobody_gets_the_dummy_row() -> None:
    """S1-26, S1-29: over a workload that fills pool and rows."""
    harness = make(num_pages=12, max_running=3, max_step_tokens=12)
    for number in range(1, 20):
        harness.add(request(number, range(number, number + 9), max_tokens=9))
    seen: set[int] = set()
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is None:
            continue
        seen |= set(step.rows)
        assert max(step.rows) < 3
        assert all(page < 12 for page in step.new_page_ids)
        for row in step.rows:
            assert max(harness.runner.page_table[row][: 4 * 6]) <= 12 * 4  # unwritten entries: the dummy's
        harness.audit_rows()
    assert seen == {0, 1, 2}
    assert harness.runner.page_table[3] == [48] * len(harness.runner.page_table[3])


@BOTH
@pytest.mark.parametrize("cache_write", [True, False])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_prompt_in_chunks_is_computed_once(sharing: bool, cache_write: bool, overlap: bool) -> None:
    """B013, M-19: 4·C + 3 tokens are exactly five pieces, cached or not, and pages held = ceil(len / P)."""
    chunk = 7
    length = 4 * chunk + 3
    harness = make(overlap, num_pages=32, sharing=sharing, max_chunk_tokens=chunk)
    spec = request(1, range(length), max_tokens=3, cache_write=cache_write)
    harness.add(spec)
    pieces = []
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is not None and not step.num_decode:
            pieces.append(step.ends[0] - step.starts[0])
            assert harness.scheduler.cache.pool.num_active == -(-step.ends[0] // 4)
    assert pieces == [7, 7, 7, 7, 3]
    assert harness.scheduler.counts().prompt_tokens_computed_total == length
    assert harness.answers[1].tokens == alone(spec)


@BOTH
def test_pieces_of_a_long_prompt_shrink_with_its_context_beside_running_sequences(overlap: bool) -> None:
    """Attention makes late pieces dear: half a step at the start, those who run counted with it, a fifth at
    four times the doubling context.

    Alone the same prompt takes whole steps, and so does beside others a prompt that fits in one.
    """
    settings = {"num_pages": 64, "max_context_tokens": 200, "doubling_context": 16}

    def pieces(num_running: int, num_tokens: int = 130) -> list[int]:
        prompt = range(100, 100 + num_tokens)
        harness = make(overlap, **settings)
        for number in range(num_running):
            harness.add(request(number + 1, [number] * 3, max_tokens=60))
        harness.turn()
        harness.turn()
        harness.add(request(9, prompt, max_tokens=2))
        found = []
        while harness.scheduler.has_work(harness.now):
            step = harness.turn()
            spans = [] if step is None else range(len(step.rows))
            found += [
                step.ends[i] - step.starts[i]
                for i in spans
                if step.sequence_ids[i] == 9 and i >= step.num_decode
            ]
        assert harness.answers[9].tokens == alone(request(9, prompt, max_tokens=2), 200)
        return found

    assert pieces(0) == [64, 64, 2]
    assert pieces(1, 60) == [60]
    beside = pieces(1)
    assert beside[:5] == [31, 21, 15, 12, 10]
    assert beside == sorted(beside, reverse=True)
    assert sum(beside) == 130
    assert pieces(3)[0] == 29
    # A limit of pieces is halved by itself; it does not pay for those who run as well.
    settings["max_chunk_tokens"] = 8
    assert pieces(3)[:3] == [4, 4, 4]


def test_pieces_get_no_shorter_than_a_part_of_the_longest_however_late_they_come() -> None:
    """A step has costs of its own."""
    harness = make(num_pages=160, max_context_tokens=300, doubling_context=1)
    harness.add(request(1, range(3), max_tokens=200))
    harness.turn()
    harness.add(request(2, range(100, 380), max_tokens=2))
    pieces = []
    while not harness.answers[2].tokens:
        step = harness.turn()
        assert step is not None
        pieces.append(step.ends[1] - step.starts[1])
    assert sum(pieces) == 280
    assert pieces[0] > min(pieces[:-1]) == pieces[-2] == 64 // 32


def test_a_long_prompt_goes_on_beside_more_running_sequences_than_half_a_step() -> None:
    """A piece that leaves its prompt unfinished is shorter by their number; something is left of it."""
    harness = make(
        num_pages=400, max_running=50, max_step_tokens=64, max_context_tokens=300, doubling_context=64
    )
    for number in range(1, 41):
        harness.add(request(number, [number], max_tokens=60))
    harness.turn()
    harness.add(request(99, range(100, 200), max_tokens=2))
    for _ in range(3):
        step = harness.turn()
        assert step is not None
        assert step.num_decode == 40
        assert step.ends[40] - step.starts[40] == 64 // 32


def test_a_prompt_in_the_queue_that_goes_after_others_is_left_nothing() -> None:
    """What is kept of a step is for one of higher priority."""
    harness = make(num_pages=64, max_running=3, max_step_tokens=16, max_context_tokens=128)
    for number in (1, 2, 3, 4):
        harness.add(request(number, range(100 * number, 100 * number + 40)))
    harness.turn()
    step = harness.turn()
    assert step is not None
    assert list(step.sequence_ids) == [1, 2, 3]


@BOTH
@pytest.mark.parametrize("chunk", [1, 2, 7, 22])
def test_only_the_last_chunk_samples(chunk: int, overlap: bool) -> None:
    """B064: 3·C + 1 tokens; a token and a log-probability each output token, none from inner chunks."""
    harness = make(overlap, num_pages=32, max_chunk_tokens=chunk, max_context_tokens=80)
    spec = request(1, range(3 * chunk + 1 if chunk < 22 else 22), max_tokens=6, logprobs=0)
    harness.add(spec)
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is not None and step.ends[0] < len(spec.prompt_token_ids):
            assert list(step.sampled) == []
    answer = harness.answers[1]
    assert answer.tokens == alone(spec, 80)
    assert len(answer.logprobs) == len(answer.tokens) == 6


@BOTH
@pytest.mark.parametrize("length", [1, 7, 8, 9, 19])
def test_the_context_is_filled_exactly(length: int, overlap: bool) -> None:
    """B043: prompt and output together are L tokens, never L + 1, whatever the chunk."""
    for chunk in (0, 3):
        harness = make(overlap, max_context_tokens=20, max_chunk_tokens=chunk)
        harness.add(request(1, range(length), max_tokens=20))
        harness.run()
        answer = harness.answers[1]
        assert len(answer.tokens) == 20 - length
        assert answer.code == FinishCode.CONTEXT_LENGTH
        assert answer.end is not None
        assert answer.end.completion_tokens == 20 - length


@BOTH
def test_the_last_token_by_length_is_not_computed_further(overlap: bool) -> None:
    """An end that is known ahead costs no discarded token, also with a step in flight."""
    harness = make(overlap)
    harness.add(request(1, range(5), max_tokens=3))
    steps = []
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        if step is not None:
            steps.append((step.starts[0], step.ends[0]))
    assert steps == [(0, 5), (5, 6), (6, 7)]


def test_a_short_prompt_behind_long_ones_starts_within_a_few_steps() -> None:
    """B040: two long prompts and a running sequence; the short one gets its first piece soon."""
    harness = make(num_pages=400, max_running=8, max_step_tokens=65, max_context_tokens=1500)
    harness.add(request(1, range(4), max_tokens=300))
    harness.turn()
    harness.add(request(2, range(1000, 1900)))
    harness.add(request(3, range(2000, 2900)))
    for _ in range(3):
        harness.turn()
    harness.add(request(4, range(3000, 3004)))
    for _ in range(3):
        harness.turn()
    assert harness.answers[4].tokens
    assert not harness.answers[2].tokens
    assert not harness.answers[3].tokens


@pytest.mark.parametrize("num_long", [1, 3, 8])
def test_however_many_prompts_are_unfinished_one_of_higher_priority_starts_before_them(num_long: int) -> None:
    """B040: each of them takes three quarters of what is left, until nothing is; then it was not let in."""
    harness = make(num_pages=4000, max_running=32, max_step_tokens=256, max_context_tokens=1500)
    for number in range(num_long):
        harness.add(request(number, range(1400 * number, 1400 * number + 1400)))
    for _ in range(3):
        harness.turn()
    harness.add(request(99, range(4), priority=1))
    for _ in range(2):
        harness.turn()
    assert harness.answers[99].tokens
    assert not any(harness.answers[number].tokens for number in range(num_long))


def test_prompts_go_on_behind_one_of_higher_priority_that_does_not_fit() -> None:
    harness = make(num_pages=64, max_running=9, max_step_tokens=16, max_context_tokens=256)
    prompts = {number: range(100 * number, 100 * number + 20) for number in range(1, 6)}
    for number, prompt in prompts.items():
        harness.add(request(number, prompt))
    harness.turn()
    harness.add(request(9, range(900, 1140), priority=1))
    harness.turn()
    assert harness.answers[9].start is None
    while not all(harness.answers[number].end for number in prompts):
        harness.turn()
    harness.run()
    assert len(harness.answers[9].tokens) == 4


def test_tokens_that_nobody_else_can_use_go_to_the_first_prompt() -> None:
    harness = make(num_pages=64, max_step_tokens=41, max_context_tokens=200, max_running=2)
    harness.add(request(1, range(100)))
    harness.add(request(2, range(500, 503)))
    step = launched(harness)
    assert step.num_tokens == 41
    assert list(step.ends) == [38, 3]
    harness.settle()


def test_what_is_left_of_a_step_is_spent_once() -> None:
    """Two prompts that are not finished, and one that waits for a row: both could use what is left."""
    harness = make(num_pages=100, max_running=2, max_step_tokens=16, max_context_tokens=100)
    for number in (1, 2, 3):
        harness.add(request(number, range(100 * number, 100 * number + 60)))
    step = harness.turn()
    assert step is not None
    assert [end - start for start, end in zip(step.starts, step.ends, strict=True)] == [13, 3]


def test_running_sequences_go_on_while_a_prompt_is_computed() -> None:
    """Open streams never stall behind a long prompt."""
    harness = make(num_pages=64, max_step_tokens=16, max_context_tokens=300, max_running=2)
    harness.add(request(1, range(4), max_tokens=50))
    harness.turn()
    harness.add(request(2, range(1000, 1100)))
    for count in range(2, 8):
        harness.turn()
        assert len(harness.answers[1].tokens) == count


def test_rows_are_never_twice_in_a_step_and_bound_concurrency() -> None:
    """S1-06."""
    harness = make(num_pages=64, max_running=3)
    for number in range(1, 8):
        harness.add(request(number, range(number * 10, number * 10 + 3), max_tokens=5))
    while harness.scheduler.has_work(harness.now):
        step = launched(harness)
        assert len(set(step.rows)) == len(step.rows) <= 3
        harness.settle()


@BOTH
def test_input_ids_come_from_the_token_pool(overlap: bool) -> None:
    """M-04: a row's ids are sent once; with overlap the next step starts before the token is known."""
    harness = make(overlap)
    spec = request(1, range(5), max_tokens=10)
    harness.add(spec)
    num_starts = 0
    while harness.scheduler.has_work(harness.now):
        step = harness.turn()
        num_starts += len(step.row_starts) if step is not None else 0
    assert num_starts == 1
    assert harness.answers[1].tokens == alone(spec)


def test_eos_ids_are_a_union_and_can_be_ignored() -> None:
    """H11, B076: every EOS id of the model ends; ignoring them does not switch off stop ids."""
    for token_id in (5, 9):
        model = FakeModel(1000, (token_id,), eos_every=3)
        spec = request(1, [1, 2, 3], max_tokens=40)
        harness = make(model=model, eos_token_ids=frozenset({5, 9}))
        harness.add(spec)
        harness.run()
        assert harness.answers[1].code == FinishCode.EOS
        assert harness.answers[1].tokens[-1] == token_id
        assert token_id not in harness.answers[1].tokens[:-1]
        ignoring = make(model=model, eos_token_ids=frozenset({5, 9}))
        ignoring.add(request(1, [1, 2, 3], max_tokens=40, stop_at_eos=False))
        ignoring.run()
        assert ignoring.answers[1].code == FinishCode.MAX_TOKENS
        stopping = make(model=model, eos_token_ids=frozenset({5, 9}))
        stop = frozenset({token_id})
        stopping.add(request(1, [1, 2, 3], max_tokens=40, stop_at_eos=False, stop_token_ids=stop))
        stopping.run()
        assert stopping.answers[1].code == FinishCode.STOP_TOKEN
        assert stopping.answers[1].tokens == harness.answers[1].tokens


@BOTH
def test_nothing_ends_before_min_tokens(overlap: bool) -> None:
    model = FakeModel(50, (5,), eos_every=2)
    for least in (0, 1, 7):
        spec = request(1, [1, 2, 3], max_tokens=40, min_tokens=least)
        harness = make(overlap, model=model, eos_token_ids=frozenset({5}))
        harness.add(spec)
        harness.run()
        expected = answer_alone(model, [1, 2, 3], spec.params, 0, frozenset({5}), 64)
        assert harness.answers[1].tokens == expected
        assert len(expected) > least


def test_a_stop_id_below_min_tokens_is_a_token_like_any_other() -> None:
    """The sampler masks it; should one come all the same, the sequence goes on."""
    harness = make(eos_token_ids=frozenset({5}))
    harness.add(request(1, [1, 2, 3], max_tokens=9, min_tokens=3, stop_token_ids=frozenset({6})))
    for token_id in (5, 6, 5):
        step = harness.scheduler.schedule(harness.now)
        assert step is not None
        harness.scheduler.commit(step, StepResult([token_id]), harness.now)
        assert harness.scheduler.num_live == 1
    step = harness.scheduler.schedule(harness.now)
    assert step is not None
    harness.scheduler.commit(step, StepResult([6]), harness.now)
    harness.collect()
    assert harness.answers[1].tokens == [5, 6, 5, 6]
    assert harness.answers[1].code == FinishCode.STOP_TOKEN


def test_resumed_tokens_are_output() -> None:
    """Tokens of a lost worker are computed like a prompt, and counted as output."""
    whole = request(1, range(6), max_tokens=10, temperature=1.0, seed=4)
    expected = alone(whole)
    for cut in (1, 5, 9):
        harness = make()
        spec = request(1, range(6), max_tokens=10, temperature=1.0, seed=4, resume_token_ids=expected[:cut])
        harness.add(spec)
        step = launched(harness)
        assert (step.ends[0], step.row_starts[0].num_prompt_tokens) == (6 + cut, 6)
        harness.settle()
        harness.run()
        answer = harness.answers[1]
        assert answer.tokens == expected[cut:]
        assert answer.end is not None
        assert (answer.end.code, answer.end.completion_tokens) == (FinishCode.MAX_TOKENS, 10)


def test_prompt_log_probabilities_switch_the_look_up_off() -> None:
    """Cached tokens have no logits; every prompt token but the first gets its value, whatever the chunk."""
    for chunk in (0, 3):
        harness = make(num_pages=32, max_chunk_tokens=chunk)
        harness.add(request(1, range(20)))
        harness.run()
        harness.add(request(2, range(20), prompt_logprobs=0))
        harness.run()
        answer = harness.answers[2]
        assert answer.start is not None
        assert answer.start.prefix is None
        assert answer.start.reused_pages == 0
        assert answer.prompt_logprobs is not None
        assert [value is None for value in answer.prompt_logprobs] == [True] + [False] * 19


def test_a_batch_that_prompts_could_not_pass_is_refused_by_the_configuration() -> None:
    with pytest.raises(ValueError, match=r"max_step_tokens \(8\) must be more than max_running \(8\)"):
        small_config(max_running=8, max_step_tokens=8)
    with pytest.raises(ValueError, match="max_running is 0"):
        small_config(max_running=0)
    with pytest.raises(ValueError, match="max_context_tokens is 1"):
        small_config(max_context_tokens=1)
    with pytest.raises(ValueError, match="aging_seconds"):
        small_config(aging_seconds=0.0)
    config: SchedulerConfig = small_config(num_pages=250)
    assert config.num_pinnable_pages == 62


def test_two_services_get_their_own_columns() -> None:
    harness = make()
    for number, source in ((1, "a"), (2, "b"), (3, "a")):
        harness.add(request(number, range(number, number + 3), max_tokens=3, source=source))
    for _ in range(3):
        step = harness.scheduler.schedule(harness.now)
        assert step is not None
        harness.scheduler.commit(step, harness.runner.launch(step).result(), harness.now)
        by_source = harness.scheduler.take_outputs()
        assert {source: list(out.sequence_ids) for source, out in by_source.items()} == {
            "a": [1, 3],
            "b": [2],
        }
    assert [end.sequence_id for end in by_source["a"].ends] == [1, 3]
    assert list(by_source["b"].finish_codes) == [FinishCode.MAX_TOKENS]
