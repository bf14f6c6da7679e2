"""What operators' calls are made of: levels for a time, quotas, the wish to drain, the file of pins."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvatlas.log_levels import LogLevels, UnknownLogger
from kvatlas.v1 import server_pb2 as pb
from service import errors
from service.admission import Quota
from service.config import ConfigError
from service.drain import DrainControl
from service.fleet.codec import LOST, SERVING
from service.handlers import pins as pins_module
from service.handlers.pins import PinKeeper, read_pins


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("kvatlas.test.levels")
    logger.setLevel(logging.WARNING)
    yield logger
    logger.setLevel(logging.NOTSET)


def test_a_level_for_a_time_goes_back_to_what_was_before_all_of_them(logger: logging.Logger) -> None:
    clock = Clock()
    levels = LogLevels(clock)
    levels.set(logger.name, logging.DEBUG, 10.0)
    clock.now += 5
    levels.set(logger.name, logging.INFO, 10.0)
    clock.now += 9
    levels.expire()
    assert logger.level == logging.INFO, "the second one counts"
    clock.now += 1
    levels.expire()
    assert logger.level == logging.WARNING, "not what the first one had set"


def test_a_level_without_a_time_stays(logger: logging.Logger) -> None:
    clock = Clock()
    levels = LogLevels(clock)
    levels.set(logger.name, logging.DEBUG, 10.0)
    levels.set(logger.name, logging.ERROR, None)
    clock.now += 1000
    levels.expire()
    assert logger.level == logging.ERROR


def test_a_logger_that_nobody_has_is_not_made() -> None:
    with pytest.raises(UnknownLogger):
        LogLevels().set("kvatlas.no.such.logger", logging.DEBUG, None)
    assert "kvatlas.no.such.logger" not in logging.root.manager.loggerDict


def test_a_quota_counts_what_waits_apart_from_what_is_in_progress() -> None:
    quota = Quota()
    quota.limit(3, 1)
    first = quota.enter()
    assert quota.full() == ("max_queued_requests", 1)
    first.started()
    first.started()
    assert (quota.active, quota.queued, quota.full()) == (1, 0, None)
    second = quota.enter()
    second.started()
    third = quota.enter()
    assert quota.full() == ("max_active_requests", 3)
    third.release()
    third.release()
    assert (quota.active, quota.queued) == (2, 0), "one that never started leaves the queue too"
    text_calls = [quota.enter_text_call() for _ in range(3)]
    assert quota.full_of_text_calls() == ("max_active_requests", 3)
    text_calls[0].release()
    assert quota.full_of_text_calls() is None, "others than generations"
    quota.limit(1, 0)
    assert quota.full_of_text_calls() == ("max_active_requests", 1)
    assert quota.full() == ("max_active_requests", 1), "a new limit is for new ones"
    quota.limit(0, 0)
    assert quota.full() is quota.full_of_text_calls() is None


def test_a_drain_is_an_operators_to_take_back_until_a_signal_or_its_end() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        drain = DrainControl(loop, grace=5.0)
        assert drain.take_back(), "nothing to take back is fine"
        drain.start(grace=60.0)
        assert drain.deadline - loop.time() > 50
        waiting = asyncio.ensure_future(drain.wait_for_change(3600.0))
        await asyncio.sleep(0)
        assert drain.take_back()
        await waiting
        assert not drain.is_wanted
        drain.start()
        drain.begin_end()
        assert not drain.take_back(), "too late"
        other = DrainControl(loop, grace=5.0)
        other.start(grace=60.0)
        other.start_for_good()
        assert not other.take_back()
        assert other.deadline - loop.time() > 50, "a signal does not shorten what an operator has given"

    asyncio.run(scenario())


PIN = '[[pin]]\nname = "a"\ntext = "some text"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "something else than"),
        ("x = 1\n" + PIN, "something else than"),
        ("[[pin]\n", "pins.toml"),
        ("x = " + "[" * 3000, "pins.toml"),
        ("pin = [1]", "pin 1: is no table"),
        (PIN + PIN, "two pins have one name"),
        (PIN + "colour = 1\n", "pin 1"),
        (PIN.replace('"a"', '"two words"'), "name: must be"),
        ('[[pin]]\nname = "a"\n', "prefix: one of"),
        (PIN + "remove = true\n", "has worker_id or remove"),
        (PIN + 'ttl = "0s"\n', "ttl: "),
    ],
)
def test_a_wrong_file_of_pins_is_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_pins(path)


def test_pins_have_the_fields_of_the_call(tmp_path: Path) -> None:
    path = tmp_path / "pins.toml"
    path.write_text(PIN + 'tenant = "t"\nsalt = "s"\nttl = "3600s"\n')
    (pin,) = read_pins(path)
    assert (pin.name, pin.text, pin.tenant, pin.salt, pin.ttl.seconds) == ("a", "some text", "t", "s", 3600)
    path.write_text(
        '[[pin]]\nname = "c"\n[[pin.chat.messages]]\nrole = "CHAT_ROLE_SYSTEM"\ncontent = "Be kind."\n'
    )
    (chat,) = read_pins(path)
    assert chat.chat.messages[0].content == "Be kind."


class PinStage:
    """One worker and who sets its pins; `answers` are given, or raised, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.link = SimpleNamespace(address="ipc://a", facts=SimpleNamespace(epoch=7), is_up=True)
        self.links = [self.link]
        kept = SimpleNamespace(link=self.link, mirror=SimpleNamespace(worker_id="w"))
        mirrors: Any = SimpleNamespace(kept=[kept])
        stage: Any = self
        self.keeper = PinKeeper(stage, stage, mirrors, [pb.SetPinnedPrefixRequest(name="a", text="x")])

    async def set(self, request: pb.SetPinnedPrefixRequest, timeout: float) -> Any:
        """Of Pinner."""
        answer = self.answers.pop(0)
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def known(self) -> list[Any]:
        """Of WorkerPool."""
        return self.links

    def state_of(self, link: Any) -> int:
        """Of WorkerPool."""
        return SERVING if link.is_up else LOST

    async def until_settled(self) -> None:
        self.keeper.look()
        await asyncio.gather(*self.keeper._tasks.values())


DONE = [pb.PinnedPrefix(name="a", worker_id="w")]


def test_a_configured_pin_is_set_again_whatever_went_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only refusals were dealt with: anything else ended the task, and the pin was missing without a word."""
    monkeypatch.setattr(pins_module, "MIN_RETRY_SECONDS", 0.01)
    stage = PinStage(ZeroDivisionError("a bug"), [], DONE)
    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(stage.until_settled(), 100))
    assert not stage.answers
    assert caplog.text.count("event=pin_failed pin=a worker=w") == 2
    assert "event=pinned pin=a worker=w" in caplog.text


def test_a_pin_that_a_lost_link_interrupted_is_set_when_the_same_life_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a new life of the worker began anew: after a partition the pins that were missing stayed so."""
    monkeypatch.setattr(pins_module, "MIN_RETRY_SECONDS", 0.01)

    def lose() -> Exception:
        stage.link.is_up = False
        return errors.not_ready()

    stage = PinStage(lose, DONE)

    async def scenario() -> None:
        await stage.until_settled()
        assert len(stage.answers) == 1, "nobody is there to be asked"
        stage.link.is_up = True
        await stage.until_settled()
        assert not stage.answers
        await stage.until_settled()

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_nothing_is_kept_of_a_worker_whose_address_is_gone() -> None:
    """One task for each address that a name ever had, in a service that follows names for months."""
    stage = PinStage(DONE)

    async def scenario() -> None:
        await stage.until_settled()
        stage.links = []
        stage.keeper.look()
        assert not stage.keeper._tasks

    asyncio.run(scenario())
