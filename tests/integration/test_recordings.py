"""Recording a running server, fetching it, replaying it, and asking what another pool had done."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvatlas.client.errors import InvalidRequest, KvatlasError, NotFound
from kvatlas.client.recordings import Recorder
from kvatlas.client.sync import Client
from kvatlas.v1 import cache_pb2, cache_pb2_grpc, server_pb2, server_pb2_grpc
from worker.trace.loading import load
from worker.trace.recording import Recording
from worker.trace.replay import Replay

ROOT = Path(__file__).resolve().parents[2]
PAGES, PAGE_SIZE = 96, 8
CLIENTS = 4
REQUESTS = 40  # of each client


@pytest.fixture
def server(start_server: Callable[..., Any], tmp_path: Path) -> Any:
    """A small pool whose cache is worth something; recordings go to `tmp_path`."""
    settings = {
        "recordings": tmp_path / "kept",
        "max_context": 256,
        "max_running": 8,
        "fake_step_ms": 2,
        "fingerprint_key": "00ff",
    }
    flags = [part for name, value in settings.items() for part in ("--set-worker", f"{name}={value}")]
    sizes = ("--page-size", str(PAGE_SIZE), "--num-pages", str(PAGES))
    return start_server("--runner", "fake", "--model", "random:tiny", *sizes, *flags)


def prompts(client: int) -> list[list[int]]:
    """Three beginnings for everybody, an end of one's own."""
    found = []
    for number in range(REQUESTS):
        common = [(number * 7 + client) % 3 + 10] * 40
        found.append(common + [20 + (number * 13 + client * 5 + at) % 100 for at in range(10 + number % 20)])
    return found


def drive(address: str) -> None:
    """Some clients at once, one request after the other."""

    def run(number: int) -> None:
        with Client(address) as client:
            for at, prompt in enumerate(prompts(number)):
                client.generate(prompt, max_tokens=4 + at % 9, temperature=0.0)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cache_stub(channel: grpc.Channel) -> Any:
    return cache_pb2_grpc.CacheServiceStub(channel)  # type: ignore[no-untyped-call]


def kvatlas(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "kvatlas.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90, check=False)


def without_a_reader(*arguments: str) -> "subprocess.CompletedProcess[str]":
    reads, writes = os.pipe()
    os.close(reads)
    try:
        return subprocess.run(
            [sys.executable, "-m", "kvatlas.cli", *arguments],
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"},
            timeout=90,
            check=False,
        )
    finally:
        os.close(writes)


def test_a_recording_of_a_running_server_is_fetched_replayed_and_run_again(
    server: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    admin = server.facts["admin_address"]
    with Recorder(admin) as recorder:
        assert list(recorder.list()) == []
        started = recorder.start(note="a test")
        assert (started.end_cause, started.note) == (0, "a test")
        drive(server.address)
        with pytest.raises(KvatlasError) as running:
            recorder.start()
        assert running.value.reason == "RECORDING_RUNNING"
        assert running.value.metadata["recording_id"] == started.recording_id
        with pytest.raises(KvatlasError) as unreadable:
            recorder.download(started.recording_id, tmp_path / "too-early")
        assert unreadable.value.reason == "RECORDING_RUNNING"
        ended = recorder.stop(started.recording_id)
        assert recorder.stop(started.recording_id).byte_count == ended.byte_count
        assert [each.recording_id for each in recorder.list()] == [started.recording_id]
        path = tmp_path / "fetched.kvrec"
        recorder.download("", path)
    assert path.read_bytes() == (tmp_path / "kept" / f"{started.recording_id}.kvrec").read_bytes()
    assert ended.request_count == CLIENTS * REQUESTS
    replay = Replay(Recording(path))
    report = replay.run()
    assert (report.end, report.num_events, report.lost_records) == ("STOPPED", ended.event_count, 0)
    assert report.num_sequences == CLIENTS * REQUESTS
    with Client(server.address) as client:
        # The service's copy follows the pool by a fraction of a second.
        states = replay.ledger.states.tobytes()
        same = lambda: client.page_map().planes["states"].tobytes() == states  # noqa: E731
        wait_until(same, "the pool that the server has")
        stats = client.page_pool().stats
    loaded = load(path)
    assert loaded.observed.num_requests == CLIENTS * REQUESTS
    assert loaded.observed.hit_tokens == stats.hit_tokens_total
    assert loaded.step_time is not None
    assert 0.001 < loaded.step_time.base < 1.0
    estimates_say_what_was_observed(server.address, stats.hit_tokens_total)
    the_commands_show_it(admin, path, tmp_path)


def estimates_say_what_was_observed(address: str, hit_tokens: int) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = cache_stub(channel)
        answer = stub.EstimateCache(cache_pb2.EstimateCacheRequest(), timeout=60)
        assert [each.pool_slots // (PAGES * PAGE_SIZE // 4) for each in answer.estimates] == [
            1, 2, 3, 4, 6, 8, 12, 16,
        ]  # fmt: skip
        assert answer.sample.request_count == CLIENTS * REQUESTS
        assert answer.sample.token_granularity == 8
        assert answer.observed.prefix.hit_tokens == hit_tokens
        today = answer.estimates[3]
        allowed = max(3 * today.hit_ratio_error, 0.02)
        assert abs(today.hit_ratio - answer.observed.hit_ratio) <= allowed
        ratios = [each.hit_ratio for each in answer.estimates]
        assert ratios[0] < ratios[-1], "more memory finds more"
        asked = cache_pb2.EstimateCacheRequest(
            pool_slots=[1024], page_sizes=[8, 16], eviction_policies=["lru", "fifo", "cost"]
        )
        assert len(stub.EstimateCache(asked, timeout=60).estimates) == 6
        for bad in (
            cache_pb2.EstimateCacheRequest(page_sizes=[12]),
            cache_pb2.EstimateCacheRequest(eviction_policies=["random"]),
            cache_pb2.EstimateCacheRequest(pool_slots=[3]),
            cache_pb2.EstimateCacheRequest(pool_slots=range(100, 3400, 100)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.EstimateCache(bad, timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def the_commands_show_it(admin: str, path: Path, folder: Path) -> None:
    listed = kvatlas("record", "list", "--admin-address", admin, "--json")
    assert json.loads(listed.stdout)[0]["end_cause"] == "stopped"
    fetched = kvatlas("record", "get", "--admin-address", admin, "-o", str(folder / "again.kvrec"))
    assert (fetched.returncode, fetched.stdout.strip()) == (0, str(folder / "again.kvrec"))
    assert (folder / "again.kvrec").read_bytes() == path.read_bytes()
    checked = kvatlas("replay", str(path))
    assert checked.returncode == 0
    assert "STOPPED" in checked.stdout
    unread = without_a_reader("replay", str(path))
    assert (unread.returncode, unread.stderr) == (141, "")
    picture = folder / "curve.svg"
    table = kvatlas(
        "whatif", str(path), "--pages", "0.5x,1x,2x", "--page-size", "8,16", "--picture", str(picture)
    )
    assert table.returncode == 0, table.stderr
    assert re.search(r"observed then, of \d+ requests? that had ended: hits ", table.stdout)
    assert picture.read_text().startswith("<?xml")
    refused = kvatlas("whatif", str(path), "--host-tier", "20GB")
    assert refused.returncode == 2
    assert "no host tier" in refused.stderr


def test_what_cannot_be_recorded_is_refused_with_its_reason(server: Any, tmp_path: Path) -> None:
    with Recorder(server.facts["admin_address"]) as recorder:
        with pytest.raises(NotFound) as missing:
            recorder.stop("nothing")
        assert missing.value.reason == "RECORDING_NOT_FOUND"
        with pytest.raises(NotFound):
            recorder.download("", tmp_path / "nothing")
        with pytest.raises(InvalidRequest) as invalid:
            recorder.start(lookback_seconds=1e6, max_seconds=0.01, max_bytes=5, note="x" * 300)
        fields = {violation.field for violation in invalid.value.violations}
        assert fields == {"lookback", "max_duration", "max_bytes", "note"}
        with pytest.raises(NotFound) as stranger:
            recorder.start("another-worker")
        assert stranger.value.reason == "WORKER_NOT_FOUND"
        (tmp_path / "kept").write_text("a file where the folder should be")
        with pytest.raises(KvatlasError) as failed:
            recorder.start()
        assert failed.value.reason == "RECORDING_FAILED"
    assert kvatlas("record", "dance", "--admin-address", server.facts["admin_address"]).returncode == 2
    public = grpc.insecure_channel(server.address)
    stub: Any = server_pb2_grpc.AdminServiceStub(public)  # type: ignore[no-untyped-call]
    with public, pytest.raises(grpc.RpcError) as elsewhere:
        stub.ListRecordings(server_pb2.ListRecordingsRequest(), timeout=60)
    assert elsewhere.value.code() is grpc.StatusCode.UNIMPLEMENTED, "only on the admin listener"


def test_an_estimate_that_nobody_waits_for_ends_with_its_process(
    server: Any, wait_until: Callable[..., None]
) -> None:
    drive(server.address)
    with grpc.insecure_channel(server.address) as channel:
        stub = cache_stub(channel)
        many = cache_pb2.EstimateCacheRequest(
            pool_slots=range(256, 1280, 32),
            page_sizes=[8, 16],
            eviction_policies=["lru", "lfu", "fifo", "cost"],
        )
        call = stub.EstimateCache.future(many, timeout=600)
        wait_until(lambda: estimators(server), "the estimate's process")
        call.cancel()
        wait_until(lambda: not estimators(server), "the end of that process")
        with pytest.raises(grpc.RpcError) as late:
            stub.EstimateCache(many, timeout=0.7)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: not estimators(server), "the end of the late one")
        assert stub.EstimateCache(cache_pb2.EstimateCacheRequest(), timeout=60).estimates


def estimators(server: Any) -> list[str]:
    """Command lines of the worker's children."""
    worker = server.process_ids["worker"]
    children = Path(f"/proc/{worker}/task").glob("*/children")
    ids = [number for each in children for number in each.read_text().split()]
    lines = []
    for number in ids:
        try:
            lines.append(Path(f"/proc/{number}/cmdline").read_text())
        except OSError:
            continue
    return [line for line in lines if "worker.trace.estimate" in line]
