"""What is asked again behind a loss, and what of the answer is new: each token and character once."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.client.errors import Incomplete
from kvatlas.client.events import Delta, Event, Finished, Queued, Started, Summary
from kvatlas.client.stream import gather
from kvatlas.v1 import generation_pb2 as pb
from tests.losing_server import (
    NUM_TOKENS,
    SUMMARY,
    course_of,
    delta,
    finished,
    lost,
    started,
    stream_request,
    text_of,
    token_of,
)


@st.composite
def runs(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Some calls, each as deltas (choice, begin, end) in an order of its own; all but the last are cut."""
    calls = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = {
            index: sorted({0, NUM_TOKENS, *draw(st.lists(st.integers(1, NUM_TOKENS - 1), max_size=5))})
            for index in range(2)
        }
        parts = {index: [(index, a, b) for a, b in itertools.pairwise(at)] for index, at in cuts.items()}
        order = draw(st.permutations([index for index, some in parts.items() for _ in some]))
        calls.append([parts[index].pop(0) for index in order])
    return [call[: draw(st.integers(0, len(call)))] for call in calls[:-1]] + calls[-1:]


@settings(max_examples=60, deadline=None)
@given(runs())
def test_wherever_calls_are_cut_the_reader_gets_every_token_and_character_once(
    calls: list[list[tuple[int, int, int]]],
) -> None:
    course = course_of(stream_request())
    events: list[Event] = []

    def take(message: pb.StreamGenerateResponse) -> None:
        if (event := course.take(message)) is not None:
            events.append(event)

    for number, parts in enumerate(calls):
        request, _ = course.next_call()
        take(started(request, drawn_seed=5 + number))
        for index, begin, end in parts:
            take(delta(5, index, begin, end, ids=True))
            if end == NUM_TOKENS:
                take(finished(index))
        if number < len(calls) - 1:
            course._without_progress = 0  # how often one may be lost is another test
            course.wait_seconds(lost())
    take(SUMMARY)
    course.end()
    whole = gather(events)
    assert [choice.text for choice in whole.choices] == [text_of(5, index, NUM_TOKENS) for index in range(2)]
    at = [0, 0]
    for event in events:
        if isinstance(event, Delta):
            assert event.token_offset == at[event.index]
            assert event.text or event.token_count
            at[event.index] += event.token_count
    assert at == [NUM_TOKENS] * 2
    kinds = [type(event) for event in events]
    assert (kinds.count(Started), kinds.count(Finished), kinds.count(Summary)) == (1, 2, 1)
    assert course.resumes == len(calls) - 1


def test_no_answer_is_gathered_from_a_stream_without_its_beginning_or_end() -> None:
    course = course_of(stream_request())
    begin = course.take(started(stream_request(), drawn_seed=5))
    summary = course.take(SUMMARY)
    assert begin is not None
    assert summary is not None
    assert gather([begin, summary]).choices == ()
    for part in ([begin], [summary], []):
        with pytest.raises(Incomplete, match="no start, or no summary"):
            gather(part)


def test_the_next_call_has_the_seed_and_the_id_that_started_told_and_no_queue_timeout() -> None:
    request = stream_request()
    request.spec.scheduling.queue_timeout.seconds = 3
    course = course_of(request)
    first = pb.StreamGenerateRequest()
    first.CopyFrom(course.next_call()[0])
    assert not first.spec.sampling.HasField("seed")
    course.take(started(first, drawn_seed=2**64 - 1))
    course.wait_seconds(lost())
    again = course.next_call()[0].spec
    assert (again.sampling.seed, again.request_id) == (2**64 - 1, "made-here")
    assert not again.scheduling.HasField("queue_timeout")
    assert again.text == "x"


def test_a_single_sample_goes_on_behind_what_was_delivered() -> None:
    """From the last message on, which may have been the end: behind an EOS nothing may follow."""
    course = course_of(stream_request(stop=pb.StopCriteria(max_tokens=NUM_TOKENS)))
    course.take(started(course.next_call()[0], 5))
    assert course.next_call()[0].spec.output.format == pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
    texts = []
    for begin, end in ((0, 2), (2, 5)):
        event = course.take(delta(5, 0, begin, end, ids=True))
        assert isinstance(event, Delta)
        assert not event.token_ids, "nobody asked for them"
        texts.append(event.text)
    course.wait_seconds(lost())
    again = course.next_call()[0]
    known = [token_of(5, 0, number) for number in range(2)]
    assert list(again.resume_after.ids) == known
    course.take(started(again, 5))
    event = course.take(delta(5, 0, 2, NUM_TOKENS, ids=True))
    assert isinstance(event, Delta)
    assert (event.token_offset, event.token_count) == (5, NUM_TOKENS - 5)
    assert "".join(texts) + event.text == text_of(5, 0, NUM_TOKENS)
    course.wait_seconds(lost())  # all tokens are here, their end is not
    assert list(course.next_call()[0].resume_after.ids) == known
    course.take(started(course.next_call()[0], 5))
    assert course.take(delta(5, 0, 2, NUM_TOKENS, ids=True)) is None
    assert isinstance(course.take(finished(0)), Finished)


def test_text_without_a_token_is_no_place_to_go_on_from() -> None:
    """What is left at the end comes behind the last token, which may be what ended the answer."""
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    for begin, end in ((0, 3), (3, 4), (4, 4)):
        course.take(delta(5, 0, begin, end, ids=True))
    course.wait_seconds(lost())
    assert len(course.next_call()[0].resume_after.ids) == 3


def test_a_repeated_run_that_is_cut_elsewhere_gives_what_is_new_of_each_message() -> None:
    course = course_of(stream_request(sampling=pb.SamplingParams(n=2)))

    def news(text: str, begin: int, *ids: int) -> tuple[str, int, list[float | None]]:
        logprobs = [pb.TokenLogprob(token_id=each, logprob=-each) for each in ids]
        message = pb.TokenDelta(
            text=text, token_offset=begin, token_ids=ids, token_count=len(ids), logprobs=logprobs
        )
        event = course.take(pb.StreamGenerateResponse(delta=message))
        assert isinstance(event, Delta)
        return event.text, event.token_offset, [each.logprob for each in event.logprobs]

    course.take(started(course.next_call()[0], 5))
    assert news("ab", 0, 7, 8) == ("ab", 0, [-7, -8])
    course.wait_seconds(lost())
    course.take(started(course.next_call()[0], 5))
    assert news("a", 0, 7, 8, 9) == ("", 2, [-9])
    assert news("bc", 3) == ("c", 3, [])


def test_a_call_that_is_lost_while_it_repeats_takes_nothing_back() -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    for number in range(3):
        course.take(delta(5, 0, number, number + 1, ids=True))
    for _ in range(2):
        course.wait_seconds(lost())
        assert len(course.next_call()[0].resume_after.ids) == 2
        course.take(started(course.next_call()[0], 5))
        course.take(delta(5, 0, 0, 1, ids=True))  # a server that does not know of `resume_after`


def test_several_samples_are_repeated_and_a_stream_that_begins_elsewhere_is_incomplete() -> None:
    course = course_of(stream_request(sampling=pb.SamplingParams(n=2)))
    course.take(started(course.next_call()[0], 5))
    course.take(delta(5, 0, 0, 3, ids=True))
    course.wait_seconds(lost())
    assert not course.next_call()[0].resume_after.ids
    single = course_of(stream_request())
    single.take(started(single.next_call()[0], 5))
    for begin, end in ((0, 3), (3, 5)):
        single.take(delta(5, 0, begin, end, ids=True))
    single.wait_seconds(lost())
    single.take(started(single.next_call()[0], 5))
    with pytest.raises(Incomplete, match="number 2 came"):
        single.take(delta(5, 0, 2, 4, ids=True))


def test_a_repeated_run_with_another_token_or_text_is_incomplete() -> None:
    for wrong in ("ids", "text"):
        course = course_of(stream_request())
        course.take(started(course.next_call()[0], 5))
        course.take(delta(5, 0, 0, 6, ids=True))
        course.wait_seconds(lost())
        course.take(started(course.next_call()[0], 5))
        course.take(delta(5, 0, 0, 2, ids=True))
        bad = delta(5, 0, 2, 6, ids=True)
        if wrong == "ids":
            bad.delta.token_ids[1] += 1
        else:
            bad.delta.text = "?" + bad.delta.text[1:]
        with pytest.raises(Incomplete, match=r"gave other (tokens|text) than"):
            course.take(bad)


def test_a_repeated_run_that_ends_earlier_is_incomplete() -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    course.take(delta(5, 0, 0, 6, ids=True))
    course.wait_seconds(lost())
    course.take(started(course.next_call()[0], 5))
    course.take(delta(5, 0, 0, 4, ids=True))
    with pytest.raises(Incomplete, match="ended after 4 tokens, 6 were delivered"):
        course.take(finished(0, 4))


def test_a_place_in_the_queue_is_told_until_the_start_and_not_again() -> None:
    course = course_of(stream_request())
    queued = pb.StreamGenerateResponse(queued=pb.QueueUpdate(position=2))
    assert [course.take(queued), course.take(queued)] == [Queued(2, None)] * 2
    course.take(started(course.next_call()[0], 5))
    course.wait_seconds(lost())
    assert course.take(queued) is None


@pytest.mark.parametrize(("n", "has_ended", "goes_on"), [(0, 0, 1), (1, 0, 1), (2, 0, 0), (0, 1, 0)])
def test_one_sample_that_has_not_ended_goes_on_behind_what_was_delivered(
    n: int, has_ended: int, goes_on: int
) -> None:
    """Of several samples a server would refuse it, and one that has ended has nothing behind its end."""
    request = stream_request()
    if n:
        request.spec.sampling.n = n
    course = course_of(request)
    course.take(started(request, drawn_seed=5))
    for begin in (0, 3):
        course.take(delta(5, 0, begin, begin + 3, ids=True))
    if has_ended:
        course.take(finished(0, 6))
    course.wait_seconds(lost())
    again, _ = course.next_call()
    assert list(again.resume_after.ids) == (
        [token_of(5, 0, number) for number in range(3)] if goes_on else []
    )


@pytest.mark.parametrize(("resume_seconds", "max_duration"), [(0.0, 0), (30.0, 5)])
def test_a_stream_that_cannot_go_on_asks_for_no_ids(resume_seconds: float, max_duration: int) -> None:
    request = stream_request()
    if max_duration:
        request.spec.stop.max_duration.FromSeconds(max_duration)
    course = course_of(request, resume_seconds=resume_seconds)
    asked, _ = course.next_call()
    assert asked.spec.output.format == pb.OUTPUT_FORMAT_UNSPECIFIED
    with pytest.raises(type(lost())):
        course.wait_seconds(lost())
