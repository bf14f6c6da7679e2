"""A stream survives its server: what is sent again, what is passed over, and when the client gives up."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Incomplete,
    KvatlasError,
    ServerFailure,
    Unavailable,
)
from kvatlas.client.events import Delta, Event, Finished, Queued, Started, Summary
from kvatlas.client.resume import MAX_CALLS_WITHOUT_PROGRESS, Course
from kvatlas.client.stream import gather
from kvatlas.client.sync import Client
from kvatlas.client.token_stream import AsyncTokenStream, TokenStream
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

NUM_TOKENS = 12


def token_of(seed: int, index: int, number: int) -> int:
    return (seed * 31 + index * 7 + number * number) % 997


def text_of(seed: int, index: int, count: int) -> str:
    """What may be shown after so many tokens: every third one only completes a character."""
    shown = count if count == NUM_TOKENS else count - count % 3 // 2
    return "".join(f"{token_of(seed, index, number)}," for number in range(shown))


def started(request: pb.StreamGenerateRequest, drawn_seed: int) -> pb.StreamGenerateResponse:
    spec = request.spec
    seed = spec.sampling.seed if spec.sampling.HasField("seed") else drawn_seed
    return pb.StreamGenerateResponse(
        started=pb.GenerationStarted(request_id=spec.request_id or "made-here", seed=seed)
    )


def delta(seed: int, index: int, begin: int, end: int, *, ids: bool) -> pb.StreamGenerateResponse:
    before, after = (text_of(seed, index, count) for count in (begin, end))
    return pb.StreamGenerateResponse(
        delta=pb.TokenDelta(
            index=index,
            text=after.removeprefix(before),
            token_ids=[token_of(seed, index, n) for n in range(begin, end)] if ids else [],
            token_offset=begin,
            token_count=end - begin,
        )
    )


def finished(index: int, count: int = NUM_TOKENS) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(
        choice_finished=pb.ChoiceFinished(
            index=index, finish_reason=pb.FINISH_REASON_MAX_TOKENS, completion_tokens=count
        )
    )


SUMMARY = pb.StreamGenerateResponse(summary=pb.GenerationSummary())


# The rule alone, without a connection


def stream_request(**spec: Any) -> pb.StreamGenerateRequest:
    return pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="x", **spec))


def lost(code: str = "UNAVAILABLE", reason: str = "") -> KvatlasError:
    return Unavailable("gone", code=code, reason=reason)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def course_of(request: pb.StreamGenerateRequest, **more: Any) -> Course:
    return Course(request, **({"timeout_seconds": 60.0, "clock": Clock(), "chance": lambda: 0.0} | more))


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


@pytest.mark.parametrize(
    ("failure", "goes_on"),
    [
        (lost("UNAVAILABLE"), True),
        (lost("INTERNAL"), True),
        (lost("CANCELLED"), True),
        (lost("UNKNOWN"), True),
        (lost("DEADLINE_EXCEEDED"), False),
        (lost("RESOURCE_EXHAUSTED"), False),
        (lost("UNAVAILABLE", "DRAINING"), True),
        (lost("UNAVAILABLE", "QUEUE_FULL"), True),
        (lost("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID"), True),
        (lost("ABORTED", "WORKER_LOST"), False),  # it may be this request that kills workers
        (lost("INTERNAL", "INTERNAL"), False),
        (lost("CANCELLED", "CANCELLED_BY_OPERATOR"), False),
        (lost("RESOURCE_EXHAUSTED", "SLOW_READER"), False),
    ],
)
def test_what_is_a_loss_of_the_server_and_what_is_its_answer(failure: KvatlasError, goes_on: bool) -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    if goes_on:
        assert 0 < course.wait_seconds(failure) <= 2
    else:
        with pytest.raises(Unavailable):
            course.wait_seconds(failure)


def test_before_the_start_only_what_grpc_does_not_retry_is_tried_again() -> None:
    for code, goes_on in (("UNAVAILABLE", False), ("INTERNAL", True)):
        course = course_of(stream_request())
        if goes_on:
            for _ in range(MAX_CALLS_WITHOUT_PROGRESS):
                assert course.wait_seconds(lost(code)) > 0
            with pytest.raises(Unavailable):
                course.wait_seconds(lost(code))
        else:
            with pytest.raises(Unavailable):
                course.wait_seconds(lost(code))


def test_a_request_that_was_told_its_place_in_the_queue_goes_on_elsewhere() -> None:
    """The first `queued` has committed the call: gRPC itself retries no more."""
    for failure in (lost(), lost("UNAVAILABLE", "DRAINING")):
        course = course_of(stream_request())
        queued = pb.StreamGenerateResponse(queued=pb.QueueUpdate(position=2))
        assert course.take(queued) == Queued(2, None)
        assert course.wait_seconds(failure) > 0
        with pytest.raises(Unavailable):
            course.wait_seconds(failure)  # nothing was heard of the next one
    course = course_of(stream_request())
    course.take(pb.StreamGenerateResponse(queued=pb.QueueUpdate(position=2)))
    with pytest.raises(Unavailable):
        course.wait_seconds(lost("RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT"))


def test_a_place_in_the_queue_is_told_until_the_start_and_not_again() -> None:
    course = course_of(stream_request())
    queued = pb.StreamGenerateResponse(queued=pb.QueueUpdate(position=2))
    assert [course.take(queued), course.take(queued)] == [Queued(2, None)] * 2
    course.take(started(course.next_call()[0], 5))
    course.wait_seconds(lost())
    assert course.take(queued) is None


def test_a_hint_of_the_server_when_to_come_again_is_kept_to() -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    full = Unavailable("full", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL", retry_seconds=7.0)
    assert course.wait_seconds(full) == 7.0
    assert course.wait_seconds(lost()) < 1


def test_a_stream_with_a_limit_on_its_time_or_without_resume_is_never_repeated() -> None:
    limited = stream_request()
    limited.spec.stop.max_duration.seconds = 9
    for course in (course_of(limited), course_of(stream_request(), resume_seconds=0.0)):
        course.take(started(course.next_call()[0], 5))
        with pytest.raises(Unavailable):
            course.wait_seconds(lost())


def test_the_client_gives_up_after_resume_seconds_and_never_passes_its_deadline() -> None:
    clock = Clock()
    course = course_of(stream_request(), clock=clock, resume_seconds=10.0)
    course.take(started(course.next_call()[0], 5))
    began, waits = clock.now, []
    with pytest.raises(Unavailable):  # noqa: PT012
        for _ in range(100):
            waits.append(course.wait_seconds(lost()))
            clock.now += waits[-1]
    assert waits[0] < waits[-1] <= 2
    assert 8 < clock.now - began <= 10
    again = course_of(stream_request(), clock=clock, resume_seconds=10.0)
    for number in range(3):  # each loss has its own seconds
        again.take(started(again.next_call()[0], 5))
        again.take(delta(5, 0, 0, number + 1, ids=True))
        again.wait_seconds(lost())
        clock.now += 9
    late = course_of(stream_request(), clock=clock, timeout_seconds=0.04)
    late.take(started(late.next_call()[0], 5))
    with pytest.raises(DeadlineExceeded):
        late.wait_seconds(lost())


def test_a_request_that_is_lost_again_and_again_without_a_new_token_is_given_up() -> None:
    course = course_of(stream_request())
    course.take(started(course.next_call()[0], 5))
    course.take(delta(5, 0, 0, 3, ids=True))
    for _ in range(MAX_CALLS_WITHOUT_PROGRESS):
        course.wait_seconds(lost())
        course.take(started(course.next_call()[0], 5))
        course.take(delta(5, 0, 0, 3, ids=True))
    with pytest.raises(Unavailable):
        course.wait_seconds(lost())


# With connections


class LosingServer(generation_pb2_grpc.GenerationServiceServicer):
    """Ends its first calls after some tokens, as a proxy does whose server has died."""

    def __init__(self) -> None:
        self.knows_resume = True
        self.lose_after: list[int] = []  # tokens of each call in turn; calls beyond are whole
        self.failure: tuple[grpc.StatusCode, str] = (grpc.StatusCode.UNAVAILABLE, "")
        self.requests: list[pb.StreamGenerateRequest] = []
        self.proceed = threading.Event()
        self.proceed.set()

    def StreamGenerate(self, request: Any, context: Any) -> Iterator[pb.StreamGenerateResponse]:
        call = len(self.requests)
        self.requests.append(request)
        first = started(request, drawn_seed=40 + call)
        seed = first.started.seed
        yield first
        end = self.lose_after[call] if call < len(self.lose_after) else NUM_TOKENS
        begin = len(request.resume_after.ids) if self.knows_resume else 0
        for number in range(begin, end):
            ids = request.spec.output.format == pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
            yield delta(seed, 0, number, number + 1, ids=ids)
        self.proceed.wait(10)
        if end < NUM_TOKENS:
            self._lose(context)
        yield finished(0)
        yield SUMMARY

    def _lose(self, context: Any) -> None:
        code, reason = self.failure
        if reason:
            packed = any_pb2.Any()
            packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvatlas.v1"))
            status = status_pb2.Status(code=code.value[0], details=[packed])
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(code, "gone")


@contextmanager
def served(servicer: LosingServer, port: int = 0) -> Iterator[tuple[Any, int]]:
    running = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, running)
    bound = running.add_insecure_port(f"127.0.0.1:{port}")
    running.start()
    try:
        yield running, bound
    finally:
        running.stop(0).wait()


def read_blocking(address: str, **options: Any) -> tuple[list[Event], int]:
    with Client(address) as client, client.stream("x", **options) as stream:
        return list(stream), stream.resumes


def read_async(address: str, **options: Any) -> tuple[list[Event], int]:
    async def main() -> tuple[list[Event], int]:
        async with AsyncClient(address) as client, client.stream("x", **options) as stream:
            return [event async for event in stream], stream.resumes

    return asyncio.run(main())


@pytest.mark.parametrize("read", [read_blocking, read_async])
@pytest.mark.parametrize("output", ["text", "both"])
@pytest.mark.parametrize("knows_resume", [True, False])
def test_a_stream_goes_on_after_its_server_was_lost_twice(
    read: Callable[..., tuple[list[Event], int]], output: str, knows_resume: bool
) -> None:
    server = LosingServer()
    server.knows_resume = knows_resume
    server.lose_after = [4, 7]
    with served(server) as (_, port):
        events, resumes = read(f"127.0.0.1:{port}", output=output)
    whole = gather(events)
    assert whole.text == text_of(40, 0, NUM_TOKENS)
    ids = tuple(token_of(40, 0, number) for number in range(NUM_TOKENS))
    assert whole.choices[0].token_ids == (ids if output == "both" else ())
    assert resumes == 2
    assert [request.spec.sampling.seed for request in server.requests] == [0, 40, 40]
    assert [tuple(request.resume_after.ids) for request in server.requests] == [(), ids[:3], ids[:6]]


@pytest.mark.parametrize("read", [read_blocking, read_async])
def test_an_answer_of_the_server_is_not_a_loss(read: Callable[..., tuple[list[Event], int]]) -> None:
    server = LosingServer()
    server.lose_after = [4, 4]
    server.failure = (grpc.StatusCode.ABORTED, "WORKER_LOST")
    with served(server) as (_, port), pytest.raises(ServerFailure) as caught:
        read(f"127.0.0.1:{port}")
    assert caught.value.reason == "WORKER_LOST"
    assert len(server.requests) == 1


def test_a_stream_goes_on_at_the_other_address() -> None:
    dying, other = LosingServer(), LosingServer()
    for each in (dying, other):
        each.lose_after = [5]
        each.proceed.clear()
    with served(dying) as (first, first_port), served(other) as (second, second_port):
        address = f"127.0.0.1:{first_port},127.0.0.1:{second_port}"
        with Client(address) as client, client.stream("x") as stream:
            events: list[Event] = [next(stream) for _ in range(6)]
            is_first = bool(dying.requests)
            survivor = other if is_first else dying
            survivor.lose_after = []
            survivor.proceed.set()
            (first if is_first else second).stop(0)  # its calls end, its port is closed
            (dying if is_first else other).proceed.set()
            events += list(stream)
            assert stream.resumes == 1
    assert gather(events).text == text_of(40, 0, NUM_TOKENS)
    assert len(survivor.requests) == 1


def test_a_stream_waits_for_its_only_server_to_come_back() -> None:
    server = LosingServer()
    server.lose_after = [5]
    server.proceed.clear()
    with (
        served(server) as (running, port),
        Client(f"127.0.0.1:{port}") as client,
        client.stream("x") as stream,
    ):
        events: list[Event] = [next(stream) for _ in range(6)]
        server.proceed.set()
        running.stop(0).wait()
        with served(server, port):
            events += list(stream)
    assert gather(events).text == text_of(40, 0, NUM_TOKENS)


class PatientCourse(Course):
    """After a loss it would wait for a minute."""

    def wait_seconds(self, failure: KvatlasError) -> float:
        super().wait_seconds(failure)
        return 60.0


@pytest.mark.parametrize("is_lost", [False, True])
def test_closing_a_stream_ends_its_reading_and_its_wait_for_a_server(is_lost: bool) -> None:
    server = LosingServer()
    if is_lost:
        server.lose_after = [1]
    else:
        server.proceed.clear()
    with served(server) as (_, port), Client(f"127.0.0.1:{port}") as client:
        course = PatientCourse(stream_request(), timeout_seconds=300.0)
        stream = TokenStream(course, client._open_stream, client.address)
        assert isinstance(next(stream), Started)
        closer = threading.Timer(0.05, stream.close)
        closer.start()
        with pytest.raises(Cancelled, match="the stream was closed"):
            list(stream)
        with pytest.raises(Cancelled, match="the stream was closed"):
            next(stream)
        closer.join()
        server.proceed.set()


@pytest.mark.parametrize("is_lost", [False, True])
def test_closing_an_async_stream_ends_its_reading_and_its_wait_and_cancels_no_task(is_lost: bool) -> None:
    """gRPC raises CancelledError for a call that was cancelled: the reader's task was not."""
    server = LosingServer()
    if is_lost:
        server.lose_after = [1]
    else:
        server.proceed.clear()

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            course = PatientCourse(stream_request(), timeout_seconds=300.0)
            stream = AsyncTokenStream(course, client._open_stream, address)
            assert isinstance(await anext(stream), Started)
            asyncio.get_running_loop().call_later(0.05, stream.close)
            with pytest.raises(Cancelled, match="the stream was closed"):
                async for _ in stream:
                    pass
            with pytest.raises(Cancelled, match="the stream was closed"):
                await anext(stream)

    with served(server) as (_, port):
        asyncio.run(main(f"127.0.0.1:{port}"))
        server.proceed.set()


def test_closing_a_client_ends_its_streams_and_none_goes_on_in_another_call() -> None:
    """The closed channel looked like a lost server: the stream went on, on a channel that nobody closed."""
    server = LosingServer()
    server.proceed.clear()
    with served(server) as (_, port):
        client = Client(f"127.0.0.1:{port}")
        stream = client.stream("x")
        assert isinstance(next(stream), Started)
        closer = threading.Timer(0.05, client.close)
        closer.start()
        with pytest.raises(Cancelled, match="the client was closed"):
            list(stream)
        closer.join()
        assert len(server.requests) == 1
        server.proceed.set()
        with client.stream("x") as again:  # a client that is closed may be used again
            list(again)
        client.close()


def test_closing_an_async_client_ends_its_streams_and_cancels_no_task() -> None:
    server = LosingServer()
    server.proceed.clear()

    async def main(address: str) -> None:
        client = AsyncClient(address)
        stream = client.stream("x")
        assert isinstance(await anext(stream), Started)
        closing = asyncio.create_task(client.close())
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        await closing

    with served(server) as (_, port):
        asyncio.run(main(f"127.0.0.1:{port}"))
        assert len(server.requests) == 1
        server.proceed.set()


def test_a_task_that_is_cancelled_while_its_stream_is_closed_is_cancelled() -> None:
    server = LosingServer()
    server.proceed.clear()

    async def main(address: str) -> None:
        async with AsyncClient(address) as client, client.stream("x") as stream:
            came: list[Event] = []

            async def read() -> None:
                async for event in stream:
                    came.append(event)

            reader = asyncio.create_task(read())
            async with asyncio.timeout(30):
                while len(came) < 1 + NUM_TOKENS:
                    await asyncio.sleep(0.001)
            stream.close()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader

    with served(server) as (_, port):
        asyncio.run(main(f"127.0.0.1:{port}"))
        server.proceed.set()
