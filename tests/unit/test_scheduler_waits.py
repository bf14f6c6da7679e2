"""How long one waits in the queue: estimated from the pace, and held against deadlines."""

import pytest

from tests.toy_scheduler import make, request
from worker.execution.testing import Harness
from worker.scheduling.request import AddStatus


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    """Known only once enough requests have been admitted out of a queue."""
    harness = make(max_running=1, max_step_tokens=9)
    assert harness.add(request(1, range(4), deadline=harness.now)).status == AddStatus.TIMEOUT_TOO_SHORT
    for number in range(1, 30):
        harness.add(request(number, range(4), max_tokens=2))
    for _ in range(40):
        harness.turn()
    waiting = harness.scheduler.counts().waiting_requests
    assert waiting > 5
    outcome = harness.add(request(50, range(4), deadline=harness.now + 0.02))
    assert outcome.status == AddStatus.TIMEOUT_TOO_SHORT
    assert outcome.estimated_wait_seconds == pytest.approx(waiting * 0.022, rel=0.5)
    assert harness.add(request(50, range(4), deadline=harness.now + 60)).status == AddStatus.ACCEPTED


def paced(seconds: float, count: int, harness: Harness | None = None) -> Harness:
    """One that lets in a request so many times, at this pace, with many more waiting behind it."""
    harness = harness or make(max_running=1, max_step_tokens=9, sharing=False)
    for number in range(len(harness.answers), len(harness.answers) + count + 9):
        harness.add(request(number, range(4), max_tokens=1))
    for _ in range(count):
        harness.now += seconds - 0.011  # a turn takes the rest
        harness.turn()
    return harness


def test_a_wait_is_estimated_from_eight_waits_on_and_follows_a_new_pace() -> None:
    def pace(harness: Harness) -> float:
        counts = harness.scheduler.counts()
        return counts.estimated_wait_seconds / counts.waiting_requests

    assert pace(paced(0.5, 8)) == 0.0, "seven waits between eight"
    known = paced(0.5, 9)
    assert pace(known) == pytest.approx(0.5)
    fast = paced(0.1, 100)
    assert pace(fast) == pytest.approx(0.1)
    assert pace(paced(1.0, 32, fast)) == pytest.approx(1 - 0.9 * (31 / 32) ** 32)


def test_the_time_in_which_nobody_waited_is_no_wait() -> None:
    harness = paced(0.5, 9)
    before = harness.scheduler.counts().estimated_wait_seconds / harness.scheduler.counts().waiting_requests
    harness.run()
    harness.now += 1000.0
    for number in (500, 501, 502):
        harness.add(request(number, range(4), max_tokens=1))
    harness.turn()
    harness.now += 0.489
    harness.turn()
    after = harness.scheduler.counts().estimated_wait_seconds / harness.scheduler.counts().waiting_requests
    assert after < before + 0.1


def test_a_deadline_at_the_end_of_the_estimated_wait_can_be_met_and_one_before_it_cannot() -> None:
    """Those that came at the same time are before it, too; whichever of the two deadlines it has."""
    harness = paced(0.5, 9)
    number, position = 500, harness.scheduler.counts().waiting_requests
    wait = position * 0.5
    for which in ("deadline", "queue_deadline"):
        for early, status in ((1e-3, AddStatus.TIMEOUT_TOO_SHORT), (-1e-3, AddStatus.ACCEPTED)):
            outcome = harness.add(request(number, range(4), **{which: harness.now + wait - early}))
            assert (outcome.status, outcome.queue_position) == (status, position)
            assert outcome.estimated_wait_seconds == pytest.approx(wait)
        number, position, wait = number + 1, position + 1, wait + 0.5


def test_a_deadline_is_held_against_the_wait_for_those_who_go_first() -> None:
    """One of higher priority passes those that wait: their number says nothing of its own wait."""
    harness = make(max_running=1, max_step_tokens=9)
    for number in range(1, 30):
        harness.add(request(number, range(4), max_tokens=2))
    for _ in range(40):
        harness.turn()
    soon = harness.now + 0.02
    assert harness.add(request(50, range(4), deadline=soon)).status == AddStatus.TIMEOUT_TOO_SHORT
    urgent = harness.add(request(50, range(4), queue_deadline=soon, priority=1))
    assert (urgent.status, urgent.queue_position) == (AddStatus.ACCEPTED, 0)
    patient = harness.add(request(51, range(4), deadline=soon, priority=-1))
    assert patient.status == AddStatus.TIMEOUT_TOO_SHORT
    assert patient.queue_position == harness.scheduler.counts().waiting_requests
