"""A worker that computes nothing: it speaks the seam and sends tokens by a script.

What is left to measure is the service. Started by benchmarks/streaming.py:

    python -m benchmarks.scripted_worker --engine ipc:///tmp/x/engine --control ipc:///tmp/x/control ...

Driven over the control socket (ZMQ PAIR), one message at a time:
    driver → {"streams": n, "steps": k, "interval": seconds, "window": w}   begin, once n sequences are here
    driver → 8 bytes: number of tokens that every stream has received       lets a closed loop go on
    worker → {"send_times_ns": [...]}                                       all steps were sent
With interval > 0 a step is sent at each tick; with 0 at most `window` steps are ahead of the slowest stream.
Every sequence takes part in every step, so token j of each stream belongs to step j. Times are those of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

import argparse
import json
import math
import os
import struct
import time
from array import array
from dataclasses import dataclass
from typing import Any

import zmq

from kvatlas.models.resolve import resolve_model
from kvatlas.models.vocabulary import tokenizer_digest
from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2

HEARTBEAT_SECONDS = 0.5
FIRST_TOKEN, NUM_TOKENS = 1000, 4096  # ordinary words of the vocabulary, one after the other
CONTEXT = 1 << 20
ACK = struct.Struct("<Q")


@dataclass(slots=True)
class Script:
    """One run, and how far it is."""

    streams: int
    steps: int
    interval: float
    window: int
    step: int = 0
    acknowledged: int = 0
    due: float = 0.0

    def is_next_due(self, now: float) -> bool:
        """Whether the next step may be sent."""
        if self.interval > 0:
            return now >= self.due
        return self.step < self.acknowledged + self.window


class ScriptedWorker:
    """One ROUTER for services, one PAIR for the driver, one thread."""

    def __init__(self, engine: str, control: str, model: server_pb2.Model) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.bind(engine)
        self._control = context.socket(zmq.PAIR)
        self._control.bind(control)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)
        self._model = model
        self._epoch = time.time_ns()
        self._service = b""
        self._number = 0
        self._sequences: array[int] = array("Q")
        self._script: Script | None = None
        self._times: list[int] = []
        self._tokens = array("I", range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS))

    def serve(self, parent: int) -> None:
        """Until the process is ended, or its parent is another one than `parent`."""
        next_beat = 0.0
        while True:
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_SECONDS
                if os.getppid() != parent:
                    return
                if self._service:
                    self._send(heartbeat=self._heartbeat())
            self._advance(now)
            for socket, _ in self._poller.poll(self._wait_ms()):
                if socket is self._router:
                    self._take(*self._router.recv_multipart())
                else:
                    self._order(self._control.recv())

    def _wait_ms(self) -> int:
        script = self._script
        if script is None or script.step == 0 or script.interval == 0:
            return 50
        return max(0, math.ceil((script.due - time.monotonic()) * 1000))

    def _order(self, message: bytes) -> None:
        if len(message) > ACK.size:
            self._script = Script(**json.loads(message))
            self._times = []
        elif self._script is not None:
            (self._script.acknowledged,) = ACK.unpack(message)

    def _take(self, identity: bytes, data: bytes) -> None:
        message = worker_pb2.ServiceMessage.FromString(data)
        kind = message.WhichOneof("kind")
        if kind == "hello":
            self._service, self._number, self._sequences = identity, 0, array("Q")
            self._send(config=self._config())
        elif kind == "add":
            self._sequences.append(message.add.sequence_id)
            result = worker_pb2.AddResult(
                sequence_id=message.add.sequence_id,
                status=worker_pb2.ADD_STATUS_ACCEPTED,
                total_pages=CONTEXT,
            )
            self._send(add_result=result)
        elif kind == "abort":
            raise SystemExit("the service aborted a sequence: the run is void")

    def _advance(self, now: float) -> None:
        script = self._script
        if script is None or len(self._sequences) < script.streams:
            return
        if script.step == 0:
            script.due = now
        while script.step < script.steps and script.is_next_due(now):
            self._send(step=self._step_output(script))
            script.step += 1
            script.due += script.interval
        if script.step == script.steps:
            self._script, self._sequences = None, array("Q")
            self._control.send(json.dumps({"send_times_ns": self._times}).encode())

    def _step_output(self, script: Script) -> worker_pb2.StepOutput:
        count = len(self._sequences)
        is_last = script.step == script.steps - 1
        output = worker_pb2.StepOutput(
            step=script.step + 1,
            sequence_ids=self._sequences.tobytes(),
            token_ids=self._token_plane(script.step, count),
            finish_codes=bytes([worker_pb2.FINISH_CODE_MAX_TOKENS if is_last else 0]) * count,
        )
        if script.step == 0:
            output.starts.extend(worker_pb2.SequenceStart(sequence_id=id_) for id_ in self._sequences)
        if is_last:
            output.ends.extend(
                worker_pb2.SequenceEnd(sequence_id=id_, completion_tokens=script.steps)
                for id_ in self._sequences
            )
        self._times.append(time.monotonic_ns())
        return output

    def _token_plane(self, step: int, count: int) -> bytes:
        first = step % (NUM_TOKENS - count)
        return self._tokens[first : first + count].tobytes()

    def _send(self, **kind: Any) -> None:
        self._number += 1
        message = worker_pb2.WorkerMessage(number=self._number, **kind)
        self._router.send_multipart([self._service, message.SerializeToString()])

    def _heartbeat(self) -> worker_pb2.Heartbeat:
        load = server_pb2.WorkerLoad(worker_id="scripted", state=server_pb2.SERVER_STATE_SERVING)
        return worker_pb2.Heartbeat(load=load)

    def _config(self) -> worker_pb2.Config:
        config = worker_pb2.Config(
            protocol=1,
            model=self._model,
            max_running_sequences=4096,
            max_queued_requests=4096,
            max_context_tokens=CONTEXT,
        )
        config.worker.worker_id = config.geometry.worker_id = "scripted"
        config.worker.epoch = config.geometry.epoch = self._epoch
        config.worker.state = server_pb2.SERVER_STATE_SERVING
        config.worker.model_id = self._model.model_id
        config.geometry.page_count, config.geometry.page_size = CONTEXT // 16 + 1, 16
        return config


def main() -> None:
    """Serves until it or the process that started it is ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripted_worker")
    parser.add_argument("--parent-watch", type=int, required=True, metavar="PID", help="who starts it")
    for name in ("engine", "control", "model"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    model = server_pb2.Model(
        model_id="scripted",
        vocab_size=CONTEXT,
        tokenizer_sha256=tokenizer_digest(resolve_model(options.model)),  # the service compares
        max_context_tokens=CONTEXT,
    )
    ScriptedWorker(options.engine, options.control, model).serve(options.parent_watch)


if __name__ == "__main__":
    main()
