"""What the engine does with orders of operators, without its loop: which pages a flush means, and checks."""

from array import array
from collections.abc import Iterator, Sequence

import pytest

from worker.channels import OutputQueue
from worker.description import PoolDescription
from worker.execution.fake_runner import FakeModel, FakeRunner
from worker.execution.testing import small_config
from worker.ids import SequenceId
from worker.live_audit import LiveAudit
from worker.messages import (
    AddAnswer,
    AddRequest,
    CallError,
    CallFailure,
    CallReason,
    CheckAnswer,
    CheckIntegrity,
    EndProfile,
    EngineCommand,
    Flush,
    FlushAnswer,
    LinkMessage,
    ListPins,
    Pin,
    Profile,
    ReadRows,
    Recorded,
    RowsAnswer,
    Ticket,
)
from worker.obey import Obedience
from worker.pinning import PIN_SOURCE
from worker.scheduling.output import OutputColumns
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler

KEYS = (b"alice\0x", b"alice\0", b"bob\0x", b"\0x", b"alicex\0")  # a tenant, a zero byte, a salt
TICKET = Ticket("s", 1)


class Desk:
    """One page is cached under each of KEYS."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(small_config())
        runner = FakeRunner(num_pages=16, page_size=4, max_running=8, row_width=64, model=FakeModel(50))
        self.audit = LiveAudit(self.scheduler, runner, interval_seconds=3600.0, clock=lambda: 0.0)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(100)
        pool = PoolDescription(16, 4, 8, 64, "lru")
        self.obedience = Obedience(self.scheduler, runner, self.outputs, pool, self.audit, clock=lambda: 0.0)
        for salt in KEYS:
            pages = self.scheduler.cache.allocate(array("H", (1,)))
            assert pages is not None
            self.scheduler.cache.seal(pages[0], None, salt, bytes(16), 1)
            self.scheduler.cache.release(pages, 1)

    def left(self) -> list[bytes]:
        index = self.scheduler.cache.index
        return sorted(index.salt(page) for page in index.pages())

    def answers(self) -> Sequence[LinkMessage]:
        return self.outputs.take(100)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.outputs.close()


@pytest.mark.parametrize(
    ("tenant", "salt", "taken"),
    [
        ("", None, KEYS),
        ("alice", None, (b"alice\0x", b"alice\0")),
        ("alice", b"x", (b"alice\0x",)),
        ("alice", b"", (b"alice\0",)),
        ("", b"x", (b"alice\0x", b"bob\0x", b"\0x")),
        ("", b"", (b"alice\0", b"alicex\0")),
        ("carol", None, ()),
        ("bob", b"", ()),
    ],
)
def test_a_flush_takes_the_pages_of_its_tenant_and_salt(
    desk: Desk, tenant: str, salt: bytes | None, taken: Sequence[bytes]
) -> None:
    """Without a tenant those of all, without a salt those with any; the empty salt is one, too."""
    desk.obedience.obey(Flush(TICKET, tenant, salt, False, False), 0.0)
    assert list(desk.answers()) == [FlushAnswer(TICKET, len(taken), 0)]
    assert desk.left() == sorted(set(KEYS) - set(taken))


@pytest.mark.parametrize(
    ("command", "target", "name"),
    [
        (Flush(TICKET, "", None, False, False), "scheduler", "flush"),
        (Pin(TICKET, "p", (1, 2, 3, 4), b"", 0.0), "scheduler", "pin"),
        (ListPins(TICKET), "scheduler", "list_pins"),
        (CheckIntegrity(TICKET), "audit", "sweep"),
    ],
)
def test_a_call_that_breaks_is_answered_and_ends_no_engine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, command: EngineCommand, target: str, name: str
) -> None:
    """Only a flush did: a bug of pins ended every sequence of the worker."""

    def broken(*_: object) -> None:
        raise KeyError("which nobody may read")

    monkeypatch.setattr(getattr(desk, target), name, broken)
    desk.obedience.obey(command, 0.0)
    assert list(desk.answers()) == [CallFailure(TICKET, CallError.INTERNAL, CallReason.INTERNAL, "KeyError")]
    desk.obedience.close()
    assert not desk.answers(), "it is answered"


def test_a_pin_that_breaks_once_it_is_computed_ends_no_engine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.obedience.obey(Pin(TICKET, "p", (1, 2, 3, 4), b"", 0.0), 0.0)
    assert desk.scheduler.num_live == 1, "it is computed first"
    columns = OutputColumns()
    columns.ends.append(None)  # type: ignore[arg-type]
    by_source = {PIN_SOURCE: columns}
    desk.obedience.take_own(by_source, 0.0)
    assert by_source == {}, "nobody's request is told to a service"
    assert "event=command_failed" in caplog.text


def test_one_check_of_everything_at_a_time_and_each_call_has_one_answer(desk: Desk) -> None:
    first, second, third = (Ticket("s", number) for number in (1, 2, 3))
    desk.obedience.obey(CheckIntegrity(first), 0.0)
    desk.obedience.obey(CheckIntegrity(second), 0.0)
    (refusal,) = desk.answers()
    assert isinstance(refusal, CallFailure)
    assert (refusal.ticket, refusal.error, refusal.reason) == (
        second,
        CallError.RESOURCE_EXHAUSTED,
        CallReason.QUOTA_EXCEEDED,
    )
    desk.audit.look(0.0)
    (answer,) = desk.answers()
    assert isinstance(answer, CheckAnswer)
    assert (answer.ticket, answer.report.num_pages, answer.report.num_findings) == (first, 16, 0)
    desk.obedience.close()
    assert not desk.answers(), "it is answered"
    desk.obedience.obey(CheckIntegrity(third), 0.0)
    desk.obedience.close()
    (told,) = desk.answers()
    assert isinstance(told, CallFailure)
    assert (told.ticket, told.error) == (third, CallError.UNAVAILABLE)


def test_what_takes_several_turns_goes_on_in_each(desk: Desk) -> None:
    ends: list[int] = []
    profile = Profile(
        Ticket("s", 2), 9, 100.0, False, lambda recorded, num_steps, why: ends.append(num_steps)
    )
    assert desk.obedience.next_time is None
    desk.obedience.obey(profile, 0.0)
    desk.obedience.obey(ReadRows(TICKET, (1, 2), False), 0.0)
    assert desk.obedience.next_time == 0.0, "the first that is due"
    desk.obedience.take_own({}, 99.0)
    (rows,) = desk.answers()
    assert isinstance(rows, RowsAnswer)
    assert [row.row for row in rows.rows] == [1, 2]
    assert (desk.obedience.next_time, ends) == (100.0, [])
    desk.obedience.take_own({}, 100.0)
    assert (desk.obedience.next_time, ends) == (None, [0])


def test_a_profile_that_nobody_waits_for_ends_and_a_turn_without_anything_says_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[int] = []
    mine, other = Ticket("s", 2), Ticket("s", 3)
    desk.obedience.obey(
        Profile(mine, 9, 100.0, False, lambda recorded, num_steps, why: ends.append(num_steps)), 0.0
    )
    desk.obedience.obey(EndProfile(other), 0.0)
    assert not ends
    desk.obedience.obey(EndProfile(mine), 0.0)
    assert (ends, desk.obedience.next_time) == ([0], None)
    desk.obedience.take_own({"a service": OutputColumns()}, 0.0)
    assert "command_failed" not in caplog.text


def test_rows_that_are_waited_for_when_the_worker_ends_are_answered(desk: Desk) -> None:
    desk.obedience.obey(ReadRows(TICKET, (1,), False), 0.0)
    desk.obedience.close()
    text = "the worker ends"
    assert list(desk.answers()) == [CallFailure(TICKET, CallError.UNAVAILABLE, CallReason.DRAINING, text)]


def test_ids_of_sequences_that_live_are_not_given_again(desk: Desk) -> None:
    """Nor the id of a later sample. It is no bug of ours that the log would tell of."""

    def add(sequence_id: int, samples: int) -> tuple[AddStatus, str]:
        spec = RequestSpec(SequenceId(sequence_id), array("I", [1, 2]), SamplingParams(), samples, source="s")
        desk.obedience.obey(AddRequest(spec), 0.0)
        (answer,) = desk.answers()
        assert isinstance(answer, AddAnswer)
        return answer.outcome.status, answer.outcome.message

    accepted, refused = (AddStatus.ACCEPTED, ""), (AddStatus.INVALID, "sequence_id is in use")
    assert add(10, 3) == accepted
    for sequence_id, samples in ((10, 1), (12, 1), (8, 3), (9, 2)):
        assert add(sequence_id, samples) == refused
    assert add(13, 2) == accepted
    assert add(8, 2) == accepted


def test_rows_that_break_are_answered_and_end_no_engine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(desk.scheduler, "row_views", None)  # not callable
    desk.obedience.obey(ReadRows(TICKET, (1,), False), 0.0)
    desk.obedience.take_own({}, 0.0)
    assert list(desk.answers()) == [CallFailure(TICKET, CallError.INTERNAL, CallReason.INTERNAL, "TypeError")]
    assert "event=command_failed" in caplog.text


def test_a_profile_that_runs_when_the_worker_ends_is_answered(desk: Desk) -> None:
    """Nobody answered it: its caller waited until the connection was gone."""
    ends: list[Recorded | None] = []
    profile = Profile(TICKET, 3, 100.0, False, lambda recorded, num_steps, why: ends.append(recorded))
    desk.obedience.obey(profile, 0.0)
    assert desk.obedience.next_time == 100.0
    desk.obedience.close()
    desk.obedience.close()
    text = "the worker ends"
    assert list(desk.answers()) == [CallFailure(TICKET, CallError.UNAVAILABLE, CallReason.DRAINING, text)]
    desk.obedience.take_own({}, 200.0)
    assert (ends, desk.obedience.next_time) == ([], None), "it is answered"
