"""What tests of the service share: a scripted worker that speaks worker.proto, and a service in this process.

The worker is a second implementation, not a mock: it has real sockets, numbers its messages and keeps the
rules of the seam, until a script says otherwise. Its tokens are the prompt said again and again, so that a
sequence goes on with the same tokens wherever it is resumed.
"""

import asyncio
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import uvloop
import zmq
from google.rpc import error_details_pb2, status_pb2

from kvatlas.models.files import ModelFiles, ModelKind
from kvatlas.models.vocabulary import BYTE_EOS, tokenizer_digest
from kvatlas.v1 import cache_pb2, generation_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from service.config import ServiceConfig
from service.request import NO_TOKEN, AddStatus, FinishCode
from service.server import Service
from service.text.tokenizer import Tokenizer

T = TypeVar("T")
TOY = ModelFiles(ModelKind.RANDOM, "random:toy", "toy", "0", shape="toy")
POLL_MS = 2
HEARTBEAT_SECONDS = 0.5

log = logging.getLogger("service.testing")


@dataclass(slots=True)
class _Sequence:
    """One sample on the scripted worker."""

    sequence_id: int
    first_id: int
    choice: int
    add: worker_pb2.AddSequence
    prompt: list[int]
    service: bytes
    num_tokens: int  # output, resumed tokens included
    next_at: float
    arrived_at: float
    script: Mapping[str, str]
    has_started: bool = False
    ends_with: int = 0  # FinishCode that is due
    hold_at: int = -1  # output tokens after which it stands still


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
        self._sequences: dict[int, _Sequence] = {}
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
            self._sequences[add.sequence_id + index] = _Sequence(
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
        outputs: dict[bytes, _Output] = {}
        for sequence in list(self._sequences.values()):
            is_held = sequence.num_tokens == sequence.hold_at
            if sequence.ends_with or (sequence.next_at <= now and not is_held):
                self._advance(sequence, outputs.setdefault(sequence.service, _Output()), now)
        for service, output in outputs.items():
            self._send(service, step=output.message())

    def _advance(self, sequence: _Sequence, output: "_Output", now: float) -> None:
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

    def _code_after(self, token: int, sequence: _Sequence, params: worker_pb2.SequenceParams) -> int:
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

    def _end(self, sequence: _Sequence, output: "_Output", token: int, code: int) -> None:
        output.put(sequence, token, code)
        del self._sequences[sequence.sequence_id]
        self._bills[sequence.first_id] -= 1
        end = output.ends.add(sequence_id=sequence.sequence_id, completion_tokens=sequence.num_tokens)
        if code == FinishCode.FAILED:
            end.error_reason = cast(Any, int(sequence.script.get("error_reason", "19")))
            end.message = "scripted"
        if not self._bills[sequence.first_id]:
            end.bill.CopyFrom(generation_pb2.KvBill(page_seconds=1.5, peak_pages=2, copied_pages=1))


class _Output:
    """A StepOutput in the making."""

    def __init__(self) -> None:
        self._ids, self._tokens, self._codes = array("Q"), array("I"), bytearray()
        self._scores: list[tuple[int, int] | None] = []  # (token, alternatives)
        self._starts: dict[int, worker_pb2.SequenceStart] = {}
        self._prompts: list[worker_pb2.PromptLogprobs] = []
        self._output = worker_pb2.StepOutput(step=1, step_us=1000)
        self.ends = self._output.ends

    def start(self, sequence: _Sequence) -> None:
        """The run left the queue; once for all its samples."""
        if sequence.first_id in self._starts or sequence.sequence_id != sequence.first_id:
            return
        prompt = len(sequence.prompt)
        queue_us = int((time.monotonic() - sequence.arrived_at) * 1e6)
        start = worker_pb2.SequenceStart(sequence_id=sequence.first_id, queue_us=queue_us)
        if not sequence.add.params.HasField("prompt_logprobs"):
            hit = 16 if prompt > 16 and sequence.add.cache_read else 0
            start.prefix.hit_tokens = hit
            start.prefix.miss_cold_tokens = (prompt - hit) // 16 * 16
            start.prefix.unaligned_tokens = prompt - hit - start.prefix.miss_cold_tokens
        else:
            self._prompts.append(_prompt_scores(sequence))
        self._starts[sequence.first_id] = start

    def put(self, sequence: _Sequence, token: int, code: int) -> None:
        """An entry of the columns."""
        self._ids.append(sequence.sequence_id)
        self._tokens.append(token)
        self._codes.append(code)
        wants = sequence.add.params.HasField("logprobs") and token != NO_TOKEN
        self._scores.append((token, sequence.add.params.logprobs) if wants else None)

    def message(self) -> worker_pb2.StepOutput:
        """All of it."""
        self._output.starts.extend(self._starts.values())
        self._output.sequence_ids = self._ids.tobytes()
        self._output.token_ids = self._tokens.tobytes()
        self._output.finish_codes = bytes(self._codes)
        self._output.prompt_logprobs.extend(self._prompts)
        if any(score is not None for score in self._scores):
            self._output.logprobs.CopyFrom(_columns(self._scores))
        return self._output


def _columns(scores: "list[tuple[int, int] | None]") -> worker_pb2.LogprobColumns:
    """Made-up log-probabilities that a test can compute: -token / 100; alternatives token + 1, + 2, ..."""
    known = [score if score is not None else (-1, 0) for score in scores]
    others = [token + place for token, count in known for place in range(1, count + 1)]
    return worker_pb2.LogprobColumns(
        logprobs=array("f", [float("nan") if token < 0 else -token / 100 for token, _ in known]).tobytes(),
        ranks=array("I", [0 if token < 0 else 1 for token, _ in known]).tobytes(),
        alternative_counts=bytes(count for _, count in known),
        alternative_token_ids=array("I", others).tobytes(),
        alternative_logprobs=array("f", [-other / 100 for other in others]).tobytes(),
    )


def _prompt_scores(sequence: _Sequence) -> worker_pb2.PromptLogprobs:
    count = sequence.add.params.prompt_logprobs
    scores: list[tuple[int, int] | None] = [None, *((token, count) for token in sequence.prompt[1:])]
    return worker_pb2.PromptLogprobs(sequence_id=sequence.first_id, columns=_columns(scores))


# What a client sees


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status of ours, taken apart."""

    code: str
    message: str
    reason: str
    metadata: Mapping[str, str]
    paths: tuple[str, ...]  # of BadRequest
    retry_ms: int | None  # of RetryInfo
    pushback: str | None  # trailer

    @classmethod
    def of(cls, error: grpc.RpcError) -> "Refusal":
        """Of what a stub raised; without details (gRPC's core made it) the reason is empty."""
        call: Any = error
        trailers = dict(call.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        has_retry = False
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(bad)
            has_retry = detail.Unpack(retry) or has_retry
        assert not status.details or info.domain == "kvatlas.v1", info
        return cls(
            call.code().name,
            call.details(),
            info.reason,
            dict(info.metadata),
            tuple(violation.field for violation in bad.field_violations),
            retry.retry_delay.ToMilliseconds() if has_retry else None,
            trailers.get("grpc-retry-pushback-ms"),
        )


# A service in this process


class _LoopThread:
    """The one event loop of this process for services under test (grpc/grpc#42357), on a thread."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="service-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
        """The result of a coroutine, computed on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)


_loop_thread: list[_LoopThread] = []


def loop_thread() -> _LoopThread:
    """Made with the first use, kept to the end of the process."""
    if not _loop_thread:
        _loop_thread.append(_LoopThread())
    return _loop_thread[0]


class RunningService:
    """A service on the loop thread with its scripted workers."""

    def __init__(self, service: Service, workers: list[ScriptedWorker]) -> None:
        self.service = service
        self.workers = workers
        self.address = f"127.0.0.1:{service.port}"
        self.metrics_url = f"http://127.0.0.1:{service.metrics_port}"

    @property
    def worker(self) -> ScriptedWorker:
        """The first one."""
        return self.workers[0]

    def value(self, name: str, **labels: str) -> float:
        """A sample of the service's own registry; 0 if there is none."""
        return self.service.backstage.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request, here and on the workers."""
        backstage = self.service.backstage
        sequences = sum(link.live_sequences for link in backstage.pool.links)
        on_workers = sum(worker.live_sequences for worker in self.workers)
        return not (len(backstage.live) or backstage.admission.active or sequences or on_workers)


@contextmanager
def running_service(
    folder: Path,
    *,
    num_workers: int = 1,
    script: WorkerScript | None = None,
    ready: bool = True,
    **settings: Any,
) -> Iterator[RunningService]:
    """A service on a free port of the loopback; `ready` waits until it has a worker."""
    workers = [
        ScriptedWorker(f"ipc://{folder}/engine-{number}", f"worker-{number}", script).start()
        for number in range(num_workers)
    ]
    config = ServiceConfig(
        **{
            "address": "127.0.0.1:0",
            "metrics_address": "127.0.0.1:0",
            "instance_id": "service-under-test",
            "workers": tuple(worker.address for worker in workers) or (f"ipc://{folder}/nobody",),
            "drain_listen": 0.0,
            "grace": 5.0,
            **settings,
        },
    )
    thread = loop_thread()

    async def start() -> Service:
        service = Service(config, Tokenizer.toy(), tokenizer_digest(TOY))
        await service.start()
        while ready and len(service.backstage.pool.usable) < num_workers:
            await asyncio.sleep(0.005)
        return service

    running = RunningService(thread.run(start()), workers)
    try:
        yield running
    finally:
        running.service.hurry()
        thread.run(running.service.drain())
        for worker in workers:
            worker.stop()
