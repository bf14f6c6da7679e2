"""What is a loss of the server and what its answer, how long the client waits, and when it gives up."""

import pytest

from kvatlas.client.errors import DeadlineExceeded, Incomplete, KvatlasError, Unavailable
from kvatlas.client.events import Queued
from kvatlas.client.resume import MAX_CALLS_WITHOUT_PROGRESS
from kvatlas.v1 import generation_pb2 as pb
from tests.losing_server import Clock, course_of, delta, lost, started, stream_request


@pytest.mark.parametrize(
    ("failure", "goes_on"),
    [
        (lost("UNAVAILABLE"), True),
        (lost("INTERNAL"), True),
        (lost("CANCELLED"), True),
        (lost("UNKNOWN"), True),
        (lost("DEADLINE_EXCEEDED"), False),
        (lost("RESOURCE_EXHAUSTED"), False),
        (lost("UNAVAILABLE", "DRAINING"), True),
        (lost("UNAVAILABLE", "QUEUE_FULL"), True),
        (lost("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID"), True),
        (lost("ABORTED", "WORKER_LOST"), False),  # it may be this request that kills workers
        (lost("INTERNAL", "INTERNAL"), False),
        (lost("CANCELLED", "CANCELLED_BY_OPERATOR"), False),
        (lost("RESOURCE_EXHAUSTED", "SLOW_READER"), False),
    ],
)
def test_what_is_a_loss_of_the_server_and_what_is_its_answer(failure: KvatlasError, goes_on: bool) -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    if goes_on:
        assert 0 < course.wait_seconds(failure) <= 2
    else:
        with pytest.raises(Unavailable):
            course.wait_seconds(failure)


def test_before_the_start_only_what_grpc_does_not_retry_is_tried_again() -> None:
    for code, goes_on in (("UNAVAILABLE", False), ("INTERNAL", True)):
        course = course_of(stream_request())
        if goes_on:
            for _ in range(MAX_CALLS_WITHOUT_PROGRESS):
                assert course.wait_seconds(lost(code)) > 0
            with pytest.raises(Unavailable):
                course.wait_seconds(lost(code))
        else:
            with pytest.raises(Unavailable):
                course.wait_seconds(lost(code))


def test_a_request_that_was_told_its_place_in_the_queue_goes_on_elsewhere() -> None:
    """The first `queued` has committed the call: gRPC itself retries no more."""
    for failure in (lost(), lost("UNAVAILABLE", "DRAINING")):
        course = course_of(stream_request())
        queued = pb.StreamGenerateResponse(queued=pb.QueueUpdate(position=2))
        assert course.take(queued) == Queued(2, None)
        assert course.wait_seconds(failure) > 0
        with pytest.raises(Unavailable):
            course.wait_seconds(failure)  # nothing was heard of the next one
    course = course_of(stream_request())
    course.take(pb.StreamGenerateResponse(queued=pb.QueueUpdate(position=2)))
    with pytest.raises(Unavailable):
        course.wait_seconds(lost("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT"))


def test_a_hint_of_the_server_when_to_come_again_is_kept_to() -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    full = Unavailable("full", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL", retry_seconds=7.0)
    assert course.wait_seconds(full) == 7.0
    assert course.wait_seconds(lost()) < 1


def test_a_stream_with_a_limit_on_its_time_or_without_resume_is_never_repeated() -> None:
    limited = stream_request()
    limited.spec.stop.max_duration.seconds = 9
    for course in (course_of(limited), course_of(stream_request(), resume_seconds=0.0)):
        course.take(started(course.next_call()[0], 5))
        with pytest.raises(Unavailable):
            course.wait_seconds(lost())


def test_the_client_gives_up_after_resume_seconds_and_never_passes_its_deadline() -> None:
    clock = Clock()
    course = course_of(stream_request(), clock=clock, resume_seconds=10.0)
    course.take(started(course.next_call()[0], 5))
    began, waits = clock.now, []
    with pytest.raises(Unavailable):  # noqa: PT012
        for _ in range(100):
            waits.append(course.wait_seconds(lost()))
            clock.now += waits[-1]
    assert waits[0] < waits[-1] <= 2
    assert 8 < clock.now - began <= 10
    again = course_of(stream_request(), clock=clock, resume_seconds=10.0)
    for number in range(3):  # each loss has its own seconds
        again.take(started(again.next_call()[0], 5))
        again.take(delta(5, 0, 0, number + 1, ids=True))
        again.wait_seconds(lost())
        clock.now += 9
    late = course_of(stream_request(), clock=clock, timeout_seconds=0.04)
    late.take(started(late.next_call()[0], 5))
    with pytest.raises(DeadlineExceeded):
        late.wait_seconds(lost())


def test_a_request_that_is_lost_again_and_again_without_a_new_token_is_given_up() -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    course.take(delta(5, 0, 0, 3, ids=True))
    for _ in range(MAX_CALLS_WITHOUT_PROGRESS):
        course.wait_seconds(lost())
        course.take(started(course.next_call()[0], 5))
        course.take(delta(5, 0, 0, 3, ids=True))
    with pytest.raises(Unavailable):
        course.wait_seconds(lost())


def test_a_call_that_goes_on_has_what_is_left_of_the_time() -> None:
    clock = Clock()
    course = course_of(stream_request(), clock=clock, timeout_seconds=60.0)
    clock.now += 2
    request, seconds = course.next_call()
    assert seconds == pytest.approx(58)
    course.take(started(request, 5))
    clock.now += 20
    wait = course.wait_seconds(lost())
    clock.now += wait
    assert course.next_call()[1] == pytest.approx(38 - wait)
    clock.now += 100
    assert course.next_call()[1] == 0  # and never less: gRPC takes no negative deadline


def test_a_call_that_ends_well_without_its_summary_is_incomplete() -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    with pytest.raises(Incomplete, match="without its summary"):
        course.end()


def test_any_number_of_losses_is_survived_while_each_call_brings_a_token() -> None:
    course = course_of(stream_request())
    for number in range(3 * MAX_CALLS_WITHOUT_PROGRESS):
        course.take(started(course.next_call()[0], 5))
        course.take(delta(5, 0, 0, number + 1, ids=True))
        assert course.wait_seconds(lost()) > 0


@pytest.mark.parametrize(("chance", "wait"), [(0.0, 0.05), (0.5, 0.075), (1.0, 0.1)])
def test_clients_that_lost_the_same_server_do_not_come_back_together(chance: float, wait: float) -> None:
    course = course_of(stream_request(), chance=lambda: chance)
    course.take(started(course.next_call()[0], 5))
    assert course.wait_seconds(lost()) == pytest.approx(wait)
