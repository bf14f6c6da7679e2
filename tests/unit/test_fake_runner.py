"""The device of lists: that it notices what it is there to notice."""

import time
from array import array

import pytest

from worker.execution.fake_runner import (
    SLOW_STEP_SECONDS,
    FakeModel,
    FakeRunner,
    answer_alone,
    next_token,
)
from worker.ids import PageId, Row, SequenceId
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import PageCopy, RowStart, Step

MODEL = FakeModel(100)
GREEDY = SamplingParams()


def make(**changes: object) -> FakeRunner:
    settings: dict[str, object] = {
        "num_pages": 8,
        "page_size": 4,
        "max_running": 3,
        "row_width": 16,
        "model": MODEL,
    }
    return FakeRunner(**settings | changes)  # type: ignore[arg-type]


def start(row: int, tokens: list[int], number: int = 1, params: SamplingParams = GREEDY) -> RowStart:
    return RowStart(Row(row), SequenceId(number), 0, tokens, len(tokens), params, frozenset())


def step(
    spans: list[tuple[int, int, int]],
    pages: list[tuple[int, int, int]] = [],  # noqa: B006
    starts: list[RowStart] = [],  # noqa: B006
    copies: list[tuple[int, int]] = [],  # noqa: B006
    ids: list[int] | None = None,
) -> Step:
    """Spans are (row, start, end), pages (row, index, page)."""
    columns = [array("i", [entry[at] for entry in pages]) for at in range(3)]
    return Step(
        number=1,
        sequence_ids=[SequenceId(number) for number in ids or [1] * len(spans)],
        rows=array("i", [span[0] for span in spans]),
        starts=array("i", [span[1] for span in spans]),
        ends=array("i", [span[2] for span in spans]),
        sampled=range(len(spans)),
        num_decode=0,
        row_starts=starts,
        page_copies=[PageCopy(PageId(source), PageId(target)) for source, target in copies],
        new_page_rows=columns[0],
        new_page_indexes=columns[1],
        new_page_ids=columns[2],
    )


def token(runner: FakeRunner, one: Step) -> int:
    return runner.launch(one).result().token_ids[0]


def test_the_next_token_depends_on_every_id_before_it() -> None:
    ids = list(range(10))
    base = next_token(MODEL, ids, GREEDY, 0, 10, frozenset())
    changed = 0
    for at in range(10):
        other = ids.copy()
        other[at] += 50
        changed += next_token(MODEL, other, GREEDY, 0, 10, frozenset()) != base
    assert changed >= 9


def test_slots_are_found_through_the_page_table() -> None:
    """S1-04, S1-05, S1-07, S1-08: a row holds slots, consecutive within a page; the KV lies there."""
    runner = make()
    first = token(runner, step([(0, 0, 6)], [(0, 0, 5), (0, 1, 2)], [start(0, [7, 8, 9, 10, 11, 12])]))
    assert runner.page_table[0][:8] == [20, 21, 22, 23, 8, 9, 10, 11]
    assert runner.kv[20:24] == [7, 8, 9, 10]
    assert runner.kv[8:10] == [11, 12]
    assert first == next_token(MODEL, [7, 8, 9, 10, 11, 12], GREEDY, 0, 6, frozenset())
    assert runner.token_pool[0][6] == first


def test_the_dummy_row_points_at_the_dummy_page() -> None:
    """S1-27: every entry is num_pages · page_size; S1-30: what is written there is nobody's."""
    runner = make()
    assert runner.page_table[3] == [32] * 16
    before = runner.kv[:32]
    runner.kv[runner.page_table[3][0]] = 99
    assert runner.kv[:32] == before


def test_a_slot_that_was_never_written_is_noticed() -> None:
    runner = make()
    with pytest.raises(AssertionError, match="position 0 was never written"):
        token(runner, step([(0, 2, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))


def test_a_position_without_a_page_is_noticed() -> None:
    runner = make()
    with pytest.raises(AssertionError, match="row 0 has no page for position 4"):
        token(runner, step([(0, 0, 5)], [(0, 0, 1)], [start(0, [1, 2, 3, 4, 5])]))


def test_the_dummy_page_in_a_row_is_noticed() -> None:
    runner = make()
    with pytest.raises(AssertionError, match="page 8 in row 0"):
        token(runner, step([(0, 0, 1)], [(0, 0, 8)], [start(0, [1])]))


def test_a_row_twice_in_a_step_is_noticed() -> None:
    runner = make()
    with pytest.raises(AssertionError, match="a row twice"):
        token(runner, step([(0, 0, 1), (0, 1, 2)], [(0, 0, 1)], [start(0, [1, 2])]))


def test_a_row_of_another_sequence_is_noticed() -> None:
    runner = make()
    with pytest.raises(AssertionError, match="row 0 is that of 1"):
        token(runner, step([(0, 0, 1)], [(0, 0, 1)], [start(0, [1])], ids=[2]))


def test_a_poisoned_page_is_noticed_when_it_is_read() -> None:
    runner = make()
    token(runner, step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))
    runner.poison([1])
    with pytest.raises(AssertionError, match="never written, or freed"):
        token(runner, step([(0, 4, 5)], [(0, 1, 2)]))


def test_poison_comes_behind_the_steps_that_were_launched() -> None:
    runner = make(lazy=True)
    first = runner.launch(step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))
    second = runner.launch(step([(0, 4, 5)], [(0, 1, 2)]))
    runner.poison([1])
    assert len(first.result().token_ids) == len(second.result().token_ids) == 1
    assert runner.kv[4:8] == [-2] * 4


def test_a_page_given_back_under_a_step_is_noticed() -> None:
    """H6."""
    held = {1}
    runner = make(lazy=True, is_held=held.__contains__)
    handle = runner.launch(step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))
    held.clear()
    with pytest.raises(AssertionError, match="page 1 is used by a step and was given back"):
        handle.result()


def test_a_copy_takes_all_slots_before_anything_is_written() -> None:
    runner = make()
    token(runner, step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))
    both = step([(1, 3, 4)], [(1, 0, 6)], [start(1, [1, 2, 3, 4], number=2)], copies=[(1, 6)], ids=[2])
    assert token(runner, both) == next_token(MODEL, [1, 2, 3, 4], GREEDY, 0, 4, frozenset())
    assert runner.kv[24:28] == [1, 2, 3, 4]
    assert runner.num_copies == 1


@pytest.mark.parametrize("lazy", [False, True])
def test_the_next_step_can_be_launched_before_the_token_is_known(lazy: bool) -> None:
    """M-04."""
    runner = make(lazy=lazy)
    first = runner.launch(step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))
    second = runner.launch(step([(0, 4, 5)], [(0, 1, 2)]))
    alone = answer_alone(MODEL, [1, 2, 3, 4], SamplingParams(max_tokens=2), 0, frozenset(), 16)
    assert [*second.result().token_ids] == alone[1:]
    assert [*first.result().token_ids] == alone[:1]


def test_samples_differ_by_choice_and_greedy_ones_do_not() -> None:
    hot = SamplingParams(temperature=1.0, seed=5)
    by_choice = {next_token(FakeModel(10_000), [1, 2], hot, choice, 2, frozenset()) for choice in range(8)}
    assert len(by_choice) == 8
    greedy = {next_token(MODEL, [1, 2], GREEDY, choice, 2, frozenset()) for choice in range(8)}
    assert len(greedy) == 1


def test_eos_comes_about_as_often_as_asked_and_never_before_min_tokens() -> None:
    model = FakeModel(1000, (5, 6), eos_every=10)
    eos = frozenset({5, 6})
    params = SamplingParams(max_tokens=400, min_tokens=400)
    assert not eos & set(answer_alone(model, [1], params, 0, eos, 1000))
    free = SamplingParams(max_tokens=400, stop_at_eos=False)
    tokens = answer_alone(model, [1], free, 0, eos, 1000)
    assert 15 <= sum(token in eos for token in tokens) <= 80


def test_steps_can_seem_to_take_time() -> None:
    runner = make(step_seconds=0.02)
    begin = time.monotonic()
    token(runner, step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))
    assert time.monotonic() - begin >= 0.02
    runner.close()
    runner.close()


def test_steps_are_slow_as_long_as_someone_wants_to_look() -> None:
    wants = [True]
    runner = make(is_slow=lambda: wants[0])
    begin = time.monotonic()  # before the launch: this thread may stand still behind it
    slow = runner.launch(step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])])).result()
    assert time.monotonic() - begin > SLOW_STEP_SECONDS / 2
    wants[0] = False
    other = make()
    fast = other.launch(step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])])).result()
    assert fast.token_ids == slow.token_ids, "what is computed does not depend on how long it takes"
    assert runner.launch(step([(0, 4, 5)], [(0, 1, 2)])).ready_time <= time.monotonic()


def test_rows_can_be_read_back() -> None:
    runner = make(lazy=True)
    runner.launch(step([(0, 0, 4)], [(0, 0, 1)], [start(0, [1, 2, 3, 4])]))
    assert runner.read_rows([0, 3], [4, 2]) == [[4, 5, 6, 7], [32, 32]]
