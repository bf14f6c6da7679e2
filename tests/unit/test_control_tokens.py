"""Promises of the masks that keep typed control tokens text."""

import random

import pytest

from kvatlas.models.errors import ModelError, ModelErrorReason
from service.text.control_tokens import ControlTokens

TOKENS = ControlTokens(["<|im_start|>", "<|im_end|>", "<s>", "[INST]", "aab", "ab"])


def controls_of(*client_texts: str, end: str = "") -> list[str]:
    """The control tokens that a template makes of a client's texts, one after the other, and its own end."""
    marked = TOKENS.mark("".join(str(TOKENS.mask(text)) for text in client_texts) + end)
    by_mark = {mark: text for text, mark in TOKENS.marks.items()}
    return [by_mark[character] for character in marked if character in by_mark]


@pytest.mark.parametrize(
    "typed", ["<|im_end|>", "x<s><s>", "[INST", "<|im_", "<|im_end|><|im_", "aaab", "aa"]
)
def test_what_a_client_types_never_becomes_a_control_token(typed: str) -> None:
    """B078: alone, with another text of his, or with what the template writes after it."""
    assert controls_of(typed) == []
    for rest in ["end|>", "INST]", "ab", "b", "]", "", "start|>x"]:
        assert controls_of(typed, rest) == []
        assert controls_of(typed, rest, end="<s>") == ["<s>"]
        assert controls_of(typed, end="b<s>") == ["<s>"]


def test_two_texts_of_a_client_never_make_a_control_token_together() -> None:
    """B078: cut at any place."""
    for token in TOKENS.texts:
        for at in range(len(token) + 1):
            assert controls_of(token[:at], token[at:]) == []


def test_masks_come_off_again() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        text = "".join(draw.choices(["<", "|", "im_", "end", ">", "<s>", "a", "b", "[", "é", " "], k=8))
        assert TOKENS.unmask(str(TOKENS.mask(text))) == text


def test_text_without_control_tokens_needs_no_mask() -> None:
    assert not TOKENS.is_in([{"content": "1 < 2 and [x], <b>bold</b>"}, "", 3, None])
    assert TOKENS.is_in({"args": [{"deep": "a <s>"}]})
    assert TOKENS.is_in({"<s>": 1})
    assert TOKENS.is_in("ends like <|im_")


def test_our_own_private_characters_cannot_be_forged() -> None:
    """B078: typed, they become U+FFFD where masks are in use."""
    forged = "".join(TOKENS.marks.values()) + "\U0010e000<s>"
    assert controls_of(forged) == []
    assert TOKENS.unmask(str(TOKENS.mask(forged))).endswith("\ufffd<s>")


def test_a_longer_control_token_wins_over_one_that_begins_it() -> None:
    tokens = ControlTokens(["<a>", "<a>b"])
    assert tokens.mark("<a>b") == tokens.marks["<a>b"]


def test_a_model_with_more_control_tokens_than_marks_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="4097 control tokens") as caught:
        ControlTokens(f"<{number}>" for number in range(4097))
    assert caught.value.reason is ModelErrorReason.UNSUPPORTED_FEATURE
    assert len(ControlTokens(f"<{number}>" for number in range(4096)).marks) == 4096
