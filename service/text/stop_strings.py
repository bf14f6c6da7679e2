"""Stop strings over token edges: finds the first to be complete, holds back only what may become one.

Owns an automaton per request (shared by its samples) and the held text per sequence. Knows text
only: no tokens, no bytes.

Which match wins does not depend on how the text is cut into pieces: the one that is complete
first, and of those that end at the same character the one that starts first. The prompt is never
pushed, so it never matches. What is held is always a proper prefix of some stop string.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    """A prefix of some stop string: what has been read and may still become one."""

    depth: int
    next: "dict[str, _State]" = field(default_factory=dict)
    shorter: "_State | None" = None  # the longest proper suffix that is a prefix too; None at the start
    stop: str | None = None  # the longest stop string that ends here
    hold: int = 0  # characters at the end of what was read that may still become a stop string


class StopStrings:
    """The stop strings of one request: Aho-Corasick, so a character costs the same for 1 or 16 stops."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere: validation refuses it"
        self.start = _State(depth=0)
        self.first_characters = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._enter(stop)
        self._link()

    def _enter(self, stop: str) -> None:
        state = self.start
        for character in stop:
            state = state.next.setdefault(character, _State(depth=state.depth + 1))
        state.stop = stop

    def _link(self) -> None:
        """Breadth first: `shorter` of a state is known before its successors need it."""
        waiting: deque[_State] = deque([self.start])
        while waiting:
            state = waiting.popleft()
            for character, longer in state.next.items():
                shorter = self.step(state.shorter, character)
                longer.shorter = shorter
                longer.stop = longer.stop or shorter.stop
                longer.hold = longer.depth if longer.next else shorter.hold
                waiting.append(longer)

    def step(self, state: _State | None, character: str) -> _State:
        """The state after one more character; None is before the start."""
        while state is not None:
            if (longer := state.next.get(character)) is not None:
                return longer
            state = state.shorter
        return self.start


class StopMatcher:
    """The text of one sequence on its way out. After a match everything else is dropped."""

    __slots__ = ("_held", "_include_stop", "_state", "_stops", "match")

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = stops.start
        self._held = ""
        self.match: str | None = None  # the stop string that ended it

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may go out. With `may_stop` false a stop string that ends here is only text."""
        if self.match is not None:
            return ""
        if not self._held and self._stops.first_characters.isdisjoint(text):
            self._state = self._stops.start
            return text
        end = len(self._held) + self._scan(text, may_stop)
        text = self._held + text
        if self.match is not None:
            self._held = ""
            return text[: end if self._include_stop else end - len(self.match)]
        out = len(text) - self._state.hold
        self._held = text[out:]
        return text[:out]

    def finish(self) -> str:
        """The end: what is held was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _scan(self, text: str, may_stop: bool) -> int:
        """Reads on; characters read, all of them unless a stop string is complete before."""
        state, step = self._state, self._stops.step
        for place, character in enumerate(text):
            state = step(state, character)
            if may_stop and state.stop is not None:
                self.match = state.stop
                return place + 1
        self._state = state
        return len(text)
