"""Rows of the page table and owner numbers: small integers lent to running sequences.

Owns which are free. The dummy row, number ``max_running``, is never among them.
"""

from collections import deque

from worker.ids import Owner, Row


class Rows:
    """Rows 0 .. max_running - 1 and as many owner numbers from 1, plus those in use one step longer."""

    def __init__(self, max_running: int) -> None:
        self._rows = list(range(max_running - 1, -1, -1))
        self._rows_in_use = bytearray(max_running)
        # First in, first out: a number that just ended is the last to be used again, so that observers
        # who merge some steps do not mix two sequences up.
        self._owners = deque(range(1, min(65_535, 2 * max_running + 64) + 1))

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return len(self._rows)

    @property
    def num_used(self) -> int:
        """Rows in use."""
        return len(self._rows_in_use) - len(self._rows)

    def take(self) -> tuple[Row, Owner]:
        """A row and an owner number; the caller looked at num_free."""
        row = self._rows.pop()
        self._rows_in_use[row] = 1
        return Row(row), Owner(self._owners.popleft())

    def give_back(self, row: Row, owner: Owner) -> None:
        """Both are free again; exactly once."""
        assert self._rows_in_use[row], f"row {row} of owner {owner} was given back twice"
        self._rows_in_use[row] = 0
        self._rows.append(row)
        self._owners.append(owner)
