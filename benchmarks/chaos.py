"""Two workers, two services, 64 streams, and a seeded schedule of everything that can go wrong.

    python -m benchmarks.chaos                            15 minutes
    python -m benchmarks.chaos --minutes 2 --seed 7

Real processes and sockets, the real CPU engine with random weights. First every request is answered without
disturbance; then streams of the same requests are kept open while workers and services are killed, paused,
drained, started again and cut off, and while some readers are slow, stall or leave. Demanded: a stream ends
exactly once, whole or as its reader wished (one in a thousand may meet more losses than a request is resumed
after); every token is that of the undisturbed run; at the end no page is held on any worker, and its audit
finds nothing. Exit code 0 only then.

The network cut needs the right to make network namespaces; without it the run says so and goes on without.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import chaos_plan
from benchmarks.chaos_plan import Disturbance, Kind, RequestPlan
from benchmarks.chaos_stack import ChaosFailed, ChaosStack, Node, why_no_network
from benchmarks.chaos_streams import Answer, Crowd, Tally, right_answer
from benchmarks.record import percentile, write_result
from kvatlas.client.aio import AsyncClient
from kvatlas.client.errors import KvatlasError, Reason

MAX_DISTURBANCES = 10_000
RIGHT_AT_ONCE = 16
LOST_SHARE = (
    1 / 1000
)  # of the streams: those that met more losses than a request may, WORKER_LOST by the rule
QUIET_SECONDS = 60.0  # in which all pages must be free once the last stream has ended
PACKAGES = ("grpcio", "protobuf", "pyzmq", "uvloop", "torch")
WORKER_SETTINGS = {
    "num-pages": 1200,
    "max-running": 64,
    "threads": 1,
    "drain-grace": 1,
    "log-level": "warning",
}
SERVICE_SETTINGS = {"resume-seconds": 90, "grace": 2, "drain-listen": 0.3, "log-level": "warning"}


@dataclass(frozen=True, slots=True)
class Run:
    """What is asked for."""

    seed: int = 1
    seconds: float = 900.0
    streams: int = 64
    requests: int = 96
    model: str = "random:tiny"
    runner: str = "torch"
    kinds: Sequence[Kind] = tuple(Kind)
    max_disturbances: int = MAX_DISTURBANCES
    max_pause_seconds: float = 4.0  # of quiet before each
    worker_settings: dict[str, object] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of it. `faults` is empty after a good run."""

    tally: Tally
    disturbances: Counter[str] = field(default_factory=Counter)
    healing_seconds: list[float] = field(default_factory=list)
    leaked_pages: dict[str, int] = field(default_factory=dict)
    violations: dict[str, int] = field(default_factory=dict)
    exit_codes: Counter[int] = field(default_factory=Counter)  # of drained processes
    network: str = "cut"
    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)  # kinds of requests that were asked
    timeline: list[dict[str, Any]] = field(default_factory=list)

    def faults(self) -> list[str]:
        """What was demanded and is not so."""
        tally = self.tally
        lost = tally.ended[Reason.WORKER_LOST]
        failed = tally.opened - tally.ended["whole"] - tally.ended["left"] - lost
        found = [] if tally.ended["whole"] else ["no stream was read to its end"]
        if lost > LOST_SHARE * tally.opened:
            found.append(f"{lost} of {tally.opened} streams met more losses than a request may")
        if failed:
            found.append(f"{failed} of {tally.opened} streams failed: {dict(tally.ended)}")
        if sum(tally.ended.values()) != tally.opened:
            found.append(f"{tally.opened} streams, {sum(tally.ended.values())} ends")
        if tally.mismatches:
            found.append(f"{tally.mismatches} answers are not those of the undisturbed run")
        for name, counts in (("pages held", self.leaked_pages), ("violations", self.violations)):
            found += [f"{worker}: {count} {name}" for worker, count in counts.items() if count]
        if set(self.exit_codes) - {0}:
            found.append(f"exit codes of drained processes: {dict(self.exit_codes)}")
        return found

    def figures(self) -> dict[str, Any]:
        """For the result file."""
        tally = self.tally
        return {
            "seconds": round(self.seconds, 1),
            "streams": tally.opened,
            "ended": dict(tally.ended),
            "readers": dict(tally.readers),
            "refused_before_start": tally.refused_before_start,
            "mismatches": tally.mismatches,
            "tokens": tally.tokens,
            "requests": dict(self.requests),
            "disturbances": dict(self.disturbances),
            "network": self.network,
            "healing_seconds": _spread(self.healing_seconds),
            "resumed_by_services": tally.server_resumes,
            "resumed_by_clients": tally.client_resumes,
            "gap_ms": _spread([gap * 1000 for gap in tally.gaps]),
            "longest_gap_of_resumed_streams_ms": _spread([gap * 1000 for gap in tally.resumed_gaps]),
            "leaked_pages": self.leaked_pages,
            "violations": self.violations,
            "exit_codes": {str(code): count for code, count in self.exit_codes.items()},
            "faults": self.faults(),
            "notes": tally.notes,
            "timeline": self.timeline,
        }


async def run(asked: Run, progress: Progress | None = None) -> Outcome:
    """The whole of it. Raises ChaosFailed where the run cannot go on."""
    kinds, why = list(asked.kinds), ""
    if Kind.CUT_WORKER in kinds and (why := why_no_network()):
        kinds.remove(Kind.CUT_WORKER)
    requests = chaos_plan.requests(asked.seed, asked.requests)
    stack = ChaosStack(
        model=asked.model,
        worker_settings={**WORKER_SETTINGS, "runner": asked.runner, **asked.worker_settings},
        service_settings=SERVICE_SETTINGS,
        with_network=Kind.CUT_WORKER in kinds,
    )
    async with stack, AsyncClient(stack.addresses, resume_seconds=120.0) as client:
        if "constraints" not in (await client.server_info()).features:
            requests = [replace(request, regex="") for request in requests]
        right = await _right_answers(client, requests, progress)
        began = monotonic()
        plans = chaos_plan.streams(asked.seed, len(requests))
        crowd = Crowd(client, plans, requests, right, asked.streams)
        outcome = Outcome(crowd.tally, network=f"not cut: {why}" if why else "cut")
        outcome.requests.update(kind for request in requests for kind in request.kinds)
        try:
            count = asked.max_disturbances
            schedule = chaos_plan.disturbances(asked.seed, count, kinds, asked.max_pause_seconds)
            await _disturb(stack, schedule, outcome, crowd, asked.seconds, progress)
            await crowd.stop()
        except BaseException:
            await crowd.abandon()
            raise
        outcome.seconds = monotonic() - began
        await _look_for_leaks(stack, outcome)
    for node in stack.nodes:
        outcome.exit_codes.update(node.exit_codes)
    if not outcome.faults():
        stack.remove_logs()
    else:
        outcome.tally.note(f"logs: {stack.folder}")
    return outcome


async def _right_answers(
    client: AsyncClient, requests: Sequence[RequestPlan], progress: Progress | None
) -> list[Answer]:
    task = progress.add_task("undisturbed", total=len(requests), note="") if progress else None
    turn = asyncio.Semaphore(RIGHT_AT_ONCE)

    async def ask(request: RequestPlan) -> Answer:
        async with turn:
            answer = await right_answer(client, request)
        if progress is not None and task is not None:
            progress.advance(task)
        return answer

    try:
        return await asyncio.gather(*map(ask, requests))
    except KvatlasError as error:
        raise ChaosFailed(f"the undisturbed run: {error}") from None


async def _disturb(
    stack: ChaosStack,
    schedule: Sequence[Disturbance],
    outcome: Outcome,
    crowd: Crowd,
    seconds: float,
    progress: Progress | None,
) -> None:
    began = monotonic()
    task = progress.add_task("chaos", total=seconds, note="") if progress else None
    for disturbance in schedule:
        await asyncio.sleep(disturbance.after_seconds)
        if monotonic() - began >= seconds:
            return
        if progress is not None and task is not None:
            tally = crowd.tally
            note = f"{crowd.open_streams} open, {tally.opened} ended, {tally.mismatches} wrong"
            note += f" · {disturbance.kind.value}"
            progress.update(task, completed=monotonic() - began, note=note)
        at = monotonic() - began
        old = await _do(stack, disturbance)
        healing = await stack.healed(old)
        outcome.healing_seconds.append(healing)
        outcome.disturbances[disturbance.kind.value] += 1
        what = {"at": round(at, 1), "what": disturbance.kind.value, "on": disturbance.target}
        outcome.timeline.append(
            what | {"seconds": round(disturbance.seconds, 2), "healed_after": round(healing, 1)}
        )


async def _do(stack: ChaosStack, what: Disturbance) -> dict[str, int]:
    """Does it and takes it back; lives of workers that must be over when all has healed."""
    worker, service = stack.workers[what.target], stack.services[what.target]
    known = await stack.known_epochs()
    old = {worker.name: known.get(worker.name, 0)}
    match what.kind:
        case Kind.KILL_WORKER:
            await _restart(worker, what.seconds)
        case Kind.DRAIN_WORKER:
            await worker.drain()
            await _restart(worker, what.seconds)
        case Kind.KILL_BOTH:
            await asyncio.gather(*(_restart(each, what.seconds) for each in stack.workers))
            return known
        case Kind.PAUSE_WORKER:
            worker.signal(signal.SIGSTOP)
            await asyncio.sleep(what.seconds)
            worker.signal(signal.SIGCONT)
            return {}
        case Kind.CUT_WORKER:
            stack.namespaces[what.target].cut()
            await asyncio.sleep(what.seconds)
            stack.namespaces[what.target].join()
            return {}
        case Kind.KILL_SERVICE:
            await _restart(service, what.seconds)
            return {}
        case Kind.DRAIN_SERVICE:
            await service.drain()
            await _restart(service, what.seconds)
            return {}
    return old


async def _restart(node: Node, seconds: float) -> None:
    await node.kill()
    await asyncio.sleep(seconds)
    node.start()


async def _look_for_leaks(stack: ChaosStack, outcome: Outcome) -> None:
    """Every worker gives all pages back, and its own audit of everything finds nothing."""
    async with AsyncClient(stack.addresses[0]) as client:
        for worker in stack.workers:
            limit, active = monotonic() + QUIET_SECONDS, -1
            while active and monotonic() < limit:
                with contextlib.suppress(KvatlasError):
                    active = (await client.page_pool(worker.name)).stats.active_pages
                await asyncio.sleep(0.05)
            outcome.leaked_pages[worker.name] = active
            checked = await client.check_integrity(worker.name)
            outcome.violations[worker.name] = checked.violations_total


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(values, share), 2) for name, share in shares.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it, prints figures, writes the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=64, help="kept open")
    parser.add_argument("--requests", type=int, default=96, help="different ones")
    parser.add_argument("--no-network", action="store_true", help="leave the network cut out")
    given = parser.parse_args(arguments)
    asked = Run(
        seed=given.seed,
        seconds=given.minutes * 60,
        streams=given.streams,
        requests=given.requests,
        kinds=chaos_plan.WITHOUT_NETWORK if given.no_network else tuple(Kind),
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    try:
        with Progress(*columns) as progress:
            outcome = asyncio.run(run(asked, progress))
    except ChaosFailed as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    figures = {"asked": {"seed": asked.seed, "minutes": given.minutes, "streams": asked.streams}}
    figures |= outcome.figures()
    for name, value in figures.items():
        if name != "timeline":
            print(f"{name}: {value}")
    print(write_result("chaos", figures, PACKAGES))
    return 1 if outcome.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
