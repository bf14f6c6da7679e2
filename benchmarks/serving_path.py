"""Where a served first token's time goes: stations from the client's call to its first message.

    python -m benchmarks.serving_path                                     a device that takes 5 ms a step
    python -m benchmarks.serving_path --model random:qwen3-0.6b --device cuda

One request at a time, every prompt new to the cache: after pauses, in which processors and caches of an idle
machine cool down, and one right after the other. A line is a station: the median and the 90th percentile of
the milliseconds since the one before, and the median since the call. Where there is a real device the engine
alone runs first, with the same pauses: its steps stand beside.
"""

import argparse
import json
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, device_name, percentile, write_result
from benchmarks.serving import PACKAGES, engine_alone, engine_settings
from benchmarks.serving_cases import (
    FIRST_TOKEN_RUNS,
    LEAD_SECONDS,
    WARM_UP_RUNS,
    client_processes,
    prompt_length,
    requests_of,
)
from benchmarks.stack import run_stack
from benchmarks.workloads import fixed, id_limit

SENT, FIRST = "client calls", "client has token"
STATIONS = (
    "headers there",
    "call",
    "handler",
    "checked",
    "worker picked",
    "request out",
    "worker has it",
    "worker decoded",
    "engine has it",
    "queued",
    "scheduled",
    "launched",
    "asks for result",
    "result there",
    "token out",
    "link has token",
    "token encoded",
    "service has token",
    "message out",
)
START = ("request out", "scheduled", "start out", "service has start", "start told", "start written")
"""Of the stream's first message, which must have left before the token's."""

WAYS = ("paused", "in_turn")
ALONE = ("queued", "scheduled", "launched", "asks for result", "result there", "committed")
"""The engine alone takes what there is after a commit; a worker's tokens go out within it."""

Passed = dict[str, list[int]]  # times of each station, ascending


def read_marks(*files: Path) -> Passed:
    """What these processes noted."""
    passed: Passed = {station: [] for station in {*STATIONS, *START, *ALONE}}
    for file in files:
        for station, at in json.loads(file.read_text()):
            passed[station].append(at)
    for times in passed.values():
        times.sort()
    return passed


def timeline(passed: Passed, sent: int, first: int) -> list[int]:
    """When one request was called, passed each station for the first time after that, and had its token."""
    return [*_follow(passed, STATIONS, sent), first]


def _follow(passed: Passed, stations: Sequence[str], start: int) -> list[int]:
    times = [start]
    for station in stations:
        known = passed[station]
        at = bisect_left(known, times[-1])
        assert at < len(known), f"no {station!r} after {start}"
        times.append(known[at])
    return times


def alone_lines(passed: Passed) -> list[list[int]]:
    """The engine's own timelines: one for each prompt that was queued."""
    return [_follow(passed, ALONE[1:], queued) for queued in passed["queued"]]


def table(stations: Sequence[str], lines: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """A row for each station, of the timelines of all requests; milliseconds."""
    rows = []
    for number, station in enumerate(stations):
        since = [(line[number] - line[max(0, number - 1)]) / 1e6 for line in lines]
        total = [(line[number] - line[0]) / 1e6 for line in lines]
        rows.append(
            {
                "station": station,
                "p50": round(percentile(since, 0.5), 3),
                "p90": round(percentile(since, 0.9), 3),
                "total_p50": round(percentile(total, 0.5), 3),
            }
        )
    return rows


def alone_tables(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """The engine without a service."""
    with tempfile.TemporaryDirectory(prefix="kvatlas-marks-") as folder:
        engine_alone(options.model, settings, options.scale, with_offline=False, marks=folder)
        files = {name: Path(folder, f"alone_{name}.marks") for name in WAYS}
        return {name: table(ALONE, alone_lines(read_marks(file))) for name, file in files.items()}


def served_tables(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Requests through a marked stack."""
    flags = {name.replace("_", "-"): value for name, value in settings.items()}
    requests = []
    for number in range(2 * FIRST_TOKEN_RUNS):
        prompt = fixed(1, prompt_length(options.scale), 4, seed=2000 + number)
        requests += requests_of(prompt.within(id_limit(options.model)))
    with tempfile.TemporaryDirectory(prefix="kvatlas-marks-") as folder:
        through = ("benchmarks.serving_marks", folder)
        with run_stack(options.model, flags, through=through) as stack, client_processes(stack, 1) as clients:
            paused = clients.send(requests[:FIRST_TOKEN_RUNS], pause=LEAD_SECONDS)
            in_turn = clients.send(requests[FIRST_TOKEN_RUNS:], pause=0.0)
        passed = read_marks(*Path(folder).glob("*.marks"))
    tables = {}
    for name, answers in zip(WAYS, (paused, in_turn), strict=True):
        counted = answers[WARM_UP_RUNS:]
        lines = [timeline(passed, answer["sent"], answer["times"][0]) for answer in counted]
        tables[name] = table([SENT, *STATIONS, FIRST], lines)
        lines = [_follow(passed, START, answer["sent"]) for answer in counted]
        tables[f"start_{name}"] = table([SENT, *START], lines)
    return tables


def show(title: str, tables: dict[str, Any], prefix: str = "") -> None:
    """Prints what was measured in both ways, side by side."""
    print(f"{title:18}" + "".join(f"{name:>9}      p90    total" for name in WAYS))
    for rows in zip(*(tables[prefix + name] for name in WAYS), strict=True):
        cells = (f"{row['p50']:9.3f}{row['p90']:9.3f}{row['total_p50']:9.3f}" for row in rows)
        print(f"{rows[0]['station']:18}" + "".join(cells))


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--device", default="fake", choices=("fake", "cpu", "cuda"))
    parser.add_argument("--scale", type=float, default=1.0, help="shortens the prompt")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the fake device")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    figures: dict[str, Any] = {"prompt_tokens": prompt_length(options.scale)}
    if options.device == "fake":
        settings: dict[str, Any] = {"runner": "fake", "fake_step_ms": options.step_ms, "overlap": None}
    else:
        settings = engine_settings(options.device, options.scale)
        figures["alone"] = alone_tables(options, settings)
        show("alone", figures["alone"])
    figures |= {"settings": settings, "served": served_tables(options, settings)}
    show("served", figures["served"])
    show("its first message", figures["served"], "start_")
    device = device_name() if options.device == "cuda" else ""
    name = f"serving-path-{options.model.removeprefix('random:')}"
    print(write_result(name, figures, PACKAGES, options.results, device))


if __name__ == "__main__":
    main()
