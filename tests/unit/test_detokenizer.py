"""Promises of the incremental detokenizer: any ids in any split give what decoding at once gives."""

import random

import pytest

from kvatlas.models.token_bytes import (
    Spelling,
    byte_alphabet,
    byte_characters,
    spell_bytes,
    token_bytes,
    without,
)
from service.text.detokenizer import Detokenizer
from service.text.tokenizer import Tokenizer

SMILE = "😀".encode()
TABLE = [bytes([byte]) for byte in range(256)] + [
    SMILE[:1],
    SMILE[1:3],
    SMILE[3:],
    "世".encode()[:2],
    b"A \xe4",
]


def stream(pieces: list[list[int]], table: list[bytes] = TABLE) -> list[str]:
    state = Detokenizer(table)
    return [*[state.push(piece) for piece in pieces], state.finish()]


def split(ids: list[int], draw: random.Random) -> list[list[int]]:
    pieces, at = [], 0
    while at < len(ids):
        size = draw.choice([1, 1, 1, 2, 5])
        pieces.append(ids[at : at + size])
        at += size
    return pieces


def test_ten_thousand_random_sequences_in_random_splits_give_the_text_at_once() -> None:
    """B071, B074, M-33: sent text is never taken back, joined it is the decoded whole."""
    draw = random.Random(3)
    interesting = [*SMILE, *"世界é".encode(), *b"ab .,'s", 0xFF, 0xC0, 0xED, 0xA0, *range(256, 261)]
    for _ in range(10_000):
        ids = draw.choices(interesting, k=draw.randint(0, 16))
        whole = b"".join(TABLE[token_id] for token_id in ids).decode("utf-8", "replace")
        assert "".join(stream(split(ids, draw))) == whole, ids


def test_a_character_in_two_tokens_comes_once_and_whole() -> None:
    """B071: 'A ' and half a character, then the other half with a letter."""
    half = "世".encode()
    assert stream([[65, 32, half[0]], [97, half[0]], [half[1], half[2]], [98]]) == [
        "A ",
        "\ufffda",
        "世",
        "b",
        "",
    ]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_sequence_that_ends_inside_a_character_ends_with_one_replacement(num_bytes: int) -> None:
    """B072: the same as decoding at once; finishing twice adds nothing."""
    state = Detokenizer(TABLE)
    assert state.push([65, *SMILE[:num_bytes]]) == "A"
    assert state.finish() == "\ufffd"
    assert state.finish() == ""


def test_endless_invalid_bytes_hold_up_nothing() -> None:
    """B072: at most three bytes ever wait."""
    state = Detokenizer(TABLE)
    out = ""
    for byte in [0xFF, 0x80, 0xC0, 0xF5] * 500:
        out += state.push([byte])
        assert len(state._held) <= 3
    assert out == "\ufffd" * 2000
    assert state.push([97]) == "a"


def test_spaces_before_punctuation_stay() -> None:
    """B074: text that has gone out is never cleaned up."""
    text = " . , ' n't 's !"
    tokenizer = Tokenizer.toy()
    ids = tokenizer.encode(text)
    state = tokenizer.detokenizer()
    assert "".join(state.push([token_id]) for token_id in ids) == tokenizer.decode(ids) == text


def test_ids_without_a_token_have_no_text() -> None:
    """Padding of a model's output layer can be sampled by random weights."""
    assert "".join(stream([[97, 999_999], [98]])) == "ab"


def test_skipped_special_tokens_leave_the_bytes_around_them_together() -> None:
    """B073: as decoding at once does."""
    table = without([*TABLE, b"<end>"], [len(TABLE)])
    assert "".join(stream([[SMILE[0], len(TABLE)], list(SMILE[1:])], table)) == "😀"


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped() -> None:
    """B073: outputs that begin with one or two spaces, or with a token that has no text."""
    tokens = ["", "\u2581Hello", "\u2581", "<0x0A>", "<0xF0>", "world"]
    table = token_bytes(tokens, Spelling.SENTENCEPIECE)
    for ids, text in [([1, 1], "Hello Hello"), ([2, 1], " Hello"), ([0, 1], "Hello"), ([5, 2], "world ")]:
        state = Detokenizer(table, strip_space=True)
        assert "".join([state.push([token_id]) for token_id in ids]) + state.finish() == text


def test_sentencepiece_names_of_bytes_are_bytes_and_look_alikes_are_text() -> None:
    tokens = ["<0x0A>", "<0xF0>", "<0xZZ>", "<0x0A", "\u2581\u2581a"]
    table = token_bytes(tokens, Spelling.SENTENCEPIECE)
    assert table == [b"\n", b"\xf0", b"<0xZZ>", b"<0x0A", b"  a"]


def test_the_byte_alphabet_names_each_byte_once() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert spell_bytes(b"a \n\xff") == "a\u0120\u010a\xff"
    assert token_bytes(list(byte_characters()), Spelling.BYTE_LEVEL) == [bytes([b]) for b in range(256)]


def test_an_added_token_outside_the_byte_alphabet_is_plain_text() -> None:
    assert token_bytes(["<\uff5cUser\uff5c>", "two words"], Spelling.BYTE_LEVEL) == [
        "<\uff5cUser\uff5c>".encode(),
        b"two words",
    ]


def test_a_state_belongs_to_its_sequence_alone() -> None:
    """H10: nothing is kept anywhere for a sequence that was aborted; its state goes with it."""
    tokenizer = Tokenizer.toy()
    aborted, other = tokenizer.detokenizer(), tokenizer.detokenizer()
    aborted.push(list(SMILE[:3]))
    assert other.push([98]) == "b"
    assert tokenizer.decode([97]) == "a"
