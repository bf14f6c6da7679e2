"""The engine's orderly end: what runs may finish within the grace, then it is handed over; none is new."""

import pytest

from tests.engine_bench import WAIT_SECONDS, Bench, Slow, bench, prompt_of
from worker.description import WorkerState
from worker.engine import EXIT_OK, EngineSettings
from worker.messages import CallError, CallFailure, CallReason, CheckIntegrity, Ticket
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AddStatus


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
