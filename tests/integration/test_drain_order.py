"""How a service process ends: in order, with a status for everyone, and with exit code 0.

Requests are held by the scripted worker until the drain was seen; a grace that is not to be waited for is
longer than any test.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
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
from service import server
from service.testing import OWN_CONNECTION, Refusal, RunningService, loop_thread, running_service
from service.testing_worker import ScriptedWorker, WorkerScript

ROOT = Path(__file__).resolve().parents[2]
CALL_SECONDS = 120.0  # ends a call that hangs
LONG = 600.0  # a grace that nobody waits for
HELD = {"fake_hold_at": "5"}


def request_of(request_id: str = "", max_tokens: int = 60, **labels: str) -> pb.StreamGenerateRequest:
    spec = pb.GenerationSpec(
        text="abcdef", request_id=request_id, stop=pb.StopCriteria(max_tokens=max_tokens)
    )
    spec.labels.update({name.replace("_", ".", 1): value for name, value in labels.items()})
    return pb.StreamGenerateRequest(spec=spec)


def health_watch(channel: grpc.Channel, name: str = "") -> Any:
    watch = channel.unary_stream(
        f"/{health.SERVICE}/Watch",
        request_serializer=health.HealthCheckRequest.SerializeToString,
        response_deserializer=health.HealthCheckResponse.FromString,
    )
    return watch(health.HealthCheckRequest(service=name), timeout=CALL_SECONDS)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path, script=WorkerScript(step_ms=0), drain_listen=0.3, grace=LONG) as service:
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
        watch, load = (
            health_watch(channel),
            info.WatchLoad(server_pb2.WatchLoadRequest(), timeout=CALL_SECONDS),
        )
        page_map = pages.WatchPageMap(cache_pb2.WatchPageMapRequest(), timeout=CALL_SECONDS)
        assert next(watch).status == health.SERVING
        next(load)

        def start(name: str, count: int, **labels: str) -> list[Any]:
            requests = [request_of(f"{name}-{number}", **labels) for number in range(count)]
            return [stub.StreamGenerate(request, timeout=CALL_SECONDS) for request in requests]

        short, long = start("short", 4, **HELD), start("long", 2, **HELD)
        queued = start("queued", 4, fake_wait_ms="600000")
        for call in (*short, *long):
            next(call)
        wait_until(lambda: len(running.worker.adds) == 10, "all requests on the worker")
        drained = begin_drain(running)
        assert next(watch).status == health.NOT_SERVING
        assert list(watch) == []  # ended with OK
        with pytest.raises(grpc.RpcError) as raised:
            stub.Generate(pb.GenerateRequest(spec=request_of().spec), timeout=CALL_SECONDS)
        refusal = Refusal.of(raised.value)
        assert (refusal.code, refusal.reason, refusal.pushback) == ("UNAVAILABLE", "DRAINING", "100")
        for ended in (load, page_map):
            with pytest.raises(grpc.RpcError) as raised:
                list(ended)
            refusal = Refusal.of(raised.value)
            assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "DRAINING")
        assert info.GetServerInfo(server_pb2.GetServerInfoRequest()).state == server_pb2.SERVER_STATE_DRAINING
        running.worker.let_go(*(f"short-{number}" for number in range(4)))
        for call in short:
            assert list(call)[-1].WhichOneof("event") == "summary"
        assert not any(call.done() for call in (*long, *queued)), "the grace is theirs"
        running.service.hurry_threadsafe()
        for call in (*long, *queued):
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            refusal = Refusal.of(raised.value)
            assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "DRAINING")
            assert (int(refusal.metadata["tokens_sent"]) > 0) == (call in long)
        drained.result(CALL_SECONDS)
    wait_until(lambda: running.worker.goodbyes == 1, "the goodbye on the worker")


def test_what_outlasts_the_grace_is_told_so(tmp_path: Path) -> None:
    with (
        running_service(tmp_path, script=WorkerScript(step_ms=0), drain_listen=0.0, grace=0.5) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.StreamGenerate(request_of(**HELD), timeout=CALL_SECONDS)
        next(call)
        began = time.monotonic()
        drained = begin_drain(running)
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert Refusal.of(raised.value).reason == "DRAINING"
        assert time.monotonic() - began >= 0.45  # the grace was kept
        drained.result(CALL_SECONDS)


def test_an_idle_service_listens_for_a_while_and_then_ends_without_using_its_grace(
    running: RunningService,
) -> None:
    began = time.monotonic()
    begin_drain(running).result(CALL_SECONDS)
    assert time.monotonic() - began >= 0.3


def test_hurry_ends_the_patience(running: RunningService) -> None:
    with grpc.insecure_channel(running.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.StreamGenerate(request_of(**HELD), timeout=CALL_SECONDS)
        next(call)
        drained = begin_drain(running)
        running.service.hurry_threadsafe()
        with pytest.raises(grpc.RpcError) as raised:
            list(call)
        assert Refusal.of(raised.value).reason == "DRAINING"
        drained.result(CALL_SECONDS)


def test_a_reader_that_never_reads_does_not_hold_up_the_drain(tmp_path: Path) -> None:
    script = WorkerScript(step_ms=0, max_context=100_000)
    with running_service(tmp_path, script=script, grace=0.2) as running:
        options = [("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(running.address, options) as channel:
            request = request_of(max_tokens=4000)
            request.spec.output.logprobs = 20
            call = generation_pb2_grpc.GenerationServiceStub(channel).StreamGenerate(
                request, timeout=CALL_SECONDS
            )
            next(call)
            begin_drain(running).result(CALL_SECONDS)
            call.cancel()


@pytest.mark.parametrize("is_done_in_time", [True, False])
def test_a_prompt_that_is_still_read_when_the_grace_is_over_is_told_so_and_reaches_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any, is_done_in_time: bool
) -> None:
    """It went to a worker after the grace, and then ended in gRPC's core, without a reason."""
    monkeypatch.setattr(server, "ABORT_SECONDS", LONG if is_done_in_time else 0.0)
    begun, done = threading.Event(), threading.Event()
    with running_service(tmp_path, script=WorkerScript(step_ms=0), grace=0.0) as running:
        tokenizer, live = running.service.backstage.prompts.tokenizer, running.service.backstage.live
        encode = tokenizer.encode

        def reading(text: str) -> Any:
            begun.set()
            assert done.wait(CALL_SECONDS)
            return encode(text)

        monkeypatch.setattr(tokenizer, "encode", reading)
        request = request_of()
        request.spec.text = "a" * 2000  # read on a thread
        with grpc.insecure_channel(running.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.StreamGenerate(request, timeout=CALL_SECONDS)
            wait_until(begun.is_set, "the prompt being read")
            drained = begin_drain(running)
            if is_done_in_time:
                wait_until(lambda: live.everything()[0].failure is not None, "the end of the grace")
                done.set()
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            done.set()
            refusal = Refusal.of(raised.value)
            assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "DRAINING")
            assert refusal.metadata["tokens_sent"] == "0"
            drained.result(CALL_SECONDS)
        assert running.worker.adds == []


class Process:
    """`python -m service` beside a scripted worker of this process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.worker = ScriptedWorker(f"ipc://{folder}/engine", script=WorkerScript(step_ms=0)).start()
        self.socket = folder / "public.sock"
        self.address = f"unix:{self.socket}"
        command = [
            sys.executable,
            "-m",
            "service",
            "--address",
            self.address,
            "--model",
            "random:tiny",
        ]
        command += ["--workers", self.worker.address, "--metrics-address", "", "--drain-listen", "0", *flags]
        self.command = command
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
        self.process = subprocess.Popen(command, env=self.environment, stderr=subprocess.PIPE, text=True)
        self.channel = grpc.insecure_channel(self.address)

    def end(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.worker.stop()


def wait_for_answer(address: str) -> None:
    """Of whoever listens there, once somebody does."""
    with grpc.insecure_channel(address, [OWN_CONNECTION]) as channel:
        stub = server_pb2_grpc.ServerServiceStub(channel)
        stub.GetServerInfo(server_pb2.GetServerInfoRequest(), wait_for_ready=True, timeout=CALL_SECONDS)


def test_a_second_server_on_a_unix_socket_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """gRPC took the path from under the first, and the second removed it when it ended."""
    first = Process(tmp_path)
    try:
        wait_for_answer(first.address)
        second = subprocess.run(
            first.command, env=first.environment, stderr=subprocess.PIPE, text=True, timeout=CALL_SECONDS
        )
        assert second.returncode == 1
        assert f"address {first.address} is taken by another server" in second.stderr
        wait_for_answer(first.address)
        assert first.process.poll() is None
        first.process.kill()
        first.process.wait()
        assert first.socket.exists(), "what a killed server leaves"
        again = subprocess.Popen(first.command, env=first.environment, stderr=subprocess.DEVNULL)
        try:
            wait_for_answer(first.address)
        finally:
            again.kill()
            again.wait()
    finally:
        first.end()


@pytest.fixture
def process(tmp_path: Path, wait_until: Any) -> Iterator[Process]:
    made = Process(tmp_path, "--grace", str(LONG))
    try:
        info = server_pb2_grpc.ServerServiceStub(made.channel)

        def is_serving() -> bool:
            request = server_pb2.GetServerInfoRequest()
            state = info.GetServerInfo(request, timeout=CALL_SECONDS, wait_for_ready=True).state
            return bool(state == server_pb2.SERVER_STATE_SERVING)

        wait_until(is_serving, "the service to serve")
        yield made
    finally:
        made.end()


def test_the_socket_is_its_owners_only(process: Process) -> None:
    assert process.socket.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0_and_leaves_nothing(
    process: Process, number: int, wait_until: Any
) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(process.channel)
    call = stub.StreamGenerate(request_of(**HELD), timeout=CALL_SECONDS)
    next(call)
    watch = health_watch(process.channel)
    assert next(watch).status == health.SERVING
    process.process.send_signal(number)
    while next(watch).status != health.NOT_SERVING:
        pass
    process.worker.let_go()
    assert list(call)[-1].WhichOneof("event") == "summary"
    assert process.process.wait(CALL_SECONDS) == 0
    assert not process.socket.exists()
    wait_until(lambda: process.worker.goodbyes == 1, "the goodbye on the worker")


def test_a_second_signal_aborts_the_rest(process: Process) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(process.channel)
    call = stub.StreamGenerate(request_of(**HELD), timeout=CALL_SECONDS)
    next(call)
    watch = health_watch(process.channel)
    assert next(watch).status == health.SERVING
    process.process.send_signal(signal.SIGTERM)
    while next(watch).status != health.NOT_SERVING:
        pass
    process.process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as raised:
        list(call)
    assert (Refusal.of(raised.value).code, Refusal.of(raised.value).reason) == ("UNAVAILABLE", "DRAINING")
    assert process.process.wait(CALL_SECONDS) == 0


def test_an_idle_service_answers_the_operator_before_it_ends(tmp_path: Path) -> None:
    with (
        running_service(tmp_path, drain_listen=0.0, admin_address="127.0.0.1:0") as running,
        grpc.insecure_channel(f"127.0.0.1:{running.service.admin_port}") as channel,
    ):
        end = asyncio.run_coroutine_threadsafe(running.service.serve(), loop_thread().loop)
        admin: Any = server_pb2_grpc.AdminServiceStub(channel)
        assert admin.StartDrain(server_pb2.StartDrainRequest(), timeout=CALL_SECONDS).running_requests == 0
        end.result(CALL_SECONDS)
