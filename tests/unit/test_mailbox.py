"""Mailboxes: nothing is lost, nothing waits for the reader, everything has a bound."""

import asyncio
from array import array
from collections.abc import Coroutine
from typing import Any

from service.mailbox import Inbox, Mailbox
from service.request import AddOutcome, AddStatus, FinishCode, LostReason, Scores, SequenceEnd, SequenceStart


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def make(limit: int = 100, **more: Any) -> tuple[Inbox, Mailbox]:
    loop = asyncio.get_running_loop()
    inbox = Inbox(loop)
    return inbox, Mailbox(inbox, limit, loop, **more)


def end(code: FinishCode = FinishCode.EOS) -> SequenceEnd:
    return SequenceEnd(1, code)


def test_a_reader_that_keeps_up_gets_one_token_and_a_late_one_gets_all() -> None:
    async def work() -> None:
        inbox, box = make()
        box.put(1)
        assert box.take().tolist() == [1]
        for token in range(2, 12):
            box.put(token)
        assert box.unread == inbox.unread == 10
        assert box.take().tolist() == list(range(2, 12))
        assert box.take().tolist() == []
        assert box.tokens.tolist() == list(range(1, 12))  # kept for a resume

    run(work())


def test_the_last_token_and_the_end_arrive_together() -> None:
    async def work() -> None:
        _, box = make()
        box.put(7)
        box.finish(end())
        assert box.is_ready
        assert box.take().tolist() == [7]
        assert box.end is not None

    run(work())


def test_what_comes_after_the_end_or_over_the_limit_is_dropped() -> None:
    async def work() -> None:
        _, box = make(limit=2)
        for token in range(5):
            box.put(token)
        assert box.tokens.tolist() == [0, 1]
        box.finish(end())
        box.put(9)
        box.finish(end(FinishCode.FAILED))
        assert box.tokens.tolist() == [0, 1]
        assert box.end == end()

    run(work())


def test_a_waiting_reader_is_woken_by_a_token_an_end_a_start_an_answer_and_a_loss() -> None:
    async def work() -> None:
        inbox, box = make()
        wakes = [
            lambda: box.put(1),
            lambda: box.finish(end()),
            lambda: inbox.started(SequenceStart(1, None, 0, 0, resumed=False)),
            lambda: inbox.added(AddOutcome(1, AddStatus.ACCEPTED)),
            lambda: inbox.lost(LostReason.CRASH),
        ]
        for wake in wakes:
            waiting = asyncio.ensure_future(inbox.wait())
            await asyncio.sleep(0)
            assert not waiting.done()
            wake()
            await asyncio.wait_for(waiting, 5)

    run(work())


def test_what_came_while_nobody_waited_is_not_missed() -> None:
    async def work() -> None:
        inbox, box = make()
        box.put(1)
        await asyncio.wait_for(inbox.wait(), 5)
        waiting = asyncio.ensure_future(inbox.wait())
        await asyncio.sleep(0)
        assert not waiting.done()  # told once
        box.put(2)
        await asyncio.wait_for(waiting, 5)

    run(work())


def test_starts_after_preemptions_wake_nobody_and_are_bounded() -> None:
    async def work() -> None:
        inbox, _ = make()
        waiting = asyncio.ensure_future(inbox.wait())
        for _ in range(1000):
            inbox.started(SequenceStart(1, None, 0, 0, resumed=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        assert 0 < len(inbox.starts) <= 64
        waiting.cancel()

    run(work())


def test_waking_twice_or_after_a_cancelled_wait_does_no_harm() -> None:
    async def work() -> None:
        inbox, _ = make()
        waiting = asyncio.ensure_future(inbox.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        inbox.wake()
        inbox.wake()
        again = asyncio.ensure_future(inbox.wait())
        await asyncio.sleep(0)
        inbox.wake()
        await asyncio.wait_for(again, 5)

    run(work())


def test_tokens_are_held_until_there_are_enough_but_never_the_first() -> None:
    async def work() -> None:
        _, box = make(hold_seconds=60.0)
        box.put(1)
        assert box.is_ready
        box.take(3)
        box.put(2)
        box.put(3)
        assert not box.is_ready
        box.put(4)
        assert box.is_ready
        assert box.take(3).tolist() == [2, 3, 4]
        box.put(5)
        box.finish(end())
        assert box.is_ready  # the end is never held

    run(work())


def test_the_hold_ends_by_itself() -> None:
    async def work() -> None:
        inbox, box = make(hold_seconds=0.01)
        box.put(1)
        box.take(50)
        box.put(2)
        await asyncio.wait_for(inbox.wait(), 5)  # the first token's news
        assert not box.is_ready
        await asyncio.wait_for(inbox.wait(), 5)
        assert box.is_ready
        assert box.take(50).tolist() == [2]

    run(work())


def test_the_end_of_the_last_sequence_is_told_and_taken_back() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop)
        first, second = Mailbox(inbox, 9, loop), Mailbox(inbox, 9, loop)
        told: list[bool] = []
        inbox.on_all_ended = told.append
        first.finish(end())
        assert told == []
        second.finish(end(FinishCode.DRAINED))
        second.reopen()
        second.finish(end())
        assert told == [True, False, True]

    run(work())


def test_scores_stay_beside_their_tokens() -> None:
    """B038: as many as tokens, also after a resume; a closed box holds nothing."""

    async def work() -> None:
        _, box = make(limit=3, has_scores=True)
        step = Scores(array("f", [-1, -2]), array("I", [1, 5]), bytearray([2, 1]), array("I", [7, 8, 9]))
        step.alternative_logprobs.extend([-3, -4, -5])
        box.put_scored(70, step, 0, 0)
        box.put_scored(71, step, 1, 2)
        box.put_scored(72, step, 0, 0)
        box.put_scored(73, step, 0, 0)  # over the limit
        assert box.scores is not None
        assert len(box.scores) == len(box.tokens) == 3
        taken = box.scores.take(2)
        assert (taken.ranks.tolist(), list(taken.counts)) == ([1, 5], [2, 1])
        assert taken.alternative_ids.tolist() == [7, 8, 9]
        assert (len(box.scores), box.scores.alternative_ids.tolist()) == (1, [7, 8])
        box.close()
        assert (box.scores, len(box.tokens)) == (None, 0)
        box.put(1)
        assert box.unread == 0

    run(work())
