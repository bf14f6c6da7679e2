"""What an audit says when an invariant does not hold. Frozen; owns no state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant, with the numbers of both sides."""

    check: str  # state_sum, refcount, free_list, page_table, trie
    subject: str
    expected: object
    actual: object
    page: int | None = None  # that it is about, if it is one
    row: int | None = None

    def __str__(self) -> str:
        return f"{self.check}: {self.subject}: expected {self.expected}, found {self.actual}"
