"""A service for tests and benchmarks of the worker: one DEALER, one SUB, plain and synchronous.

Checks the seam's rules as it reads: numbers without gaps, one AddResult per AddSequence, one finish code
per sequence. Knows the wire and nothing of the worker.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from kvatlas.worker.v1 import worker_pb2

NO_TOKEN = 0xFFFFFFFF
WAIT_SECONDS = 120.0  # only ends a test that hangs


class SeamBroken(AssertionError):
    """The worker broke a rule of worker.proto."""


@dataclass(slots=True)
class Answer:
    """What came for one sequence."""

    tokens: list[int] = field(default_factory=list)
    code: int = 0  # 0: it goes on
    end: worker_pb2.SequenceEnd | None = None


class TestService:
    """Speaks to one worker. Every wait has a limit."""

    __test__ = False  # for pytest: no test class

    def __init__(self, address: str, name: str = "service-a", service_epoch: int = 1) -> None:
        self.name = name
        self.service_epoch = service_epoch
        self.config: worker_pb2.Config | None = None
        self.refusal: worker_pb2.Refusal | None = None
        self.results: dict[int, worker_pb2.AddResult] = {}
        self.answers: dict[int, Answer] = {}
        self.starts: list[worker_pb2.SequenceStart] = []
        self.replies: list[worker_pb2.CommandReply] = []
        self.heartbeats: list[worker_pb2.Heartbeat] = []
        self.steps: list[worker_pb2.StepOutput] = []
        self.feeds: list[worker_pb2.PageFeed] = []
        self.lost_feeds: set[int] = set()  # numbers of feed messages to lose, counted from 0
        self._num_feeds = 0
        self._next_id = 1
        self._next_command = 1
        self._expected = 1
        self._next_beat = 0.0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._engine = self._context.socket(zmq.DEALER)
        self._engine.set(zmq.ROUTING_ID, name.encode())
        self._engine.set(zmq.LINGER, 0)
        self._engine.connect(address)
        self._pages: zmq.Socket[bytes] | None = None

    def close(self) -> None:
        """Ends the sockets without a word."""
        if self._pages is not None:
            self._pages.close()
        self._engine.close()
        self._context.term()

    # Out.

    def send(self, message: worker_pb2.ServiceMessage) -> None:
        """Sends one message."""
        self._engine.send(message.SerializeToString())

    def hello(self, timeout: float = WAIT_SECONDS) -> worker_pb2.Config:
        """Introduces itself and waits for the welcome."""
        self.say_hello()
        self.wait(lambda: self.config is not None, timeout)
        assert self.config is not None
        return self.config

    def say_hello(self) -> None:
        """Introduces itself; what was live before counts no more."""
        self.config, self._expected = None, 1
        self.answers.clear()
        self.results.clear()
        hello = worker_pb2.Hello(
            protocol=1, instance_id=self.name, service_epoch=self.service_epoch, version="test"
        )
        self.send(worker_pb2.ServiceMessage(hello=hello))

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        samples: int = 1,
        params: worker_pb2.SequenceParams | None = None,
        **fields: object,
    ) -> int:
        """Sends a request; returns the id of sample 0."""
        first = self._next_id
        self._next_id += samples
        self.send(
            worker_pb2.ServiceMessage(add=self.request(first, prompt, max_tokens, samples, params, **fields))
        )
        for sequence_id in range(first, first + samples):
            self.answers[sequence_id] = Answer()
        return first

    @staticmethod
    def request(
        sequence_id: int,
        prompt: Sequence[int],
        max_tokens: int = 8,
        samples: int = 1,
        params: worker_pb2.SequenceParams | None = None,
        **fields: object,
    ) -> worker_pb2.AddSequence:
        """A greedy request that does not stop at EOS, unless `params` says otherwise."""
        params = params or worker_pb2.SequenceParams(
            top_p=1.0, repetition_penalty=1.0, max_tokens=max_tokens, seed=1
        )
        values: dict[str, object] = {
            "cache_read": True,
            "cache_write": True,
            "cache_salt": b"tenant\0",
            "request_id": f"r{sequence_id}",
            "tenant": "tenant",
            **fields,
        }
        return worker_pb2.AddSequence(
            sequence_id=sequence_id,
            sample_count=samples,
            prompt_token_ids=array("I", prompt).tobytes(),
            params=params,
            **values,  # type: ignore[arg-type]
        )

    def abort(self, *sequence_ids: int, reason: int = 2) -> None:
        """Stops sequences."""
        ids = array("Q", sequence_ids).tobytes()
        abort = worker_pb2.AbortSequences(sequence_ids=ids, reason=reason)  # type: ignore[arg-type]
        self.send(worker_pb2.ServiceMessage(abort=abort))

    def heartbeat(self, live: int | None = None) -> None:
        """A sign of life."""
        believed = self.num_live if live is None else live
        beat = worker_pb2.ServiceHeartbeat(live_sequences=believed)
        self.send(worker_pb2.ServiceMessage(heartbeat=beat))

    def goodbye(self) -> None:
        """The last message."""
        self.send(worker_pb2.ServiceMessage(goodbye=worker_pb2.Goodbye()))

    def command(
        self, command: worker_pb2.Command, timeout: float = WAIT_SECONDS
    ) -> list[worker_pb2.CommandReply]:
        """Sends a command and waits for all its replies."""
        command_id = self.send_command(command)

        def mine() -> list[worker_pb2.CommandReply]:
            return [reply for reply in self.replies if reply.command_id == command_id]

        self.wait(lambda: any(not reply.more for reply in mine()), timeout)
        return mine()

    def send_command(self, command: worker_pb2.Command) -> int:
        """Sends a command; returns its id."""
        command.command_id = self._next_command
        self._next_command += 1
        self.send(worker_pb2.ServiceMessage(command=command))
        return command.command_id

    # In.

    def wait(self, is_done: Callable[[], bool], timeout: float = WAIT_SECONDS) -> None:
        """Reads until something is so; TimeoutError after the limit. Sends heartbeats meanwhile."""
        end = time.monotonic() + timeout
        while not is_done():
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"{self.name}: not so after {timeout:g} s")
            if self.config is not None and now >= self._next_beat:
                self._next_beat = now + 0.5
                self.heartbeat()
            self.read(0.05)

    def read(self, seconds: float) -> None:
        """Reads what is there, or what comes first within the time."""
        poller = zmq.Poller()
        poller.register(self._engine, zmq.POLLIN)
        if self._pages is not None:
            poller.register(self._pages, zmq.POLLIN)
        for ready, _ in poller.poll(int(seconds * 1000)):
            if ready is self._engine:
                self._read_engine()
            else:
                self._read_pages()

    def _read_engine(self) -> None:
        while True:
            try:
                data = self._engine.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(worker_pb2.WorkerMessage.FromString(data))

    def _take(self, message: worker_pb2.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "refusal":
            self.refusal = message.refusal
            return
        if self.config is None and kind != "config":
            return  # before Config everything is of an earlier session
        if message.number != self._expected:
            raise SeamBroken(f"message {message.number} came instead of {self._expected}")
        self._expected += 1
        match kind:
            case "config":
                self.config = message.config
            case "add_result":
                self._take_result(message.add_result)
            case "step":
                self._take_step(message.step)
            case "heartbeat":
                self.heartbeats.append(message.heartbeat)
            case "reply":
                self.replies.append(message.reply)

    def _take_result(self, result: worker_pb2.AddResult) -> None:
        if result.sequence_id in self.results:
            raise SeamBroken(f"two AddResults for {result.sequence_id}")
        self.results[result.sequence_id] = result

    def _take_step(self, step: worker_pb2.StepOutput) -> None:
        self.steps.append(step)
        self.starts.extend(step.starts)
        ends = iter(step.ends)
        ids, tokens = array("Q", step.sequence_ids), array("I", step.token_ids)
        for sequence_id, token, code in zip(ids, tokens, step.finish_codes, strict=True):
            answer = self.answers.setdefault(sequence_id, Answer())
            if answer.code:
                raise SeamBroken(f"sequence {sequence_id} goes on after its end")
            if token != NO_TOKEN:
                answer.tokens.append(token)
            if code:
                answer.code, answer.end = code, next(ends)
                if answer.end.sequence_id != sequence_id:
                    raise SeamBroken(f"the end of {sequence_id} is that of {answer.end.sequence_id}")
        if next(ends, None) is not None:
            raise SeamBroken("more ends than finish codes")

    @property
    def num_live(self) -> int:
        """Sequences that were not refused and did not end."""
        refused = {first for first, result in self.results.items() if result.status != 1}
        return sum(not answer.code for first, answer in self.answers.items() if first not in refused)

    def finish(self, *sequence_ids: int, timeout: float = WAIT_SECONDS) -> list[Answer]:
        """Waits until sequences have ended."""
        self.wait(lambda: all(self.answers[sequence_id].code for sequence_id in sequence_ids), timeout)
        return [self.answers[sequence_id] for sequence_id in sequence_ids]

    # The feed.

    def subscribe(self, *topics: bytes) -> None:
        """Listens to the pages socket."""
        assert self.config is not None, "hello first"
        if self._pages is None:
            self._pages = self._context.socket(zmq.SUB)
            self._pages.set(zmq.LINGER, 0)
            self._pages.connect(self.config.pages_address)
        for topic in topics:
            self._pages.set(zmq.SUBSCRIBE, topic)

    def unsubscribe(self, *topics: bytes) -> None:
        """Listens no more."""
        assert self._pages is not None
        for topic in topics:
            self._pages.set(zmq.UNSUBSCRIBE, topic)

    def _read_pages(self) -> None:
        assert self._pages is not None
        while True:
            try:
                _, data = self._pages.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._num_feeds not in self.lost_feeds:
                self.feeds.append(worker_pb2.PageFeed.FromString(data))
            self._num_feeds += 1
