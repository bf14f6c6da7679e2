"""What the engine tells its observers of steps and of rows on the device."""

import pytest

from tests.engine_bench import WAIT_SECONDS, Slow, bench, prompt_of
from worker.engine import EXIT_BUG, EngineSettings
from worker.readers.audit import AuditRound
from worker.scheduling.output import FinishCode
from worker.scheduling.step import Step
from worker.traffic import TimedStep


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
