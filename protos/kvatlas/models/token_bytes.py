"""What each token id is in bytes: the table behind detokenization and log-probability tokens.

Owns the two spellings that our model families use, byte-level and SentencePiece. Knows nothing of
sequences or of text as a whole.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache


class Spelling(Enum):
    """How a vocabulary writes bytes as strings."""

    BYTE_LEVEL = "byte-level"  # each byte is one printable character (GPT-2's alphabet)
    SENTENCEPIECE = "sentencepiece"  # U+2581 is a space, <0xNN> is a raw byte, else UTF-8


@cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies.

    Printable Latin-1 stands for itself; the other bytes get the characters from U+0100 on, in
    order. Source: the encoder of GPT-2, which all byte-level BPE vocabularies use.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + place): byte for place, byte in enumerate(others)}


@cache
def byte_characters() -> tuple[str, ...]:
    """Byte -> character, the inverse of `byte_alphabet`."""
    return tuple(sorted(byte_alphabet(), key=byte_alphabet().__getitem__))


def spell_bytes(data: bytes) -> str:
    """Bytes as a byte-level vocabulary writes them."""
    characters = byte_characters()
    return "".join([characters[byte] for byte in data])


def token_bytes(tokens: Sequence[str], spelling: Spelling) -> list[bytes]:
    """The bytes of each token; "" (an id without a token) has none."""
    if spelling is Spelling.BYTE_LEVEL:
        return _byte_level(tokens)
    return [_sentencepiece(token) for token in tokens]


def without(table: Sequence[bytes], hidden: Iterable[int]) -> list[bytes]:
    """The same table with no bytes for the `hidden` ids."""
    shown = list(table)
    for token_id in hidden:
        shown[token_id] = b""
    return shown


def _byte_level(tokens: Sequence[str]) -> list[bytes]:
    byte_of = byte_alphabet().__getitem__
    table = []
    for token in tokens:
        try:
            table.append(bytes(map(byte_of, token)))
        except KeyError:  # an added token with a character outside the alphabet is plain text
            table.append(token.encode())
    return table


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()
