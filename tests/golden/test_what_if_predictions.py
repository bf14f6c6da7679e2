"""What-if says the same, to the last bit, however fast it is made.

`python -m tests.golden.test_what_if_predictions` predicts again and writes the file: only where a change of
what the scheduler decides, or of what is counted, is meant. A recording of a small pool under
conversations, samples, priorities and cancels; each setting in single tokens and in units of eight.
"""

import hashlib
import json
import random
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from worker.execution.testing import small_config
from worker.ids import SequenceId
from worker.readers.recorder import RecordingOptions
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.trace.counts import Counts, Setting
from worker.trace.loading import load
from worker.trace.prepared import prepare
from worker.trace.simulation import Simulation
from worker.trace.step_time import StepTime
from worker.trace.testing import RecordedWorker, conversations
from worker.trace.what_if import result_of
from worker.trace.workload import Trace

GOLDEN = Path(__file__).with_name("what_if_predictions.json")
STEP = StepTime(0.004, 20e-6, 30e-6, 5e-9)  # given: a fit's last bits are the library's
SETTINGS = (
    Setting(96, 16, "lru"),
    Setting(192, 16, "lru"),
    Setting(768, 16, "lru"),
    Setting(96, 32, "lru"),
    Setting(384, 8, "lru"),
    Setting(120, 16, "lfu"),
    Setting(120, 16, "fifo"),
    Setting(120, 16, "cost"),
)


def recorded(folder: Path) -> Trace:
    """Eight seconds of 40 requests a second on 192 pages."""
    config = small_config(192, 16, 24, 256, 512, event_capacity=1 << 15, fingerprint_key=b"golden")
    worker = RecordedWorker(config, folder, seed=3, step_seconds=lambda step: 0.006)
    worker.recorder.start_recording(RecordingOptions(max_seconds=1e9, max_bytes=1 << 28))
    draw = random.Random(8)
    turns = conversations(17, seconds=8.0, rate=40.0, answer_tokens=(1, 70), live=25, most_tokens=400)
    waiting, first, steps = turns[::-1], 1, 0
    while waiting or worker.scheduler.num_live:
        while waiting and waiting[-1].time <= worker.now:
            turn = waiting.pop()
            samples = draw.choice((1, 1, 1, 1, 3))
            worker.scheduler.add(
                RequestSpec(
                    SequenceId(first),
                    array("I", turn.prompt),
                    SamplingParams(max_tokens=len(turn.answer)),
                    sample_count=samples,
                    priority=draw.choice((0, 0, 1)),
                    cache_write=draw.random() < 0.95,
                    source="s",
                ),
                worker.now,
            )
            first += samples
        if draw.random() < 0.02:
            worker.abort(draw.randrange(max(1, first - 20), first + 1))
        if worker.step() is None:
            worker.now += 0.01
        steps += 1
        if steps % 20 == 0:
            worker.recorder.turn()
    worker.recorder.turn()
    info = worker.recorder.stop_recording("")
    return load(folder / f"{info.recording_id}.kvrec").trace


def predicted(trace: Trace) -> dict[str, object]:
    """By setting and unit: the line of the table, and a digest of every look-up and wait."""
    found: dict[str, object] = {}
    for resolution in (1, 8):
        prepared = prepare(trace, resolution)
        for setting in SETTINGS:
            counts = Simulation(trace, setting, STEP, resolution=resolution, prepared=prepared).run()
            name = f"{setting.num_pages} x {setting.page_size} {setting.policy}, units of {resolution}"
            found[name] = {**result_of(counts), "each": _digest(counts)}
    return found


def _digest(counts: Counts) -> str:
    text = json.dumps([counts.lookups, counts.queue_seconds])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Predicted now, as it comes out of a file."""
    told: dict[str, object] = json.loads(json.dumps(predicted(recorded(tmp_path_factory.mktemp("r")))))
    return told


def test_predictions_are_those_of_the_file_to_the_last_bit(found: dict[str, object]) -> None:
    assert found == json.loads(GOLDEN.read_text())


def test_the_recording_shares_evicts_and_preempts(found: dict[str, object]) -> None:
    lines = [line for line in found.values() if isinstance(line, dict)]
    assert len({line["hit_ratio"] for line in lines}) > len(SETTINGS)
    for what in ("hit_tokens", "miss_evicted_tokens", "evictions", "preemptions", "recomputed_tokens"):
        assert any(line[what] for line in lines), what


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        GOLDEN.write_text(json.dumps(predicted(recorded(Path(name))), indent=1) + "\n")
