"""A tokenizer that does not come to an end of some texts before a test lets it, and counts its work."""

import threading
from typing import Any

from service.text.threads import INLINE_BYTES
from service.text.tokenizer import ChatText, Encoded, Tokenizer

HELD = "held" * INLINE_BYTES  # long enough for a thread
SECONDS = 60.0  # after which it goes on, whatever the test forgot


class HeldTokenizer(Tokenizer):
    """Made by `toy()`; holds what begins with HELD."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.num_held = self.num_placed = 0
        self.go_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids, later."""
        if text.startswith(HELD):
            self.num_held += 1
            self.go_on.wait(SECONDS)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        """Counted."""
        self.num_placed += 1
        return super().encode_with_offsets(text, add_special_tokens=add_special_tokens)

    def encode_chat_with_offsets(self, chat: ChatText, *, add_special_tokens: bool = False) -> Encoded:
        """Counted."""
        self.num_placed += 1
        return super().encode_chat_with_offsets(chat, add_special_tokens=add_special_tokens)
