"""First tokens go out before the next step is decided, where the device has them: counted in launches."""

import threading
import time
from array import array
from collections.abc import Callable

import pytest

from worker import first_tokens
from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.engine import Engine, EngineSettings
from worker.execution.fake_runner import FakeHandle, FakeModel, FakeRunner
from worker.ids import SequenceId
from worker.messages import AddAnswer, AddRequest, EngineCommand, LinkMessage, StepOutputs
from worker.pages.page_cache import CacheConfig
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step
from worker.status import first_board

MODEL = FakeModel(vocab_size=97)
PAGES, PAGE_SIZE, ROWS, CONTEXT = 64, 4, 8, 128
WAIT_SECONDS = 60.0  # only ends a test that hangs


class Log(OutputQueue[LinkMessage]):
    """Notes in which order answers, launches and first tokens come, and when the reader is woken."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.events: list[str] = []
        self.is_over = threading.Event()

    def put(self, item: LinkMessage, *, wakes: bool = True) -> None:
        super().put(item, wakes=wakes)
        if isinstance(item, AddAnswer):
            self.events.append("answer")
        elif isinstance(item, StepOutputs):
            for columns in item.by_source.values():
                self.events += ["token"] * len(columns.token_ids)
                if columns.ends:
                    self.is_over.set()

    def wake(self) -> None:
        if len(self) and self.events and self.events[-1] != "wake":
            self.events.append("wake")
        super().wake()


class Device(FakeRunner):
    """Notes launches; `is_quick` says whether a step is over when it has been launched."""

    def __init__(self, log: Log, is_quick: Callable[[Step], bool]) -> None:
        super().__init__(
            num_pages=PAGES,
            page_size=PAGE_SIZE,
            max_running=ROWS,
            row_width=CONTEXT,
            model=MODEL,
            lazy=True,
        )
        self._log = log
        self._is_quick = is_quick

    def launch(self, step: Step) -> FakeHandle:
        handle = super().launch(step)
        self._log.events.append("decode" if step.num_decode == len(step.rows) else "prompt")
        if self._is_quick(step):
            self.run_until(handle)
        return handle


def events_of(is_quick: Callable[[Step], bool], *, overlap: bool, prompts: int = 1) -> list[str]:
    log = Log()
    description = WorkerDescription(
        "w",
        1,
        ModelDescription("m", MODEL.vocab_size, CONTEXT),
        PoolDescription(PAGES, PAGE_SIZE, ROWS, CONTEXT, "lru"),
        ROWS,
        CONTEXT,
        1,
        (),
        "",
        b"",
    )
    commands: CommandQueue[EngineCommand] = CommandQueue(256)
    engine = Engine(
        Scheduler(
            SchedulerConfig(
                CacheConfig(PAGES, PAGE_SIZE),
                max_running=ROWS,
                max_step_tokens=16,
                max_context_tokens=CONTEXT,
            )
        ),
        Device(log, is_quick),
        EngineSettings(overlap=overlap, audit_interval=0.0),
        commands=commands,
        outputs=log,
        observations=Handover(1000),
        board=first_board(description, time.monotonic()),
        on_state=lambda: None,
    )
    for number in range(1, prompts + 1):
        params = SamplingParams(max_tokens=3, stop_at_eos=False)
        commands.put(
            AddRequest(RequestSpec(SequenceId(number), array("I", [number] * 6), params, source="s"))
        )
    thread = threading.Thread(target=engine.run)
    thread.start()
    assert log.is_over.wait(WAIT_SECONDS)
    engine.stop()
    thread.join(WAIT_SECONDS)
    log.close()
    return log.events


def order(events: list[str], *wanted: str) -> list[str]:
    return [event for event in events if event in wanted]


def test_a_first_token_that_is_there_does_not_wait_for_the_next_launch() -> None:
    events = order(events_of(lambda step: True, overlap=True), "prompt", "decode", "token")
    assert events[:3] == ["prompt", "token", "decode"]
    assert events.count("token") == 3


def test_a_busy_device_gets_its_next_step_before_the_first_token_is_read() -> None:
    events = order(events_of(lambda step: False, overlap=True), "prompt", "decode", "token")
    assert events[:3] == ["prompt", "decode", "token"]
    assert events.count("token") == 3


def test_the_link_has_the_interpreter_before_the_step_after_next_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(first_tokens, "let_them_go", lambda: pauses.append(1))
    events_of(lambda step: False, overlap=True)
    assert len(pauses) == 1, "after the first token, whose step had another behind it; not after later ones"
    events_of(lambda step: True, overlap=True)
    assert len(pauses) == 1, "not where the device waits for its next step"


def test_later_tokens_leave_the_device_a_step_ahead() -> None:
    """A decode step that is over already is not looked at before the next one is launched."""
    events = order(events_of(lambda step: True, overlap=True), "decode", "token")
    assert events == ["token", "decode", "decode", "token", "token"]


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_to_requests_go_out_before_a_long_launch_and_after_a_short_one(overlap: bool) -> None:
    """Without overlap a launch computes the step; with it, it is the host's, and so is the interpreter."""
    events = order(events_of(lambda step: True, overlap=overlap), "answer", "prompt", "wake")
    assert events[:3] == (["answer", "prompt", "wake"] if overlap else ["answer", "wake", "prompt"])


class Handle(FakeHandle):
    """Ready after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def step(num_decode: int, num_prompts: int, num_sampled: int) -> Step:
    count = num_decode + num_prompts
    zeros = array("i", [0] * count)
    return Step(1, [SequenceId(1)] * count, zeros, zeros, zeros, range(num_sampled), num_decode)


def test_nobody_waits_where_others_stream_or_no_prompt_is_complete() -> None:
    slept: list[float] = []

    def are_there(step: Step, looks: int, num_live: int) -> bool:
        return first_tokens.are_there(step, Handle(looks), num_live, sleep=slept.append)

    assert are_there(step(0, 1, 1), looks=3, num_live=1)
    assert slept == [first_tokens.POLL_SECONDS] * 3
    assert not are_there(step(0, 1, 1), looks=3, num_live=2), "somebody waits for the next step"
    assert are_there(step(0, 1, 1), looks=0, num_live=2)
    assert not are_there(step(2, 1, 3), looks=3, num_live=3), "two others stream"
    assert are_there(step(2, 1, 3), looks=0, num_live=3)
    assert not are_there(step(2, 1, 2), looks=0, num_live=3), "the prompt is not complete"
    assert not are_there(step(0, 1, 0), looks=0, num_live=1)
    assert len(slept) == 3


def test_the_wait_has_an_end() -> None:
    now = iter([0.0, 0.0001, first_tokens.WAIT_SECONDS + 0.0001])
    slept: list[float] = []
    assert not first_tokens.are_there(
        step(0, 1, 1), Handle(1000), 1, clock=lambda: next(now), sleep=slept.append
    )
    assert len(slept) == 1
