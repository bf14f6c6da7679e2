"""An engine without work: it sleeps, its idle time is told, and it serves the link that it borrowed."""

import threading
import time
from collections.abc import Callable

import pytest

from tests.engine_bench import bench, prompt_of
from worker.engine import EXIT_OK, EngineSettings
from worker.execution.fake_runner import FakeHandle
from worker.messages import AddAnswer
from worker.scheduling.step import Step
from worker.status import StepMark
from worker.traffic import TimedStep


def test_an_idle_engine_sleeps(wait_until: Callable[..., None]) -> None:
    """Processor time, whatever else the machine does: one that spins has half a second of it at all times."""

    def is_asleep() -> bool:
        before = time.process_time()
        threading.Event().wait(0.5)
        return time.process_time() - before < 0.1

    with bench() as b:
        b.add(1, prompt_of(1))
        b.finish(1)
        b.wait(lambda: len(b.commands.drain()) == 0)
        wait_until(is_asleep, "an engine that does not spin")


def test_idle_time_is_counted_and_numbers_reach_the_observer_without_a_step() -> None:
    with bench() as b:
        b.add(1, prompt_of(1), max_tokens=3)
        b.finish(1)
        b.wait(lambda: any(seen.counts.output_tokens_total == 3 for seen in b.observations.take_all()))
        idle: list[float] = []
        b.wait(lambda: idle.extend(s.idle_seconds for s in b.observations.take_all()) or len(idle) >= 2)
        assert idle[-1] > idle[0]


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


def test_an_idle_engine_serves_the_link_until_a_first_token_is_out(wait_until: Callable[..., None]) -> None:
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
    reason: str, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
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
