"""Clients that neither cancel nor close: a process that hangs, a host that is gone. Only time tells.

The promise is made of options of the server: a host that does not acknowledge what is sent is found by
TCP_USER_TIMEOUT, a process that does not answer pings by keepalive.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import pytest

from kvatlas.cli.config import child_environment
from kvatlas.v1 import generation_pb2 as pb
from service.request import AbortReason
from service.server_options import OPTIONS
from service.testing import RunningService, running_service
from service.testing_worker import WorkerScript

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MARGIN_SECONDS = 5.0
SECONDS = {name: value / 1000 for name, value in OPTIONS}
# Endless, and with a token now and then.
REQUEST = pb.StreamGenerateRequest(
    spec=pb.GenerationSpec(text="abc", stop=pb.StopCriteria(max_tokens=4000), labels={"fake.step_ms": "100"})
)
CLIENT = """
import sys, grpc
from kvatlas.v1 import generation_pb2 as pb, generation_pb2_grpc
request = pb.StreamGenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1]))
for message in stub.StreamGenerate(request):
    print(message.WhichOneof("event"), flush=True)
"""


class Client:
    """A process that reads a stream; `prefix` is the command that it runs under."""

    def __init__(self, address: str, *prefix: str) -> None:
        command = [*prefix, sys.executable, "-c", CLIENT, address, REQUEST.SerializeToString().hex()]
        self.process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True)

    def wait_for_tokens(self) -> None:
        assert self.process.stdout is not None
        assert [self.process.stdout.readline().strip() for _ in range(3)] == ["started", "delta", "delta"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class OtherHost:
    """A network namespace with a cable to this one."""

    name = f"kvatlas-{os.getpid()}"
    near, far = f"kva{os.getpid() % 100_000}", "peer"
    address = "10.213.77.1"

    def __init__(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
        _ip("addr", "add", f"{self.address}/30", "dev", self.near)
        _ip("link", "set", self.near, "up")
        _ip("-n", self.name, "addr", "add", "10.213.77.2/30", "dev", self.far)
        _ip("-n", self.name, "link", "set", self.far, "up")

    def vanish(self) -> None:
        """Its end of the cable is gone: nothing is refused, nothing is answered."""
        _ip("-n", self.name, "link", "set", self.far, "down")

    def end(self) -> None:
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as cleanup:
        yield cleanup


def seconds_to_abort(running: RunningService, began: float, wait_until: Callable[..., None]) -> float:
    wait_until(lambda: running.worker.aborts, "the abort", seconds=120)
    seconds = monotonic() - began
    ((ids, reason),) = running.worker.aborts
    assert (len(ids), reason) == (1, AbortReason.CLIENT)
    wait_until(lambda: running.is_idle, "an idle service")
    print(f"found after {seconds:.1f} s")
    return seconds


def test_a_client_that_hangs_is_found_by_its_missing_answer_to_a_ping(
    tmp_path: Path, stack: ExitStack, wait_until: Callable[..., None]
) -> None:
    running = stack.enter_context(running_service(tmp_path, script=WorkerScript()))
    client = Client(running.address)
    stack.callback(client.end)
    client.wait_for_tokens()
    client.process.send_signal(signal.SIGSTOP)
    limit = SECONDS["grpc.keepalive_time_ms"] + SECONDS["grpc.http2.ping_timeout_ms"]
    assert seconds_to_abort(running, monotonic(), wait_until) < limit + MARGIN_SECONDS


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip` for a network namespace"
)
def test_a_host_that_vanishes_is_found_while_sending(
    tmp_path: Path, stack: ExitStack, wait_until: Callable[..., None]
) -> None:
    host = OtherHost()
    stack.callback(host.end)
    settings = {"address": f"{host.address}:0", "insecure": True}
    running = stack.enter_context(running_service(tmp_path, script=WorkerScript(), **settings))
    client = Client(f"{host.address}:{running.service.port}", "ip", "netns", "exec", host.name)
    stack.callback(client.end)
    client.wait_for_tokens()
    host.vanish()
    limit = SECONDS["grpc.keepalive_timeout_ms"]
    assert seconds_to_abort(running, monotonic(), wait_until) < limit + MARGIN_SECONDS
