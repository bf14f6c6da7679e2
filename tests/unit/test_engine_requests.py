"""Requests that the engine refuses, lets go of, or holds back because nobody takes their tokens."""

import threading
import time

from tests.engine_bench import WAIT_SECONDS, Slow, alone, bench, prompt_of
from worker.ids import SequenceId
from worker.messages import Abort, DropSource
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AbortReason, AddStatus


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
