"""A tcp seam with keys: a real worker and services with the right key, another one, and none."""

import os
import re
import select
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.seam_keys import read_key, write_pair
from kvatlas.v1 import cache_pb2, generation_pb2
from service.testing import RunningService, running_service

ROOT = Path(__file__).resolve().parents[2]
CANARY = "canary-7d1f-request"


class Tap:
    """Stands between the two ends and keeps what passes. Ends when told to."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.seen = bytearray()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._carry, args=(near,))
                self._threads.append(thread)
                thread.start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._target)) as far, suppress(OSError):
            other = {near: far, far: near}
            while not self._stopping.is_set():
                for ready in select.select([near, far], [], [], 0.05)[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    self.seen += data
                    other[ready].sendall(data)


@dataclass
class KeyedWorker:
    """A worker with keys in a process of its own."""

    folder: Path
    engine: str = ""
    metrics: str = ""

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text(errors="replace")

    @property
    def port(self) -> int:
        return int(self.engine.rpartition(":")[2])

    def refused(self, reason: str) -> float:
        with urllib.request.urlopen(self.metrics, timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(rf'^kvatlas_seam_refused_total\{{reason="{reason}"\}} (\S+)$', text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def service(self, key: str = "service", peers: str = "worker.pub", **settings: Any) -> Any:
        names = {"seam_key": str(self.folder / f"{key}.key"), "seam_peers": str(self.folder / peers)}
        words = {
            "workers": (self.engine,),
            "instance_id": key or "plain",
            **(names if key else {}),
            **settings,
        }
        return running_service(self.folder, num_workers=0, ready=False, **words)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, wait_until: Any) -> Iterator[KeyedWorker]:
    made = KeyedWorker(tmp_path_factory.mktemp("seam"))
    folder = made.folder
    for name in ("worker", "service", "stranger", "other"):
        write_pair(folder, name)
    (folder / "known.pub").write_text((folder / "service.pub").read_text())
    command = [
        sys.executable,
        "-m",
        "worker",
        "--runner",
        "fake",
        "--model",
        "random:tiny",
        "--worker-id",
        "keyed",
    ]
    command += ["--engine-address", "tcp://127.0.0.1:0", "--pages-address", "tcp://127.0.0.1:0"]
    command += ["--seam-key", str(folder / "worker.key"), "--seam-peers", str(folder / "known.pub")]
    command += ["--metrics-port", "0", "--num-pages", "64", "--page-size", "4"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log)
    try:
        wait_until(lambda: "event=listening" in made.log or process.poll() is not None, "the worker")
        found = re.search(r"event=listening .*engine=(\S+) .*metrics_port=(\d+)", made.log)
        assert found is not None, made.log
        made.engine, made.metrics = found[1], f"http://127.0.0.1:{found[2]}/metrics"
        yield made
    finally:
        process.terminate()
        assert process.wait(30) == 0, made.log


def usable(service: RunningService) -> bool:
    return bool(service.service.backstage.pool.usable)


def failures(service: RunningService, reason: str) -> float:
    return float(service.service.backstage.metrics.seam_failures[reason]._value.get())


def answer(service: RunningService, request_id: str = "") -> Any:
    spec = generation_pb2.GenerationSpec(
        text="abcdefgh", stop={"max_tokens": 4, "ignore_eos": True}, request_id=request_id
    )
    with grpc.insecure_channel(service.address) as channel:
        call = channel.unary_unary(
            "/kvatlas.v1.GenerationService/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )
        return call(generation_pb2.GenerateRequest(spec=spec), timeout=60)


def free_pages(service: RunningService) -> int:
    """As the feed of the pages socket tells."""
    with grpc.insecure_channel(service.address) as channel:
        call = channel.unary_unary(
            "/kvatlas.v1.CacheService/GetPagePool",
            request_serializer=cache_pb2.GetPagePoolRequest.SerializeToString,
            response_deserializer=cache_pb2.GetPagePoolResponse.FromString,
        )
        try:
            return int(call(cache_pb2.GetPagePoolRequest(), timeout=60).stats.free_pages)
        except grpc.RpcError:
            return -1


def test_with_the_right_keys_both_sockets_work_and_a_listener_reads_nothing(
    worker: KeyedWorker, wait_until: Any
) -> None:
    with tapped(worker.port) as tap, worker.service(workers=(f"tcp://127.0.0.1:{tap.port}",)) as service:
        wait_until(lambda: usable(service), "the worker")
        assert answer(service, CANARY).usage.completion_tokens == 4
        wait_until(lambda: free_pages(service) > 0, "a page map from the pages socket")
        assert failures(service, "key") + failures(service, "handshake") == 0
    assert len(tap.seen) > 1000
    assert CANARY.encode() not in tap.seen
    assert b"CURVE" in tap.seen, "the tap saw the handshake"


def test_without_keys_a_listener_reads_request_ids(tmp_path: Path, wait_until: Any) -> None:
    """The counter-proof of the test before: what the tap would see."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    command = [
        sys.executable,
        "-m",
        "worker",
        "--runner",
        "fake",
        "--model",
        "random:tiny",
        "--metrics-port",
        "-1",
    ]
    command += ["--engine-address", "tcp://127.0.0.1:0", "--pages-address", "tcp://127.0.0.1:0"]
    log = tmp_path / "worker.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=file)
    try:
        wait_until(lambda: "event=listening" in log.read_text(), "the worker")
        found = re.search(r"engine=tcp://127.0.0.1:(\d+)", log.read_text())
        assert found is not None
        with (
            tapped(int(found[1])) as tap,
            running_service(
                tmp_path, num_workers=0, ready=False, workers=(f"tcp://127.0.0.1:{tap.port}",)
            ) as plain,
        ):
            wait_until(lambda: usable(plain), "the worker")
            answer(plain, CANARY)
        assert CANARY.encode() in tap.seen
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def tapped(port: int) -> Iterator[Tap]:
    tap = Tap(port)
    try:
        yield tap
    finally:
        tap.close()


def test_a_key_that_the_worker_does_not_know_is_refused_counted_and_named_until_it_is_known(
    worker: KeyedWorker, wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = worker.refused("unknown_key")
    with worker.service() as right, worker.service("stranger") as stranger:
        wait_until(lambda: usable(right), "the worker")
        wait_until(lambda: failures(stranger, "key") >= 2, "two attempts with a wrong key")
        assert not usable(stranger)
        with pytest.raises(grpc.RpcError) as refused:
            answer(stranger)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert worker.refused("unknown_key") >= before + 2
        key = read_key(worker.folder / "stranger.key")
        assert key.public.decode() in worker.log, "the log says whose key to add"
        assert "it does not know this service's key" in caplog.text
        assert key.secret.decode() not in worker.log + caplog.text
        assert answer(right).usage.completion_tokens == 4, "neighbours are unharmed"

        known = worker.folder / "known.pub"
        both = "".join((worker.folder / f"{name}.pub").read_text() for name in ("service", "stranger"))
        replace_file(known, both)
        wait_until(lambda: usable(stranger), "the worker, once it knows the key")
        assert answer(stranger).usage.completion_tokens == 4
        replace_file(known, "no key\n")
        assert answer(right).usage.completion_tokens == 4
    with worker.service() as right:
        wait_until(lambda: usable(right), "a connection by the old file")
    assert "seam_peers_refused" in worker.log
    replace_file(known, both)


def replace_file(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(text)
    aside.replace(path)


def test_a_worker_with_another_key_is_not_spoken_to_and_a_second_key_is_tried(
    worker: KeyedWorker, wait_until: Any
) -> None:
    """As while a worker's key is being replaced: the file holds both."""
    before = worker.refused("handshake")
    with worker.service(peers="other.pub") as wrong:
        wait_until(lambda: failures(wrong, "handshake") >= 2, "two attempts at a worker of another key")
        assert not usable(wrong)
    assert worker.refused("handshake") >= before + 1
    lines = [(worker.folder / f"{name}.pub").read_text() for name in ("other", "worker")]
    (worker.folder / "both.pub").write_text("".join(lines))
    with worker.service(peers="both.pub") as right:
        wait_until(lambda: usable(right), "the second key")
        assert answer(right).usage.completion_tokens == 4
        assert failures(right, "handshake") == 1


def test_a_service_without_a_key_is_refused(worker: KeyedWorker, wait_until: Any) -> None:
    before = worker.refused("handshake")
    with worker.service("") as plain:
        wait_until(lambda: failures(plain, "handshake") >= 1, "a refusal")
        assert not usable(plain)
        wait_until(lambda: worker.refused("handshake") > before, "the worker's count")


def test_bytes_that_are_no_zeromq_and_connections_that_say_nothing_harm_nobody(
    worker: KeyedWorker, wait_until: Any
) -> None:
    with worker.service() as right:
        wait_until(lambda: usable(right), "the worker")
        before = worker.refused("handshake")
        silent = [socket.create_connection(("127.0.0.1", worker.port)) for _ in range(20)]
        for text in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 64,
            b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03" * 400,
            b"",
        ):
            with socket.create_connection(("127.0.0.1", worker.port)) as stranger:
                stranger.sendall(text)
        wait_until(lambda: worker.refused("handshake") >= before + 2, "handshakes that failed")
        assert answer(right).usage.completion_tokens == 4
        for each in silent:
            each.close()


@pytest.mark.parametrize("name", ["worker", "service"])
def test_a_process_with_a_key_that_others_can_read_does_not_start(tmp_path: Path, name: str) -> None:
    key, pub = write_pair(tmp_path, name)
    key.chmod(0o644)
    words = ["--model", "random:tiny", "--seam-key", str(key), "--seam-peers", str(pub)]
    words += (
        ["--runner", "fake"] if name == "worker" else ["--address", "127.0.0.1:0", "--metrics-address", ""]
    )
    if name == "worker":
        words += ["--engine-address", "tcp://127.0.0.1:0", "--pages-address", "tcp://127.0.0.1:0"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    done = subprocess.run(
        [sys.executable, "-m", name, *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    assert "event=start_failed" in done.stderr
    assert "chmod 0640" in done.stderr
