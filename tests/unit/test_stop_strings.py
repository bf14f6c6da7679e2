"""Promises of the stop strings and of the text of one sample, against a naive search of the whole text."""

import random
import time

import pytest

from service.text.answer import AnswerText
from service.text.detokenizer import Detokenizer
from service.text.stop_strings import StopMatcher, StopStrings
from service.text.tokenizer import Tokenizer


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is complete first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text.endswith(stop, 0, end)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops), include_stop=include_stop)
    out = "".join([matcher.push(piece) for piece in pieces])
    return out + matcher.finish(), matcher.match


def cut(text: str, draw: random.Random) -> list[str]:
    pieces = []
    while text:
        length = draw.randint(0, 4)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("aab", ["b", "ab"]),
        ("aaab", ["aab"]),
        ("xaabx", ["aab", "aab"]),
        ("abcd", ["abcd", "bc"]),
        ("abcabd", ["abd", "abca"]),
        ("hello", ["world"]),
        ("END", ["END"]),
        ("ENEND", ["END"]),
        ("é世😀x", ["世😀"]),
        ("mississippi", ["issip", "ssis", "pi"]),
        ("aaaaab", ["aaab", "aab", "b"]),
        ("one STOP two", [f"{n}STOP" for n in range(99)] + ["STOP"]),
    ],
)
def test_the_stop_that_is_complete_first_wins_whatever_the_pieces(text: str, stops: list[str]) -> None:
    """B069: several stops, one inside another, overlaps, twice the same, a hundred."""
    expected = naive(text, stops)
    draw = random.Random(7)
    for pieces in [[text], list(text), *[cut(text, draw) for _ in range(20)]]:
        assert run(pieces, stops) == expected, pieces


def test_random_texts_and_stops_agree_with_a_search_of_the_whole_text() -> None:
    """B067, B069: and what comes out without a match is the whole text."""
    draw = random.Random(11)
    matches = 0
    for _ in range(4000):
        stops = ["".join(draw.choices("abc", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 4))]
        text = "".join(draw.choices("abcd", k=draw.randint(0, 30)))
        expected = naive(text, stops)
        assert run(cut(text, draw), stops) == expected, (text, stops)
        matches += expected[1] is not None
    assert 1000 < matches < 3900


def test_what_is_held_is_always_a_proper_prefix_of_a_stop_and_no_longer_than_needed() -> None:
    """B068: nothing waits that cannot become a stop string any more, below min_tokens neither."""
    draw = random.Random(13)
    for _ in range(2000):
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3))]
        matcher = StopMatcher(StopStrings(stops))
        seen = out = ""
        for piece in cut("".join(draw.choices("abc", k=20)), draw):
            seen += piece
            out += matcher.push(piece, may_stop=draw.random() < 0.5)
            if matcher.match is not None:
                break
            held = seen[len(out) :]
            assert seen.startswith(out)
            needed = max(
                (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
            )
            assert len(held) == needed, (stops, seen, held)


def test_a_long_stop_that_shares_nothing_with_the_text_delays_nothing() -> None:
    """B068."""
    matcher = StopMatcher(StopStrings(["#" * 40]))
    for piece in ["The ", "quick ", "fox."]:
        assert matcher.push(piece) == piece


def test_held_text_comes_out_at_the_end() -> None:
    """B067: the end of the answer begins like a stop string and never completes it."""
    matcher = StopMatcher(StopStrings(["</answer>"]))
    assert matcher.push("42</ans") == "42"
    assert matcher.finish() == "</ans"
    assert matcher.finish() == ""


def test_the_stop_itself_comes_out_when_asked_for() -> None:
    assert run(["a", "bS", "TO", "Pcd"], ["STOP"], include_stop=True) == ("abSTOP", "STOP")


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(StopStrings(["."]))
    assert (matcher.push("a.b"), matcher.push("c"), matcher.finish()) == ("a", "", "")


def test_sixteen_long_stops_cost_no_more_than_one() -> None:
    """The worst text for a search that starts over at each character."""
    stops = ["a" * 255 + chr(ord("b") + n) for n in range(16)]
    one, sixteen = (_seconds(StopStrings(chosen), "a" * 20_000) for chosen in (stops[:1], stops))
    assert sixteen < 4 * one + 0.01


def _seconds(stops: StopStrings, text: str) -> float:
    best = float("inf")
    for _ in range(3):
        matcher = StopMatcher(stops)
        start = time.perf_counter()
        for at in range(0, len(text), 4):
            matcher.push(text[at : at + 4])
        best = min(best, time.perf_counter() - start)
    return best


# -- one sample: tokens in, text out --------------------------------------------------------------------


def answer(stops: list[str], **options: int | bool) -> AnswerText:
    include = bool(options.get("include_stop", False))
    matcher = StopMatcher(StopStrings(stops), include_stop=include) if stops else None
    min_tokens = int(options.get("min_tokens", 0))
    return AnswerText(Detokenizer(TABLE), matcher, min_tokens=min_tokens)


TABLE = [b"he", b"llo", b" wo", b"rld", b"\xf0\x9f", b"\x98\x80", b"!", b"STO", b"P", b"x"]


def test_the_match_names_the_token_that_ended_it_and_drops_those_after() -> None:
    """B069: a token that ends beyond the stop is dropped from the text, later ones are not counted."""
    text = answer(["o w"])
    piece = text.push([0, 1, 2, 3, 6])
    assert (piece.text, piece.num_tokens, piece.stop_string) == ("hell", 3, "o w")


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_of_any_size_give_the_same_text_count_and_stop(size: int) -> None:
    ids = [0, 1, 4, 5, 7, 8, 6, 9]
    text = answer(["STOP"])
    out, count, stop = "", 0, None
    for at in range(0, len(ids), size):
        piece = text.push(ids[at : at + size])
        out, count, stop = out + piece.text, count + piece.num_tokens, piece.stop_string
        if stop is not None:
            break
    assert (out, count, stop) == ("hello😀", 6, "STOP")


def test_a_stop_that_is_complete_before_min_tokens_is_only_text() -> None:
    text = answer(["STOP"], min_tokens=5)
    piece = text.push([7, 8, 9, 7, 8, 6])
    assert (piece.text, piece.num_tokens, piece.stop_string) == ("STOPx", 5, "STOP")


def test_the_end_shows_what_was_held_for_a_stop_and_half_a_character_as_one_replacement() -> None:
    """B067, B072."""
    text = answer(["STOP"])
    assert text.push([0, 7]).text == "he"
    assert text.push([4]).text == ""
    end = text.finish()
    assert (end.text, end.stop_string) == ("STO\ufffd", None)


def test_the_last_token_counts_but_is_not_shown_when_it_only_ends_the_sequence() -> None:
    """B076: the text of an end token is not shown."""
    for stops in ([], ["zzz"]):
        text = answer(stops)
        piece = text.push([0, 1, 9], is_last_shown=False)
        assert (piece.text + text.finish().text, piece.num_tokens) == ("hello", 3)


def test_the_prompt_never_matches() -> None:
    """B069: only what the model writes is searched; the prompt's text never reaches the matcher."""
    tokenizer = Tokenizer.toy()
    prompt = tokenizer.encode("say STOP and")
    text = AnswerText(tokenizer.detokenizer(), StopMatcher(StopStrings(["STOP", "and go"])))
    piece = text.push(tokenizer.encode(" go STO"))
    assert prompt
    assert (piece.text + text.finish().text, piece.stop_string) == (" go STO", None)
