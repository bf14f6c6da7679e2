"""One sample on its way out, without a worker and without a stream."""

import asyncio
from array import array
from collections.abc import Iterator

import pytest

from service.handlers.choice import Choice, Finish
from service.mailbox import Inbox, Mailbox
from service.request import FinishCode, FinishReason, Scores, SequenceEnd, Stops
from service.text.answer import AnswerText
from service.text.stop_strings import StopMatcher, StopStrings
from service.text.tokenizer import Tokenizer


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def choice_of(loop: asyncio.AbstractEventLoop, stops: Stops, *, text: bool = True) -> Choice:
    box = Mailbox(Inbox(loop), stops.max_tokens, loop)
    matcher = StopMatcher(StopStrings(stops.strings)) if stops.strings else None
    answer = AnswerText(Tokenizer.toy().detokenizer(), matcher) if text else None
    return Choice(0, box, answer, stops)


def put(choice: Choice, data: bytes) -> None:
    for token in data:
        choice.box.put(token)


@pytest.mark.parametrize(
    ("code", "given", "reason"),
    [
        (FinishCode.EOS, True, FinishReason.EOS),
        (FinishCode.EOS, False, FinishReason.EOS),
        (FinishCode.MAX_TOKENS, True, FinishReason.MAX_TOKENS),
        (FinishCode.MAX_TOKENS, False, FinishReason.CONTEXT_LENGTH),
        (FinishCode.CONTEXT_LENGTH, True, FinishReason.CONTEXT_LENGTH),
        (FinishCode.TIME_LIMIT, True, FinishReason.TIME_LIMIT),
        (FinishCode.ABORTED, True, FinishReason.CANCELLED),
    ],
)
def test_each_code_of_the_worker_has_its_reason(
    loop: asyncio.AbstractEventLoop, code: FinishCode, given: bool, reason: FinishReason
) -> None:
    choice = choice_of(loop, Stops(9, is_limit_given=given))
    put(choice, b"ab")
    choice.box.finish(SequenceEnd(1, code))
    piece = choice.take()
    assert piece.finish is not None
    assert piece.finish.reason is reason


@pytest.mark.parametrize("code", [FinishCode.MAX_TOKENS, FinishCode.EOS])
def test_scored_tokens_leave_in_pieces_of_a_bounded_size(
    loop: asyncio.AbstractEventLoop, code: FinishCode
) -> None:
    """Thousands that waited for a slow reader, with 20 alternatives each, were one message of over 4 MiB."""
    inbox = Inbox(loop)
    box = Mailbox(inbox, 999, loop, has_scores=True)
    choice = Choice(0, box, AnswerText(Tokenizer.toy().detokenizer(), None), Stops(999), max_tokens=24)
    data = bytes(range(97, 122)) * 4
    entry = Scores(
        array("f", [-1.0]), array("I", [1]), bytearray([20]), array("I", [5] * 20), array("f", [0.0] * 20)
    )
    for token in data:
        box.put_scored(token, entry, 0, 0)
    box.finish(SequenceEnd(1, code))
    pieces = [choice.take()]
    while pieces[-1].finish is None:
        assert box.is_ready
        assert inbox._has_news, "or nobody would look again"
        inbox._has_news = False
        pieces.append(choice.take())
    assert [len(piece.token_ids) for piece in pieces] == [24, 24, 24, 24, 4]
    assert [piece.offset for piece in pieces] == [0, 24, 48, 72, 96]
    assert all(piece.scores is not None and len(piece.scores) == len(piece.token_ids) for piece in pieces)
    shown = data if code is FinishCode.MAX_TOKENS else data[:-1]
    assert "".join(piece.text for piece in pieces) == shown.decode()
    assert not inbox._has_news


def test_offsets_count_the_tokens_before(loop: asyncio.AbstractEventLoop) -> None:
    choice = choice_of(loop, Stops(99))
    offsets = []
    for data in (b"a", b"bcd", b"ef"):
        put(choice, data)
        piece = choice.take()
        offsets.append((piece.offset, len(piece.token_ids), piece.text))
    assert offsets == [(0, 1, "a"), (1, 3, "bcd"), (4, 2, "ef")]
    assert choice.num_tokens == 6


@pytest.mark.parametrize("split", range(1, 8))
def test_a_stop_string_cuts_at_the_same_token_however_late_the_reader_is(
    loop: asyncio.AbstractEventLoop, split: int
) -> None:
    choice = choice_of(loop, Stops(99, strings=("de",)))
    data, text, count = b"abcdefgh", "", 0
    for part in (data[:split], data[split:]):
        put(choice, part)
        if choice.finish is None:
            piece = choice.take()
            text, count = text + piece.text, count + len(piece.token_ids)
    assert (text, count, choice.num_tokens) == ("abc", 5, 5)
    assert choice.finish is not None
    assert choice.finish.stop_string == "de"


def test_ids_alone_need_no_text(loop: asyncio.AbstractEventLoop) -> None:
    choice = choice_of(loop, Stops(99), text=False)
    put(choice, b"\xf0\x9f")
    choice.box.finish(SequenceEnd(1, FinishCode.MAX_TOKENS))
    piece = choice.take()
    assert (piece.text, piece.token_ids) == ("", array("I", [0xF0, 0x9F]))
    assert piece.has_content


def test_an_end_alone_has_no_content(loop: asyncio.AbstractEventLoop) -> None:
    choice = choice_of(loop, Stops(99))
    put(choice, b"a")
    choice.take()
    choice.box.finish(SequenceEnd(1, FinishCode.ABORTED))
    assert not choice.take().has_content


def test_a_closed_choice_holds_no_text_and_no_tokens(loop: asyncio.AbstractEventLoop) -> None:
    """H10: an abort drops the detokenizer's state."""
    choice = choice_of(loop, Stops(99, strings=("zz",)))
    put(choice, b"abc")
    choice.close()
    assert choice._answer is None
    assert not choice.box.tokens


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_is_named_and_shown_only_where_that_is_asked_for(
    loop: asyncio.AbstractEventLoop, included: bool
) -> None:
    choice = choice_of(loop, Stops(9, include_in_output=included))
    put(choice, b"ab")
    choice.box.finish(SequenceEnd(1, FinishCode.STOP_TOKEN))
    piece = choice.take()
    assert piece.finish == Finish(FinishReason.STOP_TOKEN, stop_token_id=ord("b"))
    assert (piece.text, list(piece.token_ids)) == ("ab" if included else "a", [*b"ab"])


def test_text_that_might_have_been_a_stop_string_comes_with_the_end(loop: asyncio.AbstractEventLoop) -> None:
    choice = choice_of(loop, Stops(9, strings=("bcd",)))
    put(choice, b"abc")
    held = choice.take()
    assert (held.text, list(held.token_ids), held.offset, held.finish) == ("a", [*b"abc"], 0, None)
    choice.box.finish(SequenceEnd(1, FinishCode.EOS))
    rest = choice.take()
    assert (rest.text, list(rest.token_ids), rest.offset) == ("bc", [], 3)
    assert rest.finish == Finish(FinishReason.EOS)
    assert rest.has_content, "or a stream would not send it"


def test_what_follows_a_stop_string_is_no_output(loop: asyncio.AbstractEventLoop) -> None:
    choice = choice_of(loop, Stops(9, strings=("bc",)))
    put(choice, b"abcde")
    choice.box.finish(SequenceEnd(1, FinishCode.EOS))
    piece = choice.take()
    assert (piece.text, list(piece.token_ids), choice.num_tokens) == ("a", [*b"abc"], 3)
    assert piece.finish == Finish(FinishReason.STOP_STRING, stop_string="bc")


def test_output_that_the_reader_has_counts_and_is_not_taken_again(loop: asyncio.AbstractEventLoop) -> None:
    choice = choice_of(loop, Stops(9, strings=("bcd",)))
    choice.begin_behind([*b"abc"])
    assert (choice.num_tokens, choice.num_before) == (3, 3)
    assert choice.read_again([*b"abc"])
    put(choice, b"d")
    piece = choice.take()
    assert (piece.text, list(piece.token_ids), piece.offset) == ("", [*b"d"], 3)
    assert piece.finish == Finish(FinishReason.STOP_STRING, stop_string="bcd")
    assert list(choice.box.tokens) == [*b"abcd"], "all of it goes to another worker"
    assert not choice_of(loop, Stops(9, strings=("b",))).read_again([*b"abc"]), "nothing can follow"
    assert choice_of(loop, Stops(9), text=False).read_again([*b"abc"])
