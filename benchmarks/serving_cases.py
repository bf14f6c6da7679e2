"""The cases of benchmarks/serving.py: what is sent, and what is made of the answers.

Owns the client processes (benchmarks/serving_client.py). A case takes a Bench and gives rows of the result.
"""

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import percentile
from benchmarks.stack import Stack
from benchmarks.workloads import LOWEST_ID, Workload, fixed, published

POISSON_SECONDS = 8.0
FIRST_TOKEN_RUNS, WARM_UP_RUNS = 24, 4
OPEN_STREAMS, LONG_PROMPT = 64, 32_000
LEAD_SECONDS = 0.1  # for clients to connect before the first request is due; and more of it per request

Request = dict[str, Any]
Answer = dict[str, Any]


class Clients:
    """Client processes; requests of a case are dealt out among them."""

    def __init__(self, stack: Stack, processes: "list[subprocess.Popen[str]]", folder: Path) -> None:
        self._stack = stack
        self._processes = processes
        self._folder = folder

    def send(self, requests: list[Request], *, pause: float | None = None) -> list[Answer]:
        """Sends all, each at its time; answers in the order of the requests.

        `pause`: by one client over one connection, each so many seconds after the one before is over.
        """
        count = len(self._processes) if pause is None else 1
        start = time.monotonic() + LEAD_SECONDS + 0.002 * len(requests)
        for number, process in enumerate(self._processes[:count]):
            first = number % len(self._stack.addresses)
            order = {
                "addresses": self._stack.addresses[first:] + self._stack.addresses[:first],
                "start": start,
                "pause": pause,
                "requests": requests[number::count],
            }
            self._file(number).write_text(json.dumps(order))
            assert process.stdin is not None
            process.stdin.write(f"{self._file(number)}\n")
            process.stdin.flush()
        answers: list[Answer] = [{}] * len(requests)
        for number, process in enumerate(self._processes[:count]):
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit("a client process died: its errors are above")
            answers[number::count] = json.loads(self._file(number).with_suffix(".answer").read_text())
        return answers

    def _file(self, number: int) -> Path:
        return self._folder / f"client-{number}.order"


def requests_of(workload: Workload, at: float = 0.0, first_seed: int = 0) -> list[Request]:
    """All of a workload, at one time."""
    return [
        {"prompt": prompt, "tokens": tokens, "at": at, "seed": first_seed + number}
        for number, (prompt, tokens) in enumerate(zip(workload.prompts, workload.output_tokens, strict=True))
    ]


@contextlib.contextmanager
def client_processes(stack: Stack, count: int) -> Iterator[Clients]:
    """Starts client processes and ends them."""
    command = [sys.executable, "-m", "benchmarks.serving_client"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        with tempfile.TemporaryDirectory(prefix="kvatlas-clients-") as folder:
            yield Clients(stack, processes, Path(folder))
    finally:
        for process in processes:
            process.kill()
            process.wait()


# Figures.


def rate(answers: list[Answer]) -> float:
    """Output tokens a second, from the first request sent to the last token."""
    tokens = sum(sum(answer["counts"]) for answer in answers)
    first, last = min(a["sent"] for a in answers), max(a["times"][-1] for a in answers)
    return float(tokens / (last - first) * 1e9)


def first_token_ms(answers: list[Answer]) -> list[float]:
    """Request sent to first message received."""
    return [(answer["times"][0] - answer["sent"]) / 1e6 for answer in answers]


def gaps_ms(answers: list[Answer], after: int = 0, before: int = 1 << 62) -> list[float]:
    """Between two messages of a stream, of those that came within [after, before) nanoseconds."""
    return [
        (this - last) / 1e6
        for answer in answers
        for last, this in zip(answer["times"], answer["times"][1:], strict=False)
        if after <= this < before
    ]


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 and the largest."""
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    return {name: round(percentile(values, share), 2) for name, share in shares} if values else {}


class Meter:
    """CPU time of the stack's processes from here on."""

    def __init__(self, stack: Stack) -> None:
        self._processes = [psutil.Process(pid) for pid in [*stack.service_pids, stack.worker_pid]]
        self._began, self._before = time.monotonic(), self._used()

    def cores(self) -> list[float]:
        """Cores busy since the start: each service, then the worker."""
        seconds = time.monotonic() - self._began
        return [
            round((now - then) / seconds, 2) for now, then in zip(self._used(), self._before, strict=True)
        ]

    def _used(self) -> list[float]:
        times = [process.cpu_times() for process in self._processes]
        return [float(t.user + t.system) for t in times]


# Cases.


@dataclass(frozen=True)
class Alone:
    """What the engine did without a service, in the same run."""

    offline_rate: float | None  # output tokens/s; None: not asked for
    first_token_ms: float  # median, of prompts after pauses
    first_token_in_turn_ms: float  # median, of prompts one right after the other


@dataclass(frozen=True)
class Bench:
    """What a case needs. `scale` shortens workloads, for a try on a slow device."""

    clients: Clients
    stack: Stack
    alone: Alone | None
    id_limit: int
    scale: float
    rates: Sequence[float]  # requests a second of the Poisson arrivals

    def offline(self, number: int) -> Workload:
        """offline256, or what the scale leaves of it, with other ids for each number."""
        return offline_workload(self.scale).renamed(number).within(self.id_limit)

    def prompt(self, length: int, seed: int, tokens: int) -> Workload:
        """One prompt that the cache has not seen."""
        return fixed(1, length, tokens, seed=seed).within(self.id_limit)


def offline_workload(scale: float) -> Workload:
    """offline256 at scale 1."""
    return published(max(8, int(256 * scale)), max(110, int(1024 * scale)))


def prompt_length(scale: float) -> int:
    """512 at scale 1."""
    return max(16, int(512 * scale))


def offline_case(bench: Bench) -> list[dict[str, Any]]:
    """Everything at once; twice, like the engine alone, and the second counts.

    The worker keeps its prefix cache, which the engine alone empties: so each pass has other ids.
    """
    rates = []
    for number in range(2):
        workload = bench.offline(number)
        meter = Meter(bench.stack)
        answers = bench.clients.send(requests_of(workload))
        load = meter.cores()
        rates.append(rate(answers))
    alone = bench.alone.offline_rate if bench.alone else None
    row = {
        "case": workload.name,
        "tokens_per_second": round(rates[1], 1),
        "first_pass_tokens_per_second": round(rates[0], 1),
        "engine_alone_tokens_per_second": alone,
        "ratio": round(rates[1] / alone, 4) if alone else None,
        "tokens_per_message": round(sum(workload.output_tokens) / sum(len(a["times"]) for a in answers), 2),
        "cores": load,
        "first_token_ms": percentiles(first_token_ms(answers)),
        "between_messages_ms": percentiles(gaps_ms(answers)),
    }
    return [row]


def first_token_case(bench: Bench) -> list[dict[str, Any]]:
    """One request at a time, every prompt new to the cache; the first ones warm up.

    After pauses, in which processors and caches of an idle machine cool down, and one right after the other.
    """
    length, alone = prompt_length(bench.scale), bench.alone
    requests = [requests_of(bench.prompt(length, 1000 + n, 4)) for n in range(2 * FIRST_TOKEN_RUNS)]
    paused, in_turn = requests[:FIRST_TOKEN_RUNS], requests[FIRST_TOKEN_RUNS:]
    answers = bench.clients.send([request for (request,) in paused], pause=LEAD_SECONDS)
    row = {"case": "first-token", "prompt_tokens": length}
    row |= _beside(answers, alone.first_token_ms if alone else None)
    answers = bench.clients.send([request for (request,) in in_turn], pause=0.0)
    row["in_turn"] = _beside(answers, alone.first_token_in_turn_ms if alone else None)
    return [row]


def _beside(answers: list[Answer], alone: float | None) -> dict[str, Any]:
    served = percentiles(first_token_ms(answers)[WARM_UP_RUNS:])
    added = round(served["p50"] - alone, 2) if alone else None
    return {"first_token_ms": served, "engine_alone_ms": alone, "added_ms": added}


def poisson_case(bench: Bench) -> list[dict[str, Any]]:
    """Arrivals of a Poisson process at each rate; prompts and answers as in offline256."""
    return [_poisson(bench, per_second) for per_second in bench.rates]


def _poisson(bench: Bench, per_second: float) -> dict[str, Any]:
    draw, at, requests = random.Random(int(per_second * 10)), 0.0, []
    lengths = published(1024, max(110, int(1024 * bench.scale))).within(bench.id_limit)
    for request in requests_of(lengths):
        if at >= POISSON_SECONDS:
            break
        new = [LOWEST_ID + int(per_second) % 100, LOWEST_ID + request["seed"] % 100]  # to the cache
        requests.append({**request, "prompt": new + request["prompt"][2:], "at": at})
        at += draw.expovariate(per_second)
    meter = Meter(bench.stack)
    answers = bench.clients.send(requests)
    return {
        "case": "poisson",
        "requests_per_second": per_second,
        "requests": len(requests),
        "tokens_per_second": round(rate(answers), 1),
        "first_token_ms": percentiles(first_token_ms(answers)),
        "between_messages_ms": percentiles(gaps_ms(answers)),
        "cores": meter.cores(),
    }


def long_prompt_answers(bench: Bench) -> tuple[list[Answer], Answer, float]:
    """Of the open streams and of the long prompt that comes while all decode, and the usual step before,
    milliseconds.
    """
    tokens = max(100, int(1200 * bench.scale))
    quiet = bench.clients.send(requests_of(_short(bench, tokens, seed=7)))
    usual_step = percentile(gaps_ms(quiet), 0.5)
    prompt = bench.prompt(int(LONG_PROMPT * bench.scale), 8, 4)
    long_one = requests_of(prompt, at=usual_step * tokens * 0.4 / 1000)
    *others, last = bench.clients.send([*requests_of(_short(bench, tokens, seed=9)), *long_one])
    return others, last, usual_step


def long_prompt_case(bench: Bench) -> list[dict[str, Any]]:
    """Streams in full decode, then one long prompt: their gaps before it, and until its first token."""
    others, last, usual_step = long_prompt_answers(bench)
    begun = max(a["times"][4] for a in others)  # all decode
    arrival, served = last["sent"], last["times"][0]
    usual = gaps_ms(others, after=begun, before=arrival)
    during = gaps_ms(others, after=arrival, before=served + int(2e6 * usual_step))
    row = {
        "case": "long-prompt",
        "open_streams": OPEN_STREAMS,
        "prompt_tokens": int(LONG_PROMPT * bench.scale),
        "first_token_ms_of_the_long_prompt": round(first_token_ms([last])[0], 1),
        "usual_ms": percentiles(usual),
        "during_ms": percentiles(during),
        "p99_during_over_usual": _over(during, usual),
        "p99_of_whole_streams_over_usual": _over(gaps_ms(others, after=begun), usual),
        "tokens_per_message_during": _tokens_per_message(others, arrival, served),
        "largest_of_one_stream": largest_gaps(others[0], arrival, served),
    }
    return [row]


def largest_gaps(answer: Answer, since: int, until: int, count: int = 5) -> list[dict[str, Any]]:
    """The longest gaps of a stream within a time, in its order: when each ended, how long it was, and the
    tokens of the message behind it: of two, it was two steps.
    """
    times, counts = answer["times"], answer["counts"]
    gaps = [
        (this - since, this - last, tokens)
        for last, this, tokens in zip(times, times[1:], counts[1:], strict=False)
        if since <= this <= until
    ]
    longest = sorted(gaps, key=lambda gap: gap[1])[-count:]
    return [
        {"at_ms": round(at / 1e6, 1), "ms": round(gap / 1e6, 1), "tokens": tokens}
        for at, gap, tokens in sorted(longest)
    ]


def _tokens_per_message(answers: list[Answer], since: int, until: int) -> float | None:
    counts = [
        tokens
        for answer in answers
        for at, tokens in zip(answer["times"], answer["counts"], strict=True)
        if since <= at <= until
    ]
    return round(sum(counts) / len(counts), 3) if counts else None


def _short(bench: Bench, tokens: int, seed: int) -> Workload:
    return fixed(OPEN_STREAMS, 128, tokens, seed=seed).within(bench.id_limit)


def _over(values: list[float], usual: list[float]) -> float | None:
    if not values or not usual:
        return None
    return round(percentile(values, 0.99) / percentile(usual, 0.99), 2)


CASES: dict[str, Callable[[Bench], list[dict[str, Any]]]] = {
    "offline256": offline_case,
    "first-token": first_token_case,
    "poisson": poisson_case,
    "long-prompt": long_prompt_case,
}
