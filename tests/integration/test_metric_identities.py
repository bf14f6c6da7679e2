"""Counters as arithmetic: what a mixed load leaves in both processes' series, scrape by scrape.

Worker and service are real; the device is made of lists. Requests end in every way there is, on a pool
that is too small for them.
"""

import random
import shutil
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.v1 import cache_pb2, cache_pb2_grpc, generation_pb2, generation_pb2_grpc

SETTINGS = (
    *("--runner", "fake", "--model", "random:tiny", "--num-pages", "48"),
    *("--set-worker", "page_size=4", "--set-worker", "max_running=8", "--set-worker", "fake_step_ms=4"),
    *("--set-worker", "audit_interval=0.1"),
)
NUM_REQUESTS = 120
CALL_SECONDS = 120.0  # ends a call that hangs
MOST_PROMPT_TOKENS = 120
POLL_SECONDS = 0.2
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fetch(port: int, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
        text: str = answer.read().decode()
        return text


def scrape(port: int) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(fetch(port))
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the series of a name that have these labels."""
    return sum(v for (n, has), v in samples.items() if n == name and labels.items() <= dict(has).items())


@dataclass
class Seen:
    """What clients saw, all threads together."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prefix: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    completed_tokens: int = 0
    page_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Poller:
    """Scrapes both processes all the time and compares each scrape with itself and with the one before."""

    def __init__(self, worker: int, service: int) -> None:
        self._ports = (worker, service)
        self._before: list[Samples] = [{}, {}]
        self._stop = threading.Event()
        self.num_scrapes = 0
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            for number, port in enumerate(self._ports):
                now = scrape(port)
                self.faults += counters_that_fell(self._before[number], now)
                self._before[number] = now
            self.faults += broken_sums(self._before[0])
            self.num_scrapes += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def counters_that_fell(before: Samples, now: Samples) -> list[str]:
    ends = ("_total", "_count", "_bucket", "_sum")
    fell = [key for key, value in before.items() if key[0].endswith(ends) and now.get(key, -1) < value]
    return [f"{key} fell" for key in fell] + [f"{key} is {value}" for key, value in now.items() if value < 0]


def broken_sums(worker: Samples) -> list[str]:
    """Identities that hold in every scrape of a worker."""
    capacity = total(worker, "kvatlas_pages_capacity")
    events = {
        event: total(worker, "kvatlas_page_events_total", event=event) for event in ("allocated", "freed")
    }
    free = total(worker, "kvatlas_pages", state="free")
    checks = {
        "states": (total(worker, "kvatlas_pages"), capacity),
        "allocated - freed": (events["allocated"] - events["freed"], capacity - 1 - free),
        "slots": (
            total(worker, "kvatlas_token_slots"),
            4 * total(worker, "kvatlas_pages", state="active"),
        ),
        "evictions": (
            total(worker, "kvatlas_page_evictions_total"),
            total(worker, "kvatlas_page_events_total", event="evicted"),
        ),
        "uses at eviction": (
            total(worker, "kvatlas_page_uses_at_eviction_count"),
            total(worker, "kvatlas_page_evictions_total", reason="capacity"),
        ),
        "steps": (
            total(worker, "kvatlas_step_graphs_total"),
            total(worker, "kvatlas_step_tokens_count"),
        ),
        "integrity": (total(worker, "kvatlas_integrity_checks_total", result="fail"), 0),
    }
    return [f"{name}: {left} != {right}" for name, (left, right) in checks.items() if left != right]


def request(number: int, draw: random.Random) -> tuple[str, Any, float]:
    """How a request is meant to end, the request, and its deadline."""
    meant = draw.choice(["completed"] * 5 + ["cancelled", "cancelled", "rejected", "deadline"])
    text = "shared words of many prompts " * draw.randint(0, 3) + f"number {number % 30}"
    spec = generation_pb2.GenerationSpec(text=text, request_id=f"r-{number}")
    spec.stop.max_tokens = 180 if meant == "deadline" else 24
    if meant == "rejected":
        spec.sampling.temperature = -1.0
    if draw.random() < 0.2 and meant == "completed":
        spec.sampling.n = 2
        spec.sampling.temperature = 1.0
    wait = 0.6 if meant == "deadline" else CALL_SECONDS
    return meant, generation_pb2.StreamGenerateRequest(spec=spec), wait


def play(channel: grpc.Channel, seen: Seen, number: int) -> None:
    draw = random.Random(number)
    meant, message, wait = request(number, draw)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    call = stub.StreamGenerate(message, timeout=wait)
    tokens, started = 0, None
    try:
        for event in call:
            kind = event.WhichOneof("event")
            if kind == "started":
                started = event.started
            elif kind == "delta":
                tokens += event.delta.token_count
                if meant == "cancelled" and tokens >= 3:
                    call.cancel()
            elif kind == "summary":
                usage = event.summary.usage
                with seen.lock:
                    seen.completed_tokens += usage.completion_tokens
                    seen.page_seconds += usage.kv.page_seconds
        outcome = "completed"
    except grpc.RpcError as error:
        outcome = {
            grpc.StatusCode.CANCELLED: "cancelled",
            grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
        }.get(error.code(), "rejected")
    with seen.lock:
        seen.outcomes[outcome] += 1
        seen.tokens += tokens
        if started is not None and started.HasField("prefix"):
            for name in ("hit", "miss_cold", "miss_evicted", "unaligned"):
                seen.prefix[name] += getattr(started.prefix, f"{name}_tokens")


@dataclass
class Played:
    """A server after the load, and what was seen of it."""

    server: Any
    worker_port: int
    service_port: int
    seen: Seen
    poller: Poller
    hold: Any


@pytest.fixture(scope="module")
def played(start_module_server: Callable[..., Any], make_hold: Callable[[], Any]) -> Played:
    hold = make_hold()
    hold.off()
    server = start_module_server(*SETTINGS, *hold.settings)
    ports = server.facts["worker_metrics_port"], server.facts["metrics_port"]
    poller, seen = Poller(*ports), Seen()
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda number: play(channel, seen, number), range(NUM_REQUESTS)))
    while poller.num_scrapes < 5:
        threading.Event().wait(POLL_SECONDS)
    poller.close()
    return Played(server, *ports, seen, poller, hold)


def test_every_scrape_adds_up_and_no_counter_falls(played: Played) -> None:
    assert played.poller.faults == []


def test_requests_by_outcome_are_those_that_were_sent(
    played: Played, wait_until: Callable[..., None]
) -> None:
    """One each, and in every way. A call whose deadline passes on its way was never received."""
    method = {"grpc_method": "StreamGenerate"}
    started = total(scrape(played.service_port), "grpc_server_started_total", **method)
    wait_until(lambda: total(scrape(played.service_port), "kvatlas_requests_total") >= started, "every end")
    now, seen = scrape(played.service_port), played.seen.outcomes
    assert total(now, "kvatlas_requests_total") == started
    assert total(now, "kvatlas_request_duration_seconds_count") == started
    counted = {outcome: total(now, "kvatlas_requests_total", outcome=outcome) for outcome in seen}
    lost = NUM_REQUESTS - started
    assert 0 <= lost <= seen["deadline"]
    assert counted["rejected"] == seen["rejected"]
    # Client and server each have a clock: a deadline may reach the server as the client's cancel, and both
    # may come when it has said its last word: it completed what the client had given up.
    ended, given_up = counted["deadline"] + counted["cancelled"], seen["deadline"] + seen["cancelled"] - lost
    assert 0 < ended <= given_up
    assert counted["completed"] - seen["completed"] == given_up - ended
    assert set(seen) == {"completed", "cancelled", "deadline", "rejected"}


def test_prefix_results_are_the_prompt_tokens_that_were_looked_up(
    played: Played, wait_until: Callable[..., None]
) -> None:
    """The four results add up; a hit is what clients were told, a recompute none of them (vllm#25780)."""
    wait_until(lambda: total(scrape(played.worker_port), "kvatlas_requests_running") == 0, "an idle worker")
    worker, service = scrape(played.worker_port), scrape(played.service_port)
    results = {name: total(worker, "kvatlas_prefix_tokens_total", result=name) for name in played.seen.prefix}
    told = total(service, "kvatlas_prompt_tokens_total")
    # A request that ends while the worker's word of its start is on the way was looked up all the same.
    unheard = total(service, "kvatlas_requests_total") - total(service, "kvatlas_request_prompt_tokens_count")
    assert told <= sum(results.values()) <= told + unheard * MOST_PROMPT_TOKENS
    assert total(service, "kvatlas_request_prompt_tokens_sum") == told
    for name, number in played.seen.prefix.items():
        assert number <= results[name]
    assert played.seen.prefix.total() <= told
    assert results["hit"] > 0
    assert results["miss_evicted"] > 0


def test_tokens_and_bills_are_at_least_what_clients_got(played: Played) -> None:
    service, worker = scrape(played.service_port), scrape(played.worker_port)
    assert (
        total(service, "kvatlas_generated_tokens_total") >= played.seen.tokens >= played.seen.completed_tokens
    )
    assert total(worker, "kvatlas_request_page_seconds_sum") >= played.seen.page_seconds > 0
    assert total(worker, "kvatlas_page_evictions_total", reason="capacity") > 0
    assert total(worker, "kvatlas_preemptions_total", mode="recompute") > 0


def now_seconds() -> float:
    return time.time_ns() / 1e9


def test_time_in_bands_is_the_time_that_passed(played: Played, wait_until: Callable[..., None]) -> None:
    """All of it: as much as the worker is old, less its start."""
    name = "kvatlas_pool_pressure_seconds_total"
    age = psutil.Process(played.server.process_ids["worker"]).create_time()

    def counted() -> float:
        return total(scrape(played.worker_port), name)

    began, before = time.monotonic(), counted()
    wait_until(lambda: counted() >= before + 2.0, "two more seconds")
    assert time.monotonic() - began > 0.9, "an idle worker is seen once a second"
    assert 0 < total(scrape(played.worker_port), name, band="ok") < counted() < now_seconds() - age


@pytest.mark.parametrize("limit", [60.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_back_to_idle_after_a_mass_cancel(
    played: Played, wait_until: Callable[..., None], limit: float
) -> None:
    """Gauges do not freeze at what the last step saw, though no step follows (vllm#29928).

    On a quiet machine that takes less than two seconds.
    """
    played.hold.on()
    with grpc.insecure_channel(played.server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = []
        for number in range(40):  # minutes of work for the pool
            spec = generation_pb2.GenerationSpec(text=f"long {number}")
            spec.stop.max_tokens = 180
            spec.stop.ignore_eos = True
            calls.append(stub.StreamGenerate(generation_pb2.StreamGenerateRequest(spec=spec)))
        wait_until(
            lambda: total(scrape(played.worker_port), "kvatlas_requests_running") >= 6, "a full worker"
        )
        for call in calls:
            call.cancel()
        played.hold.off()
        wait_until(lambda: is_idle(scrape(played.worker_port)), "an idle worker", limit)


def is_idle(worker: Samples) -> bool:
    busy = total(worker, "kvatlas_requests_running") + total(worker, "kvatlas_requests_waiting")
    busy += total(worker, "kvatlas_pages", state="active") + total(worker, "kvatlas_page_references")
    return not busy and not total(worker, "kvatlas_page_table_rows", state="used")


@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_calls_with_random_names_make_no_series(played: Played, count: int) -> None:
    """Ids, models and methods that clients make up are in no label."""
    with grpc.insecure_channel(played.server.address) as channel, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: strange_call(channel, number), range(12)))  # each kind once
        before = [set(scrape(port)) for port in (played.worker_port, played.service_port)]
        codes = Counter(threads.map(lambda number: strange_call(channel, number), range(12, count + 12)))
    after = [set(scrape(port)) for port in (played.worker_port, played.service_port)]
    assert after == before
    assert codes.total() == count
    assert {"UNIMPLEMENTED", "NOT_FOUND", "INVALID_ARGUMENT"} <= set(codes)
    other = total(scrape(played.service_port), "grpc_server_handled_total", grpc_method="other")
    assert other >= codes["UNIMPLEMENTED"]


def strange_call(channel: grpc.Channel, number: int) -> str:
    """One call with names nobody knows; its status."""
    name = f"{random.Random(number).getrandbits(64):x}"
    try:
        match number % 4:
            case 0:
                channel.unary_unary(f"/kvatlas.v1.{name}/{name}")(b"", timeout=CALL_SECONDS)  # type: ignore[attr-defined]
            case 1:
                cache = cache_pb2_grpc.CacheServiceStub(channel)
                cache.GetSequence(cache_pb2.GetSequenceRequest(request_id=name), timeout=CALL_SECONDS)
            case 2:
                spec = generation_pb2.GenerationSpec(text=name, model=name, request_id=name)
                spec.labels[name[:8]] = name
                generation = generation_pb2_grpc.GenerationServiceStub(channel)
                generation.Generate(generation_pb2.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
            case _:
                spec = generation_pb2.GenerationSpec(text="x", request_id=name)
                spec.sampling.temperature = -1.0
                generation = generation_pb2_grpc.GenerationServiceStub(channel)
                generation.Generate(generation_pb2.GenerateRequest(spec=spec), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("process", ["worker", "service"])
def test_the_exposition_pleases_promtool_and_a_strict_parser(played: Played, process: str) -> None:
    """observability.md 7, check 1: names, units, colliding families."""
    port = played.worker_port if process == "worker" else played.service_port
    families = list(openmetrics(fetch(port, "application/openmetrics-text; version=1.0.0")))
    assert len(families) > 20
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=fetch(port),
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
