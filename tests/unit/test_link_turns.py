"""Whose turn it is to serve the link: one at a time, and none is left out for good."""

import threading
from collections.abc import Callable

import pytest

from worker.link import turns as turns_module
from worker.link.turns import Turns

LIMIT_SECONDS = 10.0  # only ends a turn of a test that fails


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "STAND_IN_SECONDS", 0.0)


def nothing() -> None:
    """Nobody sleeps."""


class Log:
    """Who served."""

    def __init__(self) -> None:
        self.served: list[str] = []

    def by(self, name: str) -> Callable[[], None]:
        return lambda: self.served.append(name)


def test_its_own_thread_serves_unless_the_link_is_lent() -> None:
    turns, log = Turns(nothing), Log()
    turns.take(log.by("own"), log.by("stand-in"))
    turns.borrow()
    turns.take(log.by("own"), log.by("stand-in"))
    turns.take_lent(log.by("lent"))
    turns.give_back()
    turns.take(log.by("own"), log.by("stand-in"))
    assert log.served == ["own", "stand-in", "lent", "own"]


def test_nobody_stands_in_while_who_has_borrowed_it_serves() -> None:
    turns, log = Turns(nothing), Log()
    serving, gate = threading.Event(), threading.Event()

    def serve() -> None:
        serving.set()
        gate.wait(LIMIT_SECONDS)

    turns.borrow()
    engine = threading.Thread(target=turns.take_lent, args=(serve,))
    engine.start()
    assert serving.wait(LIMIT_SECONDS)
    turns.take(log.by("own"), log.by("stand-in"))
    assert log.served == []
    gate.set()
    engine.join(LIMIT_SECONDS)
    turns.take(log.by("own"), log.by("stand-in"))
    assert log.served == ["stand-in"], "whose turn is over is asked again"


def test_who_borrows_it_ends_the_sleep_of_its_own_thread_and_waits_for_the_end_of_its_turn() -> None:
    asleep, woken = threading.Event(), threading.Event()
    turns, log = Turns(woken.set), Log()

    def sleep() -> None:
        asleep.set()
        assert woken.wait(LIMIT_SECONDS), "nobody woke it"
        assert not turns._is_own.is_set(), "woken before, it would sleep again"
        log.by("own")()

    own = threading.Thread(target=turns.take, args=(sleep, nothing))
    own.start()
    assert asleep.wait(LIMIT_SECONDS)
    turns.borrow()
    assert log.served == ["own"]
    own.join(LIMIT_SECONDS)
    turns.take(log.by("own again"), log.by("stand-in"))
    assert log.served == ["own", "stand-in"]


def test_its_own_thread_serves_only_if_it_was_not_lent_since_it_looked() -> None:
    turns, log = Turns(nothing), Log()

    class Lock:
        """Lends the link between the look and the turn."""

        def __enter__(self) -> None:
            turns._is_own.clear()

        def __exit__(self, *error: object) -> None:
            """Nothing to do."""

    turns._lock = Lock()  # type: ignore[assignment]
    turns.take(log.by("own"), log.by("stand-in"))
    assert log.served == []


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_turn_that_fails_is_over(is_lent: bool) -> None:
    turns, log = Turns(nothing), Log()

    def fails() -> None:
        raise KeyError("a bug")

    if is_lent:
        turns.borrow()
        with pytest.raises(KeyError):
            turns.take(nothing, fails)
    else:
        with pytest.raises(KeyError):
            turns.take(fails, nothing)
    with pytest.raises(KeyError):
        turns.take_lent(fails)
    turns.take(log.by("own"), log.by("stand-in"))
    assert len(log.served) == 1
