"""A mixed load on a running server: shared system prompts, private ones, samples, cancels, refusals.

Prompts are random ids of one seed. Keeps account of what the server said of each request, so that its
metrics can be compared with it. The pool is meant to be too small: system prompts are evicted and wanted
again, and bursts are preempted.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

VOCABULARY = 200  # ids from 1: below what every model has
TIMEOUT_SECONDS = 600.0  # of a call that hangs: on a loaded machine a real model takes minutes
MAX_NOTES = 10
NOT_READY = "the model is not ready"  # what the service says while its only worker is gone
RETRY_SECONDS = 0.2
RESULTS = ("hit", "miss_cold", "miss_evicted", "unaligned")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the load, made for a pool of `num_pages` pages."""

    num_pages: int
    page_size: int = 16
    num_clients: int = 10

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_pages * self.page_size

    @property
    def system_tokens(self) -> int:
        """Length of a system prompt: eight of them take more than the pool."""
        return self.pool_tokens // 6


@dataclass
class Account:
    """What was sent, and what the server said of it; behind one lock."""

    sent: int = 0
    streaming: int = 0  # requests that have started and not ended
    outcomes: Counter[str] = field(default_factory=Counter)
    prefix: Counter[str] = field(default_factory=Counter)  # tokens by result, from `started`
    prompt_tokens: int = 0  # of all requests that started
    completion_tokens: int = 0  # of those that were seen to their end
    preemptions: int = 0
    resumes: int = 0
    unexpected: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MixedLoad:
    """Clients in threads, until `stop`. `pause` waits for what runs and leaves the clients idle."""

    def __init__(self, address: str, shape: Shape, seed: int = 1) -> None:
        self.account = Account()
        self._shape = shape
        self._channel = grpc.insecure_channel(address)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        draw = random.Random(seed)
        self._systems = [_ids(draw, shape.system_tokens) for _ in range(8)]
        self._running = threading.Event()
        self._stopping = threading.Event()
        self._idle = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed}/{number}"),), daemon=True)
            for number in range(shape.num_clients)
        ]
        self._kinds: list[tuple[int, Callable[[random.Random], None]]] = [
            (60, self._shared),
            (12, self._private),
            (8, self._samples),
            (12, self._cancelled),
            (8, self._rejected),
        ]

    def start(self) -> None:
        """Lets the clients begin."""
        self._running.set()
        for thread in self._threads:
            thread.start()

    def resume(self) -> None:
        """Goes on after a pause."""
        self._running.set()

    def pause(self) -> None:
        """Returns once no request runs any more."""
        self._running.clear()
        for _ in self._threads:
            if not self._idle.acquire(timeout=TIMEOUT_SECONDS):
                raise TimeoutError("a client does not come to an end")

    def stop(self) -> None:
        """Ends the clients, each after the request that it has."""
        self._stopping.set()
        self._running.set()
        for thread in self._threads:
            thread.join(TIMEOUT_SECONDS)
        self._channel.close()

    def _client(self, draw: random.Random) -> None:
        weights = [weight for weight, _ in self._kinds]
        while not self._stopping.is_set():
            if not self._running.is_set():
                self._idle.release()
                self._running.wait()
                continue
            [(_, kind)] = draw.choices(self._kinds, weights)
            try:
                kind(draw)
            except grpc.RpcError as error:
                call: Any = error
                if call.code() is grpc.StatusCode.UNAVAILABLE and call.details() == NOT_READY:
                    self._count("unavailable")
                    self._stopping.wait(RETRY_SECONDS)
                else:
                    self._note(f"{kind.__name__}: {call.code()} {call.details()}")

    # Kinds of requests

    def _shared(self, draw: random.Random) -> None:
        prompt = [*draw.choice(self._systems), *_ids(draw, draw.randint(1, 40))]
        self._stream(prompt, draw.randint(8, 48))

    def _private(self, draw: random.Random) -> None:
        self._stream(_ids(draw, draw.randint(40, self._shape.pool_tokens // 5)), draw.randint(20, 90))

    def _samples(self, draw: random.Random) -> None:
        self._stream([*draw.choice(self._systems), *_ids(draw, 5)], draw.randint(8, 24), samples=3)

    def _cancelled(self, draw: random.Random) -> None:
        prompt = [*draw.choice(self._systems), *_ids(draw, draw.randint(1, 30))]
        self._stream(prompt, 200, cancel_after=draw.randint(1, 12))

    def _rejected(self, draw: random.Random) -> None:
        """More than the pool can ever hold: refused, not cut."""
        try:
            self._stream(_ids(draw, self._shape.pool_tokens + draw.randint(1, 99)), 10)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            self._count("rejected")
        else:
            self._note("a request larger than the pool was taken")

    # One request

    def _stream(self, prompt: list[int], tokens: int, *, samples: int = 1, cancel_after: int = 0) -> None:
        spec = pb.GenerationSpec(
            token_ids=pb.TokenSequence(ids=prompt),
            sampling=pb.SamplingParams(n=samples),
            stop=pb.StopCriteria(max_tokens=tokens, min_tokens=tokens),
        )
        with self.account.lock:
            self.account.sent += 1
        call = self._stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=TIMEOUT_SECONDS)
        num_deltas, has_started = 0, False
        summary: pb.Usage | None = None
        try:
            for message in call:
                match message.WhichOneof("event"):
                    case "started":
                        has_started = True
                        self._started(message.started)
                    case "delta":
                        num_deltas += 1
                        if cancel_after and num_deltas >= cancel_after:
                            call.cancel()
                    case "summary":
                        summary = message.summary.usage
        except grpc.RpcError as error:
            if not (cancel_after and error.code() is grpc.StatusCode.CANCELLED):
                raise
        finally:
            if has_started:
                with self.account.lock:
                    self.account.streaming -= 1
        self._count("completed" if summary is not None else "cancelled", summary)

    def _started(self, started: Any) -> None:
        with self.account.lock:
            self.account.streaming += 1
            self.account.prompt_tokens += started.prompt_tokens
            for result in RESULTS:
                tokens = getattr(started.prefix, f"{result}_tokens")
                self.account.prefix[result] += tokens

    def _count(self, outcome: str, usage: "pb.Usage | None" = None) -> None:
        with self.account.lock:
            self.account.outcomes[outcome] += 1
            if usage is not None:
                self.account.completion_tokens += usage.completion_tokens
                self.account.preemptions += usage.kv.preemptions
                self.account.resumes += usage.resumes

    def _note(self, text: str) -> None:
        with self.account.lock:
            if len(self.account.unexpected) < MAX_NOTES:
                self.account.unexpected.append(text)


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(1, VOCABULARY) for _ in range(count)]
