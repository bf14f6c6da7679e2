"""What the benchmarks make of what they saw: workloads, rates, gaps, the timeline of a start."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.observed import PAGE_METRICS, wrong_scrapes
from benchmarks.record import percentile, write_result
from benchmarks.serving_cases import Bench, first_token_ms, gaps_ms, offline_case, percentiles, rate
from benchmarks.stack import Stack
from benchmarks.startup import table, timeline
from benchmarks.workloads import HIGHEST_ID, LOWEST_ID, fixed, id_limit, named, published
from deploy.prometheus.local import Sample

NAMES = ("b1", "b8", "b64", "offline256", "first512", "first3584")


def test_the_published_workload_is_that_of_the_peers() -> None:
    """144,294 output tokens are in every published figure of this workload."""
    workload = published(256)
    assert (workload.name, len(workload.prompts)) == ("offline256", 256)
    assert sum(workload.output_tokens) == 144_294
    assert workload.prompt_tokens == 143_501


def test_a_renamed_workload_has_the_same_lengths_and_no_common_prefix() -> None:
    workload = published(16)
    other = workload.renamed(1)
    assert [len(p) for p in other.prompts] == [len(p) for p in workload.prompts]
    assert other.output_tokens == workload.output_tokens
    assert all(a[0] != b[0] for a, b in zip(workload.prompts, other.prompts, strict=True))
    assert all(LOWEST_ID <= n <= HIGHEST_ID for prompt in other.prompts for n in prompt)


def test_no_prompt_begins_like_one_of_another_workload_or_pass() -> None:
    """Engines keep their prefix cache over all passes: nothing may be found in it."""
    passes = [named(name).renamed(n) for name in NAMES for n in range(1, 8)]
    prompts = [tuple(prompt[:16]) for workload in passes for prompt in workload.prompts]
    assert len(set(prompts)) == len(prompts) == 7 * (1 + 8 + 64 + 256 + 1 + 1)


def test_ids_stay_within_a_small_vocabulary() -> None:
    small = fixed(2, 600).within(id_limit("random:tiny"))
    assert max(max(prompt) for prompt in small.prompts) < 512
    assert fixed(2, 600).within(id_limit("random:qwen3-0.6b")) == fixed(2, 600)


def test_workloads_have_names() -> None:
    assert [len(named(name).prompts) for name in ("b1", "b8", "offline32")] == [1, 8, 32]
    first = named("first512")
    assert first.name == "first512"
    assert ([len(prompt) for prompt in first.prompts], first.output_tokens) == ([512], [1])
    with pytest.raises(ValueError, match="no workload is called 'c4'"):
        named("c4")


ANSWERS = [
    {"sent": 1_000_000_000, "times": [1_010_000_000, 1_020_000_000, 1_050_000_000], "counts": [1, 1, 3]},
    {"sent": 1_500_000_000, "times": [1_520_000_000, 2_000_000_000], "counts": [2, 3]},
]


def test_the_rate_is_over_the_first_send_and_the_last_token() -> None:
    assert rate(ANSWERS) == pytest.approx(10.0)


def test_gaps_lie_between_messages_of_one_stream_and_within_the_window() -> None:
    assert gaps_ms(ANSWERS) == [10.0, 30.0, 480.0]
    assert gaps_ms(ANSWERS, after=1_050_000_000) == [30.0, 480.0]
    assert gaps_ms(ANSWERS, before=1_050_000_000) == [10.0]
    assert first_token_ms(ANSWERS) == [10.0, 20.0]
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert percentiles([]) == {}


@pytest.mark.parametrize("count", [1, 2, 20, 100, 101])
@pytest.mark.parametrize("share", [0.0, 0.07, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(count: int, share: float) -> None:
    values = [float(n) for n in range(count, 0, -1)]
    wanted = next(v for v in sorted(values) if sum(other <= v for other in values) >= share * count - 1e-9)
    assert percentile(values, share) == wanted


def test_the_timeline_counts_from_the_start_and_names_phases() -> None:
    log = (
        "2026-01-02T03:04:05.500Z level=INFO logger=worker event=listening port=1\n"
        "something else\n"
        "2026-01-02T03:04:07.250Z level=INFO logger=worker.device event=phase phase=capture seconds=1.5\n"
    )
    start_ns = 1_767_323_045_000_000_000  # 2026-01-02T03:04:05Z
    events = timeline("worker", log, start_ns)
    assert events == [
        {"process": "worker", "at": 0.5, "event": "listening"},
        {"process": "worker", "at": 0.75, "phase": "capture", "seconds": 1.5},
    ]
    start = {"start": 1, "ready_seconds": 2.5, "first_token_seconds": 2.75, "timeline": events}
    assert [line.split() for line in table(start).splitlines()] == [
        ["start", "1"],
        ["0.50", "worker", "listening"],
        ["0.75", "1.50", "worker", "capture"],
        ["2.50", "client", "serving"],
        ["2.75", "client", "first", "token"],
    ]


def test_a_result_names_files_without_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--model", "/srv/models/small.gguf", "--minutes", "3"])
    found = json.loads(write_result("try", {"a": 1}, ["torch"], tmp_path).read_text())
    assert found["command"].endswith(" --model small.gguf --minutes 3")
    assert (found["name"], found["figures"]) == ("try", {"a": 1})


class MovingRange:
    """Answers as Prometheus does: the range of each query ends, and so begins, one scrape later."""

    def __init__(self, scrapes: list[dict[str, dict[str, float]]], span: int) -> None:
        self._scrapes, self._span, self._end = scrapes, span, span

    def query(self, expression: str) -> list[Sample]:
        names = [name for name in PAGE_METRICS if re.search(rf"\b{name}\b", expression)]
        seen = range(self._end - self._span, self._end)
        self._end += 1
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for at in seen:
            for name in names:
                for label, value in self._scrapes[at].get(name, {}).items():
                    found.setdefault((name, label), []).append((float(at), value))
        key = {"kvatlas_pages": "state", "kvatlas_page_events_total": "event"}
        return [
            Sample({"__name__": name} | ({key[name]: label} if label else {}), points)
            for (name, label), points in found.items()
        ]


def scrape(free: float, allocated: float) -> dict[str, dict[str, float]]:
    """Of a pool of eight pages, one of them reserved."""
    states = {"free": free, "active": 7 - free, "reserved": 1.0}
    events = {"allocated": allocated, "freed": allocated - (7 - free)}
    return dict(zip(PAGE_METRICS, (states, {"": 8.0}, events), strict=True))


def test_scrapes_at_the_edges_of_the_range_are_looked_at_whole() -> None:
    good = [scrape(free=float(n), allocated=9.0) for n in range(6)]
    assert wrong_scrapes(MovingRange(good, 3), "3s") == (3, [])  # type: ignore[arg-type]  # has its query
    bad = [scrape(3.0, 9.0), scrape(3.0, 9.0) | {"kvatlas_pages_capacity": {"": 9.0}}, {}, {}, {}]
    assert len(wrong_scrapes(MovingRange(bad, 2), "2s")[1]) == 2  # type: ignore[arg-type]
    del bad[0]["kvatlas_page_events_total"]
    _, wrong = wrong_scrapes(MovingRange(bad, 1), "1s")  # type: ignore[arg-type]
    assert wrong == ["0.0: no kvatlas_page_events_total"]


class KeptRequests:
    """Clients that keep what they were to send, and say that all came at once."""

    def __init__(self) -> None:
        self.passes: list[list[dict[str, Any]]] = []

    def send(self, requests: list[dict[str, Any]], *, pause: float | None = None) -> list[dict[str, Any]]:
        self.passes.append(requests)
        return [{"sent": 0, "times": [1, 2], "counts": [1, r["tokens"] - 1]} for r in requests]


def test_the_served_passes_find_nothing_of_each_other_in_the_cache() -> None:
    """The pass that counts had all its prompts from the one before, the engine beside it none."""
    clients, pid = KeptRequests(), os.getpid()
    stack = Stack([], [pid], pid, began=0.0, ready_seconds=0.0)
    offline_case(Bench(clients, stack, None, 259, 0.05, ()))  # type: ignore[arg-type]  # has their send
    first, second = ({tuple(r["prompt"][:16]) for r in requests} for requests in clients.passes)
    assert len(first) == len(second) > 8
    assert not first & second
