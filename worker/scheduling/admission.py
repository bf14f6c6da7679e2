"""Who is let in: whether a request is taken at all, and when one leaves the queue.

Counts whole pages of each sequence (H2), and that cached pages which a request takes over are not
available to anybody else afterwards (B011). Nothing is taken before the decision.
"""

from array import array
from sys import maxsize
from typing import NamedTuple

from worker.pages.page_cache import Lookup
from worker.scheduling.books import Books
from worker.scheduling.fitting import pages_found
from worker.scheduling.output import PrefixCounts, SequenceStart
from worker.scheduling.request import AddOutcome, AddStatus, RequestSpec
from worker.scheduling.sequence import NOTHING_KNOWN, Place, Request, Sequence
from worker.scheduling.timers import TimerKind
from worker.stats import WaitReason

_RETRY_STEPS = 16  # a request that waits for pages is looked up again after so many steps at the latest


class Need(NamedTuple):
    """Pages that a sequence takes from what is available when it is admitted."""

    lookup: Lookup
    fresh: int  # to be allocated for its tokens
    siblings: int  # one each for the samples that will share its prompt

    @property
    def own(self) -> int:
        """Without its siblings'."""
        return self.fresh + self.lookup.num_unreferenced


class Admission:
    """The two decisions, and what follows from a yes."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._interval = 0.0  # seconds between admissions while others wait, smoothed
        self._num_intervals = 0
        self._last_admission: float | None = None

    # At arrival.
    def refuse(self, spec: RequestSpec, limit: int, now: float, draining: bool) -> AddOutcome | None:
        """Why a request is not taken; None: it is. ``limit``: what ``limit`` says of it."""
        if draining:
            return AddOutcome(AddStatus.DRAINING)
        if problem := self._invalid(spec):
            return AddOutcome(AddStatus.INVALID, message=problem)
        return self._too_big(spec, limit) or self._too_late(spec, now)

    def _invalid(self, spec: RequestSpec) -> str:
        books = self._books
        if not 1 <= spec.sample_count <= books.config.max_running:
            return f"{spec.sample_count} samples, possible are 1 .. {books.config.max_running}"
        if not len(spec.prompt_token_ids):
            return "the prompt is empty"
        if spec.params.max_tokens < 1:
            return f"max_tokens is {spec.params.max_tokens}"
        if len(spec.resume_token_ids) and spec.sample_count > 1:
            return "only a single sample can be resumed"
        if len(spec.resume_token_ids) >= spec.params.max_tokens:
            return f"{len(spec.resume_token_ids)} tokens to resume from reach max_tokens"
        for sequence_id in range(spec.sequence_id, spec.sequence_id + spec.sample_count):
            if sequence_id in books.sequences:
                return f"sequence {sequence_id} is live"
        return ""

    def limit(self, spec: RequestSpec) -> int:
        """Tokens of prompt and output at which each sample ends."""
        wanted = len(spec.prompt_token_ids) + spec.params.max_tokens
        return min(wanted, self._books.config.max_context_tokens)

    def _too_big(self, spec: RequestSpec, limit: int) -> AddOutcome | None:
        books = self._books
        longest = books.config.max_context_tokens
        num_tokens = len(spec.prompt_token_ids) + len(spec.resume_token_ids)
        needed = books.cache.pages_for(limit)
        usable = books.config.cache.num_pages - books.cache.num_pinned_pages
        if needed > usable:
            usable += self._num_pinned_found(spec)
        if num_tokens >= longest:
            message = f"a prompt of {num_tokens} tokens leaves no room for output in a context of {longest}"
            return AddOutcome(AddStatus.TOO_LONG, 0, 0.0, needed, usable, message)
        if needed > usable:
            message = (
                f"{len(spec.prompt_token_ids)} prompt tokens and {spec.params.max_tokens} output tokens need "
                f"{needed} pages, there are {usable}"
            )
            return AddOutcome(AddStatus.NEVER_FITS, 0, 0.0, needed, usable, message)
        return None

    def _num_pinned_found(self, spec: RequestSpec) -> int:
        """Pinned pages that are no loss to this request: it shares them."""
        tokens = array("I", [*spec.prompt_token_ids, *spec.resume_token_ids])
        pages = pages_found(self._books, spec, tokens)
        return sum(map(self._books.cache.pool.is_pinned, pages))

    def _too_late(self, spec: RequestSpec, now: float) -> AddOutcome | None:
        books = self._books
        wait = self.estimated_wait(books.num_queued)
        if books.num_queued >= books.config.max_queued_requests:
            return AddOutcome(AddStatus.QUEUE_FULL, books.num_queued, wait)
        position = books.queue.position((self.urgency(spec, now), maxsize))
        wait = self.estimated_wait(position)
        for deadline in (spec.deadline, spec.queue_deadline):
            if deadline is not None and (now >= deadline or now + wait > deadline):
                return AddOutcome(AddStatus.TIMEOUT_TOO_SHORT, position, wait)
        return None

    def urgency(self, spec: RequestSpec, now: float) -> float:
        """The first part of its rank, if it comes now."""
        return now - spec.priority * self._books.config.aging_seconds

    def estimated_wait(self, position: int) -> float:
        """Seconds until a request with so many before it is admitted; 0: unknown."""
        return position * self._interval if self._num_intervals >= 8 else 0.0

    def most_pages(self, spec: RequestSpec, limit: int) -> int:
        """Pages that all samples need at most: whole prompt pages once, the rest for each."""
        shared = (len(spec.prompt_token_ids) - 1) // self._books.page_size
        whole = self._books.cache.pages_for(limit)
        return shared + spec.sample_count * (whole - shared)

    # In the queue.
    def max_hit_pages(self, sequence: Sequence) -> int:
        """Whole pages that a look-up may find: at least one token is always computed (M-07)."""
        spec = sequence.request.spec
        wants_all = spec.params.prompt_logprobs is not None and not sequence.request.prompt_logprobs_sent
        if not spec.cache_read or wants_all:
            return 0
        return (len(sequence.tokens) - 1) // self._books.page_size

    def need(self, sequence: Sequence) -> Need:
        """What it would take now."""
        books = self._books
        pages = self.known_pages(sequence)
        lookup = Lookup(pages, books.cache.pool.unreferenced(pages) if pages else 0)
        fresh = books.cache.pages_for(sequence.num_final_tokens) - len(pages)
        num_siblings = sequence.request.num_live - 1 if sequence.request.admit_time is None else 0
        return Need(lookup, fresh, num_siblings)

    def known_pages(self, sequence: Sequence) -> list[int]:
        """What the cache has of it. Asked when it comes and when it is let in, mostly of the same index."""
        index, most = self._books.cache.index, self.max_hit_pages(sequence)
        version, known_most, pages = sequence.known_prefix
        if version != index.version or known_most != most:
            pages = index.match(sequence.tokens, sequence.request.spec.cache_salt, most)
            sequence.known_prefix = (index.version, most, pages)
        return pages

    def why_not(self, sequence: Sequence, room: int, promised: int) -> tuple[WaitReason, Need | None]:
        """Whether it can be admitted now; ``room``: available pages, ``promised``: to running prompts."""
        books = self._books
        request = sequence.request
        num_rows = request.num_live if request.admit_time is None else 1
        if num_rows > books.rows.num_free:
            return WaitReason.ROWS, None
        is_alone = not books.num_running() and not books.held
        if not is_alone and room < sequence.blocked_need and books.step_number < sequence.retry_step:
            return WaitReason.PAGES, None
        need = self.need(sequence)
        if is_alone and need.own <= room:
            return WaitReason.NONE, need
        # One that was preempted needs a page more for everybody who runs, or it is back at once (B035).
        head_room = books.config.num_watermark_pages
        if sequence.preemptions:
            head_room = max(head_room, books.num_running())
        wanted = need.own + need.siblings + head_room
        if wanted + promised <= room:
            return WaitReason.NONE, need
        sequence.blocked_need = wanted
        sequence.retry_step = books.step_number + _RETRY_STEPS
        return WaitReason.PAGES, need

    def admit(self, sequence: Sequence, need: Need, now: float) -> None:
        """Out of the queue: rows for all its samples, and the pages that the look-up found."""
        books = self._books
        request = sequence.request
        books.queue.remove(sequence)
        is_first = request.admit_time is None
        if is_first:
            self._note_interval(now)
            books.num_queued -= 1
            books.uncached_tokens -= request.uncached_tokens
            self._admit_samples(request, now)
        else:
            self._seat(sequence, Place.PREFILL)
        if is_first and request.spec.cache_read and books.config.cache.sharing:
            request.prefix = self._count_prefix(sequence, need.lookup)
        self.take_over(sequence, need.lookup)
        again = max(0, sequence.lost_tokens - sequence.num_computed)
        request.recomputed_tokens += again
        books.totals.recomputed_tokens += again
        sequence.lost_tokens = 0
        start = SequenceStart(
            sequence_id=request.samples[0].id if is_first else sequence.id,
            prefix=request.prefix if is_first else None,
            reused_pages=len(need.lookup.pages),
            queue_seconds=now - (request.arrival if is_first else sequence.preempted_at),
            resumed=not is_first,
        )
        books.outbox.add_start(request.spec.source, start)

    def _admit_samples(self, request: Request, now: float) -> None:
        request.admit_time = now
        duration = request.spec.params.max_duration_seconds
        if duration is not None:
            self._books.timers.add(now + duration, request.samples[0].rank[1], TimerKind.DURATION)
        for sample in request.samples:
            if sample.place == Place.QUEUE:
                self._seat(sample, Place.PREFILL if sample is request.leader else Place.SIBLING)

    def _seat(self, sequence: Sequence, place: Place) -> None:
        books = self._books
        books.seat(sequence)
        sequence.place = place
        books.prefills.add(sequence)

    def take_over(self, sequence: Sequence, lookup: Lookup) -> None:
        """References the pages that were found; they need not be computed."""
        books = self._books
        sequence.looked_up = True
        sequence.known_prefix = NOTHING_KNOWN
        if not lookup.pages:
            return
        books.take_pages(sequence, lookup.pages, is_hit=True)
        sequence.num_sealed = len(lookup.pages)
        sequence.num_computed = sequence.num_launched = len(lookup.pages) * books.page_size
        sequence.request.reused_pages += len(lookup.pages)
        sequence.request.saved_tokens += sequence.num_computed

    def _count_prefix(self, sequence: Sequence, lookup: Lookup) -> PrefixCounts | None:
        """How the prompt fared; the four numbers add up to it."""
        books = self._books
        page_size = books.page_size
        most = min(self.max_hit_pages(sequence), sequence.num_prompt // page_size)
        if sequence.request.spec.params.prompt_logprobs is not None:
            return None
        found = lookup.pages[:most]
        salt = sequence.request.spec.cache_salt
        missed = books.cache.index.classify(sequence.tokens, salt, found, most)
        counts = PrefixCounts(
            hit_tokens=len(found) * page_size,
            miss_cold_tokens=missed.num_cold * page_size,
            miss_evicted_tokens=missed.num_evicted * page_size,
            unaligned_tokens=sequence.num_prompt - most * page_size,
        )
        totals = books.totals
        totals.hit_tokens += counts.hit_tokens
        totals.miss_cold_tokens += counts.miss_cold_tokens
        totals.miss_evicted_tokens += counts.miss_evicted_tokens
        totals.unaligned_tokens += counts.unaligned_tokens
        if found:
            books.tell_hit(found)
        return counts

    def _note_interval(self, now: float) -> None:
        """Smooths the time between admissions out of a queue that does not empty."""
        last, self._last_admission = self._last_admission, now
        if self._books.num_queued < 2:
            self._last_admission = None
        elif last is not None:
            self._num_intervals += 1
            weight = 1 / min(self._num_intervals, 32)
            self._interval += weight * (now - last - self._interval)
