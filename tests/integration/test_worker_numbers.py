"""A worker's metrics are all there at zero, add up in every scrape, fall to idle, and are its own."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.worker_on_thread import Running, config_in, settled
from worker.devices import FakeDevice
from worker.link.testing import WAIT_SECONDS
from worker.link.testing_bench import until
from worker.process import WorkerProcess


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(config_in(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("limit", [WAIT_SECONDS, pytest.param(2.0, marks=pytest.mark.slow)])
def test_gauges_fall_to_idle_though_no_further_step_runs(tmp_path: Path, limit: float) -> None:
    """All requests end at once: nobody steps any more, the gauges must not freeze (observability.md 4).

    On a quiet machine that takes less than two seconds.
    """
    running = Running(config_in(tmp_path, fake_step_ms=100.0, num_pages=1200))
    try:
        service = running.ready_service()
        ids = [service.add([number] * 9, max_tokens=700) for number in range(6)]
        service.wait(lambda: all(service.answers[number].tokens for number in ids))
        until(lambda: running.metric("kvatlas_requests_running") == 6)
        assert running.metric("kvatlas_pages", state="active") > 0
        service.abort(*ids)
        ended = time.monotonic()
        service.finish(*ids)
        until(lambda: running.metric("kvatlas_pages", state="active") == 0)
        until(lambda: running.metric("kvatlas_requests_running") == 0)
        assert running.metric("kvatlas_page_table_rows", state="used") == 0
        assert time.monotonic() - ended < limit
    finally:
        running.close()


def test_numbers_add_up_in_every_scrape_and_counters_never_fall(tmp_path: Path) -> None:
    running = Running(config_in(tmp_path, num_pages=24, fake_step_ms=1.0, audit_interval=0.05))
    try:
        service = running.ready_service()
        before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        sent = []
        for number in range(40):
            prompt = [number % 5] * 8 + [number] * 3
            sent.append((len(prompt), service.add(prompt, max_tokens=6)))
            if number % 7 == 0:
                service.abort(sent[-1][1])
            if number % 4 == 0:
                now = running.metrics()
                check_sums(now)
                for key, value in before.items():
                    if key[0].endswith(("_total", "_count", "_bucket")):
                        assert now[key] >= value, key
                before = now
        service.finish(*[first for _, first in sent])
        settled(running)
        looked_up = {start.sequence_id: start.prefix for start in service.starts if start.HasField("prefix")}
        now = running.metrics()
        for result in ("hit", "miss_cold", "miss_evicted", "unaligned"):
            name = f"{result}_tokens"
            total = sum(getattr(prefix, name) for prefix in looked_up.values())
            assert now["kvatlas_prefix_tokens_total", (("result", result),)] == total
        assert now["kvatlas_page_evictions_total", (("reason", "capacity"),)] > 0
        for check in ("state_sum", "refcount", "free_list", "page_table", "trie"):
            labels = (("check", check), ("result", "pass"))
            assert now["kvatlas_integrity_checks_total", labels] > 0
            assert now["kvatlas_integrity_checks_total", (("check", check), ("result", "fail"))] == 0
        assert now["kvatlas_integrity_last_success_timestamp_seconds", ()] > 1.6e9
    finally:
        running.close()


def check_sums(now: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> None:
    def total(name: str) -> float:
        return sum(value for (series, _), value in now.items() if series == name)

    assert total("kvatlas_pages") == now["kvatlas_pages_capacity", ()]
    events = {dict(labels)["event"]: v for (n, labels), v in now.items() if n == "kvatlas_page_events_total"}
    usable = now["kvatlas_pages_capacity", ()] - 1
    assert events["allocated"] - events["freed"] == usable - now["kvatlas_pages", (("state", "free"),)]
    assert events["evicted"] == total("kvatlas_page_evictions_total")
    assert total("kvatlas_token_slots") == 4 * now["kvatlas_pages", (("state", "active"),)]
    assert min(now.values()) >= 0


def test_every_series_is_there_at_zero_before_the_first_request(running: Running) -> None:
    from worker.readers.metric_table import TABLE

    until(lambda: running.get("/readyz")[0] == 200)
    now = running.metrics()
    for row in TABLE:
        sample = row.family + "_count" if row.buckets else row.exposed
        expected = 1
        for values in row.labels.values():
            expected *= len(values)
        assert sum(name == sample for name, _ in now) == expected, row.name
    assert sum(value for key, value in now.items() if key[0].endswith("_total")) < 60
    assert not [key for key in now if key[0].endswith("_created")]


def test_two_workers_in_one_process_never_meet_in_a_registry(tmp_path: Path) -> None:
    """B112: each has its own registry; one that is passed in is used."""
    mine = CollectorRegistry()
    with (
        WorkerProcess(config_in(tmp_path / "1"), FakeDevice(), registry=mine),
        WorkerProcess(config_in(tmp_path / "2"), FakeDevice()),
    ):
        assert mine.get_sample_value("kvatlas_pages", {"state": "free"}) == 64
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        WorkerProcess(config_in(tmp_path / "3"), FakeDevice(), registry=mine)
