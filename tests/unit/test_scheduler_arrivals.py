"""What is refused as soon as it comes, and what its sender is told: limits, sizes, values, ids."""

import pytest

from tests.toy_scheduler import make, request, state
from worker.scheduling.output import FinishCode
from worker.scheduling.request import AddStatus, RequestSpec


@pytest.mark.parametrize(
    ("length", "status"),
    [(31, AddStatus.ACCEPTED), (32, AddStatus.TOO_LONG), (33, AddStatus.TOO_LONG), (500, AddStatus.TOO_LONG)],
)
def test_an_over_long_prompt_gets_an_answer_with_both_numbers(length: int, status: AddStatus) -> None:
    """H7, B044: a prompt that leaves no room for a token is refused in words, nothing is cut."""
    harness = make(max_context_tokens=32)
    outcome = harness.add(request(1, range(length)))
    assert outcome.status == status
    if status == AddStatus.TOO_LONG:
        assert str(length) in outcome.message
        assert "context of 32" in outcome.message
        assert harness.scheduler.num_live == 0


def test_output_to_resume_from_takes_room_in_the_context() -> None:
    for length, status in ((11, AddStatus.ACCEPTED), (12, AddStatus.TOO_LONG)):
        harness = make(max_context_tokens=32)
        resumed = request(1, range(20), max_tokens=1000, resume_token_ids=list(range(length)))
        assert harness.add(resumed).status == status


def test_more_output_than_the_context_holds_is_clamped_not_refused() -> None:
    """B044: the prompt fits; the answer ends as CONTEXT_LENGTH."""
    harness = make(max_context_tokens=32)
    assert harness.add(request(1, range(20), max_tokens=1000)).status == AddStatus.ACCEPTED
    harness.run()
    assert len(harness.answers[1].tokens) == 12
    assert harness.answers[1].code == FinishCode.CONTEXT_LENGTH


@pytest.mark.parametrize("num_pages", [8, 16])
def test_a_request_that_can_never_fit_the_pool_fails_at_once(num_pages: int) -> None:
    """H15, B033, S1-03: usable pages are N, not N + 1; the numbers are in the answer."""
    harness = make(num_pages=num_pages, max_context_tokens=1000)
    fits = num_pages * 4
    before = state(harness)
    refused = harness.add(request(1, range(8), max_tokens=fits - 7))
    assert (refused.status, refused.needed_pages) == (AddStatus.NEVER_FITS, num_pages + 1)
    assert refused.total_pages == num_pages
    assert state(harness) == before
    assert harness.add(request(1, range(8), max_tokens=fits - 8)).status == AddStatus.ACCEPTED
    harness.run()
    assert len(harness.answers[1].tokens) == fits - 8


def test_the_queue_has_an_end() -> None:
    harness = make(max_running=1, max_queued_requests=2)
    for number in (1, 2):
        assert harness.add(request(number, range(4))).status == AddStatus.ACCEPTED
    full = harness.add(request(3, range(4)))
    assert (full.status, full.queue_position) == (AddStatus.QUEUE_FULL, 2)
    harness.turn()
    assert harness.add(request(3, range(4))).status == AddStatus.ACCEPTED


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (request(1, []), "prompt is empty"),
        (request(1, range(3), max_tokens=0), "max_tokens is 0"),
        (request(1, range(3), sample_count=0), "0 samples"),
        (request(1, range(3), sample_count=9), "9 samples, possible are 1 .. 8"),
        (request(1, range(3), sample_count=2, resume_token_ids=[1]), "only a single sample"),
        (request(1, range(3), max_tokens=2, resume_token_ids=[1, 2]), "2 tokens to resume from"),
    ],
)
def test_a_value_that_the_service_should_have_refused_is_named(spec: RequestSpec, message: str) -> None:
    outcome = make().add(spec)
    assert outcome.status == AddStatus.INVALID
    assert message in outcome.message


def test_a_sequence_id_that_is_live_is_refused() -> None:
    harness = make()
    harness.add(request(1, range(3), sample_count=3))
    assert harness.scheduler.add(request(3, range(3)), 1.0).status == AddStatus.INVALID
    assert harness.scheduler.add(request(0, range(3), sample_count=2), 1.0).status == AddStatus.INVALID
    assert harness.scheduler.add(request(4, range(3)), 1.0).status == AddStatus.ACCEPTED


def test_the_answer_says_what_all_samples_need_at_most() -> None:
    """The page with the last prompt token is each sample's own, also where the prompt ends with it."""
    harness = make(num_pages=40)
    outcome = harness.add(request(1, range(9), max_tokens=7, sample_count=3))
    assert outcome.needed_pages == 2 + 3 * 2
    assert outcome.total_pages == 40
    second = harness.add(request(4, range(8), max_tokens=8, sample_count=3))
    assert (second.needed_pages, second.queue_position) == (1 + 3 * 3, 1)


def test_a_full_queue_does_not_hide_that_a_request_never_fits() -> None:
    """The one may be tried again, the other never."""
    harness = make(num_pages=4, max_running=1, max_queued_requests=1)
    harness.add(request(1, range(4)))
    assert harness.add(request(2, range(4))).status == AddStatus.QUEUE_FULL
    assert harness.add(request(2, range(4), max_tokens=13)).status == AddStatus.NEVER_FITS
