"""Token ids -> text that is safe to show, one state per sequence.

Owns the bytes of a character that is not complete yet, at most three. All deltas joined, with
`finish`, are the text that decoding all ids at once gives, for any ids and any split: a token's
bytes never depend on its neighbours, so nothing but an incomplete character is ever held back.
Bytes that can no longer become a character are U+FFFD at once and never hold up what follows.
Spaces before punctuation are never cleaned up: the text has gone out already.
"""

from codecs import utf_8_decode
from collections.abc import Sequence


class Detokenizer:
    """State of one sequence. `push` costs about 0.4 us a token, whatever came before.

    `table` has the bytes of each id (`Tokenizer.detokenizer` picks it); ids past it have none.
    `strip_space` drops one space at the very start, where the vocabulary puts one before the first
    word of a text (SentencePiece) and no text of a prompt goes on here.
    """

    __slots__ = ("_held", "_strip_space", "_table")

    def __init__(self, table: Sequence[bytes], *, strip_space: bool = False) -> None:
        self._table = table
        self._strip_space = strip_space
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        table = self._table
        try:
            data = self._held + b"".join([table[token_id] for token_id in token_ids])
        except IndexError:  # padding of the model's output layer: ids without a token
            known = [table[token_id] for token_id in token_ids if token_id < len(table)]
            data = self._held + b"".join(known)
        text, num_consumed = utf_8_decode(data, "replace", False)
        self._held = data[num_consumed:]
        return self._stripped(text) if self._strip_space and text else text

    def finish(self) -> str:
        """The end: what is left of an incomplete character is one U+FFFD."""
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text

    def _stripped(self, text: str) -> str:
        self._strip_space = False
        return text[1:] if text[0] == " " else text
