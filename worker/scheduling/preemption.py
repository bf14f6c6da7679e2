"""Whom to stop when pages run out, and how: by giving all pages back and computing again later.

Only between steps: nothing may be in flight, so that a victim's pages are free at once and its tokens
are known. The caller sees to that. What had been computed is often still in the prefix cache.
"""

from worker.scheduling.books import Books
from worker.scheduling.sequence import Sequence
from worker.stats import SequenceState


def choose_victim(books: Books) -> Sequence | None:
    """The running sequence that goes last (lowest priority with aging, then youngest) and holds pages.

    Never the one that goes first: the oldest can always run alone, so there is always progress (B035).
    """
    running = [*books.batch.sequences, *books.prefills]
    holders = [sequence for sequence in running if sequence.held_pages]
    if not holders or len(running) < 2:
        return None
    victim = max(holders, key=lambda sequence: sequence.rank)
    return victim if victim.rank > min(sequence.rank for sequence in running) else None


def preempt(books: Books, sequence: Sequence, now: float) -> None:
    """Takes its pages and row; its tokens stay, and its place in the queue is that of its arrival."""
    assert not books.in_flight, f"{sequence} preempted under step {books.in_flight[0].step.number}"
    num_computed = sequence.computed
    request = sequence.request
    sequence.preemptions += 1
    request.preemptions += 1
    sequence.preempted_at = now
    sequence.lost_tokens = num_computed
    books.totals.preemptions += 1
    books.totals.preempted_tokens += num_computed
    books.take_out(sequence)
    sequence.forget_progress()
    sequence.state = SequenceState.PREEMPTED
    books.requeue(sequence)
