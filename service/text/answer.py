"""The text of one sample as it goes out: detokenized, cut at a stop string, token by token counted.

Owns the order of the two filters and what counts as output. Knows nothing of clients or the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.text.detokenizer import Detokenizer
from service.text.stop_strings import StopMatcher


@dataclass(slots=True)
class Piece:
    """What a push of tokens comes to. One per message, so not frozen: that would triple its cost."""

    text: str  # may go out now
    num_tokens: int  # of those pushed, how many belong to the output: all, unless a stop string matched
    stop_string: str | None = None  # it matched: the sample is over


class AnswerText:
    """Text of one sample. `min_tokens`: a stop string that is complete before is only text."""

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_num_tokens")

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher | None = None, *, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, is_last_shown: bool = True) -> Piece:
        """Takes the next tokens, one or many.

        `is_last_shown` false: the last one ended the sequence (EOS, a stop token) and counts, but
        its text is not shown.
        """
        shown = token_ids if is_last_shown else token_ids[:-1]
        if self._matcher is None:
            self._num_tokens += len(token_ids)
            return Piece(self._detokenizer.push(shown), len(token_ids))
        texts = []
        for num_taken, token_id in enumerate(shown, start=1):
            texts.append(self._push_one(token_id))
            if self._matcher.match is not None:
                return Piece("".join(texts), num_taken, self._matcher.match)
        self._num_tokens += len(token_ids) - len(shown)
        return Piece("".join(texts), len(token_ids))

    def finish(self) -> Piece:
        """The end of the sequence: text that was held back, and possibly a stop string in it."""
        if self._matcher is None:
            return Piece(self._detokenizer.finish(), 0)
        may_stop = self._num_tokens >= self._min_tokens
        text = self._matcher.push(self._detokenizer.finish(), may_stop=may_stop) + self._matcher.finish()
        return Piece(text, 0, self._matcher.match)

    def _push_one(self, token_id: int) -> str:
        assert self._matcher is not None
        self._num_tokens += 1
        text = self._detokenizer.push((token_id,))
        return self._matcher.push(text, may_stop=self._num_tokens >= self._min_tokens)
