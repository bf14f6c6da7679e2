"""What a snapshot shows of pages and of slots that no token fills, whoever holds or shares them."""

from tests.toy_scheduler import make, request
from worker.ids import NO_PAGE
from worker.pages.events import PageState


def test_a_snapshot_is_the_pool_at_one_number_and_stays_as_it_is() -> None:
    harness = make(num_pages=12)
    harness.add(request(1, range(9), max_tokens=8))
    harness.turn()
    harness.add(request(2, [*range(8), 77], max_tokens=8))
    harness.turn()
    snapshot = harness.scheduler.snapshot()
    assert snapshot.number == harness.scheduler.cache.events.number
    first, second = snapshot.sequences
    assert first.page_ids[:2] == second.page_ids[:2]
    shared, own = first.page_ids[0], second.page_ids[2]
    assert (snapshot.states[shared], snapshot.ref_counts[shared]) == (PageState.ACTIVE, 2)
    assert (snapshot.owners[shared], snapshot.owners[own]) == (first.owner, second.owner)
    assert (snapshot.filled_slots[shared], snapshot.filled_slots[own]) == (4, 1)
    assert snapshot.filled_slots[first.page_ids[2]] == 2
    assert (snapshot.flags[shared], snapshot.flags[own]) == (1, 0)
    assert snapshot.parent_page_ids[first.page_ids[1]] == shared
    assert snapshot.parent_page_ids[shared] == NO_PAGE
    assert snapshot.hit_counts[shared] == 1
    assert snapshot.fingerprints[shared] > 0
    assert snapshot.fingerprints[own] == 0
    assert snapshot.states[12] == PageState.RESERVED
    assert len(snapshot.states) == 13 == sum(snapshot.counts.values())
    states = snapshot.states
    harness.run()
    assert snapshot.states is states
    assert harness.scheduler.snapshot().states != states


def test_slots_without_a_token_are_counted_once_however_many_samples_hold_their_page() -> None:
    """Where a sample still has to copy it, the page is as full as the sample is that went on in it."""
    harness = make()
    harness.add(request(1, range(6), max_tokens=9, sample_count=3, temperature=1.0))
    harness.turn()
    first, *others = harness.scheduler.sequence_views()
    assert (first.token_count, len(first.page_ids)) == (6, 2)
    assert [(view.token_count, view.page_ids) for view in others] == [(4, first.page_ids[:1])] * 2
    snapshot = harness.scheduler.snapshot()
    assert snapshot.ref_counts[first.page_ids[1]] == 3
    assert snapshot.held == [(view.owner, first.page_ids[1:]) for view in others], "to copy from it"
    assert harness.scheduler.unfilled_slots() == 2
    harness.turn()
    assert [view.token_count for view in harness.scheduler.sequence_views()] == [7, 6, 6]
    assert harness.scheduler.unfilled_slots() == 1 + 2 + 2
    harness.turn()
    assert harness.scheduler.unfilled_slots() == 0 + 1 + 1


def test_a_page_that_was_filled_before_a_sample_could_copy_it_has_no_slot_left() -> None:
    """A prompt of higher priority takes what the sample would need of each step."""
    harness = make(num_pages=64, max_running=4, max_step_tokens=5, max_context_tokens=128)
    harness.add(request(1, [9], max_tokens=40))
    harness.turn()
    harness.add(request(2, range(6), max_tokens=30, sample_count=2, temperature=1.0))
    harness.turn()
    harness.add(request(5, range(200, 260), max_tokens=2, priority=1))
    for _ in range(3):
        harness.turn()
    one, first, other, _ = harness.scheduler.sequence_views()
    assert (first.token_count, other.token_count, len(other.page_ids)) == (8, 4, 1)
    assert harness.scheduler.cache.pool.is_sealed(first.page_ids[1])
    unfilled = 4 * len(one.page_ids) - one.token_count
    prompt = harness.scheduler.sequence_views()[3]
    unfilled += 4 * len(prompt.page_ids) - prompt.token_count
    assert harness.scheduler.unfilled_slots() == unfilled


def test_slots_of_pages_that_are_taken_before_their_tokens_are_unfilled() -> None:
    harness = make(overlap=True)
    harness.add(request(1, range(9), max_tokens=9))
    harness.launch()
    assert harness.scheduler.unfilled_slots() == 12
    harness.settle()
    assert harness.scheduler.unfilled_slots() == 3


def test_pages_of_one_that_ended_under_a_step_are_still_its_own_in_a_snapshot() -> None:
    """Also those that another one computed, who is gone."""
    harness = make(overlap=True)
    for number, max_tokens in ((1, 2), (2, 9)):
        harness.add(request(number, range(9), max_tokens=max_tokens))
        harness.turn()
        harness.turn()
    while harness.answers[1].end is None:
        harness.turn()
    (view,) = harness.scheduler.sequence_views()
    harness.launch()
    harness.abort(2)
    snapshot = harness.scheduler.snapshot()
    assert snapshot.sequences == ()
    ((owner, pages),) = snapshot.held
    assert (owner, pages[: len(view.page_ids)]) == (view.owner, view.page_ids)
    assert [snapshot.owners[page] for page in pages] == [view.owner] * len(pages)
    harness.settle()
    assert list(harness.scheduler.snapshot().held) == []
