"""Calls of operators at the worker: levels, profiles and their files, each answered once and bounded."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from tests.desk_answers import answers_told
from worker.channels import OutputQueue
from worker.link import operators
from worker.link.commands import CallRefused
from worker.link.operators import KEPT_PROFILES, OperatorDesk
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    EndProfile,
    EngineCommand,
    LinkMessage,
    Profile,
    Ticket,
)

TICKET = Ticket("service#1", 1)
WAIT_SECONDS = 60.0  # only ends a test that hangs


class Saved:
    """A profile with these bytes; `gate` holds its file back."""

    suffix = ".pstats"

    def __init__(self, data: bytes = b"profile", gate: threading.Event | None = None) -> None:
        self._data, self._gate = data, gate

    def step(self) -> None:
        """It runs nowhere."""

    def stop(self) -> None:
        """It runs nowhere."""

    def save(self, path: Path) -> None:
        assert self._gate is None or self._gate.wait(WAIT_SECONDS)
        path.write_bytes(self._data)


class Bench:
    """A desk, its clock, and what came out of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "profiles"
        self.now = 100.0
        self.commands: list[EngineCommand] = []
        self.answers: OutputQueue[LinkMessage] = OutputQueue(1000)
        self.desk = OperatorDesk(
            self.folder,
            "w 0",
            uses_torch=False,
            to_engine=self.commands.append,
            answers=self.answers,
            clock=lambda: self.now,
        )

    def begin(self, ticket: Ticket = TICKET, *, steps: int = 3, seconds: float = 60.0) -> Profile:
        """Asks for a profile; what the engine gets."""
        self.desk.take(ticket, worker_pb2.Command(profile={"steps": steps}), seconds)
        command = self.commands.pop()
        assert isinstance(command, Profile)
        return command

    def ask(self, first_byte: int = 0, name: str = "", ticket: Ticket = TICKET) -> None:
        asked = server_pb2.GetProfileRequest(file_name=name, first_byte=first_byte)
        self.desk.take(ticket, worker_pb2.Command(get_profile=asked), 60.0)

    def set_level(self, logger: str, level: int, duration: Duration | None = None) -> None:
        asked = server_pb2.SetLogLevelRequest(logger=logger, level=level, duration=duration)  # type: ignore[arg-type]
        self.desk.take(TICKET, worker_pb2.Command(log_level=asked), 60.0)

    def settle(self) -> None:
        """Until the desk's thread has done what it was given."""
        self.desk._thread.submit(lambda: None).result(WAIT_SECONDS)

    def told(self) -> list[worker_pb2.CommandReply | CallFailure]:
        """Answers so far, each checked to be the last of its call where it says so."""
        self.settle()
        return answers_told(self.answers)

    def failure(self) -> CallFailure:
        (answer,) = self.told()
        assert isinstance(answer, CallFailure)
        return answer

    def saved(self, data: bytes = b"profile") -> str:
        """A profile that was captured; the name of its file."""
        self.begin().on_end(Saved(data), 3, "")
        (reply,) = self.told()
        assert isinstance(reply, worker_pb2.CommandReply)
        return reply.profile.file_name

    def pieces(self) -> list[server_pb2.GetProfileResponse]:
        replies = [reply for reply in self.told() if isinstance(reply, worker_pb2.CommandReply)]
        assert [reply.more for reply in replies] == [True] * (len(replies) - 1) + [False]
        return [reply.get_profile for reply in replies]

    def close(self) -> None:
        self.desk.close()
        self.answers.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


# Levels


def test_a_level_is_set_for_its_time_and_answered(bench: Bench) -> None:
    logger = logging.getLogger("worker.test.operators")
    logger.setLevel(logging.ERROR)
    bench.set_level(logger.name, server_pb2.LOG_LEVEL_DEBUG, Duration(seconds=2, nanos=500_000_000))
    (reply,) = bench.told()
    assert isinstance(reply, worker_pb2.CommandReply)
    assert reply.HasField("log_level")
    assert logger.level == logging.DEBUG
    bench.now += 2.4
    bench.desk.tick()
    assert logger.level == logging.DEBUG
    bench.now += 0.2
    bench.desk.tick()
    assert logger.level == logging.ERROR
    bench.set_level(logger.name, server_pb2.LOG_LEVEL_WARNING)
    bench.now += 1e9
    bench.desk.tick()
    assert logger.level == logging.WARNING, "without a time it stays"
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [("worker.link", 0, "level: no level 0"), ("worker.link", 9, "level: "), ("nobody.s", 1, "logger: ")],
)
def test_a_level_or_logger_that_is_none_is_refused(bench: Bench, name: str, level: int, words: str) -> None:
    with pytest.raises(CallRefused) as refused:
        bench.set_level(name, level)
    assert (refused.value.error, refused.value.reason) == (
        CallError.INVALID_ARGUMENT,
        CallReason.INVALID_FIELD,
    )
    assert refused.value.message.startswith(words)


# Profiles


@pytest.mark.parametrize("steps", [0, 1001])
def test_a_profile_of_no_or_too_many_steps_is_refused(bench: Bench, steps: int) -> None:
    with pytest.raises(CallRefused) as refused:
        bench.begin(steps=steps)
    assert (refused.value.reason, refused.value.message.partition(":")[0]) == (
        CallReason.INVALID_FIELD,
        "steps",
    )
    assert not bench.commands
    most = bench.begin(steps=1000)
    assert most.steps == 1000
    most.on_end(None, 0, "")
    assert bench.begin(steps=1).steps == 1


@pytest.mark.parametrize(("seconds", "left"), [(60.0, 55.0), (8.0, 4.0)])
def test_a_profile_ends_while_its_caller_still_waits(bench: Bench, seconds: float, left: float) -> None:
    command = bench.begin(seconds=seconds)
    assert (command.ticket, command.uses_torch) == (TICKET, False)
    assert command.deadline == bench.now + left


def test_one_profile_at_a_time_and_the_next_once_it_has_ended(bench: Bench) -> None:
    first = bench.begin()
    with pytest.raises(CallRefused) as refused:
        bench.begin(Ticket("service#2", 1))
    assert (refused.value.error, refused.value.reason) == (
        CallError.FAILED_PRECONDITION,
        CallReason.PROFILE_RUNNING,
    )
    first.on_end(None, 0, "broken")
    failure = bench.failure()
    assert (failure.ticket, failure.error, failure.reason) == (
        TICKET,
        CallError.INTERNAL,
        CallReason.INTERNAL,
    )
    second = bench.begin()
    second.on_end(Saved(), 0, "")
    failure = bench.failure()
    assert (failure.error, failure.reason) == (CallError.DEADLINE_EXCEEDED, CallReason.DEADLINE_PASSED)
    assert not bench.folder.exists(), "nothing was written"


def test_a_profile_that_nobody_waits_for_ends_and_is_not_told(bench: Bench) -> None:
    given_up = bench.begin()
    bench.desk.cancel(Ticket("service#1", 2))
    assert not bench.commands, "another one's"
    bench.desk.cancel(TICKET)
    assert bench.commands.pop() == EndProfile(TICKET)
    bench.desk.cancel(TICKET)
    assert not bench.commands, "once"
    following = bench.begin(Ticket("service#1", 3))
    given_up.on_end(Saved(), 2, "")
    assert not bench.told()
    following.on_end(Saved(), 3, "")
    (reply,) = bench.told()
    assert isinstance(reply, worker_pb2.CommandReply)
    assert (reply.command_id, reply.profile.steps, reply.profile.byte_count) == (3, 3, 7)


def test_a_profile_that_is_too_large_is_refused_and_leaves_no_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [bench.saved() for _ in range(KEPT_PROFILES)]
    monkeypatch.setattr(operators, "MAX_PROFILE_BYTES", 10)
    bench.begin().on_end(Saved(bytes(11)), 3, "")
    failure = bench.failure()
    assert (failure.reason, failure.message.partition(":")[0]) == (CallReason.INVALID_FIELD, "steps")
    assert sorted(path.name for path in bench.folder.glob("*.pstats")) == sorted(kept)
    assert bench.saved(bytes(10)) not in kept


def test_the_newest_profiles_are_kept(bench: Bench) -> None:
    names = [bench.saved() for _ in range(KEPT_PROFILES + 2)]
    assert sorted(path.name for path in bench.folder.glob("*.pstats")) == sorted(names[2:])
    assert names[0].startswith("w_0-"), "the worker's id, as far as it is a name of files"


def test_a_profile_stays_though_the_clock_was_set_back(bench: Bench) -> None:
    """It was the oldest of all by its name, and removed as soon as it was told of."""
    older = [bench.saved() for _ in range(KEPT_PROFILES)]
    for number, name in enumerate(older):
        os.rename(bench.folder / name, bench.folder / f"w_0-{10**20 + number}.pstats")
    newest = bench.saved(b"the newest")
    left = {path.name for path in bench.folder.glob("*.pstats")}
    assert len(left) == KEPT_PROFILES
    assert newest in left
    assert f"w_0-{10**20}.pstats" not in left, "the oldest of the others went"
    bench.ask()
    assert [piece.data for piece in bench.pieces()] == [b"the newest"]


# Their files


def test_a_file_comes_in_pieces_and_a_few_of_them_in_a_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "PIECE_BYTES", 4)
    monkeypatch.setattr(operators, "PIECES_PER_CALL", 2)
    bench.saved(b"older")
    name = bench.saved(b"0123456789")
    bench.ask()
    assert [(piece.first_byte, piece.data) for piece in bench.pieces()] == [(0, b"0123"), (4, b"4567")]
    bench.ask(8, name)
    (last,) = bench.pieces()
    assert (last.first_byte, last.data, last.file_name, last.byte_count) == (8, b"89", name, 10)
    bench.ask(10)
    (behind,) = bench.pieces()
    assert behind.data == b""
    bench.ask(11)
    failure = bench.failure()
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert failure.message == "first_byte: 11, the profile has 10 bytes"


def test_a_file_that_is_not_held_is_not_found(bench: Bench) -> None:
    for held, name in ((False, ""), (False, "w_0-1.pstats"), (True, "../w_0-1.pstats"), (True, "x" * 1000)):
        if held:
            bench.saved()
        bench.ask(name=name)
        failure = bench.failure()
        assert (failure.error, failure.reason) == (CallError.NOT_FOUND, CallReason.PROFILE_NOT_FOUND)
        assert len(failure.message) < 200


def test_files_that_are_no_profiles_of_this_worker_are_not_shown(bench: Bench) -> None:
    name = bench.saved()
    stamp = name.removeprefix("w_0-").removesuffix(".pstats")
    for other in (f"w_0-{stamp}9.txt", f"w_01-{stamp}9.pstats", f"w_0-{stamp}9.pstats.tmp"):
        (bench.folder / other).write_bytes(b"other")
    bench.ask()
    assert [(piece.file_name, piece.data) for piece in bench.pieces()] == [(name, b"profile")]


def test_files_of_another_live_worker_of_the_id_are_not_shown(bench: Bench) -> None:
    bench.saved()
    other = OperatorDesk(
        bench.folder, "w 0", uses_torch=False, to_engine=bench.commands.append, answers=bench.answers
    )
    other.take(TICKET, worker_pb2.Command(get_profile={}), 60.0)
    other.close()
    failure = bench.failure()
    assert (failure.reason, failure.message) == (CallReason.PROFILE_NOT_FOUND, "no profile is held")


def test_calls_that_wait_for_the_thread_are_so_many_at_most(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    bench.begin().on_end(Saved(gate=gate), 3, "")
    for number in range(operators.MAX_WAITING):
        bench.ask(ticket=Ticket("service#1", number))
    with pytest.raises(CallRefused) as refused:
        bench.ask()
    assert (refused.value.error, refused.value.reason) == (
        CallError.RESOURCE_EXHAUSTED,
        CallReason.QUOTA_EXCEEDED,
    )
    gate.set()
    assert len(bench.told()) == 1 + operators.MAX_WAITING, "all that were taken are answered"
    bench.ask()
    assert bench.pieces(), "there is room again"


def test_what_breaks_on_the_thread_is_answered_and_the_next_call_is_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.saved()
    with monkeypatch.context() as patch:
        patch.setattr(operators, "PIECE_BYTES", None)
        bench.ask()
        failure = bench.failure()
    assert (failure.error, failure.reason) == (CallError.INTERNAL, CallReason.INTERNAL)
    bench.ask()
    assert bench.pieces()


def test_the_end_of_the_desk_waits_for_the_file_that_is_written_and_for_no_other(
    bench: Bench, wait_until: Callable[..., None]
) -> None:
    """Half of one would be left; what waits behind it is for nobody."""
    writing, gate = threading.Event(), threading.Event()

    class Slow(Saved):
        def save(self, path: Path) -> None:
            writing.set()
            super().save(path)

    bench.begin().on_end(Slow(gate=gate), 3, "")
    assert writing.wait(WAIT_SECONDS)
    bench.begin().on_end(Saved(b"behind it"), 3, "")
    closing = threading.Thread(target=bench.desk.close)
    closing.start()

    def takes_no_more() -> bool:
        try:
            bench.desk._thread.submit(lambda: None)
        except RuntimeError:
            return True
        return False

    wait_until(takes_no_more, "the end of what waits")
    assert closing.is_alive()
    gate.set()
    closing.join(WAIT_SECONDS)
    (path,) = bench.folder.glob("*.pstats")
    assert path.read_bytes() == b"profile"


def test_the_end_of_the_desk_ends_its_thread_and_gives_its_name_back(bench: Bench) -> None:
    bench.saved()
    bench.desk.close()
    bench.desk.close()
    bench.ask()
    bench.begin().on_end(Saved(), 3, "")  # the worker ends: nobody is answered any more
    assert not [one for one in threading.enumerate() if one.name.startswith("kvatlas-profiles")]
    following = OperatorDesk(
        bench.folder,
        "w 0",
        uses_torch=True,
        to_engine=bench.commands.append,
        answers=bench.answers,
    )
    following._files()
    assert following._name.name == "w_0"
    following.close()
