"""A scripted worker that speaks worker.proto, for tests of the service.

A second implementation, not a mock: it has real sockets, numbers its messages and keeps the rules of the
seam, until a script says otherwise. Its tokens are the prompt said again and again, so that a sequence goes
on with the same tokens wherever it is resumed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import zmq

from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.vocabulary import BYTE_EOS, tokenizer_digest
from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from service.request import NO_TOKEN, AddStatus, FinishCode
from service.testing_steps import ScriptedSequence, StepMessage

TOY = ModelFiles(ModelKind.RANDOM, "random:toy", "toy", "0", shape="toy")
POLL_MS = 2
HEARTBEAT_SECONDS = 0.5

log = logging.getLogger("service.testing")


@dataclass
class WorkerScript:
    """How a scripted worker behaves; requests override it with labels of the same names (`fake.step_ms`).

    With the label `fake.hold_again` every attempt is held, each after `hold_at` further tokens.
    """

    step_ms: float = 1.0  # between two tokens
    wait_ms: float = 0.0  # in the queue
    hold_at: int = -1  # output tokens after which a first attempt stands still until it is let go
    status: str = "ACCEPTED"  # AddStatus of every request
    fail_at: int = -1  # output tokens after which a sequence FAILED
    drain_at: int = -1  # output tokens after which a first attempt is DRAINED
    num_pages: int = 1000
    page_size: int = 16
    max_context: int = 4096
    vocab_size: int = 512
    state: Any = server_pb2.SERVER_STATE_SERVING
    features: tuple[str, ...] = ("prefix_cache",)
    tokenizer_sha256: str = field(default_factory=lambda: tokenizer_digest(TOY))
    last_step_age: float = 0.0  # seconds, as heartbeats tell it


class ScriptedWorker:
    """A worker at an address, on a thread of its own. `stop()` is a crash, `start()` a new life.

    A test that looks at a running request holds it (`hold_at`) and lets it go: how fast the machine is then
    decides nothing.
    """

    def __init__(self, address: str, worker_id: str = "worker-0", script: WorkerScript | None = None) -> None:
        self.address = address
        self.worker_id = worker_id
        self.script = script or WorkerScript()
        self.adds: list[worker_pb2.AddSequence] = []
        self.aborts: list[tuple[list[int], int]] = []  # ids, reason
        self.goodbyes = 0
        self.hellos: list[worker_pb2.Hello] = []
        self.is_silent = False  # reads and writes nothing, as if stopped
        self.skips_number = False  # loses the next message
        self._sequences: dict[int, ScriptedSequence] = {}
        self._numbers: dict[bytes, int] = {}
        self._bills: dict[int, int] = {}  # by first id: sequences still open
        self._let_go: deque[frozenset[str]] = deque()  # request ids; empty: all
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._bound = threading.Event()

    @property
    def live_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def start(self) -> "ScriptedWorker":
        """Begins a life."""
        self._stopping.clear()
        self._bound.clear()
        self._thread = threading.Thread(target=self._run, name=self.worker_id, daemon=True)
        self._thread.start()
        assert self._bound.wait(10), "the scripted worker did not bind its socket"
        return self

    def stop(self) -> None:
        """Ends it at once, as a crash does."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def let_go(self, *request_ids: str) -> None:
        """What is in its queue or stands still now goes on, or only these; what comes later is held again."""
        self._let_go.append(frozenset(request_ids))

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._epoch = time.time_ns()
        self._sequences.clear()
        self._numbers.clear()
        self._bills.clear()
        self._bound.set()
        try:
            self._serve()
        finally:
            self._socket.close()
            context.term()

    def _serve(self) -> None:
        next_beat = 0.0
        while not self._stopping.is_set():
            if self.is_silent:
                time.sleep(POLL_MS / 1000)
                continue
            if self._socket.poll(POLL_MS):
                self._receive()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_SECONDS
                for service in list(self._numbers):
                    self._send(service, heartbeat=self._heartbeat())
            self._step(now)

    # Messages in

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                service, frame = self._socket.recv_multipart(zmq.NOBLOCK)
                message = worker_pb2.ServiceMessage.FromString(frame)
                kind = message.WhichOneof("kind")
                handler: Callable[[bytes, Any], None] | None = getattr(self, f"_on_{kind}", None)
                if handler is not None:
                    handler(service, getattr(message, kind or ""))

    def _on_hello(self, service: bytes, hello: worker_pb2.Hello) -> None:
        self.hellos.append(hello)
        for sequence in [one for one in self._sequences.values() if one.service == service]:
            del self._sequences[sequence.sequence_id]
        self._numbers[service] = 0
        self._send(service, config=self._config())

    def _on_goodbye(self, service: bytes, _: worker_pb2.Goodbye) -> None:
        self.goodbyes += 1
        self._numbers.pop(service, None)

    def _on_abort(self, service: bytes, abort: worker_pb2.AbortSequences) -> None:
        ids = memoryview(abort.sequence_ids).cast("Q").tolist()
        self.aborts.append((ids, abort.reason))
        for sequence_id in ids:
            if sequence_id in self._sequences:
                self._sequences[sequence_id].ends_with = FinishCode.ABORTED

    def _on_command(self, service: bytes, command: worker_pb2.Command) -> None:
        if command.WhichOneof("command") == "list_pins":
            for name in ("first", "last"):
                pins = server_pb2.ListPinnedPrefixesResponse(pins=[server_pb2.PinnedPrefix(name=name)])
                reply = worker_pb2.CommandReply(
                    command_id=command.command_id, more=name == "first", pins=pins
                )
                self._send(service, reply=reply)
        elif command.WhichOneof("command") == "flush":
            failed = worker_pb2.CommandReply(command_id=command.command_id, code=9, message="scripted")
            self._send(service, reply=failed)

    def _on_add(self, service: bytes, add: worker_pb2.AddSequence) -> None:
        self.adds.append(add)
        script = {key.removeprefix("fake."): value for key, value in add.labels.items()}
        status = AddStatus[script.get("status", self.script.status)]
        if add.attempt and "resume_status" in script:
            status = AddStatus[script["resume_status"]]
        prompt = memoryview(add.prompt_token_ids).cast("I").tolist()
        result = worker_pb2.AddResult(
            sequence_id=add.sequence_id,
            status=cast(Any, int(status)),
            queue_position=int(script.get("queue_position", "0")),
            estimated_wait_ms=int(script.get("estimated_wait_ms", "0")),
            needed_pages=40,
            total_pages=32,
            message=script.get("message", ""),
        )
        self._send(service, add_result=result)
        if status is not AddStatus.ACCEPTED:
            return
        begins = time.monotonic() + float(script.get("wait_ms", self.script.wait_ms)) / 1000
        resumed = len(add.resume_token_ids) // 4
        self._bills[add.sequence_id] = add.sample_count
        for index in range(add.sample_count):
            self._sequences[add.sequence_id + index] = ScriptedSequence(
                sequence_id=add.sequence_id + index,
                first_id=add.sequence_id,
                choice=add.first_choice_index + index,
                add=add,
                prompt=prompt,
                service=service,
                num_tokens=resumed,
                next_at=begins,
                arrived_at=time.monotonic(),
                script=script,
                hold_at=self._hold_of(add, script),
            )

    def _hold_of(self, add: worker_pb2.AddSequence, script: Mapping[str, str]) -> int:
        """Output tokens after which a sequence stands still; -1: never."""
        hold_at = int(script.get("hold_at", self.script.hold_at))
        if hold_at < 0 or (add.attempt and "hold_again" not in script):
            return -1
        return len(add.resume_token_ids) // 4 + hold_at

    # Messages out

    def _send(self, service: bytes, **kind: Any) -> None:
        if service not in self._numbers:
            return
        self._numbers[service] += 1
        if self.skips_number:
            self.skips_number = False
            return
        message = worker_pb2.WorkerMessage(number=self._numbers[service], **kind)
        try:
            self._socket.send_multipart([service, message.SerializeToString()], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._numbers.pop(service, None)

    def _config(self) -> worker_pb2.Config:
        script = self.script
        return worker_pb2.Config(
            protocol=1,
            worker=server_pb2.WorkerInfo(
                worker_id=self.worker_id,
                epoch=self._epoch,
                state=script.state,
                model_id="toy",
            ),
            model=server_pb2.Model(
                model_id="toy",
                vocab_size=script.vocab_size,
                tokenizer_sha256=script.tokenizer_sha256,
                max_context_tokens=script.max_context,
                has_chat_template=True,
                defaults=server_pb2.DefaultSampling(temperature=1.0, top_p=1.0, repetition_penalty=1.0),
            ),
            geometry=cache_pb2.PoolGeometry(
                worker_id=self.worker_id,
                epoch=self._epoch,
                page_count=script.num_pages + 1,
                page_size=script.page_size,
            ),
            max_running_sequences=64,
            max_queued_requests=512,
            max_context_tokens=script.max_context,
            features=script.features,
        )

    def _heartbeat(self) -> worker_pb2.Heartbeat:
        load = server_pb2.WorkerLoad(
            worker_id=self.worker_id,
            state=self.script.state,
            running_sequences=sum(1 for one in self._sequences.values() if one.has_started),
            waiting_requests=sum(1 for one in self._sequences.values() if not one.has_started),
            total_pages=self.script.num_pages,
        )
        load.last_step_age.FromMilliseconds(int(self.script.last_step_age * 1000))
        return worker_pb2.Heartbeat(load=load)

    # Work

    def _step(self, now: float) -> None:
        while self._let_go:
            chosen = self._let_go.popleft()
            for sequence in self._sequences.values():
                if not chosen or sequence.add.request_id in chosen:
                    sequence.hold_at, sequence.next_at = -1, min(sequence.next_at, now)
        outputs: dict[bytes, StepMessage] = {}
        for sequence in list(self._sequences.values()):
            is_held = sequence.num_tokens == sequence.hold_at
            if sequence.ends_with or (sequence.next_at <= now and not is_held):
                self._advance(sequence, outputs.setdefault(sequence.service, StepMessage()), now)
        for service, output in outputs.items():
            self._send(service, step=output.message())

    def _advance(self, sequence: ScriptedSequence, output: "StepMessage", now: float) -> None:
        script, params = sequence.script, sequence.add.params
        if not sequence.ends_with and not sequence.has_started:
            sequence.has_started = True
            output.start(sequence)
        done = sequence.num_tokens
        if not sequence.ends_with and done == int(script.get("fail_at", self.script.fail_at)):
            sequence.ends_with = FinishCode.FAILED
        drain_at = int(script.get("drain_at", self.script.drain_at))
        if drain_at >= 0:
            drain_at += int(script.get("drain_apart", "0")) * sequence.choice
        if not sequence.ends_with and done == drain_at and not sequence.add.attempt:
            sequence.ends_with = FinishCode.DRAINED
        if sequence.ends_with:
            self._end(sequence, output, NO_TOKEN, sequence.ends_with)
            return
        token = sequence.prompt[(done + sequence.choice) % len(sequence.prompt)]
        sequence.num_tokens += 1
        sequence.next_at = now + float(script.get("step_ms", self.script.step_ms)) / 1000
        code = self._code_after(token, sequence, params)
        if code:
            self._end(sequence, output, token, code)
        else:
            output.put(sequence, token, 0)

    def _code_after(self, token: int, sequence: ScriptedSequence, params: worker_pb2.SequenceParams) -> int:
        if sequence.num_tokens >= params.min_tokens:
            if token == BYTE_EOS and params.stop_at_eos:
                return FinishCode.EOS
            if token in memoryview(params.stop_token_ids).cast("I").tolist():
                return FinishCode.STOP_TOKEN
        if sequence.num_tokens >= params.max_tokens:
            return FinishCode.MAX_TOKENS
        if len(sequence.prompt) + sequence.num_tokens >= self.script.max_context:
            return FinishCode.CONTEXT_LENGTH
        return int(sequence.script.get("code_at_" + str(sequence.num_tokens), "0"))

    def _end(self, sequence: ScriptedSequence, output: "StepMessage", token: int, code: int) -> None:
        output.put(sequence, token, code)
        del self._sequences[sequence.sequence_id]
        self._bills[sequence.first_id] -= 1
        end = output.ends.add(sequence_id=sequence.sequence_id, completion_tokens=sequence.num_tokens)
        if code == FinishCode.FAILED:
            end.error_reason = cast(Any, int(sequence.script.get("error_reason", "19")))
            end.message = "scripted"
        if not self._bills[sequence.first_id]:
            end.bill.CopyFrom(generation_pb2.KvBill(page_seconds=1.5, peak_pages=2, copied_pages=1))
