"""Control tokens typed by a user stay text.

A chat template writes control tokens (`<|im_end|>`) around the turns. The same characters inside a
turn are only text: they must not end the turn or open another. The rule, for every string that a
client sends into a template: no control token begins in it.

How: where such a string holds a control token's text, or ends with the beginning of one, the
token's first character is masked by a private stand-in before the template runs. In the rendered
text only what the template itself wrote still reads as a control token; then the stand-ins are
taken back. Strings without such text, nearly all, are passed on as they are.
"""

import re
from collections.abc import Iterable, Mapping

from kvatlas.models.errors import ModelError, ModelErrorReason

# Private-use characters of plane 16. A client's own are replaced by U+FFFD, but only in prompts that
# hold control tokens as well, so that they cannot pose as one of ours.
_FIRST_STAND_IN = 0x10E000
_FIRST_MARK = 0x10F000
_MOST = 0x1000
_RESERVED = re.compile(f"[{chr(_FIRST_STAND_IN)}-{chr(_FIRST_MARK + _MOST - 1)}]")

JsonValue = object


class ControlTokens:
    """The texts of a model's control tokens. Raises ModelError for more than there are marks."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Longest first: where one begins another, the longer is meant, as in the tokenizer.
        self.texts = sorted({text for text in texts if text}, key=len, reverse=True)
        if len(self.texts) > _MOST:
            text = f"{len(self.texts)} control tokens beside a chat template, at most {_MOST} are supported"
            raise ModelError(ModelErrorReason.UNSUPPORTED_FEATURE, text)
        self._first_characters = frozenset(text[0] for text in self.texts)
        pattern = "|".join(re.escape(text) for text in self.texts) or r"(?!)"
        self._whole = re.compile(pattern)
        self._start = re.compile(f"(?={pattern}).", re.DOTALL)
        stand_ins = {
            first: chr(_FIRST_STAND_IN + i) for i, first in enumerate(sorted(self._first_characters))
        }
        self._masked = {ord(first): stand_in for first, stand_in in stand_ins.items()}
        self._unmasked = {ord(stand_in): first for first, stand_in in stand_ins.items()}
        self._marks = {text: chr(_FIRST_MARK + place) for place, text in enumerate(self.texts)}

    @property
    def marks(self) -> Mapping[str, str]:
        """Control token's text -> the private character that stands for the token itself."""
        return self._marks

    def is_in(self, value: JsonValue) -> bool:
        """Whether any string in a JSON value holds a control token's text or ends with the start of one."""
        if isinstance(value, str):
            return self._has(value)
        if isinstance(value, Mapping):
            return any(self.is_in(key) or self.is_in(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(self.is_in(item) for item in value)
        return False

    def mask(self, value: JsonValue) -> JsonValue:
        """A copy of a JSON value in which no string can become part of a control token."""
        if isinstance(value, str):
            return self._mask(value)
        if isinstance(value, Mapping):
            return {self.mask(key): self.mask(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in value]
        return value

    def unmask(self, text: str) -> str:
        """The text as it was typed."""
        return text.translate(self._unmasked)

    def mark(self, masked: str) -> str:
        """Rendered text with each control token of the template as its mark, and the stand-ins taken back."""
        marked = self._whole.sub(lambda match: self._marks[match[0]], masked)
        return self.unmask(marked)

    def _has(self, text: str) -> bool:
        if self._first_characters.isdisjoint(text):
            return False
        return self._whole.search(text) is not None or bool(self._unfinished(text))

    def _mask(self, text: str) -> str:
        text = _RESERVED.sub("\ufffd", text)
        text = self._start.sub(lambda match: match[0].translate(self._masked), text)
        for at in self._unfinished(text):
            text = text[:at] + text[at].translate(self._masked) + text[at + 1 :]
        return text

    def _unfinished(self, text: str) -> list[int]:
        """Where the end of the text cuts off what may be a control token."""
        longest = len(self.texts[0]) - 1 if self.texts else 0
        return [
            at
            for at in range(max(0, len(text) - longest), len(text))
            if text[at] in self._first_characters and any(t.startswith(text[at:]) for t in self.texts)
        ]
