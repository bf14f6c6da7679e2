"""Replay rebuilds the pool bit for bit at any revision, and names the first event that cannot have been."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.v1 import cache_pb2
from worker.execution.testing import small_config
from worker.pages.events import EventColumns, PageEventKind
from worker.pages.snapshot import PoolSnapshot
from worker.readers.ledger import Ledger
from worker.readers.recorder import RecordingOptions
from worker.readers.recording_file import encode_frame, read_frames
from worker.trace import replay as replay_module
from worker.trace.page_rules import BadEvent
from worker.trace.recording import Recording
from worker.trace.replay import NotRecorded, Replay
from worker.trace.testing import RandomLoad, RecordedWorker

NUM_EVENTS = 100_000


def recorded(
    folder: Path, num_events: int, *, seed: int = 1, page_size: int = 4, overlap: bool = False
) -> tuple[Path, list[PoolSnapshot]]:
    """A recording of so many events, and the pool's own snapshots along the way."""
    config = small_config(48, page_size, 6, 24, 60, event_capacity=16_384)
    worker = RecordedWorker(config, folder, seed=seed, overlap=overlap)
    load = RandomLoad(worker)
    worker.recorder.start_recording(RecordingOptions(max_seconds=1e9, max_bytes=1 << 30))
    snapshots: list[PoolSnapshot] = []
    turns = 0
    while worker.scheduler.cache.events.number < num_events:
        load.turn()
        turns += 1
        if turns % 50 == 0:
            worker.recorder.turn()
        if worker.random.random() < 0.01:
            snapshots.append(worker.scheduler.snapshot())
    worker.recorder.turn()
    info = worker.recorder.stop_recording("")
    return folder / f"{info.recording_id}.kvrec", snapshots


@pytest.fixture(scope="module")
def long_recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[PoolSnapshot]]:
    return recorded(tmp_path_factory.mktemp("recordings"), NUM_EVENTS)


def assert_same(ledger: Ledger, snapshot: PoolSnapshot) -> None:
    """Bit for bit, but for what only sequences know: tokens in pages that are not full, owners of none."""
    assert ledger.states.tobytes() == snapshot.states
    assert ledger.flags.tobytes() == snapshot.flags
    assert ledger.refs.tobytes() == snapshot.ref_counts.tobytes()
    assert ledger.parents.tobytes() == snapshot.parent_page_ids.tobytes()
    assert ledger.fingerprints.tobytes() == snapshot.fingerprints.tobytes()
    assert ledger.hits.tobytes() == snapshot.hit_counts.tobytes()
    assert ledger.used_ms.tobytes() == snapshot.used_ms.tobytes()
    assert ledger.born_ms.tobytes() == snapshot.born_ms.tobytes()
    owners = [owner if refs else 0 for owner, refs in zip(snapshot.owners, snapshot.ref_counts, strict=True)]
    assert ledger.owners.tolist() == owners


def test_a_hundred_thousand_events_are_rebuilt_bit_for_bit_at_twenty_revisions(
    long_recording: tuple[Path, list[PoolSnapshot]],
) -> None:
    path, snapshots = long_recording
    chosen = sorted(random.Random(5).sample(snapshots, 20), key=lambda snapshot: snapshot.number)
    replay = Replay(Recording(path))
    for snapshot in chosen:
        assert_same(replay.run_to(snapshot.number), snapshot)
    report = replay.run()
    assert report.num_events >= NUM_EVENTS
    assert report.end == "STOPPED"
    assert set(report.kinds) == {kind.name for kind in PageEventKind} - {"MOVED"}, "every kind was there"


def test_a_revision_that_is_not_in_it_is_refused(long_recording: tuple[Path, list[PoolSnapshot]]) -> None:
    path, _ = long_recording
    with pytest.raises(NotRecorded, match="ends at"):
        Replay(Recording(path), is_checked=False).run_to(NUM_EVENTS * 2)
    replay = Replay(Recording(path), is_checked=False)
    replay.run_to(500)
    with pytest.raises(NotRecorded, match="500 and later"):
        replay.run_to(499)


def rewritten(path: Path, number: int, change: Callable[[EventColumns, int], EventColumns]) -> Path:
    """The recording with one event changed, its checksum made anew."""
    copy = path.with_name("changed.kvrec")
    with copy.open("wb") as file:
        for at in read_frames(path):
            batch, frame = at.frame.events, at.frame
            offset = number - batch.first_number
            if frame.WhichOneof("frame") == "events" and 0 <= offset < len(batch.types):
                _change_event(batch, offset, change)
            file.write(encode_frame(frame))
    return copy


def _change_event(
    batch: cache_pb2.PageEventBatch, offset: int, change: Callable[[EventColumns, int], EventColumns]
) -> None:
    from array import array

    columns = EventColumns(
        batch.first_number,
        batch.types,
        array("I", batch.page_ids),
        array("H", batch.owners),
        array("H", batch.ref_counts),
        array("I", batch.other_page_ids),
        array("Q", batch.fingerprints),
        array("Q"),
        array("Q"),
        (),
    )
    changed = change(columns, offset)
    batch.types = changed.kinds
    batch.page_ids = changed.pages.tobytes()
    batch.owners = changed.owners.tobytes()
    batch.ref_counts = changed.refs.tobytes()
    batch.other_page_ids = changed.others.tobytes()


def another_kind(columns: EventColumns, at: int) -> EventColumns:
    kinds = bytearray(columns.kinds)
    kinds[at] = kinds[at] % 11 + 1
    return replace(columns, kinds=bytes(kinds))


def another_page(columns: EventColumns, at: int) -> EventColumns:
    columns.pages[at] ^= 1
    return columns


def another_owner(columns: EventColumns, at: int) -> EventColumns:
    columns.owners[at] ^= 0x40
    return columns


def more_references(columns: EventColumns, at: int) -> EventColumns:
    columns.refs[at] += 1
    return columns


@pytest.mark.parametrize("change", [another_kind, another_page, more_references, another_owner])
def test_a_flipped_event_is_found_and_named(
    tmp_path: Path, change: Callable[[EventColumns, int], EventColumns]
) -> None:
    """At the event itself, or at the first one after it that contradicts it."""
    path, _ = recorded(tmp_path, 3_000)
    draw = random.Random(3)
    at_once = 0
    for _ in range(12):
        number = draw.randrange(100, 2_500)
        with pytest.raises(BadEvent) as found:
            Replay(Recording(rewritten(path, number, change))).run()
        bad = found.value
        assert number <= bad.number <= number + 1_500, "not before it, and while the page lives"
        assert bad.kind in {kind.name for kind in PageEventKind}
        assert bad.why
        assert f"event {bad.number}, step {bad.step}: {bad.kind} of page {bad.page}: {bad.why}" == str(bad)
        at_once += bad.number == number
    if change is more_references:
        assert at_once == 12


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(2, 7))
def test_every_recorded_life_obeys_the_rules_and_ends_in_the_pool_state(
    tmp_path: Path, seed: int, overlap: bool
) -> None:
    page_size = (1, 2, 3, 4, 16)[seed - 2]
    path, snapshots = recorded(tmp_path, 4_000, seed=seed, page_size=page_size, overlap=overlap)
    replay = Replay(Recording(path))
    for snapshot in snapshots[::5]:
        assert_same(replay.run_to(snapshot.number), snapshot)
    assert replay.run().end == "STOPPED"


def test_the_command_prints_a_state_and_names_what_is_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, snapshots = recorded(tmp_path, 2_000)
    assert replay_module.main([str(path), "--at", str(snapshots[0].number)]) == 0
    assert f"revision  {snapshots[0].number:,}" in capsys.readouterr().out
    assert replay_module.main([str(path), "--json"]) == 0
    assert '"end": "STOPPED"' in capsys.readouterr().out
    bad = rewritten(path, 700, more_references)
    assert replay_module.main([str(bad)]) == 1
    assert "bad event: event 700, step" in capsys.readouterr().err
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert replay_module.main([str(path)]) == 1
    assert "damaged: byte" in capsys.readouterr().err
    assert replay_module.main([str(path.with_name("none"))]) == 1
