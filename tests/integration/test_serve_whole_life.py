"""`kvatlas serve` with a real worker, start to end: a worker is replaced, then everything drains."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from kvatlas.v1 import cache_pb2, cache_pb2_grpc, generation_pb2_grpc, server_pb2, server_pb2_grpc
from kvatlas.v1 import generation_pb2 as pb
from service import health_messages as health
from service.testing import Refusal
from service.testing_fleet import FAULTY_TOKENS, spec_of, tokens_of

CALL_SECONDS = 600.0  # only ends a test that hangs
SERVE = ("--model", "random:tiny", "--num-pages", "400", "--max-running", "5", "--grace", "300")
FAULTS = ("--set-worker", "debug_faults=requests", "--set-worker", "threads=1")


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.slow
def test_a_full_device_costs_a_worker_and_a_drain_ends_everything_in_order(
    start_server: Any, wait_until: Callable[..., None]
) -> None:
    """Four streams, four queued, a watch of each kind; exit code 0, no child, socket, shared memory left."""
    memory_before = shared_memory()
    server = start_server(*SERVE, *FAULTS)
    folder = Path(server.facts["folder"])
    with grpc.insecure_channel(server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        info = server_pb2_grpc.ServerServiceStub(channel)

        def stream(spec: pb.GenerationSpec) -> Any:
            return stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=CALL_SECONDS)

        def fault(name: str, max_tokens: int = 1000) -> Any:
            return stream(spec_of(chr(FAULTY_TOKENS[name]) * 8, max_tokens))

        def epoch() -> int:
            workers = info.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=CALL_SECONDS).workers
            return next((each.epoch for each in workers if each.state == server_pb2.SERVER_STATE_SERVING), 0)

        first = epoch()
        with pytest.raises(grpc.RpcError) as raised:
            list(fault("out_of_memory"))
        refusal = Refusal.of(raised.value)
        assert (refusal.code, refusal.reason) == ("INTERNAL", "DEVICE_OUT_OF_MEMORY")
        wait_until(lambda: epoch() > first, "a new life of the worker")
        assert "worker ended (exit code 75); again in" in server.log()

        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2
        holder = fault("slow_steps")
        specs = [spec_of(f"request {number}", 100) for number in range(8)]
        running = [stream(spec) for spec in specs[:4]]
        seen = [[next(call)] for call in running]
        queued = [stream(spec) for spec in specs[4:]]
        load = info.WatchLoad(server_pb2.WatchLoadRequest(), timeout=CALL_SECONDS)
        wait_until(lambda: next(load).load.waiting_requests == 4, "four in the queue")
        watch = channel.unary_stream(
            f"/{health.SERVICE}/Watch",
            request_serializer=health.HealthCheckRequest.SerializeToString,
            response_deserializer=health.HealthCheckResponse.FromString,
        )(health.HealthCheckRequest(), timeout=CALL_SECONDS)
        assert next(watch).status == health.SERVING
        pages = cache_pb2_grpc.CacheServiceStub(channel)
        page_map = pages.WatchPageMap(cache_pb2.WatchPageMapRequest(), timeout=CALL_SECONDS)
        next(page_map)

        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health.NOT_SERVING
        assert list(watch) == []  # ended with OK
        for ended in (load, page_map, stream(spec_of("too late"))):
            with pytest.raises(grpc.RpcError) as raised:
                list(ended)
            refusal = Refusal.of(raised.value)
            assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "DRAINING")
        holder.cancel()
        for call, messages in zip(running, seen, strict=True):
            assert len(tokens_of([*messages, *call])) == 100
        for call in queued:
            assert len(tokens_of(list(call))) == 100
    assert server.stop() == 0
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert len(gone) == len(children)
    assert not folder.exists()
    assert shared_memory() <= memory_before
