"""Pins that the engine computes, refuses, computes again and lets expire."""

from array import array
from collections.abc import Callable

from tests.engine_bench import CONTEXT, Slow, bench, prompt_of
from worker.messages import (
    CallError,
    CallFailure,
    CallReason,
    Flush,
    FlushAnswer,
    ListPins,
    Pin,
    PinAnswer,
    Ticket,
)
from worker.scheduling.step import Step


def test_what_ends_by_the_clock_ends_on_an_idle_engine() -> None:
    with bench() as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", prompt_of(3)), b"", 0.05))
        b.wait(lambda: bool(b.others))
        pinned = b.others.pop()
        assert isinstance(pinned, PinAnswer)
        assert (pinned.pins[0].pinned_tokens, pinned.pins[0].computed_tokens) == (12, 12)
        b.wait(lambda: not b.scheduler.list_pins())
        b.commands.put(ListPins(Ticket("s", 2)))
        b.wait(lambda: bool(b.others))
        assert b.others.pop() == PinAnswer(Ticket("s", 2), (), is_list=True)


def test_a_pin_too_large_is_refused_with_its_numbers() -> None:
    with bench(pages=16) as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", range(80)), b"", 0.0))
        b.wait(lambda: bool(b.others))
        failure = b.others.pop()
    assert "20 pages needed" in failure.message  # type: ignore[union-attr]


def test_what_a_pin_found_is_told_though_first_tokens_of_its_step_leave_early() -> None:
    late: list[Callable[[], None]] = []

    def come(stage: str, step: Step) -> None:
        while late:
            late.pop()()

    with bench(fault=come) as b:
        b.add(1, prompt_of(3))
        b.finish(1)
        pin = Pin(Ticket("s", 1), "p", array("I", [*prompt_of(3), 5, 5, 5, 5]), b"", 0.0)
        late += [lambda: b.add(3, [4, 4, 4]), lambda: b.commands.put(pin)]  # into one step
        b.add(2, prompt_of(1))
        b.wait(lambda: bool(b.others))
        answer = b.others.pop()
        assert isinstance(answer, PinAnswer)
        assert (answer.pins[0].pinned_tokens, answer.pins[0].computed_tokens) == (16, 4)
        b.finish(2, 3)


def test_a_pin_whose_pages_a_flush_took_is_computed_again() -> None:
    slow = Slow()
    with bench(fault=slow) as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", prompt_of(30)), b"", 0.0))
        b.wait(lambda: b.scheduler.cache.pool.num_active > 4)
        b.commands.put(Flush(Ticket("s", 2), "", None, include_active=True, include_pinned=False))
        b.wait(lambda: bool(b.others))
        slow.let_go()
        b.wait(lambda: len(b.others) == 2)
        flushed, pinned = b.others
        assert isinstance(flushed, FlushAnswer)
        assert flushed.unindexed_pages > 0
        assert isinstance(pinned, PinAnswer)
        assert pinned.pins[0].pinned_tokens == 36


def test_a_pin_longer_than_the_context_is_refused_as_the_callers_fault() -> None:
    with bench(pages=256) as b:
        b.commands.put(Pin(Ticket("s", 1), "p", array("I", [5] * CONTEXT), b"", 0.0))
        b.wait(lambda: bool(b.others))
        failure = b.others.pop()
    assert isinstance(failure, CallFailure)
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert failure.message.startswith("prefix: ")
    assert str(CONTEXT) in failure.message
