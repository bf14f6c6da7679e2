"""One DEALER and one SUB per worker: commands out, steps and page feeds in, heartbeats both ways.

Owns the judgement that a worker is there or lost; the sockets are in link_sockets.py, who gets what comes is
in live_runs.py. Everything runs on the event loop's thread and nothing waits for a worker. Knows no text, no
clients and no wire format (codec.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from service.fleet import codec
from service.fleet.codec import Beat, Command, CommandReply, WorkerFacts
from service.fleet.command_desk import CommandDesk, CommandFailed, WorkerUnavailable
from service.fleet.link_sockets import Context, LinkSockets
from service.fleet.live_runs import LiveRuns
from service.fleet.seam import SeamClient
from service.request import AbortReason, LostReason, Request, Run, RunReceiver, SequenceReceiver

__all__ = ["CommandFailed", "LinkListener", "WorkerLink", "WorkerUnavailable"]

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 2.0
TICK_SECONDS = 0.25
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0
HELLO_SECONDS = 5.0  # until an unanswered Hello is said again: it may have been lost with its connection

log = logging.getLogger("service.link")


class LinkListener(Protocol):
    """Who wants to know what becomes of a link. Called on the loop; must neither wait nor fail."""

    def link_welcomed(self, link: "WorkerLink") -> None:
        """A life of the worker began: link.facts are new."""
        ...

    def link_lost(self, link: "WorkerLink", reason: LostReason) -> None:
        """It is over."""
        ...

    def link_beat(self, link: "WorkerLink") -> None:
        """A heartbeat came: link.beat is new."""
        ...

    def link_fed(self, link: "WorkerLink", topic: bytes, payload: bytes) -> None:
        """A message of the pages socket."""
        ...

    def link_removed(self, link: "WorkerLink") -> None:
        """Its address is no longer one of a worker; nothing comes from this link any more."""
        ...


class WorkerLink:
    """The connection to one worker address. Reconnects for ever until it is closed."""

    def __init__(
        self,
        address: str,
        *,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        instance_id: str,
        service_epoch: int,
        version: str,
        seam: SeamClient,
    ) -> None:
        self.address = address
        self.facts: WorkerFacts | None = None  # of the last life seen
        self.beat: Beat | None = None  # the last one
        self.beat_sequences = 0  # live_sequences when it came
        self.beat_time = 0.0  # loop clock of the last sign of life
        self.is_up = False  # Config came and the worker is not lost
        self.listeners: list[LinkListener] = []
        self._loop = loop
        self._hello = codec.encode_hello(instance_id, service_epoch, version)
        self._sockets = LinkSockets(
            address,
            context=context,
            loop=loop,
            identity=instance_id,
            seam=seam,
            on_message=self._on_encoded,
            on_feed=self._on_feed,
            on_end=self._on_end,
        )
        self._expected = 0  # number of the next message
        self._runs = LiveRuns()
        self._desk = CommandDesk(loop, self._send_if_up)
        self._backoff = MIN_BACKOFF_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = 0.0
        self._last_sent_beat = 0.0
        self._last_why = ""  # of the last loss
        self._is_closed = False

    @property
    def worker_id(self) -> str:
        """Name of the worker; its address until it has said its name."""
        return self.facts.worker_id if self.facts is not None else self.address

    @property
    def live_sequences(self) -> int:
        """Sequences that this service believes to be on the worker."""
        return len(self._runs)

    def carries(self, sequence_id: int) -> bool:
        """Whether the end of that sequence is still to come from here."""
        return sequence_id in self._runs

    def open(self) -> None:
        """Starts to connect; returns at once."""
        assert not self._is_closed, "closed for good"
        self._expected = 0
        try:
            self._sockets.open(self._hello)
        except OSError as error:  # no descriptor is left now: one may be when it is tried again
            self._end_connection(LostReason.PARTITION, f"cannot connect: {error.strerror}")
            return
        self._timer = self._loop.call_later(
            HELLO_SECONDS, self._lose, LostReason.PARTITION, "no answer to Hello"
        )

    def close(self) -> None:
        """Says goodbye and frees the sockets. Idempotent."""
        self._close(says_goodbye=True)

    def retire(self) -> None:
        """Frees the sockets without a word: the worker is reached by another address, under our one name."""
        self._close(says_goodbye=False)
        self.facts = None

    def _close(self, *, says_goodbye: bool) -> None:
        if self._is_closed:
            return
        if self.is_up and says_goodbye:
            self._send(codec.encode_goodbye())
        self._is_closed = True
        self._cancel_timer()
        self._end_life(LostReason.DRAIN)
        self._sockets.close(linger_ms=200 if self.is_up else 0)
        self.is_up = False

    # What handlers ask for.

    def add(
        self, request: Request, run: Run, receiver: RunReceiver, boxes: Sequence[SequenceReceiver]
    ) -> bool:
        """Sends a run; what becomes of it reaches the receivers. False: the worker is not there."""
        if not self.is_up:
            return False
        self._runs.add(run, receiver, boxes)
        self._send(codec.encode_add(request, run))
        return self.is_up

    def abort(self, sequence_ids: Sequence[int], reason: AbortReason, *, forget: bool = True) -> None:
        """Stops sequences that are live here; others are ignored. Never waits, may be called twice.

        With `forget` nothing of them is delivered any more, else their end still comes.
        """
        live = [sequence_id for sequence_id in sequence_ids if sequence_id in self._runs]
        if not live:
            return
        if forget:
            for sequence_id in live:
                self._runs.forget(sequence_id)
        if self.is_up:
            self._send(codec.encode_abort(live, reason))

    async def command(self, command: Command, *, timeout: float) -> AsyncIterator[CommandReply]:
        """Sends a command and yields its replies.

        Raises WorkerUnavailable, CommandFailed, and TimeoutError when the replies are not complete after
        `timeout` seconds. An iteration that is given up cancels the command on the worker.
        """
        if not self.is_up:
            raise WorkerUnavailable(self.worker_id)
        async with aclosing(self._desk.ask(command, timeout)) as replies:
            async for reply in replies:
                yield reply

    def subscribe(self, topic: bytes) -> None:
        """Asks for a topic of the pages socket, b"d" or b"e", in this life of the worker and later ones."""
        self._sockets.subscribe(topic)

    def unsubscribe(self, topic: bytes) -> None:
        """Takes subscribe() back."""
        self._sockets.unsubscribe(topic)

    # Sending

    def _send(self, frame: bytes) -> None:
        if not self._sockets.send(frame):
            self._lose(LostReason.PARTITION, "takes no more messages")

    def _send_if_up(self, frame: bytes) -> None:
        if self.is_up:
            self._send(frame)

    # Receiving

    def _on_encoded(self, data: bytes) -> None:
        try:
            self._take(*codec.decode(data))
        except Exception:  # whatever a worker sends costs it this connection; the loop reads on
            log.exception("event=bad_message worker=%s", self.worker_id)
            self._lose(LostReason.PARTITION, "sent a message that cannot be used")

    def _take(self, number: int, kind: str, value: Any) -> None:
        if kind == "config":
            self._welcome(number, value)
        elif kind == "refusal":
            self._lose(LostReason.PARTITION, f"refused this service: {value}")
        elif self.is_up:
            self._on_message(number, kind, value)

    def _on_message(self, number: int, kind: str, value: Any) -> None:
        if number != self._expected:
            self._lose(LostReason.PARTITION, f"message {number} came instead of {self._expected}")
            return
        self._expected += 1
        self.beat_time = self._loop.time()
        if kind == "step":
            self._runs.fan_out(value)
        elif kind == "heartbeat":
            self.beat, self.beat_sequences = value, self.live_sequences
            for listener in self.listeners:
                listener.link_beat(self)
        elif kind == "add_result":
            self._runs.take_outcome(value)
        else:
            self._desk.take(value)

    def _welcome(self, number: int, facts: WorkerFacts) -> None:
        if self.is_up:  # a Hello of ours that was on its way for long: it ended what we have there
            self._lose(LostReason.PARTITION, "welcomed this service twice")
            return
        self._expected = number + 1
        self.beat_time = self._loop.time()
        self.facts, self.beat, self.is_up = facts, None, True
        self._backoff = MIN_BACKOFF_SECONDS
        log.info("event=worker_up worker=%s epoch=%d address=%s", facts.worker_id, facts.epoch, self.address)
        if facts.pages_address:
            self._sockets.open_pages(facts.pages_address)
        self._tick()
        for listener in self.listeners:
            listener.link_welcomed(self)

    def _on_feed(self, topic: bytes, payload: bytes) -> None:
        for listener in self.listeners:
            listener.link_fed(self, topic, payload)

    def _on_end(self, why: str) -> None:
        self._lose(LostReason.CRASH, why)

    # Life

    def _tick(self) -> None:
        now = self._loop.time()
        self._cancel_timer()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        was_late = now - self._last_tick > 4 * TICK_SECONDS
        self._last_tick = now
        if now - self._last_sent_beat >= HEARTBEAT_SECONDS - 0.01:
            self._last_sent_beat = now
            self._send(codec.encode_heartbeat(self.live_sequences))
        # After a pause of this process the worker's signs of life are still in the socket: read them first.
        if self.is_up and not was_late and now - self.beat_time > SILENCE_SECONDS:
            self._lose(LostReason.PARTITION, f"silent for {now - self.beat_time:.1f} s")

    def _lose(self, reason: LostReason, why: str) -> None:
        """Ends this connection and begins the next; a worker that starts is absent until it has one."""
        if not self._is_closed and self._sockets.is_open:
            self._end_connection(reason, why)

    def _end_connection(self, reason: LostReason, why: str) -> None:
        is_news = self.is_up or why != self._last_why
        self._last_why = why
        log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "event=%s worker=%s reason=%s why=%r sequences=%d",
            "worker_lost" if self.is_up else "worker_absent",
            self.worker_id,
            reason.value,
            why,
            self.live_sequences,
        )
        was_up, self.is_up = self.is_up, False
        self._cancel_timer()
        self._sockets.close()
        self._end_life(reason)
        if was_up:
            for listener in list(self.listeners):
                listener.link_lost(self, reason)
        if self._is_closed:  # nobody wants it any more
            return
        self._timer = self._loop.call_later(self._backoff, self.open)
        self._backoff = min(self._backoff * 2, MAX_BACKOFF_SECONDS)

    def _end_life(self, reason: LostReason) -> None:
        self._runs.lose(reason)
        self._desk.lose()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
