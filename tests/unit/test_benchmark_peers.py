"""Engines side by side: who starts when, whose turn it is, what is compared, and that every process ends."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from benchmarks.peers import fleet as fleet_module
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.fleet import Fleet, Limits, Settings
from benchmarks.peers.process import EngineProcess
from benchmarks.peers.rates import ratios
from benchmarks.peers.sizes import engine_bytes, pool_tokens, token_bytes, weight_bytes
from benchmarks.peers.table import markdown
from benchmarks.workloads import Workload, named

SMALL, LARGE = "random:qwen3-0.6b", "random:llama-3.1-8b"
TOKENS = pool_tokens([named("offline256")], "kvatlas")


class FakeProcess:
    """Ready at once; answers every order; `fails` names orders at which an engine ends."""

    events: ClassVar[list[str]] = []
    fails: ClassVar[set[str]] = set()

    def __init__(self, engine: str, model: str, device: str, tokens: int, log: Path, site: str) -> None:
        self.name, self.ended, self.last_lines = engine + ("+" if model == LARGE else ""), "", []
        self.events.append(f"start {self.name}")

    def ready(self, limit_seconds: float) -> dict[str, Any] | None:
        return self._answer("ready", {"ready_seconds": 1.0})

    def run(self, workload: str, number: int, limit_seconds: float) -> dict[str, Any] | None:
        row = {"workload": workload, "pass": number, "tokens_per_second": 1.0}
        return self._answer(f"{workload}.{number}", row)

    def close(self) -> None:
        self.events.append(f"end {self.name}")

    def _answer(self, what: str, message: dict[str, Any]) -> dict[str, Any] | None:
        self.events.append(f"{what} {self.name}")
        if f"{what} {self.name}" in self.fails:
            self.ended = "exit 1"
            return None
        return message


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What fake processes were asked, in order."""
    monkeypatch.setattr(fleet_module, "EngineProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "events", [])
    monkeypatch.setattr(FakeProcess, "fails", set())
    return FakeProcess.events


def make_fleet(tmp_path: Path, memory: int, whole: float = 60.0) -> Fleet:
    comparisons = [(SMALL, ["kvatlas", "vllm"]), (LARGE, ["kvatlas", "vllm"])]
    limits = Limits(10.0, 10.0, whole, memory)
    return Fleet(comparisons, Settings("cuda", dict.fromkeys(ENGINES, TOKENS), limits, tmp_path, {}))


def test_what_fits_starts_at_once_and_the_slow_starter_of_the_next_model_too(
    tmp_path: Path, events: list[str]
) -> None:
    fleet = make_fleet(tmp_path, 2 * engine_bytes(SMALL, TOKENS) + engine_bytes(LARGE, TOKENS))
    assert fleet.start(SMALL)
    assert events[:3] == ["start kvatlas", "start vllm", "start vllm+"]
    assert events[3:] == ["ready kvatlas", "ready vllm", "ready vllm+"]
    list(fleet.passes(SMALL, []))
    assert fleet.of(SMALL)[0].found["beside"] == ["vllm-qwen3-0.6b", "vllm-llama-3.1-8b"]
    fleet.end(SMALL)
    assert fleet.start(LARGE)
    assert events[6:] == ["end kvatlas", "end vllm", "start kvatlas+", "ready kvatlas+"]
    fleet.close()
    assert events[10:] == ["end kvatlas+", "end vllm+"]


def test_passes_alternate_between_the_engines(tmp_path: Path, events: list[str]) -> None:
    fleet = make_fleet(tmp_path, 2 * engine_bytes(SMALL, TOKENS))
    fleet.start(SMALL)
    del events[:]
    list(fleet.passes(SMALL, [("b1", 2), ("b8", 1)]))
    assert events == [
        f"{turn} {engine}" for turn in ("b1.1", "b1.2", "b8.1") for engine in ("kvatlas", "vllm")
    ]
    assert [row["pass"] for row in fleet.of(SMALL)[1].found["rows"]] == [1, 2, 1]


def test_an_engine_that_ends_keeps_its_rows_and_stops_no_other(tmp_path: Path, events: list[str]) -> None:
    FakeProcess.fails = {"b1.2 vllm"}
    fleet = make_fleet(tmp_path, 2 * engine_bytes(SMALL, TOKENS))
    fleet.start(SMALL)
    list(fleet.passes(SMALL, [("b1", 2), ("b8", 1)]))
    ours, peer = (entry.found for entry in fleet.of(SMALL))
    assert (len(ours["rows"]), len(peer["rows"]), peer["ended"]) == (3, 1, "exit 1")
    assert "ended" not in ours


def measure_all(fleet: Fleet, model: str) -> None:
    while fleet.start(model):
        list(fleet.passes(model, [("b1", 1)]))
        fleet.end(model)


def test_who_finds_no_room_beside_the_others_is_measured_after_them(
    tmp_path: Path, events: list[str]
) -> None:
    fleet = make_fleet(tmp_path, engine_bytes(SMALL, TOKENS))
    measure_all(fleet, SMALL)
    assert events == [
        f"{what} {engine}" for engine in ("kvatlas", "vllm") for what in ("start", "ready", "b1.1", "end")
    ]
    assert [entry.found["beside"] for entry in fleet.of(SMALL)] == [[], []]


def test_who_is_measured_after_the_others_does_not_need_them(tmp_path: Path, events: list[str]) -> None:
    FakeProcess.fails = {"ready kvatlas"}
    fleet = make_fleet(tmp_path, engine_bytes(SMALL, TOKENS))
    measure_all(fleet, SMALL)
    assert [len(entry.found["rows"]) for entry in fleet.of(SMALL)] == [0, 1]


def test_who_never_found_room_is_named(tmp_path: Path, events: list[str]) -> None:
    fleet = make_fleet(tmp_path, engine_bytes(SMALL, TOKENS))
    measure_all(fleet, SMALL)
    measure_all(fleet, LARGE)
    assert all(entry.found["ended"].startswith("not started") for entry in fleet.of(LARGE))
    assert not any("+" in event for event in events)


def test_nothing_is_asked_when_the_time_is_over(tmp_path: Path, events: list[str]) -> None:
    fleet = make_fleet(tmp_path, 1 << 60, whole=0.0)
    fleet.start(SMALL)
    del events[:]
    list(fleet.passes(SMALL, [("b1", 1)]))
    assert events == []
    assert fleet.of(SMALL)[0].found["ended"] == "the time of the whole run was over"


def test_the_pool_holds_the_most_that_is_held_at_once() -> None:
    """Lengths 3 + 2 and 1 + 5: 7 after the second token, when the first is still there."""
    assert Workload("two", [[3] * 3, [3]], [2, 5]).peak_tokens == 8
    assert Workload("late", [[3] * 3, [3]], [2, 9]).peak_tokens == 10
    assert named("b64").peak_tokens == 64 * 768
    peak = named("offline256").peak_tokens
    assert peak * 1.1 <= TOKENS + 1 <= peak * 1.1 + 4097
    assert TOKENS % 16 == 0


def test_an_engine_that_reserves_whole_answers_has_room_for_all_of_them() -> None:
    """With the pool of the others it would have kept a third of offline256 waiting."""
    workload = named("offline256")
    tokens = pool_tokens([named("b64"), workload], "mini_sglang")
    assert 0 <= tokens - workload.prompt_tokens - sum(workload.output_tokens) < 4096
    assert tokens > 1.4 * TOKENS


def test_bytes_of_an_engine_are_those_of_the_published_models() -> None:
    assert token_bytes(SMALL) == 114_688
    assert token_bytes(LARGE) == 131_072
    assert weight_bytes(SMALL) == pytest.approx(2 * 596e6, rel=0.01)
    assert weight_bytes(LARGE) == pytest.approx(2 * 8.03e9, rel=0.01)


def test_ratios_compare_first_with_first_and_the_medians_of_later_passes() -> None:
    def row(number: int, tokens: float, workload: str = "b1") -> dict[str, object]:
        return {"workload": workload, "pass": number, "tokens_per_second": tokens}

    ours = [row(1, 50.0), row(2, 300.0), row(3, 100.0), row(1, 7.0, "b8")]
    engines = {"kvatlas": {"rows": ours}, "vllm": {"rows": [row(1, 100.0), row(2, 100.0)]}}
    assert ratios(engines) == {"vllm": {"b1": {"first": 0.5, "later": 2.0}}}
    engines["vllm"]["rows"].append(row(1, 14.0, "b8"))
    assert ratios(engines)["vllm"]["b8"] == {"first": 0.5}
    assert ratios({"vllm": {"rows": []}}) == {"vllm": {}}


def test_ratios_leave_out_what_ours_did_not_reach() -> None:
    row = {"workload": "b1", "pass": 1, "tokens_per_second": 2.0}
    assert ratios({"kvatlas": {"rows": []}, "vllm": {"rows": [row]}}) == {"vllm": {}}
    later = row | {"pass": 2}
    assert ratios({"kvatlas": {"rows": [row]}, "vllm": {"rows": [row, later]}}) == {
        "vllm": {"b1": {"first": 1.0}}
    }


def test_a_table_has_a_dash_where_an_engine_has_no_pass() -> None:
    def rows(*rates: float) -> dict[str, object]:
        return {
            "rows": [
                {"workload": "b1", "pass": number, "tokens_per_second": rate}
                for number, rate in enumerate(rates, 1)
            ]
        }

    engines = {"kvatlas": rows(1000.4, 3000.0, 2000.0), "vllm": rows(500.2), "mini_sglang": rows()}
    assert markdown(engines).splitlines() == [
        "| workload | pass | kvatlas | vLLM | mini-sglang | over vLLM | over mini-sglang |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| b1 | first | 1,000 | 500 | - | 2.00 | - |",
        "|  | later | 2,500 | - | - | - | - |",
    ]


def test_a_ratio_of_a_table_is_rounded_once() -> None:
    row = {"workload": "b1", "pass": 1}
    engines = {"kvatlas": {"rows": [row | {"tokens_per_second": 1.2249}]}}
    engines["vllm"] = {"rows": [row | {"tokens_per_second": 1.0}]}
    assert markdown(engines).splitlines()[-1].endswith("| 1.22 |")


def test_a_first_token_is_told_in_milliseconds() -> None:
    row = {"workload": "first512", "pass": 1, "tokens_per_second": 400.0}
    engines = {"kvatlas": {"rows": [row]}, "vllm": {"rows": [row | {"tokens_per_second": 100.0}]}}
    assert markdown(engines).splitlines()[2:] == ["| first512 | first | 2.5 ms | 10.0 ms | 4.00 |"]


def test_a_process_that_dies_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    process = EngineProcess("no-engine", "random:tiny", "cpu", 64, tmp_path / "log")
    assert process.ready(60.0) is None
    assert process.ended == "exit 1"
    assert process.last_lines[-1] == "KeyError: 'no-engine'"
    assert "KeyError" in (tmp_path / "log").read_text()
    assert process.run("b1", 1, 5.0) is None  # and nothing is waited for
    process.close()


def test_a_process_that_is_late_is_ended_with_its_group(tmp_path: Path) -> None:
    process = EngineProcess("kvatlas", "random:tiny", "cpu", 4096, tmp_path / "log")
    group = process.group
    began = time.monotonic()
    assert process.ready(0.0) is None
    assert process.ended.startswith("not ready after")
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


LOADING = """
import sys, types
def load(request):
    import subprocess, time
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
engines = types.ModuleType("benchmarks.peers.engines")
engines.ENGINES, engines.Request = {"kvatlas": load}, lambda *what: what
engines.timed = engines.version_of = None
sys.modules["benchmarks.peers.engines"] = engines
"""
LAUNCHER = """
import sys
from pathlib import Path
from benchmarks.peers.process import EngineProcess
folder = Path(sys.argv[1])
process = EngineProcess("kvatlas", "random:tiny", "cpu", 64, folder / "log", str(folder))
print(process.group, flush=True)
process.ready(600)
"""


def test_an_engine_that_still_loads_ends_with_who_started_it(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """The suite kills the group of a stage that is over time, and engines have groups of their own."""
    (tmp_path / "sitecustomize.py").write_text(LOADING)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert launcher.stdout is not None
        group = int(launcher.stdout.readline())
        wait_until(lambda: len(members(group)) == 2)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
    try:
        wait_until(lambda: not members(group))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def members(group: int) -> list[int]:
    """Processes of a group that run."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


READY = '\nPEER {"ready_seconds": 1.0}\n'


def answering(tmp_path: Path, answer: str) -> EngineProcess:
    """An engine that is ready, answers the first order with this, and then neither ends nor obeys."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import os\nos.write(1, {READY.encode()!r})\nos.read(0, 4096)\n"
        f"os.write(1, {answer.encode()!r})\nwhile os.read(0, 4096): pass\nos._exit(3)\n"
    )
    return EngineProcess("kvatlas", "random:tiny", "cpu", 64, tmp_path / "log", str(site))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ('\nPEER {"workload": "b1", "pa\n', """not an answer: '{"workload": "b1", "pa'"""),
        ('\nPEER ["b1", 1]\n', """not an answer: '["b1", 1]'"""),
        ('\nPEER {"workload": "b8", "pass": 2}\n', "the answer to another order: b8 pass 2"),
        ('\nPEER {"ready_seconds": 1.0}\n', "the answer to another order: None pass None"),
    ],
)
def test_an_answer_that_cannot_be_used_ends_the_pass_with_its_reason(
    tmp_path: Path, answer: str, why: str
) -> None:
    """It ended the thread that reads, and the pass only at its limit, without a reason."""
    process = answering(tmp_path, answer)
    group = process.group
    assert process.ready(60.0) == {"ready_seconds": 1.0}
    assert process.run("b1", 1, 20.0) is None
    assert process.ended == why
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_answers_that_nobody_asked_for_do_not_hold_up_the_thread_that_reads(tmp_path: Path) -> None:
    process = answering(tmp_path, 20 * READY)
    assert process.ready(60.0) == {"ready_seconds": 1.0}
    assert process.run("b1", 1, 20.0) is None
    assert process.ended.startswith("the answer to another order")
    assert "kvatlas-output" not in {thread.name for thread in threading.enumerate()}


def test_a_log_that_cannot_be_written_ends_the_engine_with_its_reason(tmp_path: Path) -> None:
    process = EngineProcess("kvatlas", "random:tiny", "cpu", 64, tmp_path / "no-folder" / "log")
    assert process.ready(60.0) is None
    assert process.ended.startswith("FileNotFoundError")
