"""What ends the engine: a full or lost device, a bug, another thread's death. All get an answer."""

import pytest

from tests.engine_bench import WAIT_SECONDS, Slow, bench, prompt_of
from worker.engine import EXIT_BUG, EXIT_OUT_OF_MEMORY, EngineSettings
from worker.scheduling.output import FailureReason, FinishCode
from worker.scheduling.step import Step


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


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
