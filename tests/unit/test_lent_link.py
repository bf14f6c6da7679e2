"""The link in the engine's hands: who serves it when, and that nothing is slept through or left behind."""

import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest

from worker.channels import OutputQueue
from worker.first_tokens import are_close
from worker.ids import SequenceId
from worker.lent_link import LentLink
from worker.link.peers import Peer
from worker.link.testing import WAIT_SECONDS
from worker.link.testing_bench import LinkBench, until
from worker.messages import AddRequest, LinkMessage, StepOutputs
from worker.scheduling.request import RequestSpec
from worker.scheduling.step import Step


class Bench(LinkBench):
    """A link whose test is the engine, with the threads that have sent something."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lent = LentLink(self.link, self.commands, self.outputs)
        self.senders: list[int | None] = []
        send = self.link._send_bytes

        def note_and_send(peer: Peer, data: bytes) -> None:
            self.senders.append(threading.get_ident())
            send(peer, data)

        self.link._send_bytes = note_and_send  # type: ignore[method-assign]

    def put_off_beats(self) -> None:
        """Its own thread has no reason to stand in, however busy the machine is, and does not just now."""
        self.link._next_beat = time.monotonic() + 2 * WAIT_SECONDS
        self.link._turns.take_lent(lambda: None)

    def taken(self) -> RequestSpec:
        """The request that a wait has ended with."""
        (command,) = self.commands.drain()
        assert isinstance(command, AddRequest)
        return command.spec


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.lent.give_back()
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvatlas-io"]


def test_who_has_the_link_receives_and_sends_and_its_thread_goes_on_afterwards(bench: Bench) -> None:
    service = bench.service()
    service.hello()
    number = service.add([1, 2, 3])
    until(lambda: bench.lent.wait(0.01) is None and not bench.commands.is_empty)  # hello may come in between
    spec = bench.taken()
    bench.put_off_beats()
    del bench.senders[:]
    bench.accept(spec)
    bench.lent.wake()
    service.wait(lambda: number in service.results)
    assert set(bench.senders) == {threading.get_ident()}
    bench.lent.give_back()
    del bench.senders[:]
    bench.tokens(spec, 5)
    service.wait(lambda: service.answers[number].tokens == [5])
    assert set(bench.senders) == {bench.link.thread.ident}
    second = service.add([4])
    until(lambda: not bench.commands.is_empty)  # read by the link's thread: the test reads nothing
    bench.accept(bench.taken())
    service.wait(lambda: second in service.results)


def test_a_look_between_two_steps_takes_what_has_come_without_waiting(bench: Bench) -> None:
    service = bench.service()
    service.hello()
    assert bench.lent.wait(0.0) is None
    service.add([1, 2, 3])

    def looks_and_finds() -> bool:
        bench.lent.look()
        return not bench.commands.is_empty

    until(looks_and_finds)
    assert list(bench.taken().prompt_token_ids) == [1, 2, 3]


def test_its_own_thread_stands_in_where_the_engine_is_held_up(bench: Bench) -> None:
    """A launch that compiles a kernel takes seconds; without a heartbeat the service gives the worker up."""
    service = bench.service()
    service.hello()
    bench.lent.wait(0.0)
    del bench.senders[:]
    seen = len(service.heartbeats)
    service.wait(lambda: len(service.heartbeats) >= seen + 2)
    number = service.add([1, 2, 3])
    until(lambda: not bench.commands.is_empty)
    bench.accept(bench.taken())
    service.wait(lambda: number in service.results)
    assert set(bench.senders) == {bench.link.thread.ident}
    bench.lent.look()
    assert bench.lent.is_held


@pytest.mark.parametrize("ends", ["a command", "a wake"])
def test_others_end_the_wait_of_who_has_the_link(bench: Bench, ends: str) -> None:
    spec = RequestSpec(SequenceId(1), array("I", [1]), params=None)  # type: ignore[arg-type]
    act = bench.commands.wake if ends == "a wake" else lambda: bench.commands.put(AddRequest(spec))
    bench.lent.wait(0.0)
    began = time.monotonic()
    bench.put_off_beats()  # the next one would end it, too
    timer = threading.Timer(0.01, act)
    timer.start()
    assert bench.lent.wait(WAIT_SECONDS) is None
    assert time.monotonic() - began < WAIT_SECONDS
    timer.join()
    assert len(bench.commands.drain()) == (ends == "a command")


def test_a_flood_does_not_hold_up_its_first_request(bench: Bench) -> None:
    service = bench.service()
    service.hello()
    bench.lent.wait(0.0)  # or its own thread would read them
    bench.put_off_beats()
    numbers = [service.add([1]) for _ in range(40)]
    found = 0
    while found < len(numbers):
        bench.lent.wait(WAIT_SECONDS)
        commands = bench.commands.drain()
        assert len(commands) <= 16
        found += len(commands)


def test_a_link_that_fails_in_other_hands_ends_as_in_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.lent.wait(0.0)
    bench.put_off_beats()
    monkeypatch.setattr(bench.link, "_receive", None)  # not callable
    bench.lent.look()
    assert bench.failures == ["failed"]
    assert "event=link_failed" in caplog.text
    bench.lent.look()
    assert bench.failures == ["failed"], "it is over, not tried again"
    bench.lent.give_back()
    bench.link.thread.join(WAIT_SECONDS)
    assert not bench.link.thread.is_alive()


def test_a_link_that_fails_while_its_thread_stands_in_is_over_for_who_has_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread went on with a socket that was closed already, and told of a second failure."""
    bench.lent.wait(0.0)
    monkeypatch.setattr(bench.link, "_receive", None)  # not callable
    bench.link.thread.join(WAIT_SECONDS)
    assert bench.failures == ["failed"]
    turns: list[float] = []
    monkeypatch.setattr(bench.link, "_turn", lambda *given: turns.append(given[0]))
    bench.lent.look()
    bench.lent.wake()
    assert (bench.failures, turns) == (["failed"], [])


def test_without_a_link_the_engine_sleeps_on_its_commands(bench: Bench) -> None:
    lent = LentLink(None, bench.commands, bench.outputs)
    spec = RequestSpec(SequenceId(1), array("I", [1]), params=None)  # type: ignore[arg-type]
    bench.commands.put(AddRequest(spec))
    assert lent.wait(WAIT_SECONDS) == AddRequest(spec)
    lent.look()
    lent.give_back()
    assert bench.commands.is_empty


class TimedLink:
    """Serves for four tenths of a second, or as long as it may."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.calls: list[str] = []

    def borrow(self) -> None:
        self.calls.append("borrow")

    def give_back(self) -> None:
        self.calls.append("give back")

    def send_outputs(self) -> None:
        self.calls.append("send")

    def serve(self, seconds: float) -> None:
        self.waits.append(round(seconds, 6))
        self.now += min(0.4, seconds)


def test_a_wait_goes_on_to_its_end_however_often_the_link_comes_back(bench: Bench) -> None:
    """Each heartbeat ends a turn of the link."""
    link = TimedLink()
    lent = LentLink(link, bench.commands, bench.outputs, lambda: link.now)
    assert lent.wait(1.0) is None
    assert link.waits == [1.0, 0.6, 0.2]
    assert lent.wait(0.0) is None
    assert link.waits[3:] == [0.0], "it is looked at once"
    bench.commands.wake()
    assert lent.wait(1.0) is None
    assert len(link.waits) == 4, "there is a command to be taken"
    lent.give_back()


def test_the_engine_leaves_a_link_alone_that_it_does_not_have_and_waits_for_nothing_between_steps(
    bench: Bench,
) -> None:
    """Its own thread holds it for as long as it waits: an engine that served it too would stand still."""
    link = TimedLink()
    outputs: OutputQueue[LinkMessage] = OutputQueue(4)
    lent = LentLink(link, bench.commands, outputs, lambda: link.now)
    for _ in range(2):
        del link.calls[:], link.waits[:]
        lent.look()
        lent.wake()
        lent.give_back()
        assert (link.calls, link.waits) == ([], [])
        assert not select([outputs.wakeup], [], [], 0)[0], "nothing was put out"
        outputs.put(StepOutputs({}, 0, 0.0), wakes=False)
        lent.wake()
        assert select([outputs.wakeup], [], [], 0)[0], "its own thread sends it"
        outputs.take(1)
        outputs.wakeup.clear()
        lent.wait(0.0)
        lent.wait(0.0)
        lent.look()
        lent.wake()
        assert link.waits == [0.0, 0.0, 0.0]
        lent.give_back()
        lent.give_back()
        assert link.calls == ["borrow", "send", "give back"]
    outputs.close()


def step(num_prompts: int, num_tokens: int) -> Step:
    """One decode, and prompts that end in it."""
    num_rows = num_prompts + 1
    ends = array("i", [9, *[num_tokens - 1] * num_prompts])
    return Step(
        number=1,
        sequence_ids=tuple(map(SequenceId, range(num_rows))),
        rows=array("i", range(num_rows)),
        starts=array("i", [8, *[0] * num_prompts]),
        ends=ends,
        sampled=tuple(range(num_rows)),
        num_decode=1,
    )


def test_a_first_token_is_close_where_its_step_is_short_and_no_prompt_is_behind_it() -> None:
    prompt, long_prompt, decode = step(1, 1024), step(1, 1025), step(0, 1)
    assert [prompt.num_tokens, long_prompt.num_tokens, decode.num_tokens] == [1024, 1025, 1]
    assert are_close([prompt])
    assert are_close([prompt, decode])
    assert not are_close([prompt, prompt])
    assert not are_close([long_prompt])
    assert not are_close([decode, prompt])
    assert not are_close([])
