"""What streams wait for while a long prompt is computed beside them: the steps of their longest gaps.

    python -m benchmarks.long_prompt_path --model random:qwen3-0.6b --device cuda
    python -m benchmarks.long_prompt_path --scale 0.05                    a device that takes 5 ms a step

The case long-prompt of benchmarks/serving.py, marked by benchmarks/serving_marks.py. For each of
the longest gaps of one stream: when it ended, how long it was, the tokens that came then, and the stations
that steps passed within it, in milliseconds before its end. Two rounds of stations in one gap are two steps;
one long way between two stations is what to look at.
"""

import argparse
import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, device_name, write_result
from benchmarks.serving import PACKAGES, engine_settings
from benchmarks.serving_cases import (
    Bench,
    client_processes,
    first_token_ms,
    gaps_ms,
    largest_gaps,
    long_prompt_answers,
    percentiles,
)
from benchmarks.stack import run_stack
from benchmarks.workloads import id_limit

STATIONS = (
    *("scheduled", "launched", "asks for result", "result there", "committed"),
    *("token out", "link has token", "service has token"),
)
"""Of every step; what each stream's message passes is left out."""
LEAD_NS = 2_000_000  # before a gap, for the step whose tokens ended the gap before it
MOST_MARKS = 60  # of a gap
CLIENTS = 8

Mark = tuple[int, str]


def read_steps(folder: Path) -> list[Mark]:
    """When steps passed a station, ascending, of all processes."""
    marks = [
        (at, station)
        for file in folder.glob("*.marks")
        for station, at in json.loads(file.read_text())
        if station in STATIONS
    ]
    return sorted(marks)


def within(marks: Sequence[Mark], begin: int, end: int) -> list[dict[str, Any]]:
    """Stations between two times, each in milliseconds before the second: the last of them."""
    first = bisect_left(marks, (begin, ""))
    last = bisect_right(marks, (end, "\x7f"))
    return [
        {"station": station, "before_ms": round((end - at) / 1e6, 2)}
        for at, station in marks[max(first, last - MOST_MARKS) : last]
    ]


def measure(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """One round of the case."""
    flags = {name.replace("_", "-"): value for name, value in settings.items()}
    with tempfile.TemporaryDirectory(prefix="kvatlas-marks-") as name:
        through = ("benchmarks.serving_marks", name)
        with (
            run_stack(options.model, flags, through=through) as stack,
            client_processes(stack, CLIENTS) as clients,
        ):
            bench = Bench(clients, stack, None, id_limit(options.model), options.scale, ())
            others, last, usual_ms = long_prompt_answers(bench)
        marks = read_steps(Path(name))
    arrival, served = last["sent"], last["times"][0]
    gaps = largest_gaps(others[0], arrival, served)
    for gap in gaps:
        end = arrival + int(gap["at_ms"] * 1e6)
        gap["stations"] = within(marks, end - int(gap["ms"] * 1e6) - LEAD_NS, end)
    return {
        "usual_step_ms": round(usual_ms, 2),
        "first_token_ms_of_the_long_prompt": round(first_token_ms([last])[0], 1),
        "during_ms": percentiles(gaps_ms(others, after=arrival, before=served)),
        "largest_of_one_stream": gaps,
    }


def show(figures: dict[str, Any]) -> None:
    """Prints the gaps, a line for each station: milliseconds before the end, and since the one before."""
    print({name: value for name, value in figures.items() if name != "largest_of_one_stream"})
    for gap in figures["largest_of_one_stream"]:
        print(f"{gap['ms']} ms, ended after {gap['at_ms']} ms with {gap['tokens']} tokens")
        before = None
        for mark in gap["stations"]:
            since = "" if before is None else f"{before - mark['before_ms']:8.2f}"
            print(f"  {-mark['before_ms']:8.2f} {since:8} {mark['station']}")
            before = mark["before_ms"]


def main() -> None:
    """Measures, prints and writes the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--device", default="fake", choices=("fake", "cpu", "cuda"))
    parser.add_argument("--scale", type=float, default=1.0, help="shortens the prompt and the streams")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the fake device")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    settings = engine_settings("cpu" if options.device == "fake" else options.device, options.scale)
    if options.device == "fake":
        settings |= {"runner": "fake", "fake_step_ms": options.step_ms}
    figures = measure(options, settings) | {"settings": settings}
    show(figures)
    device = device_name() if options.device == "cuda" else ""
    name = f"long-prompt-path-{options.model.removeprefix('random:')}"
    print(write_result(name, figures, PACKAGES, options.results, device))


if __name__ == "__main__":
    main()
