"""The evictions that a worker is said to have had, beside those predicted: for room, over all of the time."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.estimate_task import estimate_task
from worker.execution.testing import small_config
from worker.readers import samples
from worker.readers.prefix_keys import PrefixKeys
from worker.readers.recorder import RecordingOptions
from worker.readers.samples import PoolLook, RequestLog
from worker.trace.estimate import estimate
from worker.trace.loading import load
from worker.trace.testing import RecordedWorker

LOOKS = ((1_000_000, 10), (4_700_000, 20), (5_700_000, 40), (6_700_000, 70))  # time, evictions


def fill(worker: RecordedWorker, first_token: int, requests: int) -> None:
    for number in range(requests):
        worker.add([first_token + number] * 64, 1)
        while worker.step() is not None:
            pass
        worker.recorder.turn()


def test_pages_that_a_flush_drops_are_not_counted_as_evicted_for_room(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(24, 16, 4, 64, 128), tmp_path)
    worker.recorder.start_recording(RecordingOptions())
    fill(worker, 100, 10)
    counts = worker.scheduler.counts()
    worker.scheduler.flush(worker.now, include_active=False)
    flushed = worker.scheduler.counts().flush_evictions_total
    worker.recorder.turn()
    recording = worker.recorder.stop_recording("")
    found = load(worker.store.folder / f"{recording.recording_id}.kvrec")
    assert flushed > 10
    assert found.observed.evictions == counts.capacity_evictions_total > 10


def test_looks_cover_all_of_the_time_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_LOOKS", 16)
    log = RequestLog(PrefixKeys(b"key", 16))
    for second in range(1000):
        log.look(second * 1_000_000, second, 5)
    looks = log.sample(1_000_000_000).looks
    assert 8 <= len(looks) <= 16
    assert looks[0].time_us == 0
    gaps = [later.time_us - look.time_us for look, later in pairwise(looks)]
    assert max(gaps) <= 1_000_000_000 // 8
    assert looks[-1].evictions_total - looks[0].evictions_total > 800


@pytest.mark.parametrize(
    ("window_us", "evictions"),
    [
        (0, 70),  # all of them: those before the first look as well
        (1_000_000, 30),  # it has one look, and what came since the one before it
        (600_000, 30),
        (2_400_000, 50),
        (7_000_000, 70),
        (100_000, None),  # nobody looked
    ],
)
def test_evictions_are_counted_from_the_last_look_before_the_window(
    window_us: int, evictions: int | None
) -> None:
    """It said 0 of a window with a single look."""
    task = estimate_task(
        end_us=7_200_000,
        window_us=window_us,
        is_whole=True,
        steps=(),
        looks=[PoolLook(time_us, total, 4) for time_us, total in LOOKS],
        num_requests=0,
    )
    observed = estimate(task, ())["observed"]
    assert isinstance(observed, dict)
    assert observed["evictions"] == evictions
    assert observed["mean_wasted_slots"] == (None if evictions is None else 4.0)
