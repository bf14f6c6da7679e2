"""The engine socket: commands in, one StepOutput per step and service out, heartbeats.

One I/O thread owns the ROUTER (router.py) and everything in this file; it never reads engine state. While the
engine is idle that one's thread takes its place (worker/lent_link.py), one at a time (turns.py). The rules
are those at the head of worker.proto. Whatever cannot be sent ends that service's session, and with it its
sequences: nothing is dropped in silence.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import zmq
from google.protobuf.message import DecodeError

from kvatlas.worker.v1 import worker_pb2
from worker.channels import CommandQueue, OutputQueue
from worker.description import WorkerState
from worker.link import codec, integrity_codec, status_codec
from worker.link.commands import CommandDesk, OtherDesk
from worker.link.constraint_desk import ConstraintDesk
from worker.link.doorkeeper import Doorkeeper
from worker.link.peers import Peer, Peers, Refused
from worker.link.router import CannotSend, open_router
from worker.link.turns import Turns
from worker.log import log_event, trace_id_of
from worker.messages import (
    Abort,
    AddAnswer,
    AddRequest,
    CallFailure,
    CheckAnswer,
    DropSource,
    EncodedReply,
    EngineCommand,
    FlushAnswer,
    LinkMessage,
    ObserverCall,
    PinAnswer,
    RowsAnswer,
    StepOutputs,
    Ticket,
)
from worker.scheduling.request import AbortReason, AddOutcome, AddStatus
from worker.status import StatusBoard

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0
READS_PER_TURN = 256  # so that outputs are not held up by a flood of requests
LENT_READS = 16  # of the engine's thread, so that a first request is not held up either
SENDS_PER_TURN = 64
BEHIND_SECONDS = 0.005
FLUSH_SECONDS = 0.5  # for the last messages of an orderly end

_ABORT_REASONS = frozenset(map(int, AbortReason))

logger = logging.getLogger("worker.link")


class EngineLink:
    """The I/O thread. Made and bound by one thread, then run by its own until `close`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        *,
        commands: CommandQueue[EngineCommand],
        outputs: OutputQueue[LinkMessage],
        status: StatusBoard,
        to_observer: Callable[[ObserverCall], bool],
        other_desk: OtherDesk | None = None,
        constraints: ConstraintDesk | None = None,
        doorkeeper: Doorkeeper | None = None,
        on_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._commands = commands
        self._outputs = outputs
        self._status = status
        self._on_failure = on_failure
        self._clock = clock
        self._silence_seconds = silence_seconds
        self._peers = Peers()
        self._constraints = constraints
        vocab_size = status.description.model.vocab_size
        self._desk = CommandDesk(commands.put, to_observer, other_desk, vocab_size=vocab_size)
        self.sequence_mismatches = 0  # heartbeats of services whose live count differs from ours
        self._is_stopping = False
        self._beats_at_once = False
        self._next_beat = clock()
        self._turns = Turns(outputs.wakeup.notify)
        self._router = open_router(context, address, outputs.wakeup.fileno(), doorkeeper)
        self.address = self._router.address
        self.thread = threading.Thread(target=self._run, name="kvatlas-io", daemon=True)

    @property
    def num_services(self) -> int:
        """Services that have said Hello and are not lost."""
        return len(self._peers)

    def start(self) -> None:
        """Begins to answer."""
        self.thread.start()

    def close(self) -> None:
        """Sends what is handed over already, then ends the thread and the socket; idempotent.

        Not while it is lent.
        """
        self._is_stopping = True
        self._outputs.wakeup.notify()
        if self.thread.ident is not None:
            self.thread.join()
        else:
            self._router.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            self._fail()
        finally:
            # The ends of drained sequences are the last messages of all.
            self._router.close(linger_seconds=FLUSH_SECONDS)

    def _fail(self) -> None:
        """Within an `except`: what failed ends the link, and with it the worker."""
        logger.exception("event=link_failed")
        self._on_failure()

    def _serve(self) -> None:
        turn, stand_in = partial(self._guarded, self._turn), partial(self._guarded, self._stand_in)
        while not self._is_stopping:
            self._turns.take(turn, stand_in)
        while len(self._outputs):
            self._send_outputs()

    def _turn(self, most_seconds: float = HEARTBEAT_SECONDS, most_reads: int = READS_PER_TURN) -> None:
        now = self._clock()
        if now >= self._next_beat or self._beats_at_once:
            self._beats_at_once = False
            self._beat()
            self._next_beat = max(self._next_beat + HEARTBEAT_SECONDS, now)
        self._wait(min(most_seconds, self._next_beat - now))
        self._outputs.wakeup.clear()
        self._send_outputs()
        if self._receive(most_reads):
            self._drop_silent()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Within a turn: what fails ends the link, and with it the worker. Whoever is next finds it over."""
        if self._is_stopping:
            return
        try:
            work()
        except Exception:  # whatever it was: the engine's thread goes on, to its orderly end
            self._is_stopping = True
            self._fail()

    def _stand_in(self) -> None:
        """The engine has the link and is late with the heartbeat: it is in a launch, or waits for a step."""
        if self._clock() >= self._next_beat:
            self._turn(0.0)

    # For the engine's thread: worker.lent_link.Link.

    def borrow(self) -> None:
        """Its own thread only stands in until `give_back`."""
        self._turns.borrow()

    def give_back(self) -> None:
        """Its own thread goes on."""
        self._turns.give_back()

    def serve(self, seconds: float) -> None:
        """Sends and receives what there is; waits so long at most for the first of it. Never raises."""
        self._turns.take_lent(partial(self._guarded, partial(self._turn, seconds, LENT_READS)))

    def send_outputs(self) -> None:
        """Sends all that the engine has put out. Never raises."""
        while len(self._outputs) and not self._is_stopping:
            self._turns.take_lent(partial(self._guarded, self._send_outputs))

    def _wait(self, seconds: float) -> None:
        if len(self._outputs):
            seconds = 0.0
        if self._commands.has_room:
            self._router.wait(seconds, reads=True)
        else:  # the engine is behind: look again soon, read nothing until then
            self._router.wait(min(seconds, BEHIND_SECONDS), reads=False)

    # Service to worker.

    def _receive(self, most_reads: int) -> bool:
        """Reads what services sent; whether the socket is empty now."""
        for _ in range(most_reads):
            if not self._commands.has_room:
                return False
            came = self._router.receive()
            if came is None:
                return True
            self._take_safely(*came)
        return False

    def _take_safely(self, identity: bytes, data: bytes) -> None:
        """One service's message, whatever is in it, costs at most that service its session."""
        try:
            self._take(identity, data)
        except Exception:
            logger.exception("event=message_broke_link service=%r", identity)
            peer = self._peers.by_identity.get(identity)
            if peer is not None:
                self._end_session(peer, "its message broke the link")

    def _take(self, identity: bytes, data: bytes) -> None:
        try:
            message = worker_pb2.ServiceMessage.FromString(data)
        except DecodeError:
            log_event(logger, logging.WARNING, "message_malformed", service=identity, bytes=len(data))
            return
        kind = message.WhichOneof("kind")
        if kind == "hello":
            self._hello(identity, message.hello)
            return
        peer = self._peers.by_identity.get(identity)
        if peer is None:
            return  # it will find us silent and say Hello
        peer.last_heard = self._clock()
        match kind:
            case "add":
                self._add(peer, message.add)
            case "abort":
                self._abort(peer, message.abort)
            case "heartbeat":
                self._compare_live(peer, message.heartbeat.live_sequences)
            case "command":
                failure = self._desk.take(
                    peer.source,
                    message.command,
                    now=peer.last_heard,
                    is_ready=self._status.state is not WorkerState.STARTING,
                )
                if failure is not None:
                    self._send(peer, reply=codec.failure_reply(failure))
            case "goodbye":
                self._end_session(peer, "goodbye")

    def _hello(self, identity: bytes, hello: worker_pb2.Hello) -> None:
        try:
            if hello.protocol != codec.PROTOCOL:
                raise Refused(f"protocol {hello.protocol}, this worker speaks {codec.PROTOCOL}")
            peer, replaced = self._peers.open(identity, hello.instance_id, hello.service_epoch, self._clock())
        except Refused as refused:
            log_event(logger, logging.WARNING, "hello_refused", service=hello.instance_id, why=refused)
            refusal = worker_pb2.Refusal(protocol=codec.PROTOCOL, message=str(refused))
            self._send_to_stranger(identity, worker_pb2.WorkerMessage(number=1, refusal=refusal))
            return
        if replaced is not None:
            self._drop(replaced)
        log_event(logger, logging.INFO, "service_joined", service=peer.source, version=hello.version)
        self._send(peer, config=status_codec.config(self._status))

    def _add(self, peer: Peer, add: worker_pb2.AddSequence) -> None:
        status = self._status
        try:
            if status.state is WorkerState.STARTING:
                raise codec.Unfit(AddStatus.NOT_READY, "the worker is loading its model")
            spec = codec.request_spec(
                add,
                session=peer.session,
                source=peer.source,
                now=peer.last_heard,
                vocab_size=status.description.model.vocab_size,
            )
            constraint = codec.constraint_text(add.params)
            if constraint is not None and self._constraints is None:
                raise codec.Unfit(AddStatus.FEATURE_DISABLED, "constraints")
        except codec.Unfit as unfit:
            outcome = AddOutcome(unfit.status, message=str(unfit))
            inner = codec.inner_id(0, add.sequence_id & codec.LOCAL_ID_MASK)
            if unfit.status is AddStatus.INVALID:
                about = {"request": add.request_id, "trace": trace_id_of(add.traceparent), "why": unfit}
                log_event(logger, logging.WARNING, "request_invalid", **about)
            self._send(peer, add_result=codec.add_result(AddAnswer(peer.source, inner, 0, outcome)))
            return
        if constraint is not None and self._constraints is not None:
            self._constraints.take(spec, constraint)
        else:
            self._commands.put(AddRequest(spec))

    def _abort(self, peer: Peer, abort: worker_pb2.AbortSequences) -> None:
        try:
            outer = codec.plane("Q", abort.sequence_ids, "sequence_ids")
        except codec.Unfit as unfit:
            log_event(logger, logging.WARNING, "abort_malformed", service=peer.source, why=unfit)
            return
        known = abort.reason in _ABORT_REASONS
        reason = AbortReason(abort.reason) if known else AbortReason.UNSPECIFIED
        inner = [
            codec.inner_id(peer.session, outer_id) for outer_id in outer if outer_id <= codec.LOCAL_ID_MASK
        ]
        if not inner:
            return
        if self._constraints is not None:
            self._constraints.abort(inner, reason)
        else:
            self._commands.put(Abort(inner, reason))

    def _compare_live(self, peer: Peer, believed: int) -> None:
        if not self._may_be_on_its_way(peer) and peer.disagrees(believed):
            self.sequence_mismatches += 1
            log_event(
                logger,
                logging.ERROR,
                "sequence_mismatch",
                service=peer.source,
                service_count=believed,
                worker_count=peer.live_sequences,
            )

    def _may_be_on_its_way(self, peer: Peer) -> bool:
        """Whether a difference of live sequences says nothing: the engine may be within one long step.

        What a service began or ended meanwhile waits for it; a prompt on a busy CPU takes seconds.
        """
        step, before = self._status.step.number, peer.compared_step
        peer.compared_step = step
        is_computing = self._status.load.counts.running_sequences > 0
        if self._constraints is not None and self._constraints.is_busy:
            return True
        return not self._commands.is_empty or (is_computing and step == before)

    # Worker to service.

    def _send_outputs(self) -> None:
        for item in self._outputs.take(SENDS_PER_TURN):
            match item:
                case StepOutputs():
                    self._send_step(item)
                case AddAnswer():
                    self._send_answer(item)
                case EncodedReply():
                    self._send_encoded(item)
                case RowsAnswer():
                    self._send_replies(item.ticket, status_codec.row_replies(item))
                case FlushAnswer():
                    self._send_replies(item.ticket, [status_codec.flush_reply(item)])
                case PinAnswer():
                    worker_id = self._status.description.worker_id
                    self._send_replies(item.ticket, [status_codec.pin_reply(item, worker_id, time.time_ns())])
                case CheckAnswer():
                    epoch = self._status.description.epoch
                    self._send_replies(item.ticket, [integrity_codec.check_reply(item, epoch)])
                case CallFailure():
                    self._send_replies(item.ticket, [codec.failure_reply(item)])

    def _send_step(self, item: StepOutputs) -> None:
        for source, columns in item.by_source.items():
            peer = self._peers.by_source.get(source)
            if peer is not None:
                peer.live_sequences -= len(columns.ends)
                self._send(peer, step=codec.step_output(item.step, item.seconds, columns))

    def _send_answer(self, item: AddAnswer) -> None:
        peer = self._peers.by_source.get(item.source)
        if peer is not None:
            if item.outcome.status is AddStatus.ACCEPTED:
                peer.live_sequences += item.sample_count
            self._send(peer, add_result=codec.add_result(item))

    def _send_replies(self, ticket: Ticket, replies: list[worker_pb2.CommandReply]) -> None:
        for reply in replies:
            peer = self._peers.by_source.get(ticket.source)
            if peer is not None and self._desk.claim(ticket, is_last=not reply.more):
                self._send(peer, reply=reply)

    def _send_encoded(self, item: EncodedReply) -> None:
        peer = self._peers.by_source.get(item.ticket.source)
        if peer is not None and self._desk.claim(item.ticket, is_last=item.is_last):
            self._send_bytes(peer, codec.wrapped_reply(peer.next_number(), item.payload))

    def _beat(self) -> None:
        now = self._clock()
        for failure in self._desk.expired(now):
            peer = self._peers.by_source.get(failure.ticket.source)
            if peer is not None:
                self._send(peer, reply=codec.failure_reply(failure))
        if self._peers.by_identity:
            beat = status_codec.heartbeat(self._status, now)
            for peer in list(self._peers.by_identity.values()):
                self._send(peer, heartbeat=beat)

    def announce(self) -> None:
        """Makes the thread send a heartbeat at once: the state has changed."""
        self._beats_at_once = True
        self._outputs.wakeup.notify()

    def _send(
        self,
        peer: Peer,
        *,
        config: worker_pb2.Config | None = None,
        add_result: worker_pb2.AddResult | None = None,
        step: worker_pb2.StepOutput | None = None,
        heartbeat: worker_pb2.Heartbeat | None = None,
        reply: worker_pb2.CommandReply | None = None,
    ) -> None:
        message = worker_pb2.WorkerMessage(
            number=peer.next_number(),
            config=config,
            add_result=add_result,
            step=step,
            heartbeat=heartbeat,
            reply=reply,
        )
        self._send_bytes(peer, message.SerializeToString())

    def _send_bytes(self, peer: Peer, data: bytes) -> None:
        try:
            self._router.send(peer.identity, data)
        except CannotSend as error:
            self._end_session(peer, str(error))

    def _send_to_stranger(self, identity: bytes, message: worker_pb2.WorkerMessage) -> None:
        try:
            self._router.send(identity, message.SerializeToString())
        except CannotSend as error:
            log_event(logger, logging.WARNING, "refusal_not_sent", service=identity, why=error)

    # Ends.

    def _drop_silent(self) -> None:
        for peer in self._peers.silent(self._clock(), self._silence_seconds):
            self._end_session(peer, f"silent for {self._silence_seconds:g} s")

    def _end_session(self, peer: Peer, why: str) -> None:
        if self._peers.by_identity.get(peer.identity) is peer:
            self._peers.close(peer.identity)
            log_event(
                logger, logging.INFO, "service_left", service=peer.source, why=why, live=peer.live_sequences
            )
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        self._desk.close(peer.source)
        if self._constraints is not None:
            self._constraints.drop(peer.source)
        self._commands.put(DropSource(peer.source))
