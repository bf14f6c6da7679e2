"""Real Prometheus and Alertmanager beside a real server: data in all panels, sums in all scrapes, alerts."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from benchmarks.mixed_load import MixedLoad, Shape
from benchmarks.observed import RULES, kill_worker_of, observe
from deploy.prometheus.local import (
    Prometheus,
    missing_programs,
    receiving_alerts,
    running_alertmanager,
    running_prometheus,
)
from deploy.prometheus.shorten import shortened
from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
LOAD_SECONDS = 20.0
TTFT = "kvatlas_time_to_first_token_seconds"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SHORTER = 120.0  # what takes two minutes in production takes a second here; windows stay at 5 s or more

pytestmark = [
    pytest.mark.timeout(400),  # 40 s each on a quiet machine
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"needs the Debian packages {', '.join(missing_programs())}"
    ),
]


def targets_of(server: Any) -> dict[str, list[str]]:
    return {
        "kvatlas-service": [f"127.0.0.1:{server.facts['metrics_port']}"],
        "kvatlas-worker": [f"127.0.0.1:{server.facts['worker_metrics_port']}"],
    }


def small_server(start_server: Any, *more: str) -> Any:
    """A pool too small for the load; streams wait as long as a new worker needs on a busy machine."""
    arguments = ("--model", "random:tiny", "--num-pages", "64", "--set-service", "resume_seconds=60")
    return start_server(*arguments, "--set-worker", "threads=1", "--log-level", "warning", *more)


@pytest.fixture
def load() -> Iterator[list[MixedLoad]]:
    """Loads that a test starts; they end with it."""
    loads: list[MixedLoad] = []
    yield loads
    for each in loads:
        each.stop()


def generate_traced(address: str) -> None:
    """One request of a client that keeps its trace."""
    with grpc.insecure_channel(address) as channel:
        spec = pb.GenerationSpec(text="abc", stop=pb.StopCriteria(max_tokens=2))
        context = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stub.Generate(pb.GenerateRequest(spec=spec), timeout=120, metadata=context)


def test_every_panel_shows_data_and_every_scrape_adds_up(
    start_server: Any, load: list[MixedLoad], tmp_path: Path, wait_until: Any
) -> None:
    """B118, S1-35: states sum to the capacity, allocated less freed are the pages in use, in every scrape.

    Cancels, refusals, evictions, preemptions and a killed worker happen meanwhile. The four results of a
    look-up are, to the last token, what clients were told.
    """
    server = small_server(start_server)
    load.append(MixedLoad(server.address, Shape(64)))
    began = time.time_ns() / 1e9
    with running_prometheus(tmp_path, targets_of(server), rules=RULES) as prometheus:
        kill_worker = partial(kill_worker_of, server.process.pid)
        found = observe(prometheus, load[0], kill_worker, LOAD_SECONDS)
        generate_traced(server.address)
        wait_until(
            lambda: {"trace_id": TRACE} in prometheus.exemplars(f"{TTFT}_bucket", began), "the exemplar"
        )
    assert found.queries > 100
    assert found.silent_panels == []
    assert found.wrong_scrapes == []
    assert found.scrapes >= LOAD_SECONDS / 2
    assert found.scraped == found.looked_up
    assert all(found.looked_up.values()), found.looked_up
    assert found.unexpected == []
    assert set(found.outcomes) - {"unavailable"} == {"completed", "cancelled", "rejected"}
    assert (found.preemptions > 0, found.evictions > 0, found.resumes > 0) == (True, True, True), found


class Inbox:
    """What Alertmanager sent, by receiver."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {"on-call": set(), "daytime": set()}
        self._lock = threading.Lock()

    def keep(self, path: str, alert: Mapping[str, Any]) -> None:
        if alert["status"] == "firing":
            with self._lock:
                self._names[path.strip("/")].add(alert["labels"]["alertname"])

    def names(self, receiver: str) -> set[str]:
        with self._lock:
            return set(self._names[receiver])


def alertmanager_config(url: str) -> dict[str, Any]:
    """The example, with the receivers of this test and without its patience."""
    config: dict[str, Any] = yaml.safe_load(
        (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
    )
    config["route"] |= {"group_wait": "0s", "group_interval": "1s"}
    for receiver in config["receivers"]:
        for webhook in receiver["webhook_configs"]:
            webhook["url"] = f"{url}/{receiver['name']}"
    return config


def test_leak_thrashing_exhaustion_and_a_dead_process_are_alerted(
    start_server: Any, load: list[MixedLoad], tmp_path: Path, wait_until: Any
) -> None:
    """Provoked on a real server; seen firing by Prometheus and received from Alertmanager."""
    inbox = Inbox()
    server = small_server(start_server, "--set-worker", "debug_faults=page_leak")
    with ExitStack() as stack:
        url = stack.enter_context(receiving_alerts(inbox.keep))
        alertmanager = stack.enter_context(running_alertmanager(tmp_path, alertmanager_config(url)))
        prometheus = stack.enter_context(
            running_prometheus(
                tmp_path,
                targets_of(server),
                rules=shortened(tmp_path, SHORTER),
                alertmanager=alertmanager,
            )
        )
        load.append(MixedLoad(server.address, Shape(64)))
        load[0].start()
        overloaded = {"KvatlasPoolExhausted", "KvatlasCacheThrashing"}
        wait_until(lambda: overloaded <= firing(prometheus), "exhaustion and thrashing", 120)
        assert "KvatlasPageLeak" not in firing(prometheus), "requests run"
        wait_until(lambda: "KvatlasIntegrityCheckFailing" in firing(prometheus), "the audit to see it")
        load[0].pause()
        wait_until(lambda: "KvatlasPageLeak" in firing(prometheus), "the leak")
        wait_until(lambda: not overloaded & firing(prometheus), "their end with the load")
        server.stop()
        wait_until(lambda: jobs_down(prometheus) == {"kvatlas-service", "kvatlas-worker"}, "both down")
        critical = {"KvatlasPoolExhausted", "KvatlasPageLeak", "KvatlasIntegrityCheckFailing", "KvatlasDown"}
        wait_until(lambda: critical <= inbox.names("on-call"), "who is on call to be told")
        wait_until(lambda: "KvatlasCacheThrashing" in inbox.names("daytime"), "the other receiver")
    assert not inbox.names("on-call") & inbox.names("daytime")


def firing(prometheus: Prometheus) -> set[str]:
    return {labels["alertname"] for labels in prometheus.alerts()}


def jobs_down(prometheus: Prometheus) -> set[str]:
    return {labels["job"] for labels in prometheus.alerts() if labels["alertname"] == "KvatlasDown"}
