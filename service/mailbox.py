"""Mailboxes: what a worker sent for a sequence and its reader has not taken yet.

The step fan-out appends and wakes; it never waits and never fails. The reader takes everything at
once: one token a message while it keeps up, many when it is late. Bound: max_tokens x 4 bytes and
8 bytes per alternative. Knows no text, no sockets, no clients.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence

from service.request import AddOutcome, LostReason, Scores, SequenceEnd, SequenceStart

MAX_STARTS = 64  # untaken ones of one request: a thrashing pool preempts it again and again


class Inbox:
    """All that workers say about one request; wakes its one reader."""

    __slots__ = (
        "_has_news",
        "_loop",
        "_open",
        "_waiter",
        "boxes",
        "loss",
        "on_all_ended",
        "outcomes",
        "prompt_scores",
        "starts",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False  # something came while nobody waited
        self.boxes: list[Mailbox] = []
        self._open = 0  # boxes whose end has not come
        self.on_all_ended: Callable[[bool], None] | None = None  # told True, and False when one goes on again
        # What the reader has not dealt with yet.
        self.outcomes: list[AddOutcome] = []
        self.starts: list[SequenceStart] = []  # re-admissions after a preemption are no news
        self.prompt_scores: Scores | None = None
        self.loss: LostReason | None = None

    def add_box(self, box: "Mailbox") -> None:
        """One more sequence of the request."""
        self.boxes.append(box)
        self._open += 1

    def box_ended(self, *, has_ended: bool) -> None:
        """A box got its end, or lost it again."""
        self._open += -1 if has_ended else 1
        if self.on_all_ended is not None and self._open == (0 if has_ended else 1):
            self.on_all_ended(has_ended)

    @property
    def has_all_ended(self) -> bool:
        """Whether no worker has anything more to say: of a call that was cancelled early, from the start."""
        return self._open == 0

    def wake(self) -> None:
        """Lets the reader look again. Cheap when nobody waits."""
        self._has_news = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when there was a wake() since the last wait() returned; the caller looks at everything."""
        if not self._has_news:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._has_news = False

    @property
    def unread(self) -> int:
        """Tokens that wait to be taken."""
        return sum(box.unread for box in self.boxes)

    # What a link calls.

    def added(self, outcome: AddOutcome) -> None:
        """The worker's answer to a run."""
        self.outcomes.append(outcome)
        self.wake()

    def started(self, start: SequenceStart) -> None:
        """A run left the queue; once more after a preemption, which no client waits for."""
        if not start.resumed:
            self.starts.append(start)
            self.wake()
        elif len(self.starts) < MAX_STARTS:
            self.starts.append(start)

    def prompt_scored(self, scores: Scores) -> None:
        """Log-probabilities of the prompt are complete."""
        self.prompt_scores = scores

    def lost(self, reason: LostReason) -> None:
        """The worker is gone; nothing more comes from it."""
        self.loss = reason
        self.wake()


class Mailbox:
    """Tokens of one sequence over all attempts: first those taken, then those that wait."""

    __slots__ = ("_hold", "_inbox", "_limit", "_loop", "_need", "_timer", "end", "scores", "taken", "tokens")

    def __init__(
        self,
        inbox: Inbox,
        limit: int,
        loop: asyncio.AbstractEventLoop,
        *,
        has_scores: bool = False,
        hold_seconds: float = 0.0,
    ) -> None:
        self._inbox = inbox
        self._limit = limit  # tokens; a worker that sends more is wrong, and the surplus is dropped
        self._loop = loop
        self._hold = hold_seconds
        self._need = 1  # unread tokens that wake the reader; the first token is never held
        self._timer: asyncio.TimerHandle | None = None
        self.tokens: array[int] = array("I")
        self.taken = 0
        self.scores: Scores | None = Scores() if has_scores else None  # of unread tokens only
        self.end: SequenceEnd | None = None
        inbox.add_box(self)

    @property
    def unread(self) -> int:
        """Tokens that wait to be taken."""
        return len(self.tokens) - self.taken

    @property
    def is_ready(self) -> bool:
        """Whether a take is due: enough tokens, the hold is over, or the end."""
        return len(self.tokens) - self.taken >= self._need or self.end is not None

    def put(self, token_id: int) -> None:
        """A token came."""
        tokens = self.tokens
        if self.end is not None or len(tokens) >= self._limit:
            return
        tokens.append(token_id)
        if len(tokens) - self.taken >= self._need:
            self._inbox.wake()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._hold, self._stop_holding)

    def put_scored(self, token_id: int, scores: Scores, entry: int, first_alternative: int) -> None:
        """A token came with its log-probabilities."""
        if self.scores is not None and self.end is None and len(self.tokens) < self._limit:
            self.scores.append(scores, entry, first_alternative)
        self.put(token_id)

    def finish(self, end: SequenceEnd) -> None:
        """The sequence ended on its worker."""
        if self.end is None:
            self.end = end
            self._stop_timer()
            self._inbox.box_ended(has_ended=True)
            self._inbox.wake()

    def begin_behind(self, token_ids: Sequence[int]) -> None:
        """Begins with tokens that an earlier reader took."""
        assert not self.tokens, "a mailbox that is in use"
        self.tokens.extend(token_ids)
        self.taken = len(self.tokens)

    def reopen(self) -> None:
        """The sequence goes on elsewhere: its end was none."""
        assert self.end is not None, "only what ended can go on again"
        self.end = None
        self._inbox.box_ended(has_ended=False)

    def take(self, min_tokens: int = 1, max_tokens: int = 0) -> "array[int]":
        """What waits, at most `max_tokens`; 0: everything. Then the next take is due after `min_tokens` more,
        or the hold; where some was left, at once.
        """
        end = min(len(self.tokens), self.taken + max_tokens) if max_tokens else len(self.tokens)
        taken = self.tokens[self.taken : end]
        self.taken = end
        self._stop_timer()
        if self.unread:
            self._need = 1
            self._inbox.wake()
        elif self.taken:
            self._need = min_tokens
        return taken

    def close(self) -> None:
        """No reader any more: the memory goes, what still comes is dropped."""
        self._stop_timer()
        self._limit = 0
        self.tokens = array("I")
        self.taken = 0
        self.scores = None

    def _stop_holding(self) -> None:
        self._timer = None
        self._need = 1
        self._inbox.wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
