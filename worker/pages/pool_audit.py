"""The audit of the page pool: do its columns, its totals and its free list agree?

Reads the columns and changes nothing. Knows the pool alone: whether the index and the sequences agree with it
is asked in page_cache.py and by the scheduler.
"""

from worker.pages.columns import ACTIVE, CACHED, FREE, HELD, PINNED, RESERVED, SEALED, PageColumns
from worker.pages.events import PageState
from worker.pages.violation import Violation

_SOUND = frozenset(  # state, whether it is referred to, flags
    [
        (FREE, False, 0),
        (CACHED, False, SEALED),
        (HELD, False, SEALED | PINNED),
        (RESERVED, False, 0),
        *[(ACTIVE, True, flags) for flags in (0, SEALED, SEALED | PINNED)],
    ]
)
_FLAGS = {FREE: 0, CACHED: SEALED, HELD: SEALED | PINNED, RESERVED: 0}  # that go with a state


class AuditedColumns(PageColumns):
    """Columns that can be told whether they are sound."""

    def check(self, window: range | None = None) -> list[Violation]:
        """Invariants of the pool alone: totals, and page by page those in ``window``; None: all pages."""
        found: list[Violation] = []
        states, counts = self._states, self._counts
        for state in PageState:
            if states.count(state) != counts[state]:
                found.append(Violation("state_sum", state.name, counts[state], states.count(state)))
        if window is None:  # under load each page is compared with who holds it; a sum takes 10 ms a million
            held = sum(self._refs)
            if held != self._num_references:
                found.append(Violation("refcount", "references over all pages", self._num_references, held))
            shared = sum([count >= 2 for count in self._refs])
            if shared != self._num_shared:
                found.append(Violation("refcount", "shared pages", self._num_shared, shared))
        found += self._check_pages(range(self.num_pages) if window is None else window)
        found += self._check_pages(range(self.num_pages, self.num_pages + 1))
        return found + self._check_free_list(window)

    def _check_pages(self, window: range) -> list[Violation]:
        at = slice(window.start, window.stop)
        # All at once first: a round of the live audit is the engine's time, and nearly always all is well.
        found = zip(self._states[at], map(bool, self._refs[at]), self._flags[at], strict=True)
        has_dummy = self._states[at].count(RESERVED) == 1
        if _SOUND.issuperset(found) and has_dummy == (window.stop == self.num_pages + 1):
            return []
        return self._find_in_pages(window)

    def _find_in_pages(self, window: range) -> list[Violation]:
        """Page by page, what does not hold."""
        found = []
        states, all_refs, all_flags = self._states, self._refs, self._flags
        for page in window:
            state, refs, flags = states[page], all_refs[page], all_flags[page]
            if (state == ACTIVE) != (refs > 0):
                expected = "some" if state == ACTIVE else 0
                subject = f"references of page {page}, state {state}"
                found.append(Violation("refcount", subject, expected, refs, page))
            in_use = SEALED | PINNED if flags & PINNED else flags & SEALED
            expected_flags = in_use if state == ACTIVE else _FLAGS[state]
            if flags != expected_flags:
                subject = f"flags of page {page}, state {state}"
                found.append(Violation("state_sum", subject, expected_flags, flags, page))
            is_dummy = page == self.num_pages
            if (state == RESERVED) != is_dummy:
                subject = f"page {page} as the dummy page"
                found.append(Violation("state_sum", subject, is_dummy, not is_dummy, page))
        return found

    def _check_free_list(self, window: range | None) -> list[Violation]:
        """The free list holds the first slots of FREE pages, and in the whole audit each exactly once."""
        free, states, page_size = self._free, self._states, self.page_size
        if len(free) != self._counts[FREE]:
            return [Violation("free_list", "entries", self._counts[FREE], len(free))]
        if window is None:
            expected = {page * page_size for page, state in enumerate(states) if state == FREE}
            if set(free) != expected:
                return [
                    Violation(
                        "free_list", "slots", sorted(expected - set(free)), sorted(set(free) - expected)
                    )
                ]
            return []
        wrong = [
            s for s in free[window.start : window.stop] if s % page_size or states[s // page_size] != FREE
        ]
        return [Violation("free_list", "slots of pages that are not FREE", [], wrong)] if wrong else []
