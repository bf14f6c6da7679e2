"""The worker's ROUTER for services of other hosts, which is libzmq's, with DEALERs at the other end."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.router_bench import WAIT_SECONDS, Context, RouterBench
from worker.channels import Wakeup
from worker.link import router as router_module
from worker.link.addresses import last_endpoint
from worker.link.router import UnixRouter, ZmqRouter, open_router


class Bench(RouterBench):
    """At a free port."""

    def __init__(self) -> None:
        wakeup, context = Wakeup(), Context()
        super().__init__(open_router(context, "tcp://127.0.0.1:0", wakeup.fileno(), None), wakeup, context)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not is_so():
            assert time.monotonic() < end
            self.router.wait(0.01, reads=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_an_address_says_which_router_there_is(bench: Bench, tmp_path: Path) -> None:
    assert isinstance(bench.router, ZmqRouter)
    assert bench.router.address.startswith("tcp://127.0.0.1:")
    assert int(bench.router.address.rpartition(":")[2]) > 0, "the port that it got"
    local = open_router(bench.context, f"ipc://{tmp_path}/engine", bench.wakeup.fileno(), None)
    assert isinstance(local, UnixRouter)
    local.close()


def test_its_socket_is_guarded_before_it_is_bound(bench: Bench) -> None:
    guarded: list[str] = []

    class Guard:
        """A doorkeeper's place."""

        def guard(self, socket: "zmq.Socket[bytes]") -> None:
            guarded.append(last_endpoint(socket))

    made = open_router(bench.context, "tcp://127.0.0.1:0", bench.wakeup.fileno(), Guard())  # type: ignore[arg-type]
    assert guarded == [""]
    assert made.address != ""
    made.close()


def test_messages_go_both_ways_each_to_its_own(bench: Bench) -> None:
    dealers = {name: bench.dealer(name) for name in (b"a", b"b")}
    for name, dealer in dealers.items():
        dealer.send(name * 3)
    assert dict(bench.receive() for _ in dealers) == {b"a": b"aaa", b"b": b"bbb"}
    for name in dealers:
        bench.router.send(name, name * 2)
    assert [dealers[name].recv() for name in dealers] == [b"aa", b"bb"]
    assert bench.router.receive() is None


def test_messages_of_several_frames_are_passed_over(bench: Bench) -> None:
    dealer = bench.dealer(b"a")
    dealer.send_multipart([b"x", b"y"])
    dealer.send(b"z")
    assert bench.receive() == (b"a", b"z")


def test_a_flood_of_what_is_passed_over_ends_a_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sent nothing else kept the worker's thread for itself: no heartbeat reached anybody."""

    class Flood:
        num_read = 0

        def recv_multipart(self, flags: int) -> list[bytes]:
            self.num_read += 1
            assert self.num_read < 1000, "read for ever"
            return [b"a", b"x", b"y"]

    with monkeypatch.context() as patch:
        patch.setattr(bench.router, "_socket", Flood())
        assert bench.router.receive() is None


def test_who_is_not_there_or_has_left_is_unreachable(bench: Bench) -> None:
    assert bench.refuses(b"a", bytes(1 << 20)).startswith("unreachable")
    dealer = bench.dealer(b"a")
    dealer.send(b"here")
    assert bench.receive() == (b"a", b"here")
    assert bench.refuses(b"a", bytes(1 << 20)) == ""
    dealer.close()
    bench.until(lambda: bench.refuses(b"a", bytes(1 << 20)).startswith("unreachable"))


def test_who_comes_again_takes_its_name_over(bench: Bench) -> None:
    bench.dealer(b"a").send(b"first")
    assert bench.receive() == (b"a", b"first")
    newer = bench.dealer(b"a")
    newer.send(b"second")
    assert bench.receive() == (b"a", b"second")
    bench.router.send(b"a", b"to the newer")
    assert newer.recv() == b"to the newer"


def test_a_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "HIGH_WATER_MARK", 5)
    bench = Bench()
    try:
        dealer = bench.context.socket(zmq.DEALER)
        bench.dealers.append(dealer)
        dealer.set(zmq.ROUTING_ID, b"stuck")
        dealer.set(zmq.RCVHWM, 1)
        dealer.connect(bench.router.address)
        dealer.send(b"here")
        bench.receive()
        for _ in range(1000):  # and what the system's own buffers take
            if why := bench.refuses(b"stuck", bytes(1 << 20)):
                break
        assert why == "its queue is full"
    finally:
        bench.close()


def test_a_wait_ends_with_the_wakeup_and_reads_nothing_if_so_told(bench: Bench) -> None:
    dealer = bench.dealer(b"a")
    dealer.send(b"here")
    bench.receive()
    began = time.monotonic()
    for reads in (True, False):
        bench.wakeup.notify()
        bench.router.wait(WAIT_SECONDS, reads=reads)
        bench.wakeup.clear()
    dealer.send(b"more")
    bench.router.wait(WAIT_SECONDS, reads=True)
    assert time.monotonic() - began < WAIT_SECONDS
    bench.router.wait(0.05, reads=False)
    assert bench.receive() == (b"a", b"more")


@pytest.mark.parametrize("reads", [True, False])
def test_a_wait_lasts_until_its_end(bench: Bench, reads: bool) -> None:
    began = time.monotonic()
    bench.router.wait(0.05, reads=reads)
    assert time.monotonic() - began >= 0.049, "poll counts whole milliseconds"


def test_what_waits_has_time_to_go_when_it_closes(bench: Bench) -> None:
    dealer = bench.dealer(b"a")
    dealer.send(b"here")
    bench.receive()
    messages = [bytes(1 << 20)] * 20 + [b"the last"]
    for message in messages:
        bench.router.send(b"a", message)
    bench.router.close(linger_seconds=WAIT_SECONDS)
    assert [dealer.recv() for _ in messages] == messages
