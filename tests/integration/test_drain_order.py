"""How a service process ends: in order, with a status for everyone, and with exit code 0."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.v1 import cache_pb2, cache_pb2_grpc, generation_pb2_grpc, server_pb2, server_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service import health_messages as health
from service.testing import (
    Refusal,
    RunningService,
    ScriptedWorker,
    WorkerScript,
    loop_thread,
    running_service,
)

ROOT = Path(__file__).resolve().parents[2]


def request_of(max_tokens: int = 4000, **labels: str) -> pb.StreamGenerateRequest:
    spec = pb.GenerationSpec(text="abcdef", stop=pb.StopCriteria(max_tokens=max_tokens))
    spec.labels.update({name.replace("_", ".", 1): value for name, value in labels.items()})
    return pb.StreamGenerateRequest(spec=spec)


def health_watch(channel: grpc.Channel, name: str = "") -> Any:
    watch = channel.unary_stream(
        f"/{health.SERVICE}/Watch",
        request_serializer=health.HealthCheckRequest.SerializeToString,
        response_deserializer=health.HealthCheckResponse.FromString,
    )
    return watch(health.HealthCheckRequest(service=name), timeout=60)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    script = WorkerScript(step_ms=5)
    with running_service(tmp_path, script=script, drain_listen=0.3, grace=0.8) as service:
        yield service


def begin_drain(running: RunningService) -> "Future[None]":
    import asyncio

    return asyncio.run_coroutine_threadsafe(running.service.drain(), loop_thread().loop)


def test_a_drain_lets_the_running_end_refuses_the_new_and_ends_the_watches(
    running: RunningService, wait_until: Any
) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        info = server_pb2_grpc.ServerServiceStub(channel)
        pages = cache_pb2_grpc.CacheServiceStub(channel)
        watch, load = health_watch(channel), info.WatchLoad(server_pb2.WatchLoadRequest(), timeout=60)
        page_map = pages.WatchPageMap(cache_pb2.WatchPageMapRequest(), timeout=60)
        assert next(watch).status == health.SERVING
        next(load)
        short = [stub.StreamGenerate(request_of(60), timeout=60) for _ in range(4)]
        long = [stub.StreamGenerate(request_of(4000), timeout=60) for _ in range(2)]
        queued = [stub.StreamGenerate(request_of(fake_wait_ms="60000"), timeout=60) for _ in range(4)]
        for call in (*short, *long):
            next(call)
        wait_until(lambda: len(running.worker.adds) == 10, "all requests on the worker")
        began = time.monotonic()
        drained = begin_drain(running)
        assert next(watch).status == health.NOT_SERVING
        assert list(watch) == []  # ended with OK
        with pytest.raises(grpc.RpcError) as raised:
            stub.Generate(pb.GenerateRequest(spec=request_of(1).spec), timeout=5)
        refusal = Refusal.of(raised.value)
        assert (refusal.code, refusal.reason, refusal.pushback) == ("UNAVAILABLE", "DRAINING", "100")
        for ended in (load, page_map):
            with pytest.raises(grpc.RpcError) as raised:
                list(ended)
            refusal = Refusal.of(raised.value)
            assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "DRAINING")
        assert info.GetServerInfo(server_pb2.GetServerInfoRequest()).state == server_pb2.SERVER_STATE_DRAINING
        for call in short:
            assert list(call)[-1].WhichOneof("event") == "summary"
        for call in (*long, *queued):
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            refusal = Refusal.of(raised.value)
            assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "DRAINING")
            assert (int(refusal.metadata["tokens_sent"]) > 0) == (call in long)
        assert time.monotonic() - began >= 0.75  # the grace was kept
        drained.result(10)
    assert running.worker.goodbyes == 1


def test_an_idle_service_listens_for_a_while_and_then_ends(running: RunningService) -> None:
    began = time.monotonic()
    begin_drain(running).result(10)
    assert 0.3 <= time.monotonic() - began < 0.75


def test_hurry_ends_the_patience(running: RunningService) -> None:
    with grpc.insecure_channel(running.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(request_of(), timeout=60)
        next(call)
        drained = begin_drain(running)
        running.service.hurry_threadsafe()
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert Refusal.of(raised.value).reason == "DRAINING"
        drained.result(5)


def test_a_reader_that_never_reads_does_not_hold_up_the_drain(tmp_path: Path) -> None:
    script = WorkerScript(step_ms=0, max_context=100_000)
    with running_service(tmp_path, script=script, grace=0.2) as running:
        options = [("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(running.address, options) as channel:
            request = request_of(4000)
            request.spec.output.logprobs = 20
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(request, timeout=60)
            next(call)
            begin_drain(running).result(10)
            call.cancel()


class Process:
    """`python -m service` beside a scripted worker of this process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.worker = ScriptedWorker(f"ipc://{folder}/engine", script=WorkerScript(step_ms=5)).start()
        self.socket = folder / "public.sock"
        command = [
            sys.executable,
            "-m",
            "service",
            "--address",
            f"unix:{self.socket}",
            "--model",
            "random:tiny",
        ]
        command += ["--workers", self.worker.address, "--metrics-address", "", "--drain-listen", "0", *flags]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.channel = grpc.insecure_channel(f"unix:{self.socket}")

    def end(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.worker.stop()


@pytest.fixture
def process(tmp_path: Path, wait_until: Any) -> Iterator[Process]:
    made = Process(tmp_path, "--grace", "30")
    try:
        info = server_pb2_grpc.ServerServiceStub(made.channel)

        def is_serving() -> bool:
            request = server_pb2.GetServerInfoRequest()
            state = info.GetServerInfo(request, timeout=10, wait_for_ready=True).state
            return bool(state == server_pb2.SERVER_STATE_SERVING)

        wait_until(is_serving, "the service to serve")
        yield made
    finally:
        made.end()


def test_the_socket_is_its_owners_only(process: Process) -> None:
    assert process.socket.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0_and_leaves_nothing(process: Process, number: int) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(process.channel)
    call = stub.StreamGenerate(request_of(60), timeout=60)
    next(call)
    process.process.send_signal(number)
    assert list(call)[-1].WhichOneof("event") == "summary"
    assert process.process.wait(10) == 0
    assert not process.socket.exists()
    assert process.worker.goodbyes == 1


def test_a_second_signal_aborts_the_rest(process: Process) -> None:
    call = generation_pb2_grpc.GenerationServiceStub(process.channel).StreamGenerate(request_of(), timeout=60)
    next(call)
    process.process.send_signal(signal.SIGTERM)
    watch = health_watch(process.channel)
    while next(watch).status != health.NOT_SERVING:
        pass
    process.process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    assert (Refusal.of(raised.value).code, Refusal.of(raised.value).reason) == ("UNAVAILABLE", "DRAINING")
    assert process.process.wait(10) == 0
