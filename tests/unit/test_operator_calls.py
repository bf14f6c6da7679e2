"""Operators' calls one by one: what is asked of a worker, for how long, and what is made of its answers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.v1 import server_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service.drain import DrainControl
from service.errors import Failure
from service.handlers.admin import COMMAND_SECONDS, DEFAULT_PINS, MAX_COMMAND_SECONDS, AdminServicer
from service.handlers.live import LiveCalls
from service.handlers.pins import Pinner
from service.health import HealthBoard

GRACE = 60.0


class _Link:
    """A worker that answers one question after the other, by a list of replies or an error."""

    worker_id, address, is_up = "w", "ipc://w", True

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.asked: list[worker_pb2.Command] = []
        self.timeouts: list[float] = []

    async def command(
        self, command: worker_pb2.Command, *, timeout: float
    ) -> AsyncIterator[worker_pb2.CommandReply]:
        """As WorkerLink has it."""
        self.asked.append(worker_pb2.Command.FromString(command.SerializeToString()))
        self.timeouts.append(timeout)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        for reply in answer:
            yield reply


class _Context:
    def __init__(self, left: float | None = None) -> None:
        self.written: list[Any] = []
        self._left = left

    async def write(self, message: Any) -> None:
        self.written.append(type(message).FromString(message.SerializeToString()))

    def time_remaining(self) -> float | None:
        return self._left


class Stage:
    """A servicer before one worker."""

    def __init__(self, *answers: Any) -> None:
        loop = asyncio.get_running_loop()
        self.link = _Link(list(answers))
        self.board, self.drain, self.live = HealthBoard(loop), DrainControl(loop, GRACE), LiveCalls()
        kept = SimpleNamespace(link=self.link, mirror=SimpleNamespace(worker_id="w"))
        mirrors: Any = SimpleNamespace(kept=[kept])
        backstage: Any = SimpleNamespace(board=self.board, drain=self.drain, live=self.live)
        self.servicer = AdminServicer(backstage, mirrors, Pinner(backstage, mirrors))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def reason_of(call: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(Failure) as raised:
        await call
    return raised.value.reason


def recorded(first_byte: int, data: bytes, *, size: int, name: str = "r7") -> worker_pb2.CommandReply:
    info = pb.RecordingInfo(recording_id=name, byte_count=size)
    piece = pb.GetRecordingResponse(first_byte=first_byte, data=data, recording=info)
    return worker_pb2.CommandReply(get_recording=piece)


def profiled(first_byte: int, data: bytes, *, size: int) -> worker_pb2.CommandReply:
    piece = pb.GetProfileResponse(first_byte=first_byte, data=data, file_name="p7", byte_count=size)
    return worker_pb2.CommandReply(get_profile=piece)


def test_the_last_recording_is_the_same_one_to_its_end_and_is_introduced_once() -> None:
    async def scenario() -> None:
        stage = Stage([recorded(2, b"cd", size=5)], [recorded(4, b"e", size=5)])
        context = _Context()
        await stage.servicer.GetRecording(pb.GetRecordingRequest(first_byte=2), context)
        wanted = [command.get_recording for command in stage.link.asked]
        assert [(each.recording_id, each.first_byte) for each in wanted] == [("", 2), ("r7", 4)]
        assert [(each.first_byte, each.data) for each in context.written] == [(2, b"cd"), (4, b"e")]
        assert [each.HasField("recording") for each in context.written] == [True, False]

    run(scenario)


def test_the_last_profile_is_the_same_one_to_its_end_and_is_introduced_once() -> None:
    async def scenario() -> None:
        stage = Stage([profiled(0, b"ab", size=3)], [profiled(2, b"c", size=3)])
        context = _Context()
        await stage.servicer.GetProfile(pb.GetProfileRequest(), context)
        wanted = [command.get_profile for command in stage.link.asked]
        assert [(each.file_name, each.first_byte) for each in wanted] == [("", 0), ("p7", 2)]
        told = [(each.data, each.file_name, each.byte_count) for each in context.written]
        assert told == [(b"ab", "p7", 3), (b"c", "", 0)]

    run(scenario)


def test_a_file_without_a_byte_is_introduced_all_the_same() -> None:
    async def scenario() -> None:
        stage, context = Stage([recorded(0, b"", size=0)], [profiled(0, b"", size=0)]), _Context()
        await stage.servicer.GetRecording(pb.GetRecordingRequest(), context)
        await stage.servicer.GetProfile(pb.GetProfileRequest(), context)
        assert context.written[0].recording.recording_id == "r7"
        assert context.written[1].file_name == "p7"

    run(scenario)


def test_a_file_that_goes_while_it_is_fetched_is_not_a_short_one() -> None:
    async def scenario() -> None:
        gone = pb.GetRecordingResponse(first_byte=2)
        stage = Stage(
            [recorded(0, b"ab", size=5)],
            [worker_pb2.CommandReply(get_recording=gone)],
            [profiled(0, b"ab", size=5)],
            [profiled(2, b"", size=5)],
        )
        servicer, context = stage.servicer, _Context()
        recording, profile = pb.GetRecordingRequest(), pb.GetProfileRequest()
        assert await reason_of(servicer.GetRecording(recording, context)) == "RECORDING_NOT_FOUND"
        assert await reason_of(servicer.GetProfile(profile, context)) == "PROFILE_NOT_FOUND"
        assert [each.data for each in context.written] == [b"ab", b"ab"]

    run(scenario)


@pytest.mark.parametrize(("left", "patience"), [(None, MAX_COMMAND_SECONDS), (2.5, 2.5), (3600.0, 60.0)])
def test_a_profile_is_waited_for_as_long_as_the_caller_waits(left: float | None, patience: float) -> None:
    async def scenario() -> None:
        stage = Stage(TimeoutError())
        call = stage.servicer.CaptureProfile(pb.CaptureProfileRequest(steps=1), _Context(left))
        assert await reason_of(call) == "DEADLINE_PASSED"
        assert stage.link.timeouts == [patience]

    run(scenario)


def test_a_worker_that_does_not_answer_an_operator_is_not_ready() -> None:
    async def scenario() -> None:
        stage = Stage(TimeoutError())
        assert await reason_of(stage.servicer.StopRecording(pb.StopRecordingRequest(), None)) == "NOT_READY"
        assert stage.link.timeouts == [COMMAND_SECONDS]

    run(scenario)


def test_pins_come_in_parts_of_a_hundred_and_the_last_part_says_so() -> None:
    async def scenario() -> None:
        pins = [pb.PinnedPrefix(name=f"n{number:03}", worker_id="w") for number in range(DEFAULT_PINS + 1)]
        listed = [worker_pb2.CommandReply(pins=pb.ListPinnedPrefixesResponse(pins=pins))]
        stage = Stage(*[listed] * 4)

        async def part(**fields: Any) -> tuple[list[str], str]:
            answer = await stage.servicer.ListPinnedPrefixes(pb.ListPinnedPrefixesRequest(**fields), None)
            return [pin.name for pin in answer.pins], answer.next_cursor

        names, cursor = await part()
        assert names == [f"n{number:03}" for number in range(DEFAULT_PINS)]
        assert await part(cursor=cursor) == (["n100"], "")
        names, cursor = await part(max_results=DEFAULT_PINS + 1)
        assert (len(names), cursor) == (DEFAULT_PINS + 1, ""), "nothing is left behind exactly as many"
        names, cursor = await part(max_results=DEFAULT_PINS)
        assert (len(names), bool(cursor)) == (DEFAULT_PINS, True)

    run(scenario)


@pytest.mark.parametrize(("seconds", "grace"), [(None, GRACE), (0, 0.0), (7, 7.0)])
def test_a_drain_begins_with_the_answer_and_has_the_operators_patience(
    seconds: int | None, grace: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        stage = Stage()
        assert stage.live.enter("r", "t") is not None
        request = pb.StartDrainRequest()
        if seconds is not None:
            request.grace.FromSeconds(seconds)
        before = asyncio.get_running_loop().time()
        assert (await stage.servicer.StartDrain(request, None)).running_requests == 1
        assert stage.board.is_draining, "nothing new from here on"
        after = asyncio.get_running_loop().time()
        assert before + grace <= stage.drain.deadline <= after + grace
        await stage.servicer.StopDrain(pb.StopDrainRequest(), None)
        assert not stage.board.is_draining

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "event=drain_asked generations=1" in caplog.text


def test_requests_that_an_operator_ends_are_those_meant_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        stage = Stage()
        calls = [stage.live.enter(f"r{number}", "t", "alice", {"team": "x"}) for number in range(2)]
        other = stage.live.enter("r2", "t", "bob", {"team": "x"})
        assert other is not None
        request = pb.CancelRequestsRequest(principal="alice", labels={"team": "x"}, reason="too many")
        assert (await stage.servicer.CancelRequests(request, None)).cancelled_ids == ["r0", "r1"]
        for call in calls:
            assert call is not None
            assert call.failure is not None
            assert call.failure.reason == "CANCELLED_BY_OPERATOR"
        assert other.failure is None

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert "event=requests_cancelled count=2 why='too many'" in caplog.text
