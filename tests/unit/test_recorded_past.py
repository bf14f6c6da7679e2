"""Recordings that begin in the past, go on in another file, or have more to say than a frame holds."""

from pathlib import Path

import pytest

from worker.execution.testing import small_config
from worker.readers import recording_frames
from worker.readers.ledger import Ledger
from worker.readers.recorder import RecordingOptions
from worker.readers.recording_file import MAX_FRAME_BYTES, encode_frame
from worker.readers.recording_store import RecordingSummary
from worker.trace.counts import Setting
from worker.trace.loading import Loaded, load
from worker.trace.recording import Recording
from worker.trace.replay import Replay
from worker.trace.simulation import Simulation
from worker.trace.step_time import StepTime
from worker.trace.testing import RecordedWorker, conversations, frame_maker, run_turns


def ended(worker: RecordedWorker) -> RecordingSummary:
    return worker.recorder.stop_recording("")


def loaded(worker: RecordedWorker) -> Loaded:
    return load(worker.store.folder / f"{ended(worker).recording_id}.kvrec")


def test_a_recording_begins_no_earlier_than_its_map(tmp_path: Path) -> None:
    """Where the ring reaches less far than was asked for: requests of before would find their own pages."""
    worker = RecordedWorker(small_config(96, 16, 8, 64, 600, event_capacity=1024), tmp_path)
    turns = conversations(3, seconds=20, rate=8, most_tokens=400)
    run_turns(worker, turns)
    worker.recorder.start_recording(RecordingOptions(lookback_seconds=3600.0))
    found = loaded(worker)
    first = found.trace.requests[0]
    assert len(found.trace.requests) < len(turns) // 4
    assert first.arrival < 1.0
    assert found.trace.seconds < 4.0
    simulated = Simulation(found.trace, Setting(96, 16, "lru"), StepTime(0.01)).run()
    assert simulated.hit_ratio == pytest.approx(found.observed.hit_ratio, abs=0.001)
    assert simulated.evictions == pytest.approx(found.observed.evictions or 0, abs=3)


def test_a_file_that_goes_on_has_the_ends_of_samples_that_had_ended(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(96, 16, 8, 64, 600), tmp_path)
    first = worker.add([1, 2, 3, 4] * 5, 40, samples=3)
    worker.recorder.start_recording(RecordingOptions(rotate=True, max_seconds=1.0))
    for _ in range(5):
        worker.step()
    worker.abort(first + 1)
    worker.recorder.turn()
    worker.now = 1.2
    worker.recorder.turn()
    while worker.step() is not None:
        pass
    worker.recorder.turn()
    (request,) = loaded(worker).trace.requests
    assert [output.num_tokens for output in request.outputs] == [40, 4, 40]
    assert not any(output.is_cut for output in request.outputs)


def test_requests_whose_ends_were_lost_are_not_live_for_ever(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(96, 16, 8, 64, 600), tmp_path, traffic_limit=1)
    worker.add([1, 2, 3, 4] * 5, 40)
    worker.recorder.turn()
    while worker.step() is not None:  # its end, and all but one of its steps, find no room
        pass
    worker.recorder.turn()
    worker.now += 100.0
    worker.recorder.start_recording(RecordingOptions())
    assert ended(worker).num_requests == 0


def test_a_pool_that_is_shared_by_many_makes_no_frame_that_nobody_reads() -> None:
    ledger = Ledger(8192, 1)
    ledger.sharers = {page: list(range(2, 402)) for page in range(8192)}
    frames = list(frame_maker(small_config(8192, 1, 6, 24, 60)).snapshot(ledger))
    assert max(len(encode_frame(frame)) for frame in frames) <= MAX_FRAME_BYTES
    sharers = [frame.sharers for frame in frames if frame.WhichOneof("frame") == "sharers"]
    assert sum(len(each.owners) // 2 for each in sharers) == 8192 * 400


def test_sharers_in_several_frames_are_one_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_frames, "SHARERS_PER_FRAME", 2)
    worker = RecordedWorker(small_config(96, 16, 8, 64, 600), tmp_path)
    worker.add([1, 2, 3, 4] * 12, 30, samples=5)
    for _ in range(4):
        worker.step()
    worker.recorder.turn()
    worker.recorder.start_recording(RecordingOptions())
    while worker.step() is not None:
        worker.recorder.turn()
    path = worker.store.folder / f"{ended(worker).recording_id}.kvrec"
    first = next(iter(Recording(path).items()))
    assert {len(owners) for owners in first.sharers.values()} == {4}  # type: ignore[union-attr]
    assert Replay(Recording(path)).run().end == "STOPPED"


def test_the_map_behind_a_gap_is_not_of_the_step_at_which_the_recording_began(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(96, 16, 8, 64, 600, event_capacity=64), tmp_path)
    worker.recorder.start_recording(RecordingOptions())
    for number in range(2):
        worker.add([1 + number] * 50, 60)
        worker.step()
    worker.recorder.turn()
    seen = worker.scheduler.step_number
    for number in range(10):
        worker.add([10 + number] * 50, 20)
    while worker.step() is not None:
        pass
    worker.recorder.turn()
    ledger = Ledger(96, 16)
    ledger.restore(worker.scheduler.snapshot())
    worker.asked.pop()(ledger)
    worker.recorder.turn()
    replay = Replay(Recording(worker.store.folder / f"{ended(worker).recording_id}.kvrec"))
    assert replay.run_to(ledger.revision).step >= seen > replay.header.first_step
