"""Frozen views of sequences for observers on other threads.

Reads the books, keeps nothing but what was handed over last.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from worker.ids import Owner, PageId, Row, SequenceId
from worker.pages.snapshot import PoolSnapshot
from worker.scheduling.books import Books
from worker.scheduling.sequence import Place, Request, Sequence
from worker.stats import EngineCounts, Growth, SequenceState, SequenceView, WaitReason

_NO_REASONS = dict.fromkeys(WaitReason, 0)


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened to sequences since the last time. Apply ends first, then growth, then views."""

    ended_owners: "array[int]"  # 'H': gave their owner number back (ended, or preempted)
    ended_ids: tuple[SequenceId, ...]  # ended for good, those that only waited included
    started: tuple[SequenceView, ...]  # got an owner number, in order, without pages; may have ended since
    growth: Growth
    views: tuple[SequenceView, ...]  # new, or the state changed; pages from first_page_index on
    bills: tuple[float, ...]  # page-seconds of each request that ended


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens with KV of every running sequence; columns of equal length."""

    owners: "array[int]"  # 'H'
    token_counts: "array[int]"  # 'I'


def _num_stored(books: Books, sequence: Sequence) -> int:
    """Tokens with KV in its own pages: a sample that still has to copy a page lacks those in there."""
    return min(sequence.computed, len(sequence.pages) * books.config.page_size)


def view(books: Books, sequence: Sequence, first_page: int = 0) -> SequenceView:
    """One sequence, its pages from ``first_page`` on. By position: by name it costs half as much again."""
    spec = sequence.request.spec
    waits = sequence.place == Place.QUEUE
    return SequenceView(
        sequence.id,
        spec.request_id,
        sequence.choice_index,
        sequence.owner,
        None if waits else sequence.row,
        sequence.state,
        cast("tuple[PageId, ...]", tuple(sequence.pages[first_page:])),
        first_page,
        _num_stored(books, sequence),
        sequence.num_prompt,
        _prefix(sequence),
        spec.priority,
        sequence.preemptions,
        spec.receive_time_ns,
        sequence.wait_reason if waits else WaitReason.NONE,
        books.cache.pages_for(sequence.num_final_tokens) if waits else 0,
        spec.tenant,
        spec.labels,
    )


def rows_in_use(books: Books) -> list[Row]:
    """Rows of running sequences."""
    return [sequence.row for sequence in books.by_owner.values()]


def row_views(books: Books, rows: Iterable[int]) -> dict[Row, SequenceView]:
    """The running sequences of these rows."""
    wanted = set(rows)
    running = books.by_owner.values()
    return {sequence.row: view(books, sequence) for sequence in running if sequence.row in wanted}


def _prefix(sequence: Sequence) -> tuple[int, int, int, int] | None:
    prefix = sequence.request.prefix
    if prefix is None:
        return None
    return (
        prefix.hit_tokens,
        prefix.miss_cold_tokens,
        prefix.miss_evicted_tokens,
        prefix.unaligned_tokens,
    )


def _started(sequence: Sequence, owner: Owner) -> SequenceView:
    """Who has, or had, an owner number; the sequence may have ended since."""
    spec = sequence.request.spec
    return SequenceView(
        sequence.id,
        spec.request_id,
        sequence.choice_index,
        owner,
        None,
        sequence.state,
        (),
        0,
        0,
        sequence.num_prompt,
        _prefix(sequence),
        spec.priority,
        sequence.preemptions,
        spec.receive_time_ns,
        WaitReason.NONE,
        0,
        spec.tenant,
        spec.labels,
    )


def take_changes(books: Books) -> Changes:
    """Everything since the last call; the first one starts the record, with all that is live."""
    if not books.is_observed:
        books.is_observed = True
        books.changed = dict.fromkeys(books.sequences.values(), 0)
        books.started = [(sequence, owner) for owner, sequence in books.by_owner.items()]
    changed, books.changed = books.changed, {}
    growth, books.growth = books.growth, Growth()
    started, books.started = books.started, []
    owners, books.ended_owners = books.ended_owners, []
    ids, books.ended_ids = books.ended_ids, []
    bills, books.bills = books.bills, []
    return Changes(
        ended_owners=array("H", owners),
        ended_ids=tuple(ids),
        started=tuple([_started(sequence, owner) for sequence, owner in started]),
        views=tuple([view(books, sequence, first) for sequence, first in changed.items()]),
        growth=growth,
        bills=tuple(bills),
    )


def progress(books: Books) -> Progress:
    """Where running sequences stand."""
    batch, in_flight = books.batch, books.in_flight
    if len(batch) != len(books.by_owner) or any(record.prefills for record in in_flight):
        return _progress_one_by_one(books)
    # All decode, and every member is in every step in flight: so far ahead of its KV is its next position.
    ahead = len(in_flight)
    return Progress(batch.owners, array("I", [start - ahead for start in batch.starts]))


def unfilled_slots(books: Books) -> int:
    """Slots of the running sequences' pages that hold no token; of a page that samples share once."""
    size, found = books.config.page_size, dict[int, int]()
    for sequence in books.by_owner.values():
        pages, num_tokens = sequence.held_pages, sequence.computed
        for index in range(num_tokens // size, len(pages)):
            free = min(size, (index + 1) * size - num_tokens)
            found[pages[index]] = min(free, found.get(pages[index], free))
    is_sealed = books.cache.pool.is_sealed  # by the sample that went on in it, where others will copy it
    return sum(free for page, free in found.items() if not is_sealed(page))


def _progress_one_by_one(books: Books) -> Progress:
    """As _num_stored, without two calls for each of many that decode."""
    running, decode = books.by_owner, SequenceState.DECODE
    counts = [len(s.tokens) - 1 if s.state is decode else _num_stored(books, s) for s in running.values()]
    return Progress(array("H", cast("dict[int, Sequence]", running)), array("I", counts))


def counts(books: Books, blocked: dict[Sequence, WaitReason], estimated_wait: float = 0.0) -> EngineCounts:
    """Totals, and what the engine holds now; waiting reasons add up to the waiting requests."""
    num_waiting = len(books.requests) - books.num_running_requests
    reasons, counted = _NO_REASONS.copy(), set[Request]()
    for sequence, reason in blocked.items():
        request = sequence.request
        # Samples that were preempted wait one by one; what they are samples of counts once.
        if sequence.place == Place.QUEUE and not request.num_with_row and request not in counted:
            counted.add(request)
            reasons[reason] += 1
    reasons[WaitReason.PRIORITY] += num_waiting - sum(reasons.values())
    totals = books.totals
    return EngineCounts(
        running_sequences=books.num_running(),
        running_requests=books.num_running_requests,
        waiting_requests=num_waiting,
        waiting_by_reason=reasons,
        waiting_uncached_tokens=books.uncached_tokens,
        estimated_wait_seconds=estimated_wait,
        prompt_tokens_computed_total=totals.prompt_tokens_computed,
        output_tokens_total=totals.output_tokens,
        hit_tokens_total=totals.hit_tokens,
        miss_cold_tokens_total=totals.miss_cold_tokens,
        miss_evicted_tokens_total=totals.miss_evicted_tokens,
        unaligned_tokens_total=totals.unaligned_tokens,
        preemptions_total=totals.preemptions,
        preempted_tokens_total=totals.preempted_tokens,
        recomputed_tokens_total=totals.recomputed_tokens,
        allocation_failures_total=totals.allocation_failures,
        capacity_evictions_total=books.cache.num_capacity_evictions,
        flush_evictions_total=books.cache.num_flush_evictions,
        pin_pages=books.cache.num_pinned_pages,
    )


def snapshot(books: Books, sequences: tuple[SequenceView, ...]) -> PoolSnapshot:
    """Planes of the pool, completed by what only sequences know: owners and filled slots."""
    planes = books.cache.pool.planes()
    page_size, owners, filled = books.config.page_size, planes.owners, planes.filled_slots
    held = _held(books)
    for owner, of_owner in held:
        for page in of_owner:
            owners[page] = owner
    for sequence in reversed(books.by_owner.values()):  # who was let in last first: earlier ones count
        pages, num_tokens = sequence.pages, sequence.computed
        for page in sequence.held_pages:
            owners[page] = sequence.owner
        for index in range(sequence.num_sealed, len(pages)):
            filled[pages[index]] = max(0, min(page_size, num_tokens - index * page_size))
    return PoolSnapshot(
        number=books.cache.events.number,
        step=books.cache.events.step,
        time_us=books.cache.events.time_us,
        page_size=page_size,
        states=planes.states,
        flags=planes.flags,
        ref_counts=planes.ref_counts,
        filled_slots=filled,
        owners=owners,
        hit_counts=planes.hit_counts,
        parent_page_ids=planes.parent_page_ids,
        born_ms=planes.born_ms,
        used_ms=planes.used_ms,
        fingerprints=planes.fingerprints,
        counts=books.cache.pool.counts_by_state(),
        sequences=sequences,
        held=held,
    )


def _held(books: Books) -> list[tuple[Owner, tuple[int, ...]]]:
    """References that no row of a running sequence has, see PoolSnapshot."""
    found = [(held.owner, tuple(held.pages)) for held in books.held]
    running = books.by_owner.items()
    return found + [(owner, (s.copy_source,)) for owner, s in running if s.copy_source is not None]
