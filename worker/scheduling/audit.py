"""The live audit: the books against each other, while sequences run (H5, S1-35, S1-36).

Reads everything, changes nothing. Each invariant has a name; what breaks one is returned with the
numbers of both sides.
"""

from collections import Counter

from worker.pages.violation import Violation
from worker.scheduling.books import Books
from worker.scheduling.sequence import Place, Sequence

CHECKS = ("state_sum", "refcount", "free_list", "page_table", "trie")


class Auditor:
    """Audits everything, or a part that moves on with each round so that a round stays short under load."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._next_page = 0
        self._next_sequence = 0

    def check(self, max_pages: int | None = None) -> list[Violation]:
        """What does not hold.

        ``max_pages``: totals, rows and reference counts as always; page by page only so many pages of
        the pool, and of sequences as many as hold so many pages. The rest follows in later rounds.
        """
        books = self._books
        window, sequences = None, list(books.sequences.values())
        if max_pages is not None:
            window = self._window(max_pages)
            sequences = self._some(sequences, max_pages)
        found = books.cache.check(window)
        found += _check_references(books, window)
        found += _check_rows(books)
        for sequence in sequences:
            found += _check_sequence(books, sequence)
        return found + [Violation("page_table", text, "", "") for text in books.batch.check()]

    def _window(self, max_pages: int) -> range:
        num_pages = self._books.config.cache.num_pages
        first = self._next_page if self._next_page < num_pages else 0
        self._next_page = min(first + max_pages, num_pages)
        return range(first, self._next_page)

    def _some(self, sequences: list[Sequence], max_pages: int) -> list[Sequence]:
        if not sequences:
            return []
        chosen, num_pages = [], 0
        first = self._next_sequence % len(sequences)
        for sequence in sequences[first:] + sequences[:first]:
            chosen.append(sequence)
            num_pages += 1 + len(sequence.pages)
            if num_pages >= max_pages:
                break
        self._next_sequence = first + len(chosen)
        return chosen


def _check_references(books: Books, window: range | None) -> list[Violation]:
    """Every reference count equals the rows that hold the page, those on their way out included."""
    expected: Counter[int] = Counter()
    for sequence in books.by_owner.values():
        expected.update(sequence.held_pages)
    for held in books.held:
        expected.update(held.pages)
    pool, num_pages = books.cache.pool, books.config.cache.num_pages
    found = []
    for page in range(num_pages) if window is None else window:
        actual = pool.references(page)
        if actual != expected[page]:
            found.append(Violation("refcount", f"references of page {page}", expected[page], actual))
    if pool.num_references != expected.total():
        found.append(Violation("refcount", "references over all rows", expected.total(), pool.num_references))
    total = pool.num_free + pool.num_cached + pool.num_pinned + len(expected)
    if pool.num_active != len(expected) or total != num_pages:
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
            found.append(Violation("page_table", "row", f"0 .. {books.config.max_running - 1}", row))
    return found


def _check_sequence(books: Books, sequence: Sequence) -> list[Violation]:
    found = []
    pool, page_size, pages = books.cache.pool, books.config.page_size, sequence.pages
    if sequence.place == Place.QUEUE:
        if pages or sequence.owner:
            found.append(Violation("page_table", f"pages of {sequence}, which waits", [], pages))
        return found
    if len(set(pages)) != len(pages):
        found.append(Violation("page_table", f"pages of {sequence} that differ", len(pages), len(set(pages))))
    for index, page in enumerate(pages):
        if page >= books.config.cache.num_pages or not pool.references(page):
            found.append(Violation("page_table", f"references of page {page} of {sequence}", "some", 0))
        if index >= sequence.num_sealed and pool.is_sealed(page):
            found.append(Violation("trie", f"page {page} of {sequence}", "not sealed", "sealed"))
    launched = sequence.num_launched
    if sequence.place == Place.BATCH:
        launched = books.batch.starts[sequence.batch_index]
    started = sequence.place in (Place.BATCH, Place.LAST)
    if started and len(pages) != books.cache.pages_for(launched):
        found.append(
            Violation("page_table", f"pages of {sequence}", books.cache.pages_for(launched), len(pages))
        )
    if (
        not sequence.num_sealed * page_size
        <= sequence.computed
        <= launched
        <= len(sequence.tokens) + len(books.in_flight)
    ):
        found.append(Violation("page_table", f"{sequence}: sealed <= computed <= launched <= tokens", "", ""))
    return found + _check_sealed(books, sequence)


def _check_sealed(books: Books, sequence: Sequence) -> list[Violation]:
    """Sealed pages hold the tokens that they are found under."""
    found = []
    page_size, spec = books.config.page_size, sequence.request.spec
    above: int | bytes = spec.cache_salt
    for index in range(sequence.num_sealed):
        page = sequence.pages[index]
        key = books.cache.index.key(page)
        tokens = sequence.tokens[index * page_size : (index + 1) * page_size].tobytes()
        if key is not None and key != (above, tokens):
            found.append(Violation("trie", f"key of page {page} of {sequence}", (above, tokens), key))
        above = page
    return found
