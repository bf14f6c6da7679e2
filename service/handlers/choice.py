"""One sample on its way out: what waits in its mailbox becomes one piece of text, ids and scores.

Owns what was sent of a sample and why it ended. Knows no worker and no stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from service.mailbox import Mailbox
from service.request import FinishCode, FinishReason, Scores, SequenceEnd, Stops
from service.text.answer import AnswerText

_REASONS = {
    FinishCode.EOS: FinishReason.EOS,
    FinishCode.STOP_TOKEN: FinishReason.STOP_TOKEN,
    FinishCode.MAX_TOKENS: FinishReason.MAX_TOKENS,
    FinishCode.CONTEXT_LENGTH: FinishReason.CONTEXT_LENGTH,
    FinishCode.TIME_LIMIT: FinishReason.TIME_LIMIT,
    FinishCode.ABORTED: FinishReason.CANCELLED,
}
_HIDDEN_LAST = (FinishCode.EOS, FinishCode.STOP_TOKEN)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended, and what matched."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


class Piece(NamedTuple):
    """What one take of a mailbox comes to; `offset` counts the tokens before it."""

    sample: int
    text: str
    token_ids: Sequence[int]
    scores: Scores | None
    offset: int
    finish: Finish | None

    @property
    def has_content(self) -> bool:
        """Whether there is anything beside the end."""
        return bool(self.token_ids) or bool(self.text)


class Choice:
    """One sample of a request."""

    __slots__ = (
        "_answer",
        "_max_tokens",
        "_min_tokens",
        "_stops",
        "box",
        "finish",
        "index",
        "num_before",
        "num_tokens",
    )

    def __init__(
        self,
        index: int,
        box: Mailbox,
        answer: AnswerText | None,
        stops: Stops,
        *,
        min_tokens: int = 1,
        max_tokens: int = 0,
    ) -> None:
        self.index = index
        self.box = box
        self.num_tokens = 0  # that were taken and belong to the output
        self.num_before = 0  # of these, that the reader had before
        self.finish: Finish | None = None
        self._answer = answer  # None: neither text nor stop strings are asked for
        self._min_tokens = min_tokens  # of one message
        self._max_tokens = max_tokens  # of one message; 0: any number
        self._stops = stops

    def begin_behind(self, token_ids: Sequence[int]) -> None:
        """Output that the reader has already. `read_again` belongs to it."""
        self.box.begin_behind(token_ids)
        self.num_tokens = self.num_before = len(token_ids)

    def read_again(self, token_ids: Sequence[int]) -> bool:
        """Brings the text to where the reader's is; False: it holds a stop string, so nothing can follow.

        Touches nothing but the text, so that a thread may do it before the sample runs.
        """
        return self._answer is None or self._answer.push(token_ids).stop_string is None

    def take(self) -> Piece:
        """What waits, as much as a message holds, and the end behind all of it. Not called after the end."""
        assert self.finish is None, f"sample {self.index} ended before"
        ids = self.box.take(self._min_tokens, self._max_tokens)
        end = self.box.end if not self.box.unread else None
        text, stop_string = "", None
        if self._answer is not None and ids:
            part = self._answer.push(ids, is_last_shown=self._shows_last(end))
            text, stop_string = part.text, part.stop_string
            if stop_string is not None:
                ids = ids[: part.num_tokens]
        if stop_string is None and end is not None:
            flushed, stop_string = self._flush()
            text += flushed
        scores = self.box.scores.take(len(ids)) if self.box.scores is not None else None
        offset, self.num_tokens = self.num_tokens, self.num_tokens + len(ids)
        self.finish = self._finished(stop_string, end)
        return Piece(self.index, text, ids, scores, offset, self.finish)

    def close(self) -> None:
        """Drops mailbox and text state (H10)."""
        self.box.close()
        self._answer = None

    def _shows_last(self, end: SequenceEnd | None) -> bool:
        return self._stops.include_in_output or end is None or end.code not in _HIDDEN_LAST

    def _flush(self) -> tuple[str, str | None]:
        if self._answer is None:
            return "", None
        part = self._answer.finish()
        return part.text, part.stop_string

    def _finished(self, stop_string: str | None, end: SequenceEnd | None) -> Finish | None:
        if stop_string is not None:
            return Finish(FinishReason.STOP_STRING, stop_string=stop_string)
        if end is None:
            return None
        if end.code == FinishCode.STOP_TOKEN and self.box.tokens:
            return Finish(FinishReason.STOP_TOKEN, stop_token_id=self.box.tokens[-1])
        if end.code == FinishCode.MAX_TOKENS and not self._stops.is_limit_given:
            return Finish(FinishReason.CONTEXT_LENGTH)  # all that was left is used up
        return Finish(_REASONS[end.code])
