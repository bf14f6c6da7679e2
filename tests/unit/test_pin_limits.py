"""How much pins may keep, what each of them counts, and what is left of one that was let go."""

from dataclasses import replace

import pytest

from tests.toy_scheduler import make, request
from worker.execution.testing import Harness
from worker.scheduling.pins import MAX_PINS, PinStatus
from worker.scheduling.request import AddStatus

PROMPT = list(range(16))
OTHER = list(range(50, 66))


def with_cached(*prompts: list[int], **changes: object) -> Harness:
    """16 pages, of which pins may keep 8; these prompts are cached."""
    harness = make(**{"num_pages": 16, "max_context_tokens": 64, "max_pinned_pages": 8} | changes)  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts, 900):
        harness.add(request(number, [*prompt, 7], max_tokens=1))
        harness.run()
    return harness


def pin(harness: Harness, name: str, prompt: list[int], computed_tokens: int = 0) -> PinStatus:
    scheduler = harness.scheduler
    status = scheduler.pin(name, prompt, b"", None, harness.now, computed_tokens).status
    harness.audit()
    return status


def hits(harness: Harness) -> dict[str, int]:
    return {each.name: each.hit_tokens for each in harness.scheduler.list_pins()}


def test_a_prefix_that_is_too_large_is_refused_before_it_is_computed() -> None:
    harness = with_cached()
    assert pin(harness, "a", list(range(36))) == PinStatus.LIMIT
    assert pin(harness, "a", list(range(32))) == PinStatus.NOT_CACHED


def test_a_longer_prefix_under_the_same_name_counts_what_both_have_once() -> None:
    harness = with_cached(list(range(40)), max_pinned_pages=4)
    assert pin(harness, "a", PROMPT[:8]) == PinStatus.PINNED
    assert pin(harness, "a", list(range(20))) == PinStatus.LIMIT
    assert pin(harness, "a", PROMPT) == PinStatus.PINNED
    assert harness.scheduler.cache.num_pinned_pages == 4


def test_there_are_so_many_names_and_no_more_but_each_may_be_set_again() -> None:
    harness = with_cached(PROMPT)
    for number in range(MAX_PINS):
        assert harness.scheduler.pin(f"p{number}", PROMPT, b"", None, harness.now).status == PinStatus.PINNED
    assert pin(harness, "more", PROMPT) == PinStatus.LIMIT
    assert pin(harness, "p7", PROMPT[:8]) == PinStatus.PINNED
    assert harness.scheduler.unpin("p8", harness.now)
    assert pin(harness, "more", PROMPT) == PinStatus.PINNED
    assert harness.scheduler.cache.num_pinned_pages == 4


@pytest.mark.parametrize(("num_tokens", "status"), [(48, PinStatus.PINNED), (49, PinStatus.LIMIT)])
def test_every_live_request_can_run_alone_beside_what_is_pinned(num_tokens: int, status: PinStatus) -> None:
    """H15: 12 of 16 pages are left beside four; another request that needs few says nothing of it."""
    harness = with_cached(PROMPT)
    harness.add(request(1, [9] * 4, max_tokens=num_tokens - 4))
    harness.add(request(2, [8] * 4, max_tokens=4))
    assert pin(harness, "a", PROMPT) == status
    harness.run()
    assert len(harness.answers[1].tokens) == num_tokens - 4


def test_one_request_that_shares_a_pin_makes_no_room_for_one_that_does_not() -> None:
    """H15: each must be able to run alone."""
    harness = with_cached(PROMPT, max_running=1)
    harness.add(request(1, [*PROMPT, 7, 7], max_tokens=46))
    harness.add(request(2, [9] * 18, max_tokens=46))
    assert pin(harness, "a", PROMPT) == PinStatus.LIMIT
    harness.abort(2)
    assert pin(harness, "a", PROMPT) == PinStatus.PINNED
    harness.run()
    assert len(harness.answers[1].tokens) == 46


def test_a_name_that_is_set_anew_no_longer_gives_what_it_stood_for() -> None:
    """H15: a request that shares what was pinned has no part in what replaces it."""
    harness = with_cached(PROMPT, OTHER)
    assert pin(harness, "a", PROMPT) == PinStatus.PINNED
    harness.add(request(1, [*PROMPT, 7, 7], max_tokens=46))  # 16 pages, four of them the pin's
    harness.turn()
    assert pin(harness, "a", OTHER) == PinStatus.LIMIT
    harness.run()
    assert len(harness.answers[1].tokens) == 46


def test_a_prompt_that_ends_with_a_pinned_page_computes_that_page_itself() -> None:
    """H15: at least one token is always computed, so the last page is not found and needs room."""
    harness = with_cached(PROMPT)
    assert pin(harness, "a", PROMPT) == PinStatus.PINNED
    refused = harness.add(request(1, PROMPT, max_tokens=48))
    assert (refused.status, refused.needed_pages, refused.total_pages) == (AddStatus.NEVER_FITS, 16, 15)
    assert harness.add(request(1, PROMPT, max_tokens=44)).status == AddStatus.ACCEPTED
    harness.run()
    assert len(harness.answers[1].tokens) == 44


def test_a_sample_that_waits_for_the_prompt_of_another_shares_its_pinned_pages() -> None:
    harness = with_cached(PROMPT, max_chunk_tokens=4)
    spec = request(1, [*PROMPT, *range(100, 120)], max_tokens=28, temperature=1.0)  # 16 pages
    harness.add(replace(spec, sample_count=2))
    harness.turn()
    assert [len(view.page_ids) for view in harness.scheduler.sequence_views()] == [5, 0]
    assert pin(harness, "a", PROMPT) == PinStatus.PINNED
    harness.run()
    assert [len(harness.answers[number].tokens) for number in (1, 2)] == [28, 28]


def test_the_same_pin_once_more_changes_no_page_and_goes_on_counting() -> None:
    harness = with_cached(PROMPT, OTHER)
    assert pin(harness, "a", PROMPT, computed_tokens=12) == PinStatus.PINNED
    harness.add(request(1, [*PROMPT, 7], max_tokens=1))
    harness.run()
    number = harness.scheduler.cache.events.number
    assert pin(harness, "a", PROMPT) == PinStatus.PINNED
    assert harness.scheduler.cache.events.number == number
    (same,) = harness.scheduler.list_pins()
    assert (same.computed_tokens, same.hit_tokens) == (12, 16)
    assert pin(harness, "a", OTHER, computed_tokens=3) == PinStatus.PINNED
    (other,) = harness.scheduler.list_pins()
    assert (other.computed_tokens, other.hit_tokens) == (3, 0)


def test_hits_are_tokens_that_a_prompt_has_in_common_with_the_pin() -> None:
    harness = with_cached([*PROMPT, *OTHER])
    for name, length in (("long", 16), ("short", 8)):
        assert pin(harness, name, PROMPT[:length]) == PinStatus.PINNED
    for number, prompt in enumerate(([*PROMPT, *OTHER, 7], [*PROMPT[:6], 5, 5, 5], [5, 5, 5, 5, 5], OTHER)):
        harness.add(request(number, prompt, max_tokens=1))
        harness.run()
    assert hits(harness) == {"long": 16 + 4, "short": 8 + 4}


def test_of_a_pin_that_was_let_go_nothing_is_left() -> None:
    """Its prefix is still cached, and whoever finds it finds no pin."""
    harness = with_cached(PROMPT)
    for name in ("a", "b"):
        assert pin(harness, name, PROMPT) == PinStatus.PINNED
    assert harness.scheduler.unpin("a", harness.now)
    harness.add(request(1, [*PROMPT, 7], max_tokens=1))
    harness.run()
    assert hits(harness) == {"b": 16}
    assert harness.scheduler.unpin("b", harness.now)
    harness.add(request(2, [*PROMPT, 7], max_tokens=1))
    harness.run()
    start = harness.answers[2].start
    assert start is not None
    assert start.reused_pages == 4
    assert harness.scheduler._pins._by_first_page == {}


def test_a_pin_ends_at_its_time_and_not_before() -> None:
    harness = with_cached(PROMPT)
    scheduler, end = harness.scheduler, harness.now + 5
    scheduler.pin("a", PROMPT, b"", end, harness.now)
    scheduler.schedule(end - 1e-6)
    assert len(scheduler.list_pins()) == 1
    scheduler.schedule(end)
    assert scheduler.list_pins() == []
