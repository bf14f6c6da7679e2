"""What a step costs on the seam: `python -m benchmarks.seam`.

The worker's real I/O thread over ipc, a service in another process that reads and counts. Processor time
of the engine's hand-over and of the I/O thread per step, and how old a step is when the service has it.
"""

import argparse
import statistics
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from benchmarks.record import percentile, write_result
from kvatlas.worker.v1 import worker_pb2
from worker.channels import CommandQueue, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription, WorkerState
from worker.link import codec
from worker.link.server import EngineLink
from worker.messages import EngineCommand, LinkMessage, StepOutputs
from worker.scheduling.output import OutputColumns
from worker.status import first_board

AGES = 4096


def read(address: str) -> None:
    """The service: says hello, reads steps, prints their ages in microseconds when the worker closes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, b"reader")
    socket.connect(address)
    hello = worker_pb2.Hello(protocol=1, instance_id="reader", service_epoch=1)
    socket.send(worker_pb2.ServiceMessage(hello=hello).SerializeToString())
    heartbeat = worker_pb2.ServiceMessage(heartbeat=worker_pb2.ServiceHeartbeat()).SerializeToString()
    ages, next_beat = [], 0.0
    while socket.poll(3000):
        message = worker_pb2.WorkerMessage.FromString(socket.recv())
        if message.HasField("step"):
            # The number of a step is when it was handed over, on the clock that both processes share.
            ages.append(time.monotonic_ns() // 1000 - message.step.step)
        if time.monotonic() > next_beat:
            next_beat = time.monotonic() + 0.5
            socket.send(heartbeat)
    print(*ages[-AGES:])


class Seam:
    """A link, and an engine that only hands over."""

    def __init__(self, folder: Path) -> None:
        self.commands: CommandQueue[EngineCommand] = CommandQueue(4096)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(1024)
        pool = PoolDescription(8, 16, 256, 4096, "lru")
        description = WorkerDescription(
            "bench", 1, ModelDescription("m", 1 << 20, 4096), pool, 1, 1, 0, (), "", b""
        )
        board = first_board(description, time.monotonic())
        board.state = WorkerState.SERVING
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = f"ipc://{folder}/engine"
        self.link = EngineLink(
            self.context,
            self.address,
            commands=self.commands,
            outputs=self.outputs,
            status=board,
            to_observer=lambda call: False,
            on_failure=lambda: None,
        )
        self.link.start()

    def close(self) -> None:
        """Ends it."""
        self.link.close()
        self.outputs.close()
        self.context.term()


def measure(num_tokens: int, steps_per_second: float, seconds: float) -> dict[str, float]:
    """Steps of so many tokens at a pace."""
    with TemporaryDirectory() as folder:
        seam = Seam(Path(folder))
        command = [sys.executable, "-m", "benchmarks.seam", "--read", seam.address]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while not seam.link.num_services:
            assert reader.poll() is None, "the reader ended"
            time.sleep(0.01)
        ids = array("Q", [codec.inner_id(1, number) for number in range(num_tokens)])
        tokens, codes = array("I", range(num_tokens)), bytearray(num_tokens)
        io_clock = time.pthread_getcpuclockid(seam.link.thread.ident or 0)
        io_before, own_before = time.clock_gettime(io_clock), time.thread_time()
        num_steps = int(seconds * steps_per_second)
        began = time.monotonic()
        for step in range(num_steps):
            handed_over = time.monotonic_ns() // 1000
            seam.outputs.put(StepOutputs(handed_over, 0.0, {"reader#1": OutputColumns(ids, tokens, codes)}))
            time.sleep(max(0.0, began + (step + 1) / steps_per_second - time.monotonic()))
        io_cpu = time.clock_gettime(io_clock) - io_before
        own_cpu = time.thread_time() - own_before
        threading.Event().wait(0.2)
        seam.close()
        ages = [int(age) for age in (reader.communicate(timeout=30)[0] or "").split()]
    return {
        "tokens_per_step": num_tokens,
        "io_us_per_step": round(io_cpu / num_steps * 1e6, 1),
        "engine_us_per_step": round(own_cpu / num_steps * 1e6, 1),
        "age_us_p50": round(statistics.median(ages)),
        "age_us_p99": round(percentile(ages, 0.99)),
        "messages": len(ages),
    }


def main() -> None:
    """Measures, prints and writes a result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seam", description=__doc__)
    parser.add_argument("--read", metavar="ADDRESS", help="be the service of another run")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/")
    options = parser.parse_args()
    if options.read:
        read(options.read)
        return
    figures = [measure(tokens, 200.0, options.seconds) for tokens in (32, 256, 1024)]
    for figure in figures:
        print(figure)
    if options.write:
        print(write_result("seam", {"cases": figures}, ["protobuf", "pyzmq", "numpy"]))


if __name__ == "__main__":
    main()
