"""The live audit: the books against each other, while sequences run (H5, S1-35, S1-36).

Reads everything, changes nothing. Each invariant has a name; what breaks one is returned with the
values of both sides. A round looks at totals and at a part of pages, sequences and rows, and the next
one goes on behind it, so that a round stays short under load.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass

from worker.ids import Row
from worker.pages.prefix_trie import TOKEN_BYTES
from worker.pages.violation import Violation
from worker.scheduling.books import Books
from worker.scheduling.sequence import Place, Sequence


@dataclass(frozen=True, slots=True)
class RowSpan:
    """What the device has to have in a part of a row, after the last step that was scheduled.

    Whole pages: slots behind the last token are valid, too (S1-25).
    """

    row: Row
    first: int  # position of the first slot
    slots: "array[int]"  # 'i'


class Auditor:
    """Goes round over pages, sequences and rows; `once`: over what there is now, and no further."""

    def __init__(self, books: Books, *, once: bool = False) -> None:
        self._books = books
        self._once = once
        self._next_page = 0
        self._sequences = deque(books.sequences.values())
        self._rows = deque(self._row_parts()) if once else deque[tuple[Sequence, int]]()
        self.num_sweeps = 0  # how often every page was looked at

    @property
    def is_done(self) -> bool:
        """Whether everything was looked at."""
        return self.num_sweeps > 0 and not self._sequences and not self._rows

    def check(self, max_pages: int | None = None) -> list[Violation]:
        """What does not hold.

        ``max_pages``: totals and rows as always; page by page only so many pages of the pool, and of
        sequences as many as hold so many pages. The rest follows in later rounds. References are counted
        page by page at the end of the pool, or when their total is wrong: 0.1 us each.
        """
        books = self._books
        window, sequences = None, list(books.sequences.values())
        if max_pages is not None:
            window = self._window(max_pages)
            sequences = self._some(max_pages)
        found = books.cache.check(window)
        is_sweep_over = window is None or window.stop == books.config.cache.num_pages > window.start
        found += _check_references(books, every_page=is_sweep_over)
        found += _check_rows(books)
        for sequence in sequences:
            found += _check_sequence(books, sequence)
        return found + books.batch.check()

    def _window(self, max_pages: int) -> range:
        num_pages = self._books.config.cache.num_pages
        if self._once and self.num_sweeps:
            return range(0)
        first = self._next_page
        last = min(first + max_pages, num_pages)
        self.num_sweeps += last == num_pages
        self._next_page = last % num_pages
        return range(first, last)

    def _some(self, max_pages: int) -> list[Sequence]:
        if not self._sequences and not self._once:
            self._sequences.extend(self._books.sequences.values())
        chosen, num_pages = [], 0
        while self._sequences and num_pages < max_pages:
            sequence = self._sequences.popleft()
            if sequence.place != Place.ENDED:
                chosen.append(sequence)
                num_pages += 1 + len(sequence.pages)
        return chosen

    # Rows on the device.
    def row_spans(self, max_rows: int, max_slots: int) -> list[RowSpan]:
        """Parts of rows of running sequences, other ones each time, each of at most so many slots.

        Rows whose pages were exchanged since the last step are left out until that is written.
        """
        page_size = self._books.config.page_size
        most = max(1, max_slots // page_size)
        stale = {sequence for sequence, _ in self._books.repointed}
        if not self._rows and not self._once:
            self._rows.extend(self._row_parts())
        spans: list[RowSpan] = []
        while self._rows and len(spans) < max_rows:
            sequence, first = self._rows.popleft()
            last = min(first + most, sequence.num_written)
            if not sequence.owner or not sequence.started or sequence in stale or last <= first:
                continue
            spans.append(_span(sequence, first, last, page_size))
            if last < sequence.num_written:
                self._rows.appendleft((sequence, last))
        return spans

    def _row_parts(self) -> list[tuple[Sequence, int]]:
        return [(sequence, 0) for sequence in self._books.by_owner.values() if sequence.started]


def _span(sequence: Sequence, first: int, last: int, page_size: int) -> RowSpan:
    pages = sequence.pages[first:last]
    slots = array("i", [slot for page in pages for slot in range(page * page_size, (page + 1) * page_size)])
    return RowSpan(sequence.row, first * page_size, slots)


def _check_references(books: Books, *, every_page: bool) -> list[Violation]:
    """Every reference count equals the rows that hold the page, those on their way out included."""
    pool, num_pages = books.cache.pool, books.config.cache.num_pages
    holders = [sequence.held_pages for sequence in books.by_owner.values()]
    holders += [held.pages for held in books.held]
    total, found = sum(map(len, holders)), list[Violation]()
    if pool.num_references != total:
        found.append(Violation("refcount", "references over all rows", total, pool.num_references))
    if not every_page and not found:
        return []
    expected: Counter[int] = Counter()
    for pages in holders:
        expected.update(pages)
    for page in pool.referenced() | expected.keys():
        actual = pool.references(page)
        if actual != expected[page]:
            found.append(Violation("refcount", f"references of page {page}", expected[page], actual, page))
    total = pool.num_free + pool.num_cached + pool.num_pinned + len(expected)
    if pool.num_active != len(expected):
        found.append(Violation("state_sum", "pages that rows hold", len(expected), pool.num_active))
    if total != num_pages:
        found.append(Violation("state_sum", "free + cached + pinned + held", num_pages, total))
    return found


def _check_rows(books: Books) -> list[Violation]:
    found = []
    rows = [sequence.row for sequence in books.by_owner.values()]
    rows += [held.sequence.row for held in books.held if held.sequence is not None]
    if len(set(rows)) != len(rows):
        found.append(Violation("page_table", "rows in use that differ", len(rows), len(set(rows))))
    if len(rows) != books.rows.num_used:
        found.append(Violation("page_table", "rows in use", books.rows.num_used, len(rows)))
    for row in rows:
        if not 0 <= row < books.config.max_running:
            found.append(Violation("page_table", "row", f"0 .. {books.config.max_running - 1}", row, row=row))
    return found


def _check_sequence(books: Books, sequence: Sequence) -> list[Violation]:
    found = []
    pool, pages = books.cache.pool, sequence.pages
    row = sequence.row if sequence.owner else None
    if sequence.place == Place.QUEUE:
        for what, actual in (("pages", len(pages)), ("owner number", sequence.owner)):
            if actual:
                subject = f"{what} of {sequence.name}, which waits"
                found.append(Violation("page_table", subject, 0, actual, row=row))
        return found
    if len(set(pages)) != len(pages):
        subject = f"pages of {sequence.name} that differ"
        found.append(Violation("page_table", subject, len(pages), len(set(pages)), row=row))
    num_pages = books.config.cache.num_pages
    if max(pages, default=0) >= num_pages or not all(pool.references_of(pages)):
        for page in pages:
            if page >= num_pages or not pool.references(page):
                subject = f"references of page {page} of {sequence.name}"
                found.append(Violation("page_table", subject, "some", 0, page, row))
    for page in pages[sequence.num_sealed :]:
        if pool.is_sealed(page):
            subject = f"page {page} of {sequence.name}"
            found.append(Violation("trie", subject, "not sealed", "sealed", page, row))
    return found + _check_progress(books, sequence, row) + _check_sealed(books, sequence)


def _check_progress(books: Books, sequence: Sequence, row: int | None) -> list[Violation]:
    """It has pages for what was launched, and sealed <= computed <= launched <= tokens."""
    found = []
    launched = sequence.num_launched
    if sequence.place == Place.BATCH:
        launched = books.batch.starts[sequence.batch_index]
    started = sequence.place in (Place.BATCH, Place.LAST)
    needed = books.cache.pages_for(launched)
    if started and len(sequence.pages) != needed:
        subject = f"pages of {sequence.name}"
        found.append(Violation("page_table", subject, needed, len(sequence.pages), row=row))
    sealed, most = sequence.num_sealed * books.config.page_size, len(sequence.tokens) + len(books.in_flight)
    if not sealed <= sequence.computed <= launched <= most:
        subject = f"tokens of {sequence.name}: sealed, computed, launched, at most"
        actual = f"{sealed}, {sequence.computed}, {launched}, {most}"
        found.append(Violation("page_table", subject, "not falling", actual, row=row))
    return found


def _check_sealed(books: Books, sequence: Sequence) -> list[Violation]:
    """Sealed pages hold the tokens that they are found under."""
    found = []
    size, key_of = books.config.page_size * TOKEN_BYTES, books.cache.index.key
    above: int | bytes = sequence.request.spec.cache_salt
    raw = sequence.tokens[: sequence.num_sealed * books.config.page_size].tobytes()
    for index, page in enumerate(sequence.pages[: sequence.num_sealed]):
        key, tokens = key_of(page), raw[index * size : (index + 1) * size]
        if key is not None and key != (above, tokens):
            subject = f"key of page {page} of {sequence.name}"
            actual = _in_words(key[0], same_tokens=key[1] == tokens)
            found.append(Violation("trie", subject, _in_words(above, same_tokens=True), actual, page))
        above = page
    return found


def _in_words(above: int | bytes, *, same_tokens: bool) -> str:
    """A key without what a user wrote."""
    place = f"after page {above}" if isinstance(above, int) else "at the beginning"
    return f"{'its' if same_tokens else 'other'} tokens {place}"
