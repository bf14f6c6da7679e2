"""An engine on a thread with its queues in a test's hands, over a runner that breaks where a test says so."""

import select
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.engine import Engine, EngineSettings
from worker.execution.fake_runner import FakeHandle, FakeModel, FakeRunner, answer_alone
from worker.ids import SequenceId
from worker.messages import AddAnswer, AddRequest, EngineCommand, LinkMessage, StepOutputs
from worker.pages.page_cache import CacheConfig
from worker.readers.observation import Observation
from worker.scheduling.output import NO_TOKEN, FinishCode, SequenceEnd
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult
from worker.status import StatusBoard, first_board
from worker.traffic import TrafficQueue

MODEL = FakeModel(vocab_size=97)
CONTEXT = 128
WAIT_SECONDS = 60.0  # only ends a test that hangs
Fault = Callable[[str, Step], BaseException | None]


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
