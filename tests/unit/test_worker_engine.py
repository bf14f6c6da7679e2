"""The engine's loop: every request ends exactly once, whatever breaks, and only what is broken ends badly."""

import select
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription, WorkerState
from worker.engine import EXIT_BUG, EXIT_OK, EXIT_OUT_OF_MEMORY, Engine, EngineSettings
from worker.execution.fake_runner import FakeHandle, FakeModel, FakeRunner, answer_alone
from worker.ids import SequenceId
from worker.messages import (
    Abort,
    AddAnswer,
    AddRequest,
    CallError,
    CallFailure,
    CallReason,
    CheckIntegrity,
    DropSource,
    EngineCommand,
    Flush,
    FlushAnswer,
    LinkMessage,
    ListPins,
    Pin,
    PinAnswer,
    StepOutputs,
    Ticket,
)
from worker.pages.page_cache import CacheConfig
from worker.readers.audit import AuditRound
from worker.readers.observation import Observation
from worker.scheduling.output import NO_TOKEN, FailureReason, FinishCode, SequenceEnd
from worker.scheduling.request import AbortReason, AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult
from worker.status import StatusBoard, StepMark, first_board
from worker.traffic import TimedStep, TrafficQueue

MODEL = FakeModel(vocab_size=97)
CONTEXT = 128
WAIT_SECONDS = 60.0  # only ends a test that hangs
Fault = Callable[[str, Step], BaseException | None]


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


class BreakingRunner(FakeRunner):
    """Asks `fault` at each stage of each step whether to raise."""

    def __init__(self, fault: Fault, **sizes: object) -> None:
        super().__init__(model=MODEL, lazy=True, fail=self._is_not_a_number, **sizes)  # type: ignore[arg-type]
        self.fault = fault
        self.lies = False
        self.is_lost = False  # the device answers nothing any more
        self.not_a_number: tuple[int, int] | None = None  # sequence, position
        self.is_dead_end = False  # that it is none is the constraint's doing

    def _is_not_a_number(self, sequence_id: SequenceId, position: int) -> str | None:
        return "non-finite logits" if (sequence_id, position) == self.not_a_number else None

    def launch(self, step: Step) -> FakeHandle:
        if (error := self.fault("prepare", step)) is not None:
            raise error
        return super().launch(step)

    def _run(self, step: Step) -> StepResult:
        result = super()._run(step)
        if (error := self.fault("sample", step)) is not None:
            raise error
        return result._replace(dead_ends=tuple(result.failed)) if self.is_dead_end else result

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        found = super().read_rows(rows, num_slots)
        return [[slot + 1 for slot in row] for row in found] if self.lies else found


@dataclass(slots=True)
class Got:
    """What services were told of one sequence."""

    tokens: list[int] = field(default_factory=list)
    ends: list[SequenceEnd] = field(default_factory=list)


class RecordedLink:
    """A link that can be lent, and what the engine did with it, in order. It has no thread of its own."""

    def __init__(self, outputs: OutputQueue[LinkMessage]) -> None:
        self.did: list[str | LinkMessage] = []  # by the engine's thread
        self._outputs = outputs

    def borrow(self) -> None:
        self.did.append("borrow")

    def give_back(self) -> None:
        self.did.append("give back")

    def serve(self, seconds: float) -> None:
        select.select([self._outputs.wakeup.fileno()], [], [], seconds)
        self._outputs.wakeup.clear()
        self.send_outputs()

    def send_outputs(self) -> None:
        self.did += self._outputs.take(1000)

    def sent_tokens(self, end: int | None = None) -> int:
        """Before that entry of `did`."""
        steps = [message for message in self.did[:end] if isinstance(message, StepOutputs)]
        return sum(len(columns.token_ids) for step in steps for columns in step.by_source.values())


class Bench:
    """An engine on a thread, with its queues in the test's hands."""

    def __init__(
        self, settings: EngineSettings, fault: Fault, *, output_limit: int, pages: int, lends: bool = False
    ) -> None:
        cache = CacheConfig(pages, 4)
        config = SchedulerConfig(cache, max_running=8, max_step_tokens=16, max_context_tokens=CONTEXT)
        self.scheduler = Scheduler(config)
        self.runner = BreakingRunner(fault, num_pages=pages, page_size=4, max_running=8, row_width=CONTEXT)
        self.commands: CommandQueue[EngineCommand] = CommandQueue(256)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(output_limit)
        self.observations: Handover[Observation] = Handover(100_000)
        self.traffic: TrafficQueue = TrafficQueue(1000)
        self.ahead = 0.0  # seconds by which the engine's clock is put forward
        self.link = RecordedLink(self.outputs)
        self.board: StatusBoard = first_board(description(pages), time.monotonic())
        self.engine = Engine(
            self.scheduler,
            self.runner,
            settings,
            commands=self.commands,
            outputs=self.outputs,
            observations=self.observations,
            board=self.board,
            on_state=lambda: None,
            link=self.link if lends else None,
            traffic=self.traffic,
            clock=lambda: time.monotonic() + self.ahead,
        )
        self.status: int | None = None
        self.got: dict[int, Got] = {}
        self.answers: dict[int, AddAnswer] = {}
        self.others: list[LinkMessage] = []
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.status = self.engine.run()

    def add(self, sequence_id: int, prompt: list[int], max_tokens: int = 8, samples: int = 1) -> None:
        spec = RequestSpec(
            SequenceId(sequence_id),
            array("I", prompt),
            SamplingParams(max_tokens=max_tokens, stop_at_eos=False),
            sample_count=samples,
            source="s",
        )
        self.commands.put(AddRequest(spec))

    def read(self) -> None:
        for message in self.outputs.take(1000):
            if isinstance(message, AddAnswer):
                assert message.sequence_id not in self.answers, "exactly one answer"
                self.answers[message.sequence_id] = message
            elif isinstance(message, StepOutputs):
                for columns in message.by_source.values():
                    for sequence_id, token in zip(columns.sequence_ids, columns.token_ids, strict=True):
                        got = self.got.setdefault(sequence_id, Got())
                        assert not got.ends, f"{sequence_id} goes on after its end"
                        if token != NO_TOKEN:
                            got.tokens.append(token)
                    for end in columns.ends:
                        self.got.setdefault(end.sequence_id, Got()).ends.append(end)
            else:
                self.others.append(message)

    def wait(self, is_done: Callable[[], bool], limit: float = WAIT_SECONDS) -> None:
        end = time.monotonic() + limit
        while not is_done():
            assert time.monotonic() < end, "not so in time"
            self.outputs.wakeup.clear()
            self.read()
            threading.Event().wait(0.001)

    def finish(self, *sequence_ids: int) -> dict[int, FinishCode]:
        """Waits for the ends; each sequence has exactly one."""
        self.wait(lambda: all(self.got.get(number, Got()).ends for number in sequence_ids))
        for number in sequence_ids:
            assert len(self.got[number].ends) == 1
        return {number: self.got[number].ends[0].code for number in sequence_ids}

    def end(self) -> int:
        self.engine.stop()
        self.thread.join(WAIT_SECONDS)
        self.read()
        assert self.status is not None
        return self.status


def description(pages: int) -> WorkerDescription:
    pool = PoolDescription(pages, 4, 8, CONTEXT, "lru")
    return WorkerDescription(
        "w", 1, ModelDescription("m", MODEL.vocab_size, CONTEXT), pool, 8, CONTEXT, 1, (), "", b""
    )


@contextmanager
def bench(
    settings: EngineSettings | None = None,
    fault: Fault = lambda stage, step: None,
    *,
    output_limit: int = 10_000,
    pages: int = 64,
    lends: bool = False,
) -> Iterator[Bench]:
    made = Bench(settings or EngineSettings(), fault, output_limit=output_limit, pages=pages, lends=lends)
    made.thread.start()
    try:
        yield made
        if isinstance(fault, Slow):
            fault.let_go()
        made.end()
    finally:
        made.engine.stop()
        made.engine.stop()
        made.thread.join(WAIT_SECONDS)
        made.outputs.close()
    assert not made.thread.is_alive()
    assert not made.scheduler.check()


def prompt_of(number: int) -> list[int]:
    return [(number * 31 + at) % MODEL.vocab_size for at in range(9 + number)]


def alone(number: int, max_tokens: int = 8) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, stop_at_eos=False)
    return answer_alone(MODEL, prompt_of(number), params, 0, frozenset(), CONTEXT)


class Slow:
    """Steps take a fifth of a second, so that a test can act while requests run; until it lets them go."""

    def __init__(self) -> None:
        self._goes = threading.Event()

    def __call__(self, stage: str, step: Step) -> BaseException | None:
        self._goes.wait(0.1)
        return None

    def let_go(self) -> None:
        self._goes.set()


def breaks_with(sequence_id: int, stage: str, is_prompt: bool) -> Fault:
    """Raises whenever the sequence is in a step, at one stage, while it prefills or decodes."""

    def fault(at: str, step: Step) -> BaseException | None:
        if at != stage or sequence_id not in list(step.sequence_ids):
            return None
        span = list(step.sequence_ids).index(sequence_id)
        return ValueError("this one") if (step.starts[span] == 0) == is_prompt else None

    return fault


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_prompt", [True, False])
@pytest.mark.parametrize("stage", ["prepare", "sample"])
def test_one_broken_request_ends_alone(stage: str, is_prompt: bool, overlap: bool) -> None:
    """B102: at each stage only that request fails, pages come back, the loop goes on."""
    with bench(EngineSettings(overlap=overlap), breaks_with(3, stage, is_prompt)) as b:
        for number in range(1, 6):
            b.add(number, prompt_of(number))
        codes = b.finish(1, 2, 3, 4, 5)
        b.add(6, prompt_of(6))
        codes |= b.finish(6)
        b.wait(lambda: b.scheduler.num_live == 0)
    assert codes.pop(3) is FinishCode.FAILED
    assert set(codes.values()) == {FinishCode.MAX_TOKENS}
    assert b.got[3].ends[0].failure is FailureReason.INTERNAL
    for number in codes:
        assert b.got[number].tokens == alone(number), number
    assert b.scheduler.cache.pool.num_active == 0
    assert b.status == EXIT_OK


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_is_not_a_number_ends_its_request_alone(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """B057: no words from noise, nothing of that step in the shared tree, the others as ever."""
    with bench(EngineSettings(overlap=overlap)) as b:
        b.runner.not_a_number = (3, len(prompt_of(3)) + 3)
        for number in range(1, 5):
            b.add(number, prompt_of(number))
        codes = b.finish(1, 2, 3, 4)
        b.wait(lambda: b.scheduler.cache.pool.num_active == 0)
    assert codes.pop(3) is FinishCode.FAILED
    assert b.got[3].tokens == alone(3)[:3]
    assert b.got[3].ends[0].failure is FailureReason.INTERNAL
    for number in codes:
        assert b.got[number].tokens == alone(number)
    assert "event=sequence_failed sequence=3" in caplog.text


def test_a_dead_end_of_a_constraint_is_no_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "worker.engine")
    with bench() as b:
        b.runner.not_a_number, b.runner.is_dead_end = (3, len(prompt_of(3)) + 3), True
        b.add(3, prompt_of(3))
        assert b.finish(3) == {3: FinishCode.FAILED}
    assert b.got[3].ends[0].failure is FailureReason.CONSTRAINT_DEAD_END
    (told,) = [record for record in caplog.records if "event=sequence_failed" in record.getMessage()]
    assert told.levelname == "INFO"


def test_what_breaks_behind_the_end_of_a_sequence_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """A step was launched before its end was seen. Constraints have nothing left there, after each answer."""
    tokens = alone(3)
    assert tokens[2] not in tokens[:2]
    params = SamplingParams(max_tokens=8, stop_at_eos=False, stop_token_ids=frozenset({tokens[2]}))
    with bench(EngineSettings(overlap=True)) as b:
        b.runner.not_a_number = (3, len(prompt_of(3)) + 3)
        b.commands.put(AddRequest(RequestSpec(SequenceId(3), array("I", prompt_of(3)), params, source="s")))
        b.add(1, prompt_of(1), max_tokens=16)  # steps go on behind it
        codes = b.finish(1, 3)
    assert codes[3] is FinishCode.STOP_TOKEN
    assert b.got[3].tokens == tokens[:3]
    assert "sequence_failed" not in caplog.text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_once_for_no_one_in_particular_costs_nobody(overlap: bool) -> None:
    failures = [RuntimeError("hiccup")]

    def fault(stage: str, step: Step) -> BaseException | None:
        return failures.pop() if failures and stage == "sample" and step.number == 4 else None

    with bench(EngineSettings(overlap=overlap), fault) as b:
        for number in range(1, 5):
            b.add(number, prompt_of(number))
        codes = b.finish(1, 2, 3, 4)
    assert not failures
    assert set(codes.values()) == {FinishCode.MAX_TOKENS}
    for number in codes:
        assert b.got[number].tokens == alone(number)


def test_samples_that_share_pages_survive_a_step_run_again() -> None:
    failures = [RuntimeError("hiccup")]

    def fault(stage: str, step: Step) -> BaseException | None:
        return failures.pop() if failures and stage == "sample" and step.page_copies else None

    with bench(fault=fault) as b:
        b.add(10, prompt_of(5), samples=3)
        codes = b.finish(10, 11, 12)
    assert not failures, "no step copied a page"
    assert set(codes.values()) == {FinishCode.MAX_TOKENS}
    for number in codes:
        assert b.got[number].tokens == alone(5)


@pytest.mark.parametrize("overlap", [False, True])
def test_poisoned_pages_are_never_read(overlap: bool) -> None:
    """H6, H12: what is freed is filled at once; with a pool so small that every page is used again."""
    with bench(EngineSettings(overlap=overlap), pages=14) as b:
        poisoned: list[int] = []

        def poison(pages: Sequence[int]) -> None:
            poisoned.extend(pages)
            b.runner.poison(pages)

        b.engine.set_poison(poison)
        for number in range(1, 9):
            b.add(number, prompt_of(number), samples=1)
        codes = b.finish(*range(1, 9))
    assert set(codes.values()) == {FinishCode.MAX_TOKENS}
    for number in codes:
        assert b.got[number].tokens == alone(number)
    assert len(poisoned) > 14, "no page was freed twice: the test shows nothing"


def while_capturing(error: Exception) -> Exception:
    """What the end of a graph's capture raises that this error broke off."""
    try:
        try:
            raise error
        finally:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")
    except RuntimeError as raised:
        return raised


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("no memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        while_capturing(OutOfMemoryError("no memory")),
    ],
    ids=["allocation", "graph", "kernel", "capture"],
)
def test_a_full_device_ends_everything_with_its_reason(error: Exception) -> None:
    """Whoever met it: for a graph's and a kernel's own memory torch has another error."""

    def fault(stage: str, step: Step) -> BaseException | None:
        return error if stage == "sample" and step.number == 5 else None

    with bench(fault=fault) as b:
        for number in range(1, 4):
            b.add(number, prompt_of(number), max_tokens=50)
        codes = b.finish(1, 2, 3)
        b.thread.join(WAIT_SECONDS)
        assert b.status == EXIT_OUT_OF_MEMORY
    assert set(codes.values()) == {FinishCode.FAILED}
    assert {b.got[number].ends[0].failure for number in codes} == {FailureReason.DEVICE_OUT_OF_MEMORY}


def test_a_device_that_is_full_when_a_broken_step_runs_again_is_told_as_full() -> None:
    def fault(stage: str, step: Step) -> BaseException | None:
        if step.number != 5 or (stage == "prepare" and not raised):
            return None
        raised.append(OutOfMemoryError("no memory") if raised else RuntimeError("broken"))
        return raised[-1]

    raised: list[BaseException] = []
    with bench(fault=fault) as b:
        b.add(1, prompt_of(1), max_tokens=50)
        b.finish(1)
        b.thread.join(WAIT_SECONDS)
        assert b.status == EXIT_OUT_OF_MEMORY
    assert b.got[1].ends[0].failure == FailureReason.DEVICE_OUT_OF_MEMORY


def test_the_death_of_another_thread_ends_all_at_once_with_an_answer() -> None:
    with bench(EngineSettings(drain_grace=3600.0), Slow()) as b:
        b.add(1, prompt_of(1), max_tokens=100)
        b.wait(lambda: 1 in b.got)
        b.engine.fail()
        assert b.finish(1) == {1: FinishCode.FAILED}
        b.thread.join(WAIT_SECONDS)
        assert b.status == EXIT_BUG
    assert b.got[1].ends[0].failure == FailureReason.INTERNAL


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_is_lost_ends_the_worker_and_all_with_an_answer(
    overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A CUDA error that stays: the worker lived on, had time for every request, and broke them all."""

    def fault(stage: str, step: Step) -> BaseException | None:
        b.runner.is_lost |= stage == "sample" and step.number == 5
        return RuntimeError("an illegal memory access was encountered") if b.runner.is_lost else None

    with bench(EngineSettings(overlap=overlap), fault) as b:
        for number in range(1, 4):
            b.add(number, prompt_of(number), max_tokens=50)
        codes = b.finish(1, 2, 3)
        b.thread.join(WAIT_SECONDS)
        assert b.status == EXIT_BUG
    assert set(codes.values()) == {FinishCode.FAILED}
    assert {b.got[number].ends[0].failure for number in codes} == {FailureReason.INTERNAL}
    assert "event=step_failed" in caplog.text
    assert "event=span_failed" not in caplog.text, "no sequence is looked for where the device is gone"


def test_a_bug_of_the_control_plane_ends_all_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(fault=Slow()) as b:
        b.add(1, prompt_of(1), max_tokens=100)
        b.wait(lambda: 1 in b.got)

        def broken(now: float) -> None:
            raise AssertionError("our bug")

        monkeypatch.setattr(b.scheduler, "schedule", broken)
        codes = b.finish(1)
        b.thread.join(WAIT_SECONDS)
        assert b.status == EXIT_BUG
    assert codes == {1: FinishCode.FAILED}


def test_a_request_that_breaks_add_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """B102: the stage before the first step."""
    with bench() as b:
        whole = b.scheduler.add

        def add(spec: RequestSpec, now: float) -> object:
            if spec.sequence_id == 2:
                raise ValueError("this one")
            return whole(spec, now)

        monkeypatch.setattr(b.scheduler, "add", add)
        for number in (1, 2, 3):
            b.add(number, prompt_of(number))
        b.wait(lambda: 2 in b.answers)
        codes = b.finish(1, 3)
    assert b.answers[2].outcome.status is AddStatus.INVALID
    assert set(codes.values()) == {FinishCode.MAX_TOKENS}


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    slow = Slow()
    with bench(fault=slow) as b:
        b.add(1, prompt_of(1), max_tokens=60)
        b.wait(lambda: 1 in b.answers)
        first = b.answers.pop(1)
        b.add(1, prompt_of(2))
        b.wait(lambda: 1 in b.answers)
        assert b.answers[1].outcome.status is AddStatus.INVALID
        assert first.outcome.status is AddStatus.ACCEPTED
        slow.let_go()
        assert b.finish(1) == {1: FinishCode.MAX_TOKENS}


def test_abort_and_a_lost_service_give_pages_back() -> None:
    with bench(fault=Slow()) as b:
        b.add(1, prompt_of(1), max_tokens=100)
        b.add(2, prompt_of(2), max_tokens=100)
        b.wait(lambda: 1 in b.got and 2 in b.got)
        b.commands.put(Abort([SequenceId(1), SequenceId(99)], AbortReason.CLIENT))
        assert b.finish(1) == {1: FinishCode.ABORTED}
        b.commands.put(DropSource("s"))
        b.wait(lambda: b.scheduler.num_live == 0)
        b.wait(lambda: b.scheduler.cache.pool.num_active == 0)
    assert not b.got[2].ends, "nobody is there to be told"


def test_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    slow = Slow()
    with bench(fault=slow) as b:
        b.add(1, prompt_of(1), max_tokens=60)
        b.wait(lambda: 1 in b.got)
        b.engine.stop()
        b.wait(lambda: b.board.state is WorkerState.DRAINING)
        b.add(2, prompt_of(2))
        slow.let_go()
        assert b.finish(1) == {1: FinishCode.MAX_TOKENS}
        b.thread.join(WAIT_SECONDS)
        b.read()
        assert b.status == EXIT_OK
    assert b.answers[2].outcome.status is AddStatus.DRAINING


@pytest.mark.parametrize("overlap", [False, True])
def test_after_the_grace_the_rest_is_handed_over(overlap: bool) -> None:
    with bench(EngineSettings(overlap=overlap, drain_grace=1000.0), Slow()) as b:
        for number in range(1, 12):  # more than rows: some wait
            b.add(number, prompt_of(number), max_tokens=100)
        b.wait(lambda: len(b.answers) == 11)
        b.engine.stop()
        b.wait(lambda: b.board.state is WorkerState.DRAINING)
        b.ahead = 900.0
        number = b.scheduler.step_number
        b.wait(lambda: b.scheduler.step_number > number + 2)
        b.ahead = 1001.0
        b.thread.join(WAIT_SECONDS)
        assert b.status == EXIT_OK
        codes = b.finish(*range(1, 12))
        ended = {each for seen in b.observations.take_all() for each in seen.ended}
    assert set(codes.values()) == {FinishCode.DRAINED}
    assert ended == set(codes), "the observer hears of it, too"


def test_a_step_is_told_to_last_from_the_end_of_the_one_before() -> None:
    """Not from its launch, where that was before: the device began it then."""

    def advance(stage: str, step: Step) -> None:
        b.ahead += 1000.0 * (stage == "sample")

    with bench(EngineSettings(overlap=True), advance) as b:
        b.add(1, prompt_of(1), max_tokens=5)
        b.finish(1)
        steps = [step for step in b.traffic.take_all() if isinstance(step, TimedStep)]
    assert len(steps) == 5
    assert all(step.seconds < 1500 for step in steps)


def test_a_check_of_everything_that_the_end_breaks_off_is_told() -> None:
    made = Bench(EngineSettings(), lambda stage, step: None, output_limit=100, pages=64)
    ticket = Ticket("s", 7)
    made.commands.put(CheckIntegrity(ticket))
    made.engine.stop()
    made.thread.start()
    made.end()
    made.outputs.close()
    (failure,) = made.others
    assert isinstance(failure, CallFailure)
    assert (failure.ticket, failure.error, failure.reason) == (
        ticket,
        CallError.UNAVAILABLE,
        CallReason.DRAINING,
    )


def test_a_second_signal_does_not_wait_for_the_grace() -> None:
    with bench(EngineSettings(drain_grace=3600.0), Slow()) as b:
        b.add(1, prompt_of(1), max_tokens=100)
        b.wait(lambda: 1 in b.got)
        b.engine.stop()
        b.engine.stop()
        assert b.finish(1) == {1: FinishCode.DRAINED}


def test_a_full_output_queue_holds_the_engine_back_and_loses_nothing() -> None:
    with bench(output_limit=4) as b:
        for number in range(1, 5):
            b.add(number, prompt_of(number), max_tokens=30)
        end = time.monotonic() + WAIT_SECONDS
        while not b.outputs.is_full:
            assert time.monotonic() < end
            threading.Event().wait(0.001)
        stopped_at = b.scheduler.step_number
        threading.Event().wait(0.15)  # nobody reads: the engine must stand still, and live
        assert b.scheduler.step_number <= stopped_at + 2
        codes = b.finish(1, 2, 3, 4)
    assert set(codes.values()) == {FinishCode.MAX_TOKENS}
    for number in codes:
        assert b.got[number].tokens == alone(number, 30)


def test_an_idle_engine_sleeps() -> None:
    with bench() as b:
        b.add(1, prompt_of(1))
        b.finish(1)
        b.wait(lambda: len(b.commands.drain()) == 0)
        began = time.thread_time()
        threading.Event().wait(0.3)
        before = time.process_time()
        threading.Event().wait(0.5)
        assert time.process_time() - before < 0.1, "it spins"
        assert time.thread_time() - began < 0.1


def test_idle_time_is_counted_and_numbers_reach_the_observer_without_a_step() -> None:
    with bench() as b:
        b.add(1, prompt_of(1), max_tokens=3)
        b.finish(1)
        b.wait(lambda: any(seen.counts.output_tokens_total == 3 for seen in b.observations.take_all()))
        idle: list[float] = []
        b.wait(lambda: idle.extend(s.idle_seconds for s in b.observations.take_all()) or len(idle) >= 2)
        assert idle[-1] > idle[0]


def test_what_ends_by_the_clock_ends_on_an_idle_engine() -> None:
    with bench() as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", prompt_of(3)), b"", 0.05))
        b.wait(lambda: bool(b.others))
        pinned = b.others.pop()
        assert isinstance(pinned, PinAnswer)
        assert (pinned.pins[0].pinned_tokens, pinned.pins[0].computed_tokens) == (12, 12)
        b.wait(lambda: not b.scheduler.list_pins())
        b.commands.put(ListPins(Ticket("s", 2)))
        b.wait(lambda: bool(b.others))
        assert b.others.pop() == PinAnswer(Ticket("s", 2), (), is_list=True)


def test_a_pin_too_large_is_refused_with_its_numbers() -> None:
    with bench(pages=16) as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", range(80)), b"", 0.0))
        b.wait(lambda: bool(b.others))
        failure = b.others.pop()
    assert "20 pages needed" in failure.message  # type: ignore[union-attr]


def test_what_a_pin_found_is_told_though_first_tokens_of_its_step_leave_early() -> None:
    late: list[Callable[[], None]] = []

    def come(stage: str, step: Step) -> None:
        while late:
            late.pop()()

    with bench(fault=come) as b:
        b.add(1, prompt_of(3))
        b.finish(1)
        pin = Pin(Ticket("s", 1), "p", array("I", [*prompt_of(3), 5, 5, 5, 5]), b"", 0.0)
        late += [lambda: b.add(3, [4, 4, 4]), lambda: b.commands.put(pin)]  # into one step
        b.add(2, prompt_of(1))
        b.wait(lambda: bool(b.others))
        answer = b.others.pop()
        assert isinstance(answer, PinAnswer)
        assert (answer.pins[0].pinned_tokens, answer.pins[0].computed_tokens) == (16, 4)
        b.finish(2, 3)


def test_a_pin_whose_pages_a_flush_took_is_computed_again() -> None:
    slow = Slow()
    with bench(fault=slow) as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", prompt_of(30)), b"", 0.0))
        b.wait(lambda: b.scheduler.cache.pool.num_active > 4)
        b.commands.put(Flush(Ticket("s", 2), "", None, include_active=True, include_pinned=False))
        b.wait(lambda: bool(b.others))
        slow.let_go()
        b.wait(lambda: len(b.others) == 2)
        flushed, pinned = b.others
        assert isinstance(flushed, FlushAnswer)
        assert flushed.unindexed_pages > 0
        assert isinstance(pinned, PinAnswer)
        assert pinned.pins[0].pinned_tokens == 36


def test_a_pin_longer_than_the_context_is_refused_as_the_callers_fault() -> None:
    with bench(pages=256) as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", [5] * CONTEXT), b"", 0.0))
        b.wait(lambda: bool(b.others))
        failure = b.others.pop()
    assert isinstance(failure, CallFailure)
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert failure.message.startswith("prefix: ")
    assert str(CONTEXT) in failure.message


def test_a_worker_that_was_idle_for_long_is_not_taken_for_stuck_nor_its_step_for_long() -> None:
    marks: list[StepMark] = []

    def note(stage: str, step: Step) -> None:
        marks.append(b.board.step)

    with bench(fault=note) as b:
        b.add(1, prompt_of(1), max_tokens=2)
        b.finish(1)
        b.wait(lambda: b.engine._last_end is None)  # asleep
        before, began = len(marks), b.board.step
        b.ahead = 1000.0
        b.add(2, prompt_of(2), max_tokens=2)
        b.finish(2)
        assert marks[before].number == began.number, "no later step is over"
        assert marks[before].ended > began.ended + 500
        assert all(step.seconds < 500 for step in b.traffic.take_all() if isinstance(step, TimedStep))


@pytest.mark.parametrize("debug", [False, True])
def test_device_rows_that_differ_from_the_books_are_reported(debug: bool) -> None:
    """The audit compares device rows with the host's, under load; debug mode ends the worker."""
    with bench(EngineSettings(audit_interval=0.01, debug=debug), Slow()) as b:
        b.add(1, prompt_of(1), max_tokens=100)
        b.wait(lambda: 1 in b.got)
        b.runner.lies = True
        if debug:
            b.thread.join(WAIT_SECONDS)
            assert b.status == EXIT_BUG
            assert b.finish(1) == {1: FinishCode.FAILED}
        else:
            audits: list[AuditRound] = []
            b.wait(
                lambda: (
                    audits.extend(audit for seen in b.observations.take_all() for audit in seen.audits)
                    or any(audit.findings for audit in audits)
                )
            )
            finding = next(audit.findings[0] for audit in audits if audit.findings)
            assert finding.check == "device_table"
            assert finding.row is not None
            assert "by the books" in finding.text


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end, "not so in time"
        threading.Event().wait(0.001)


def test_an_idle_engine_serves_the_link_until_a_first_token_is_out() -> None:
    with bench(EngineSettings(overlap=True), lends=True) as b:
        wait_until(lambda: b.link.did == ["borrow"])
        b.add(1, prompt_of(1))  # from another thread, which ends the engine's sleep in the link
        wait_until(lambda: "give back" in b.link.did)
        end = b.link.did.index("give back")
        assert any(isinstance(message, AddAnswer) for message in b.link.did[:end])
        assert b.link.sent_tokens(end) == 1, "the first token, and nothing behind it"
        wait_until(lambda: b.link.sent_tokens() == 8)  # when it is idle again: the link has no other thread
        assert b.link.did.count("borrow") == 2
    assert b.status == EXIT_OK
    assert b.link.did[-1] == "give back", "whoever closes the link needs its thread"


@pytest.mark.parametrize("reason", ["the launch is the step", "the step is long", "another prompt behind it"])
def test_a_link_that_would_wait_for_a_step_is_given_back(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "the step is long":
        monkeypatch.setattr("worker.first_tokens.CLOSE_TOKENS", len(prompt_of(1)) - 1)
    with bench(EngineSettings(overlap=reason != "the launch is the step"), lends=True) as b:
        wait_until(lambda: b.link.did == ["borrow"])
        launch, late = b.runner.launch, [2] if reason == "another prompt behind it" else []

        def noted_launch(step: Step) -> FakeHandle:
            b.link.did.append("launch")
            while late:  # it comes before the result of the first, which is asked for behind a launch
                number = late.pop()
                b.add(number, prompt_of(number))
            return launch(step)

        monkeypatch.setattr(b.runner, "launch", noted_launch)
        b.add(1, prompt_of(1))
        wait_until(lambda: "give back" in b.link.did)
        end = b.link.did.index("give back")
        assert b.link.sent_tokens(end) == 0
        assert b.link.did[:end].count("launch") == (2 if reason == "another prompt behind it" else 0)
        wait_until(lambda: b.link.sent_tokens() == (16 if reason == "another prompt behind it" else 8))
    assert b.status == EXIT_OK
