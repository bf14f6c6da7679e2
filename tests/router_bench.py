"""A worker's router and DEALERs that talk to it, whichever router it is."""

import time

import zmq

from worker.channels import Wakeup
from worker.link.router import CannotSend, UnixRouter, ZmqRouter

WAIT_SECONDS = 60.0  # only ends a test that hangs
Context = zmq.Context["zmq.Socket[bytes]"]


class RouterBench:
    """Closes all that it holds, the router too."""

    def __init__(self, router: UnixRouter | ZmqRouter, wakeup: Wakeup, context: Context) -> None:
        self.router, self.wakeup, self.context = router, wakeup, context
        self.dealers: list[zmq.Socket[bytes]] = []

    def dealer(self, name: bytes) -> "zmq.Socket[bytes]":
        """One that has connected."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.ROUTING_ID, name)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
        dealer.connect(self.router.address)
        self.dealers.append(dealer)
        return dealer

    def receive(self) -> tuple[bytes, bytes]:
        """The next message of anybody."""
        end = time.monotonic() + WAIT_SECONDS
        while (came := self.router.receive()) is None:
            assert time.monotonic() < end
            self.router.wait(1.0, reads=True)
        return came

    def refuses(self, name: bytes, data: bytes = b"?") -> str:
        """Why nothing can be sent to it; empty: something can."""
        try:
            self.router.send(name, data)
        except CannotSend as error:
            return str(error)
        return ""

    def close(self) -> None:
        """At the end of a test."""
        for dealer in self.dealers:
            dealer.close()
        self.router.close()
        self.context.term()  # waits for what still lingers
        self.wakeup.close()
