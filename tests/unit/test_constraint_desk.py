"""Requests that wait until their constraint is compiled: each is answered once, and ends once."""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvatlas.constraints.compiler import Compiled, Compiler, TokenTable
from kvatlas.constraints.text import ConstraintText
from kvatlas.models.text_vocabulary import toy_vocabulary
from worker.ids import SequenceId
from worker.link.constraint_desk import THREADS, ConstraintDesk
from worker.messages import Abort, AddAnswer, AddRequest
from worker.scheduling.request import AbortReason, AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams

DIGITS = ConstraintText("regex", r"\d+")
Wait = Callable[..., None]


class SlowCompiler(Compiler):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda: TokenTable.of(toy_vocabulary(512), {257}), 512)
        self.gate = threading.Event()
        self.begun: list[ConstraintText] = []

    def compile(self, constraint: ConstraintText) -> Compiled:
        self.begun.append(constraint)
        assert self.gate.wait(60)
        return super().compile(constraint)


class Stand:
    """A desk, and what came out of it."""

    def __init__(self, max_waiting: int = 8) -> None:
        self.compiler = SlowCompiler()
        self.commands: list[AddRequest | Abort] = []
        self.answers: list[AddAnswer] = []
        self.desk = ConstraintDesk(
            self.compiler,
            to_engine=self.commands.append,
            answer=self.answers.append,
            max_waiting=max_waiting,
        )

    def added(self) -> list[int]:
        return [command.spec.sequence_id for command in self.commands if isinstance(command, AddRequest)]


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.compiler.gate.set()
    made.desk.close()


def spec(number: int, source: str = "a", samples: int = 1) -> RequestSpec:
    return RequestSpec(SequenceId(number), [1], SamplingParams(), sample_count=samples, source=source)


def test_a_request_goes_on_with_its_constraint_compiled(stand: Stand, wait_until: Wait) -> None:
    stand.desk.take(spec(1), DIGITS)
    assert stand.desk.is_busy
    assert stand.commands == []
    stand.compiler.gate.set()
    wait_until(lambda: stand.commands, "the request is passed on")
    (command,) = stand.commands
    assert isinstance(command, AddRequest)
    assert command.spec.params.constraint is stand.compiler.known(DIGITS)
    wait_until(lambda: not stand.desk.is_busy, "nothing waits")


def test_a_desk_prepares_when_it_is_told(monkeypatch: pytest.MonkeyPatch, wait_until: Wait) -> None:
    """Beside the start of its worker it would take the interpreter from what the first token waits for."""
    prepared: list[str] = []
    monkeypatch.setattr(
        SlowCompiler, "prepare", lambda self: prepared.append(threading.current_thread().name)
    )
    made = Stand()
    made.desk.take(spec(1), DIGITS)
    made.compiler.gate.set()
    wait_until(lambda: made.commands, "a constraint needs no preparation")
    assert prepared == []
    made.desk.begin_preparing()
    wait_until(lambda: prepared, "it is prepared")
    assert prepared[0].startswith("kvatlas-constraints")
    made.desk.close()


def test_a_known_constraint_takes_no_other_thread(stand: Stand) -> None:
    stand.compiler.gate.set()
    stand.compiler.compile(DIGITS)
    stand.compiler.gate.clear()
    stand.desk.take(spec(1), DIGITS)
    assert stand.added() == [1]
    assert not stand.desk.is_busy, "nor is it compiled again"


def test_an_abort_of_one_that_waits_comes_behind_it(stand: Stand, wait_until: Wait) -> None:
    stand.desk.take(spec(1, samples=3), DIGITS)
    stand.desk.abort([SequenceId(2)], AbortReason.CLIENT)
    stand.desk.abort([SequenceId(77)], AbortReason.CLIENT)
    stand.compiler.gate.set()
    wait_until(lambda: len(stand.commands) == 4, "the request and its abort")
    assert [type(command) for command in stand.commands] == [Abort, Abort, AddRequest, Abort]
    last = stand.commands[-1]
    assert isinstance(last, Abort)
    assert (list(last.sequence_ids), last.reason) == ([2], AbortReason.CLIENT)


def test_aborts_of_one_that_waits_are_kept_once_whatever_a_service_sends(
    stand: Stand, wait_until: Wait
) -> None:
    """Each of them was kept, with all ids in it, as often as it came."""
    stand.desk.take(spec(10, samples=3), DIGITS)
    for _ in range(50):
        stand.desk.abort([SequenceId(number) for number in range(12)], AbortReason.DEADLINE)
    stand.desk.abort([SequenceId(11), SequenceId(12), SequenceId(13)], AbortReason.CLIENT)
    del stand.commands[:]
    stand.compiler.gate.set()
    wait_until(lambda: not stand.desk.is_busy, "nothing waits")
    (added, *aborts) = stand.commands
    assert isinstance(added, AddRequest)
    told = {abort.reason: sorted(abort.sequence_ids) for abort in aborts if isinstance(abort, Abort)}
    assert (len(aborts), told) == (2, {AbortReason.CLIENT: [12], AbortReason.DEADLINE: [10, 11]})


def test_one_request_sent_twice_is_two_that_wait(stand: Stand, wait_until: Wait) -> None:
    for _ in range(2):
        stand.desk.take(spec(1), DIGITS)
    first, second = stand.desk._waiting
    stand.desk._pass_on(second, second.spec)
    (left,) = stand.desk._waiting
    assert left is first, "the one that goes on is the one that leaves"
    stand.compiler.gate.set()
    wait_until(lambda: stand.added() == [1, 1], "the other")


def test_what_waits_of_a_service_that_left_is_forgotten(stand: Stand, wait_until: Wait) -> None:
    stand.desk.take(spec(1, "gone"), DIGITS)
    stand.desk.take(spec(2, "here"), DIGITS)
    stand.desk.drop("gone")
    stand.compiler.gate.set()
    wait_until(lambda: not stand.desk.is_busy, "nothing waits")
    assert (stand.added(), stand.answers) == ([2], [])


def test_what_a_service_that_left_has_not_begun_is_not_compiled(wait_until: Wait) -> None:
    """A hundred large schemas of a service that was gone were compiled, with others behind them."""
    stand = Stand(max_waiting=4)
    for number in range(4):
        stand.desk.take(spec(number, "gone"), ConstraintText("regex", "a" * (number + 1)))
    wait_until(lambda: len(stand.compiler.begun) == THREADS, "both threads are at it")
    stand.desk.drop("gone")
    assert not stand.desk.is_busy
    stand.desk.take(spec(9, "here"), DIGITS)
    stand.compiler.gate.set()
    wait_until(lambda: stand.added() == [9], "the other service's")
    assert len(stand.compiler.begun) == THREADS + 1
    assert stand.answers == []
    stand.desk.close()


def test_a_constraint_that_does_not_compile_is_answered(stand: Stand, wait_until: Wait) -> None:
    stand.compiler.gate.set()
    stand.desk.take(spec(1), ConstraintText("regex", "("))
    wait_until(lambda: stand.answers, "the answer")
    (answer,) = stand.answers
    assert (answer.sequence_id, answer.outcome.status) == (1, AddStatus.INVALID)
    assert "unclosed group" in answer.outcome.message
    assert stand.commands == []
    assert not stand.desk.is_busy


def test_a_compiler_that_breaks_costs_one_request(stand: Stand, wait_until: Wait) -> None:
    def broken(constraint: ConstraintText) -> Compiled:
        raise KeyError("bug")

    working, stand.compiler.compile = stand.compiler.compile, broken  # type: ignore[method-assign]
    stand.desk.take(spec(1), DIGITS)
    wait_until(lambda: stand.answers, "the answer")
    assert stand.answers[0].outcome.message == "internal error"
    stand.compiler.compile = working  # type: ignore[method-assign]
    stand.compiler.gate.set()
    stand.desk.take(spec(2), DIGITS)
    wait_until(lambda: stand.added() == [2], "the next request")


def test_who_waits_when_the_worker_ends_is_answered_once(wait_until: Wait) -> None:
    stand = Stand()
    for number in range(3):
        stand.desk.take(spec(number, samples=2), ConstraintText("regex", "a" * (number + 1)))
    stand.desk.refuse_waiting()
    stand.desk.refuse_waiting()
    assert [(answer.sequence_id, answer.sample_count) for answer in stand.answers] == [(0, 2), (1, 2), (2, 2)]
    assert {answer.outcome.status for answer in stand.answers} == {AddStatus.DRAINING}
    assert not stand.desk.is_busy
    stand.compiler.gate.set()
    stand.desk.close()
    stand.desk._threads.join(60)
    assert (stand.commands, len(stand.answers)) == ([], 3)


def test_a_desk_that_is_closed_answers_and_keeps_nothing(stand: Stand) -> None:
    stand.desk.close()
    stand.desk.take(spec(1), DIGITS)
    assert [answer.outcome.status for answer in stand.answers] == [AddStatus.QUEUE_FULL]
    assert not stand.desk.is_busy


def test_more_than_may_wait_are_told_to_come_back(wait_until: Wait) -> None:
    stand = Stand(max_waiting=2)
    for number in range(4):
        stand.desk.take(spec(number), ConstraintText("regex", "a" * (number + 1)))
    assert [answer.outcome.status for answer in stand.answers] == [AddStatus.QUEUE_FULL] * 2
    stand.compiler.gate.set()
    wait_until(lambda: stand.added() == [0, 1] or stand.added() == [1, 0], "those that waited")
    stand.desk.close()
