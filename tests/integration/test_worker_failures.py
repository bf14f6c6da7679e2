"""Real workers on the CPU share the requests, and die, hang, are cut off, run out of memory and drain.

What runs is held by a request that makes every step of its worker slow (worker/faults.py): it is cancelled
once the test has seen what it waited for.
"""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest

from kvatlas.v1 import cache_pb2
from kvatlas.v1 import generation_pb2 as pb
from service.health import GENERATION
from service.health_messages import NOT_SERVING, SERVING
from service.testing import Refusal
from service.testing_fleet import FAULTY_TOKENS, PAGE_SIZE, Fleet, running_fleet, spec_of, tokens_of

ROWS = 9  # eight and the one that holds
FLAGS = ("--num-pages", "400", "--max-running", str(ROWS), "--debug-faults", "requests")
WaitUntil = Callable[..., None]
Tokens = list[list[int]]  # of each stream


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    # A worker takes its time to start on a busy machine: longer than a request would wait in production.
    settings = {"resume_seconds": 60.0, "stall_seconds": 60.0}
    with running_fleet(tmp_path_factory.mktemp("fleet"), *FLAGS, "--drain-grace", "0.1", **settings) as made:
        yield made


@pytest.fixture(autouse=True)
def whole_again(request: pytest.FixtureRequest, wait_until: WaitUntil) -> Iterator[None]:
    """After each test of the shared fleet: both workers are there, nothing is left on them."""
    yield
    if "fleet" not in request.fixturenames:
        return
    fleet: Fleet = request.getfixturevalue("fleet")
    for worker in fleet.workers:
        if worker.process is not None and worker.process.poll() is not None:
            worker.start()
    wait_until(lambda: fleet.usable == ["worker-0", "worker-1"], "both workers")
    wait_until(lambda: fleet.running.is_idle, "an idle service")
    for worker in fleet.workers:
        wait_until(lambda name=worker.worker_id: fleet.active_pages(name) == 0, "the pages to be free")


def specs_of(count: int) -> list[pb.GenerationSpec]:
    return [spec_of(f"request {number}: tell me", 256) for number in range(count)]


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> Tokens:
    """What the requests of `specs_of` give when nothing happens."""
    calls = [fleet.stream(spec) for spec in specs_of(16)]
    return [tokens_of(list(call)) for call in calls]


def running_on(calls: Sequence[Any]) -> tuple[list[str], list[list[pb.StreamGenerateResponse]]]:
    """Where each stream has started, and its messages up to the third token or more."""
    places, seen = [], []
    for call in calls:
        messages = [next(call)]
        while sum(message.delta.token_count for message in messages) < 3:
            messages.append(next(call))
        places.append(messages[0].started.worker_id)
        seen.append(messages)
    return places, seen


def by_worker(fleet: Fleet, worker_id: str) -> Any:
    return next(worker for worker in fleet.workers if worker.worker_id == worker_id)


def resumes(fleet: Fleet, reason: str) -> float:
    return fleet.running.value("kvatlas_resumes_total", reason=reason)


def whole(calls: Sequence[Any], seen: Sequence[Sequence[pb.StreamGenerateResponse]]) -> Tokens:
    """Every stream to its end, each token once."""
    return [tokens_of([*messages, *call]) for call, messages in zip(calls, seen, strict=True)]


def test_several_workers_must_be_named(fleet: Fleet) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        fleet.cache.GetPagePool(cache_pb2.GetPagePoolRequest(), timeout=60)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("FAILED_PRECONDITION", "WORKER_ID_REQUIRED")
    assert sorted(refusal.metadata["worker_ids"].split(",")) == ["worker-0", "worker-1"]
    for worker in fleet.workers:
        request = cache_pb2.GetPagePoolRequest(worker_id=worker.worker_id)
        assert fleet.cache.GetPagePool(request, timeout=60).geometry.worker_id == worker.worker_id


def test_prompts_go_where_the_pages_of_their_prefix_are(fleet: Fleet) -> None:
    """Both workers are used, and every later prompt finds all pages of those before it."""
    places = {}
    for number in range(8):
        prefix = f"{number} is the number of this conversation. " * 3
        for turn in range(3):
            spec = spec_of(prefix + "and then? " * 3 * turn, 4)
            response = fleet.generation.Generate(pb.GenerateRequest(spec=spec), timeout=300)
            assert response.worker_id == places.setdefault(prefix, response.worker_id)
            found = response.usage.prefix.hit_tokens
            assert (found > 0) == (turn > 0)
            assert found >= (len(prefix) if turn else 0) // PAGE_SIZE * PAGE_SIZE
    assert set(places.values()) == {"worker-0", "worker-1"}


def test_eight_running_and_eight_queued_survive_a_killed_worker(
    fleet: Fleet, undisturbed: Tokens, wait_until: WaitUntil
) -> None:
    """All on one worker, since the other one sleeps; what waited is sent again, which is no resume."""
    first, second = fleet.workers
    specs = specs_of(16)
    before = resumes(fleet, "crash")
    second.signal(signal.SIGSTOP)
    wait_until(lambda: fleet.usable == [first.worker_id], "the second to be lost")
    holder = fleet.slow()
    calls = [fleet.stream(spec) for spec in specs[:8]]
    _, seen = running_on(calls)
    calls += [fleet.stream(spec) for spec in specs[8:]]
    live = fleet.running.service.backstage.live
    wait_until(lambda: live.waiting() == 8 and not live.untaken(), "eight in the queue")
    second.signal(signal.SIGCONT)
    wait_until(lambda: len(fleet.usable) == 2, "the second worker")
    first.kill()
    wait_until(lambda: resumes(fleet, "crash") == before + ROWS, "the running ones to go on")
    holder.cancel()
    seen += [[] for _ in range(8)]
    assert whole(calls, seen) == undisturbed[: len(calls)]
    assert resumes(fleet, "crash") == before + ROWS


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced_and_says_nothing_twice(
    fleet: Fleet, undisturbed: Tokens, wait_until: WaitUntil
) -> None:
    specs = specs_of(3)
    before = resumes(fleet, "partition")
    holders = [fleet.slow(), fleet.slow()]
    calls = [fleet.stream(spec) for spec in specs]
    places, seen = running_on(calls)
    victim = by_worker(fleet, places[0])
    moved = places.count(places[0]) + 1  # and the one that holds
    victim.signal(signal.SIGSTOP)
    wait_until(lambda: resumes(fleet, "partition") == before + moved, "the streams to go on elsewhere")
    victim.signal(signal.SIGCONT)  # its tokens of before come now, or when they like
    wait_until(lambda: len(fleet.usable) == 2, "its return")
    for holder in holders:
        holder.cancel()
    assert whole(calls, seen) == undisturbed[: len(calls)]


def test_a_request_that_breaks_a_step_ends_alone(fleet: Fleet, undisturbed: Tokens) -> None:
    specs = specs_of(4)
    holders = [fleet.slow(), fleet.slow()]
    calls = [fleet.stream(spec) for spec in specs]
    _, seen = running_on(calls)
    with pytest.raises(grpc.RpcError) as raised:
        list(fleet.stream(spec_of(chr(FAULTY_TOKENS["breaks_step"]) * 8)))
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.message, refusal.reason) == ("INTERNAL", "internal error", "INTERNAL")
    for holder in holders:
        holder.cancel()
    assert whole(calls, seen) == undisturbed[: len(calls)]
    assert [worker.process.poll() for worker in fleet.workers if worker.process] == [None, None]


def test_a_device_without_memory_ends_its_worker_with_a_status(fleet: Fleet, wait_until: WaitUntil) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(fleet.stream(spec_of(chr(FAULTY_TOKENS["out_of_memory"]) * 8)))
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("INTERNAL", "DEVICE_OUT_OF_MEMORY")
    wait_until(lambda: len(fleet.usable) == 1, "the worker's end")
    (gone,) = (worker for worker in fleet.workers if worker.worker_id not in fleet.usable)
    assert gone.wait() == 75  # its launcher starts it again


@pytest.mark.slow
def test_a_request_that_kills_its_worker_kills_two_at_most(
    fleet: Fleet, undisturbed: Tokens, wait_until: WaitUntil
) -> None:
    """One resume without a token; innocent streams go on with the worker that comes back."""
    specs = specs_of(3)
    holders = [fleet.slow(), fleet.slow()]
    calls = [fleet.stream(spec) for spec in specs]
    _, seen = running_on(calls)
    poison = fleet.stream(spec_of(chr(FAULTY_TOKENS["kills_worker"]) * 8))
    for worker in fleet.workers:
        wait_until(lambda one=worker: one.process is None or one.process.poll() is not None, "its end")
        worker.start()
    with pytest.raises(grpc.RpcError) as raised:
        list(poison)
    refusal = Refusal.of(raised.value)
    assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "WORKER_LOST")
    assert refusal.metadata["tokens_sent"] == "0"
    for holder in holders:
        holder.cancel()
    assert whole(calls, seen) == undisturbed[: len(calls)]


@pytest.mark.slow
def test_workers_are_restarted_one_by_one_without_a_failed_stream(
    fleet: Fleet, undisturbed: Tokens, wait_until: WaitUntil
) -> None:
    """SIGTERM, a grace too short for the streams, a new life: what was handed over goes on elsewhere."""
    specs = specs_of(6)
    before = resumes(fleet, "drain")
    holders = [fleet.slow(), fleet.slow()]
    calls = [fleet.stream(spec) for spec in specs]
    places, seen = running_on(calls)
    for worker in fleet.workers:
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        worker.start()
        wait_until(lambda: len(fleet.usable) == 2, "its next life")
    for holder in holders:
        holder.cancel()
    assert whole(calls, seen) == undisturbed[: len(calls)]
    # At least those of the first worker; some may have ended before the second one had to go.
    assert resumes(fleet, "drain") > before + places.count(fleet.workers[0].worker_id)


@pytest.mark.slow
def test_a_worker_that_is_cut_off_is_left_in_two_seconds_and_taken_back(
    tmp_path: Path, undisturbed: Tokens, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing closes, nothing arrives: only the silence tells. Its own side frees the pages after five."""
    with running_fleet(tmp_path, *FLAGS, has_cables=True) as fleet:
        specs = specs_of(6)
        holders = [fleet.slow(), fleet.slow()]
        calls = [fleet.stream(spec) for spec in specs]
        places, seen = running_on(calls)
        victim = by_worker(fleet, places[0])
        assert victim.cable is not None
        moved = places.count(places[0]) + 1
        victim.cable.cut()
        wait_until(lambda: resumes(fleet, "partition") == moved, "the streams to go on elsewhere")
        silent = re.search(r"silent for ([\d.]+) s", caplog.text)
        assert silent is not None
        assert 2.0 <= float(silent[1]) < 2.6
        wait_until(lambda: "silent for 5 s" in victim.log_path.read_text(), "its side to drop the service")
        victim.cable.mend()  # what it said meanwhile arrives now, and matches nothing
        wait_until(lambda: len(fleet.usable) == 2, "its return")
        for holder in holders:
            holder.cancel()
        assert whole(calls, seen) == undisturbed[: len(calls)]
        wait_until(lambda: fleet.running.is_idle, "an idle service")
        for worker in fleet.workers:
            wait_until(lambda name=worker.worker_id: fleet.active_pages(name) == 0, "the pages to be free")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_takes_over_and_every_call_ends_in_time(
    tmp_path: Path, wait_until: WaitUntil, number: int
) -> None:
    """Eight run, eight wait, the only worker is gone: ten seconds of patience, three to notice and to tell.

    Stopped, it comes back after a minute with all that it had to say. Nobody hears it twice.
    """
    with running_fleet(tmp_path, *FLAGS, count=1) as fleet:
        (worker,) = fleet.workers
        expected = tokens_of(list(fleet.stream(specs_of(1)[0])))
        board = fleet.running.service.backstage.board
        holder = fleet.slow()
        running = [fleet.stream(spec) for spec in specs_of(8)]
        _, seen = running_on(running)
        waiting = [fleet.stream(spec) for spec in specs_of(8)]
        live = fleet.running.service.backstage.live
        wait_until(lambda: live.waiting() == 8 and not live.untaken(), "eight in the queue")
        began = monotonic()
        worker.signal(number)
        wait_until(lambda: board.status(GENERATION) == NOT_SERVING, "the health to be red")
        red_after = monotonic() - began
        for call, messages, code in [
            *((call, messages, "ABORTED") for call, messages in zip(running, seen, strict=True)),
            *((call, [], "UNAVAILABLE") for call in waiting),
        ]:
            with pytest.raises(grpc.RpcError) as raised:
                messages.extend(call)
            refusal = Refusal.of(raised.value)
            assert (refusal.code, refusal.reason) == (code, "WORKER_LOST")
            told = sum(message.delta.token_count for message in messages)
            assert int(refusal.metadata["tokens_sent"]) == told
        with pytest.raises(grpc.RpcError):
            list(holder)
        ended_after = monotonic() - began
        print(f"red after {red_after:.2f} s, all ended after {ended_after:.2f} s")
        assert red_after < 3.0
        assert ended_after < 13.0
        if number == signal.SIGSTOP:
            wait_until(lambda: monotonic() - began > 60.0, "a minute", seconds=80)
            worker.signal(signal.SIGCONT)
        else:
            worker.wait()
            worker.start()
        wait_until(lambda: board.status(GENERATION) == SERVING, "the health to be green")
        assert tokens_of(list(fleet.stream(specs_of(1)[0]))) == expected
        wait_until(lambda: fleet.running.is_idle, "an idle service")
        wait_until(lambda: fleet.active_pages("worker-0") == 0, "the pages to be free")
