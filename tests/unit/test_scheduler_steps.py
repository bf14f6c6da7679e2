"""What a step holds: spans, pages, table writes, rows, and input that is not known yet."""

from array import array

import pytest

from tests.toy_scheduler import BOTH, alone, make, request
from worker.execution.testing import Harness, small_config
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AddStatus
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step


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
