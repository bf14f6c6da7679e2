"""Calls of services at the desk: each has one end, in time, and takes its place with it."""

from typing import Any

import pytest

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.link import commands
from worker.link.commands import CallRefused, CommandDesk, Desks
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    CheckIntegrity,
    EngineCommand,
    Flush,
    IntegrityCall,
    ListPins,
    ObserverCall,
    Pin,
    ReadRows,
    Ticket,
)


class Other:
    """A desk for one kind of call."""

    def __init__(self, kind: str) -> None:
        self.kinds = frozenset((kind,))
        self.taken: list[tuple[Ticket, str, float]] = []
        self.cancelled: list[Ticket] = []
        self.ticks = 0
        self.refuses = False

    def take(self, ticket: Ticket, command: worker_pb2.Command, seconds: float) -> None:
        if self.refuses:
            raise CallRefused(CallError.NOT_FOUND, CallReason.RECORDING_NOT_FOUND, "nothing")
        self.taken.append((ticket, command.WhichOneof("command") or "", seconds))

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def tick(self) -> None:
        self.ticks += 1


class Bench:
    """A desk, its clock and those behind it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.engine: list[EngineCommand] = []
        self.observer: list[ObserverCall] = []
        self.recordings, self.operators = Other("list_recordings"), Other("log_level")
        self.desk = CommandDesk(
            self.engine.append,
            lambda call: self.observer.append(call) is None,
            Desks(self.recordings, self.operators),
            vocab_size=10,
        )

    def ask(
        self, number: int, kind: str = "list_pins", *, source: str = "a#1", timeout_ms: int = 0, **fields: Any
    ) -> CallFailure | None:
        command = worker_pb2.Command(command_id=number, timeout_ms=timeout_ms)
        getattr(command, kind).SetInParent()
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(getattr(command, kind), name).extend(value)
            else:
                setattr(getattr(command, kind), name, value)
        return self.desk.take(source, command, now=self.now, is_ready=True)

    def is_open(self, number: int, source: str = "a#1") -> bool:
        return self.desk.claim(Ticket(source, number), is_last=False)

    def late(self) -> list[int]:
        return [failure.ticket.command_id for failure in self.desk.expired(self.now)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("timeout_ms", "seconds"),
    [(0, commands.DEFAULT_TIMEOUT_SECONDS), (250, 0.25), (2**32 - 1, commands.MAX_TIMEOUT_SECONDS)],
)
def test_a_call_has_its_time_within_bounds(bench: Bench, timeout_ms: int, seconds: float) -> None:
    assert bench.ask(1, "list_recordings", timeout_ms=timeout_ms) is None
    assert bench.recordings.taken == [(Ticket("a#1", 1), "list_recordings", seconds)]
    bench.now += seconds - 0.001
    assert bench.late() == []
    bench.now += 0.001
    (failure,) = bench.desk.expired(bench.now)
    assert (failure.ticket, failure.error, failure.reason) == (
        Ticket("a#1", 1),
        CallError.DEADLINE_EXCEEDED,
        CallReason.DEADLINE_PASSED,
    )
    assert not bench.is_open(1)
    assert bench.late() == [], "once"


def test_other_desks_get_their_own_calls_and_hear_of_every_end(bench: Bench) -> None:
    bench.ask(1, "list_recordings")
    bench.ask(2, "log_level")
    bench.ask(3, "list_pins")
    assert [kind for _, kind, _ in bench.recordings.taken] == ["list_recordings"]
    assert [kind for _, kind, _ in bench.operators.taken] == ["log_level"]
    assert bench.engine == [ListPins(Ticket("a#1", 3))]
    assert bench.desk.claim(Ticket("a#1", 1), is_last=True)
    bench.ask(9, "cancel", command_id=2)
    bench.now += 1e3
    assert bench.late() == [3]
    ended = [Ticket("a#1", number) for number in (1, 2, 3)]
    assert (bench.recordings.cancelled, bench.operators.cancelled) == (ended, ended)
    assert (bench.recordings.ticks, bench.operators.ticks) == (1, 1)


def test_a_call_that_a_desk_refuses_is_answered_and_not_open(bench: Bench) -> None:
    bench.recordings.refuses = True
    failure = bench.ask(1, "list_recordings")
    assert failure == CallFailure(
        Ticket("a#1", 1), CallError.NOT_FOUND, CallReason.RECORDING_NOT_FOUND, "nothing"
    )
    assert not bench.is_open(1)
    assert bench.recordings.cancelled == []


def test_the_last_answer_ends_a_call_and_others_do_not(bench: Bench) -> None:
    bench.ask(1)
    assert bench.is_open(1)
    assert not bench.is_open(1, "b#2"), "another service's"
    assert bench.desk.claim(Ticket("a#1", 1), is_last=True)
    assert not bench.desk.claim(Ticket("a#1", 1), is_last=True)
    assert bench.ask(1) is None, "its number is free again"


def test_a_number_in_use_is_refused_and_the_call_that_has_it_goes_on(bench: Bench) -> None:
    bench.ask(1)
    failure = bench.ask(1)
    assert failure is not None
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert bench.is_open(1)
    assert bench.ask(1, source="b#2") is None, "each service counts for itself"
    assert len(bench.engine) == 2


def test_calls_of_a_service_are_so_many_at_most_and_each_end_makes_room(bench: Bench) -> None:
    for number in range(commands.MAX_OPEN_CALLS):
        assert bench.ask(number) is None
    for _ in range(2):
        failure = bench.ask(1000)
        assert failure is not None
        assert (failure.error, failure.reason) == (CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED)
    assert bench.ask(1, source="b#2") is None
    bench.desk.claim(Ticket("a#1", 0), is_last=True)
    assert bench.ask(1000) is None
    assert bench.ask(1001) is not None


def test_calls_of_a_service_that_is_gone_are_forgotten_and_no_others(bench: Bench) -> None:
    for source in ("a#1", "b#2"):
        for number in range(3):
            bench.ask(number, source=source)
    bench.desk.close("a#1")
    assert not any(bench.is_open(number) for number in range(3))
    assert all(bench.is_open(number, "b#2") for number in range(3))
    assert bench.recordings.cancelled == [Ticket("a#1", number) for number in range(3)]
    assert bench.desk._open_by_source == {"b#2": 3}, "nothing is kept of who is gone"
    bench.desk.close("a#1")


def test_a_cancel_of_what_is_not_open_changes_nothing(bench: Bench) -> None:
    bench.ask(1)
    assert bench.ask(2, "cancel", command_id=7) is None
    assert bench.ask(2, "cancel", command_id=1, source="b#2") is None
    assert bench.is_open(1)
    assert not bench.is_open(2), "a cancel has no answer"
    assert bench.desk._open_by_source == {"a#1": 1}


def test_nothing_is_asked_of_a_worker_that_loads(bench: Bench) -> None:
    command = worker_pb2.Command(command_id=1, list_recordings=server_pb2.ListRecordingsRequest())
    failure = bench.desk.take("a#1", command, now=bench.now, is_ready=False)
    assert failure is not None
    assert (failure.error, failure.reason) == (CallError.UNAVAILABLE, CallReason.NOT_READY)
    assert not bench.recordings.taken
    assert not bench.is_open(1)


def test_reads_of_the_device_and_checks_are_a_second_apart_for_all_services_together(bench: Bench) -> None:
    for kind, fields in (("page_table", {"from_device": True}), ("check_integrity", {})):
        assert bench.ask(1, kind, **fields) is None
        bench.now += 0.999
        failure = bench.ask(2, kind, source="b#2", **fields)
        assert failure is not None
        assert (failure.error, failure.reason) == (CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED)
        bench.now += 0.001
        assert bench.ask(3, kind, source="b#2", **fields) is None, "a refused one does not put it off"
        bench.desk.close("a#1")
        bench.desk.close("b#2")
    assert bench.ask(1, "page_table", rows=[1, 2]) is None, "reads of the books are not limited"
    assert bench.engine == [
        ReadRows(Ticket("a#1", 1), (), True),
        ReadRows(Ticket("b#2", 3), (), True),
        CheckIntegrity(Ticket("a#1", 1)),
        CheckIntegrity(Ticket("b#2", 3)),
        ReadRows(Ticket("a#1", 1), (1, 2), False),
    ]


def test_as_many_rows_as_may_be_are_read_and_not_one_more(bench: Bench) -> None:
    assert bench.ask(1, "page_table", rows=list(range(commands.MAX_ROWS))) is None
    failure = bench.ask(2, "page_table", rows=list(range(commands.MAX_ROWS + 1)), from_device=True)
    assert failure is not None
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert bench.ask(2, "page_table", from_device=True) is None, "what was refused took nobody's second"


def test_what_the_observer_answers_is_passed_to_it(bench: Bench) -> None:
    assert bench.ask(1, "integrity") is None
    assert bench.ask(2, "replay", after_number=7, include_token_ids=True) is None
    assert bench.observer[0] == IntegrityCall(Ticket("a#1", 1))
    assert (bench.observer[1].ticket, bench.observer[1].after_number) == (Ticket("a#1", 2), 7)  # type: ignore[union-attr]
    assert bench.observer[1].include_token_ids  # type: ignore[union-attr]


def test_a_page_map_that_takes_no_more_calls_is_told_of(bench: Bench) -> None:
    desk = CommandDesk(bench.engine.append, lambda call: False, vocab_size=10)
    for kind in ("snapshot", "replay", "integrity"):
        command = worker_pb2.Command(command_id=1)
        getattr(command, kind).SetInParent()
        failure = desk.take("a#1", command, now=0.0, is_ready=True)
        assert failure is not None
        assert (failure.error, failure.reason) == (CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED)
    assert desk.expired(1e9) == [], "none of them is open"


@pytest.mark.parametrize(("fields", "salt"), [({}, None), ({"salt": ""}, b""), ({"salt": "ä"}, "ä".encode())])
def test_a_flush_tells_no_salt_from_an_empty_one(
    bench: Bench, fields: dict[str, str], salt: bytes | None
) -> None:
    """No salt: those of all requests."""
    assert bench.ask(1, "flush", tenant="t", include_pinned=True, **fields) is None
    assert bench.engine == [Flush(Ticket("a#1", 1), "t", salt, False, True)]


def test_a_pin_comes_with_its_time_and_without_ids_it_is_let_go(bench: Bench) -> None:
    assert bench.ask(1, "pin", name="p", ttl_ms=1500) is None
    (pin,) = bench.engine
    assert isinstance(pin, Pin)
    assert (pin.ticket, pin.name, list(pin.token_ids), pin.ttl_seconds) == (Ticket("a#1", 1), "p", [], 1.5)


def test_a_desk_without_others_says_what_it_has_not(bench: Bench) -> None:
    alone = CommandDesk(bench.engine.append, lambda call: True, vocab_size=10)
    command = worker_pb2.Command(command_id=1, estimate=cache_pb2.EstimateCacheRequest())
    failure = alone.take("a#1", command, now=0.0, is_ready=True)
    assert failure is not None
    assert (failure.error, failure.reason) == (CallError.UNIMPLEMENTED, CallReason.FEATURE_DISABLED)
    assert failure.message == "estimate is not a feature of this worker"
    empty = alone.take("a#1", worker_pb2.Command(command_id=1), now=0.0, is_ready=True)
    assert empty is not None
    assert (empty.error, empty.message) == (CallError.INVALID_ARGUMENT, "command: none is set")
    alone.close("a#1")
    assert alone.expired(0.0) == []
