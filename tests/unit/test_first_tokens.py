"""First tokens go out before the next step is decided, where the device has them: counted in launches."""

import threading
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from worker import first_tokens
from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.engine import Engine, EngineSettings
from worker.execution.fake_runner import FakeHandle, FakeModel, FakeRunner
from worker.ids import SequenceId
from worker.messages import AddAnswer, AddRequest, EngineCommand, LinkMessage, StepOutputs
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import OutputColumns
from worker.scheduling.request import AbortReason, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult, TokenLogprob
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


def scheduler_with(*requests: RequestSpec) -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            CacheConfig(PAGES, PAGE_SIZE), max_running=ROWS, max_step_tokens=64, max_context_tokens=CONTEXT
        )
    )
    for request in requests:
        scheduler.add(request, 0.0)
    return scheduler


def request(number: int, *, max_tokens: int = 3, samples: int = 1, **how: Any) -> RequestSpec:
    params = SamplingParams(max_tokens=max_tokens, stop_at_eos=False, **how)
    return RequestSpec(
        SequenceId(10 * number), array("I", [number] * 9), params, source=f"s{number}", sample_count=samples
    )


def test_first_tokens_are_put_out_before_pages_are_sealed() -> None:
    """All that streams on alone; whose answer ends, or whose samples begin, is told after the books."""
    scheduler = scheduler_with(
        request(1), request(2, max_tokens=1), request(3), request(4, samples=2), request(5, prompt_logprobs=0)
    )
    step = scheduler.schedule(0.0)
    assert step is not None
    told: list[set[str]] = []

    def look() -> None:
        told.append({source for source, columns in scheduler.take_outputs().items() if columns.token_ids})
        assert not any(map(scheduler.cache.pool.is_sealed, step.new_page_ids)), "sealed before"

    result = StepResult([7] * len(step.sampled), prompt_logprobs={4: [TokenLogprob(-1.0, 1)] * 8})
    scheduler.commit(step, result, 0.0, look)
    assert told == [{"s1", "s3"}]
    later = scheduler.take_outputs()
    assert {source for source, columns in later.items() if columns.token_ids} == {"s2", "s4", "s5"}
    assert len(later["s2"].ends) == 1
    assert scheduler.cache.pool.is_sealed(step.new_page_ids[0])
    assert not scheduler.check()


def test_a_step_without_first_tokens_is_not_told() -> None:
    scheduler = scheduler_with(request(1), request(2, max_tokens=1))
    for number in range(3):
        step = scheduler.schedule(0.0)
        assert step is not None
        told: list[int] = []
        scheduler.commit(step, StepResult([7] * len(step.sampled)), 0.0, partial(told.append, 1))
        assert told == [1] * (number == 0)


def test_who_failed_or_left_has_no_first_token() -> None:
    scheduler = scheduler_with(request(1), request(2), request(3))
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.abort([SequenceId(30)], AbortReason.CLIENT, 0.0)
    scheduler.take_outputs()
    taken: dict[str, OutputColumns] = {}
    result = StepResult([7, -1, 7], failed={1: "non-finite logits"})
    scheduler.commit(step, result, 0.0, lambda: taken.update(scheduler.take_outputs(leaving="s2")))
    assert list(taken) == ["s1"]
    assert list(taken["s1"].token_ids) == [7]
    left = scheduler.take_outputs()
    assert list(left) == ["s2"], "it waited for the next take"
    assert len(left["s2"].ends) == 1
    assert not scheduler.check()


def test_the_link_has_the_interpreter_before_the_step_after_next_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[int] = []
    monkeypatch.setattr(first_tokens, "let_them_go", lambda are_taken: pauses.append(1))
    events_of(lambda step: False, overlap=True)
    assert len(pauses) == 1, "after the first token, whose step had another behind it; not after later ones"
    events_of(lambda step: True, overlap=True)
    assert len(pauses) == 1, "not where the device waits for its next step"


@pytest.mark.parametrize(("looks", "pauses"), [(0, 0), (2, 2), (1000, first_tokens.POLLS)])
def test_the_pause_ends_when_they_are_taken_or_after_a_few_looks(looks: int, pauses: int) -> None:
    slept: list[float] = []
    first_tokens.let_them_go(lambda: len(slept) >= looks, sleep=slept.append)
    assert slept == [first_tokens.POLL_SECONDS] * pauses


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


def test_nobody_waits_for_first_tokens_before_the_next_launch() -> None:
    def are_there(step: Step, looks: int) -> bool:
        handle = Handle(looks)
        found = first_tokens.are_there(step, handle)
        assert handle.looks >= looks - 1, "looked at once at most"
        return found

    assert are_there(step(0, 1, 1), looks=0)
    assert not are_there(step(0, 1, 1), looks=1)
    assert are_there(step(2, 1, 3), looks=0)
    assert not are_there(step(2, 1, 2), looks=0), "the prompt is not complete"
    assert not are_there(step(0, 1, 0), looks=0)
