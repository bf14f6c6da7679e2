"""A constraint as a client sends it, and what is said of one that cannot be meant. Needs no library."""

from dataclasses import dataclass
from importlib.util import find_spec

MAX_CONSTRAINT_BYTES = 64 * 1024
"""Of the text, or of all choices together. Rules in a chain cost stack: threads.py has room for this many."""


class ConstraintError(Exception):
    """What is wrong with a constraint; the text is for the client."""


@dataclass(frozen=True, slots=True)
class ConstraintText:
    """The name of the field in the spec, and its value."""

    kind: str  # json_schema, regex, grammar or choices
    text: str = ""
    choices: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all its text in UTF-8."""
        return len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)


def can_compile() -> bool:
    """Whether the library is installed; without it the feature "constraints" is off."""
    return find_spec("llguidance") is not None
