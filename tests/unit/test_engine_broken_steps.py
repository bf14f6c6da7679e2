"""What breaks in a step, or while a request is added, ends that request alone; the others go on as ever."""

from array import array
from collections.abc import Sequence

import pytest

from tests.engine_bench import Fault, alone, bench, prompt_of
from worker.engine import EXIT_OK, EngineSettings
from worker.ids import SequenceId
from worker.messages import AddRequest
from worker.scheduling.output import FailureReason, FinishCode
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import Step


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
