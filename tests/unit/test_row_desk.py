"""Rows of the page table are read a few in each turn, and no copy from the device is waited for."""

from array import array
from collections.abc import Callable, Iterator, Sequence

import pytest

from worker.channels import OutputQueue
from worker.description import PoolDescription
from worker.execution.fake_runner import CopiedRows, FakeModel, FakeRunner
from worker.ids import SequenceId
from worker.link.status_codec import row_replies
from worker.messages import CallFailure, CallReason, LinkMessage, ReadRows, RowsAnswer, Ticket
from worker.pages.page_cache import CacheConfig
from worker.row_desk import BOOK_ROWS, DEVICE_ROWS, MAX_CALLS, READ_SECONDS, RowDesk
from worker.scheduling.audit import RowSpan
from worker.scheduling.request import AbortReason, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig

PAGES, PAGE_SIZE, WIDTH = 400, 4, 64


class LateCopy:
    """Arrives when the test says so."""

    def __init__(self, rows: CopiedRows, is_here: Callable[[], bool]) -> None:
        self._rows, self._is_here = rows, is_here

    def is_ready(self) -> bool:
        return self._is_here()

    def result(self) -> list[list[int]]:
        assert self._is_here(), "the engine waited for the device"
        return self._rows.result()


class SlowRunner(FakeRunner):
    """Counts the rows of each copy; none is there before `has_arrived`."""

    has_arrived = True
    is_broken = False

    def begin_read(self, spans: Sequence[RowSpan]) -> LateCopy:  # type: ignore[override]
        if self.is_broken:
            raise RuntimeError("no copy")
        self.sizes = [*getattr(self, "sizes", []), len(spans)]
        return LateCopy(super().begin_read(spans), lambda: self.has_arrived)


class Bench:
    """Sequences that run, a desk, and a clock in the test's hands."""

    def __init__(self, sequences: int) -> None:
        self.now = 0.0
        running = max(sequences, 8)
        config = SchedulerConfig(
            CacheConfig(PAGES, PAGE_SIZE),
            max_running=running,
            max_step_tokens=20 * running,
            max_context_tokens=WIDTH,
        )
        self.scheduler = Scheduler(config)
        self.runner = SlowRunner(
            num_pages=PAGES, page_size=PAGE_SIZE, max_running=running, row_width=WIDTH, model=FakeModel(50)
        )
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(1000)
        pool = PoolDescription(PAGES, PAGE_SIZE, running, WIDTH, "lru")
        self.desk = RowDesk(self.scheduler, self.runner, self.outputs, pool, lambda: self.now)
        for number in range(1, sequences + 1):
            params = SamplingParams(max_tokens=40, stop_at_eos=False)
            spec = RequestSpec(
                SequenceId(number), array("I", [number] * 10), params, source="s", request_id=f"r{number}"
            )
            self.scheduler.add(spec, self.now)
        self.turn()

    def turn(self) -> list[LinkMessage]:
        """A step with the engine's order of things."""
        step = self.scheduler.schedule(self.now)
        handle = None if step is None else self.runner.launch(step)
        if step is not None and handle is not None:
            self.scheduler.commit(step, handle.result(), self.now)
        self.scheduler.take_outputs()
        self.desk.look()
        return list(self.outputs.take(100))

    def ask(self, *rows: int, from_device: bool, call: int = 1) -> None:
        self.desk.obey(ReadRows(Ticket("s", call), rows, from_device))


@pytest.fixture
def make() -> Iterator[Callable[[int], Bench]]:
    """Benches of so many sequences, closed at the end."""
    made: list[Bench] = []

    def one(sequences: int) -> Bench:
        made.append(Bench(sequences))
        return made[-1]

    yield one
    for bench in made:
        bench.outputs.close()


def slots_of(answer: LinkMessage) -> dict[str, list[int]]:
    """By request, as a client gets them."""
    assert isinstance(answer, RowsAnswer)
    replies = row_replies(answer)
    assert [reply.more for reply in replies] == [True] * (len(replies) - 1) + [False]
    return {row.request_id: array("i", row.slots).tolist() for row in (r.page_table for r in replies)}


def held_by(scheduler: Scheduler) -> dict[str, list[int]]:
    """The same from the books."""
    return {
        view.request_id: [page * PAGE_SIZE + at for page in view.page_ids for at in range(PAGE_SIZE)]
        for view in scheduler.sequence_views()
    }


def test_a_turn_reads_a_few_rows_from_the_device_and_steps_go_on_between(
    make: Callable[[int], Bench],
) -> None:
    bench = make(11)
    bench.ask(from_device=True)
    before = bench.scheduler.step_number
    found: list[LinkMessage] = []
    while not found:
        found = bench.turn()
    assert bench.runner.sizes == [DEVICE_ROWS, DEVICE_ROWS, 11 - 2 * DEVICE_ROWS]
    assert bench.scheduler.step_number - before == len(bench.runner.sizes) + 1
    (answer,) = found
    assert isinstance(answer, RowsAnswer)
    assert len({row.step for row in answer.rows}) == len(bench.runner.sizes), "each row says when it was read"
    now = held_by(bench.scheduler)
    for name, slots in slots_of(answer).items():
        assert len(slots) >= 10
        assert slots == now[name][: len(slots)]


def test_the_books_answer_with_the_slots_of_the_pages_in_one_turn(make: Callable[[int], Bench]) -> None:
    bench = make(11)
    assert BOOK_ROWS > 11
    bench.ask(from_device=False)
    (answer,) = bench.turn()
    assert slots_of(answer) == held_by(bench.scheduler)


@pytest.mark.parametrize("from_device", [False, True])
def test_rows_not_in_use_and_the_dummy_row(make: Callable[[int], Bench], from_device: bool) -> None:
    bench = make(2)
    bench.ask(8, 7, from_device=from_device)
    answers = bench.turn() or bench.turn()
    (answer,) = answers
    assert isinstance(answer, RowsAnswer)
    dummy, unused = [reply.page_table for reply in row_replies(answer)]
    assert set(array("i", dummy.slots)) == {PAGES * PAGE_SIZE}
    assert len(dummy.slots) == 4 * WIDTH
    assert (dummy.owner, unused.owner, unused.slots) == (0, 0, b"")


def test_a_row_whose_sequence_ends_before_its_turn_is_not_in_use(make: Callable[[int], Bench]) -> None:
    bench = make(8)
    bench.ask(from_device=True)
    bench.turn()
    bench.scheduler.abort([5, 6, 7, 8], AbortReason.CLIENT, bench.now)
    found: list[LinkMessage] = []
    while not found:
        found = bench.turn()
    (answer,) = found
    assert isinstance(answer, RowsAnswer)
    assert len(answer.rows) == 8
    assert sum(row.owner == 0 for row in answer.rows) == 4


def test_the_engine_never_waits_for_a_copy(make: Callable[[int], Bench]) -> None:
    bench = make(3)
    bench.runner.has_arrived = False
    bench.ask(from_device=True)
    before = bench.scheduler.step_number
    for _ in range(10):
        assert bench.turn() == []
    assert bench.scheduler.step_number == before + 10
    assert bench.desk.next_time is not None
    assert bench.desk.next_time > bench.now, "an idle engine looks again later, not at once"
    bench.runner.has_arrived = True
    assert len(bench.turn()) == 1
    assert bench.desk.next_time is None


def test_a_copy_that_never_comes_ends_its_call_and_the_next_is_served(make: Callable[[int], Bench]) -> None:
    bench = make(3)
    bench.runner.has_arrived = False
    bench.ask(from_device=True, call=1)
    bench.ask(from_device=True, call=2)
    assert bench.turn() == []
    bench.now += READ_SECONDS + 0.1
    (failure,) = bench.turn()
    assert isinstance(failure, CallFailure)
    assert (failure.ticket.command_id, failure.reason) == (1, CallReason.INTERNAL)
    bench.runner.has_arrived = True
    answers = bench.turn() or bench.turn()
    assert [answer.ticket.command_id for answer in answers if isinstance(answer, RowsAnswer)] == [2]


def test_a_copy_that_breaks_ends_its_call_alone(make: Callable[[int], Bench]) -> None:
    bench = make(3)
    bench.runner.is_broken = True
    bench.ask(from_device=True, call=1)
    bench.ask(from_device=False, call=2)
    with pytest.raises(RuntimeError, match="no copy"):
        bench.turn()
    failure, answer = [*bench.outputs.take(10), *bench.turn()]
    assert isinstance(failure, CallFailure)
    assert (failure.ticket.command_id, failure.reason) == (1, CallReason.INTERNAL)
    assert slots_of(answer) == held_by(bench.scheduler)


def test_calls_that_wait_are_few_and_none_is_forgotten_at_the_end(make: Callable[[int], Bench]) -> None:
    bench = make(3)
    for call in range(MAX_CALLS + 1):
        bench.ask(from_device=True, call=call)
    (refused,) = bench.outputs.take(10)
    assert isinstance(refused, CallFailure)
    assert (refused.ticket.command_id, refused.reason) == (MAX_CALLS, CallReason.QUOTA_EXCEEDED)
    bench.turn()
    bench.desk.close()
    told = [each for each in bench.outputs.take(100) if isinstance(each, CallFailure)]
    assert [each.ticket.command_id for each in told] == list(range(MAX_CALLS))
    assert {each.reason for each in told} == {CallReason.DRAINING}
    assert bench.desk.next_time is None


def test_a_row_that_cannot_be_is_refused_with_the_last_one(make: Callable[[int], Bench]) -> None:
    bench = make(3)
    bench.ask(9, from_device=False)
    (failure,) = bench.outputs.take(10)
    assert isinstance(failure, CallFailure)
    assert failure.reason == CallReason.INVALID_FIELD
    assert failure.message == "rows: 9 is no row, the last is 8"
