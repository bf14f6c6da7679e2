"""The flight recorder: what its files hold, where they begin and end, and that its faults reach nobody."""

import copy
import errno
import os
import resource
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from kvatlas.v1 import cache_pb2
from worker.execution.testing import numbers, small_config
from worker.readers.ledger import Ledger
from worker.readers.prefix_keys import PrefixKeys
from worker.readers.recorder import MAX_WAITING_CALLS, RecorderBusy, RecordingOptions
from worker.readers.recording_file import CHECKSUM_TAG, DamagedRecording, read_ends, read_frames
from worker.readers.recording_store import (
    KEPT_RECORDINGS,
    EndCause,
    NoSuchRecording,
    RecordingStore,
    RecordingSummary,
)
from worker.readers.samples import RequestLog
from worker.trace.replay import Replay
from worker.trace.testing import RandomLoad, RecordedWorker
from worker.traffic import Arrival, Departure

KEY = b"key"


@pytest.fixture
def worker(tmp_path: Path) -> RecordedWorker:
    return RecordedWorker(small_config(48, 4, 6, 24, 60), tmp_path)


def run(worker: RecordedWorker, turns: int, every: int = 20) -> None:
    """Random load, with a turn of the recorder now and then."""
    load = RandomLoad(worker)
    for number in range(turns):
        load.turn()
        if number % every == 0:
            worker.recorder.turn()
    worker.recorder.turn()


def path_of(worker: RecordedWorker, recording_id: str) -> Path:
    return worker.store.folder / f"{recording_id}.kvrec"


def frames(path: Path, kind: str) -> list[cache_pb2.RecordingFrame]:
    return [at.frame for at in read_frames(path) if at.frame.WhichOneof("frame") == kind]


def open_recording(path: Path) -> Replay:
    from worker.trace.recording import Recording

    return Replay(Recording(path))


def test_nothing_is_written_while_nothing_is_recorded(worker: RecordedWorker) -> None:
    run(worker, 200)
    assert list(worker.store.folder.iterdir()) == []
    assert worker.recorder.running is None
    assert len(worker.recorder.log.requests) > 20, "the log is kept all the same"


def test_a_recording_holds_every_event_request_end_and_step(worker: RecordedWorker) -> None:
    run(worker, 50)
    first = worker.scheduler.cache.events.number
    started = worker.recorder.start_recording(RecordingOptions(note="why"))
    steps = worker.scheduler.step_number
    run(worker, 300)
    worker.recorder.turn()
    info = worker.recorder.stop_recording(started.recording_id)
    last = worker.scheduler.cache.events.number
    replay = open_recording(path_of(worker, info.recording_id))
    report = replay.run()
    assert (report.num_events, info.num_events) == (last - first, last - first)
    assert replay.ledger.states.tobytes() == worker.scheduler.snapshot().states
    assert report.num_steps == worker.scheduler.step_number - steps
    assert report.end == "STOPPED"
    assert (info.cause, info.note) == (EndCause.STOPPED, "why")
    assert replay.header.granularity == 4


def test_keys_at_whole_pages_are_the_fingerprints_of_the_page_map() -> None:
    from worker.pages.fingerprint import Fingerprinter

    keys = PrefixKeys(KEY, 16)
    assert keys.granularity == 8
    tokens = numbers(1, 70)
    found = keys.of(tokens, b"salt")
    fingerprints = Fingerprinter(KEY)
    first = fingerprints.of_page(fingerprints.of_salt(b"salt"), tokens[:16].tobytes())
    second = fingerprints.of_page(first.to_bytes(8, "little"), tokens[16:32].tobytes())
    assert len(found) == 8
    assert (found[1], found[3]) == (first, second)
    assert keys.of(tokens, b"other")[0] != found[0]


@pytest.mark.parametrize("known", range(0, 80, 7))
def test_keys_that_are_continued_equal_keys_made_at_once(known: int) -> None:
    keys = PrefixKeys(KEY, 16)
    tokens = numbers(5, 83)
    first = keys.of(tokens[:known], b"s")
    assert first + keys.of(tokens, b"s", first) == keys.of(tokens, b"s")


def test_a_recording_may_begin_in_the_past(worker: RecordedWorker) -> None:
    """`lookback` takes in what the ring still holds, requests that were live then included."""
    run(worker, 400)
    now = worker.now
    info = worker.recorder.start_recording(RecordingOptions(lookback_seconds=1.0))
    info = worker.recorder.stop_recording(info.recording_id)
    replay = open_recording(path_of(worker, info.recording_id))
    report = replay.run()
    assert 0.9 < now - replay.header.start_us / 1e6 < 1.1
    assert report.num_events > 100
    assert replay.ledger.revision == worker.scheduler.cache.events.number
    ring = worker.scheduler.cache.events
    before = ring.read(replay.header.first_number - 1, 2)
    assert before is not None
    assert before.times_us[0] < replay.header.start_us <= before.times_us[1]


def test_a_lookback_reaches_as_far_as_the_ring(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60, event_capacity=1024), tmp_path)
    run(worker, 600, every=5)
    info = worker.recorder.start_recording(RecordingOptions(lookback_seconds=1e6))
    worker.recorder.stop_recording(info.recording_id)
    replay = open_recording(path_of(worker, info.recording_id))
    report = replay.run()
    assert 512 <= report.num_events <= 1024


@pytest.mark.parametrize("seed", range(8))
def test_a_recording_that_begins_within_a_release_can_be_replayed(tmp_path: Path, seed: int) -> None:
    """As far back as the ring reaches a map stands anywhere, of some seeds between RELEASED and CACHED."""
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60, event_capacity=1024), tmp_path, seed=seed)
    run(worker, 400 + seed, every=5)
    info = worker.recorder.start_recording(RecordingOptions(lookback_seconds=1e6))
    worker.recorder.stop_recording(info.recording_id)
    assert open_recording(path_of(worker, info.recording_id)).run().end == "STOPPED"


def test_prompts_cannot_be_read_from_it_unless_asked_for(worker: RecordedWorker) -> None:
    secret = array("I", [0xC0FFEE] * 20)
    for with_token_ids in (False, True):
        info = worker.recorder.start_recording(RecordingOptions(with_token_ids=with_token_ids))
        worker.add(secret, 3)
        while worker.step(lambda sequence_id: 0xC0FFEE) is not None:
            pass
        worker.recorder.turn()
        worker.recorder.stop_recording("")
        path = path_of(worker, info.recording_id)
        assert (array("I", [0xC0FFEE]).tobytes() in path.read_bytes()) == with_token_ids
        (request,) = frames(path, "request")
        (sequence,) = frames(path, "sequence")
        assert request.request.token_ids == (secret.tobytes() if with_token_ids else b"")
        assert len(sequence.sequence.token_ids) == (12 if with_token_ids else 0)
        assert sequence.sequence.completion_tokens == 3


def test_it_ends_by_itself_at_its_size_and_its_duration(worker: RecordedWorker) -> None:
    info = worker.recorder.start_recording(RecordingOptions(max_bytes=20_000))
    run(worker, 200, every=5)
    ended = worker.store.find(info.recording_id)
    assert ended.cause is EndCause.SIZE
    assert 20_000 <= ended.num_bytes < 40_000
    info = worker.recorder.start_recording(RecordingOptions(max_seconds=0.5))
    run(worker, 100, every=5)
    ended = worker.store.find(info.recording_id)
    assert ended.cause is EndCause.DURATION
    assert 0.4 < ended.seconds < 0.7
    assert open_recording(path_of(worker, info.recording_id)).run().end == "DURATION"


def test_rotation_goes_on_and_keeps_the_last_four(worker: RecordedWorker) -> None:
    first = worker.recorder.start_recording(RecordingOptions(max_bytes=20_000, rotate=True))
    run(worker, 1500, every=5)
    worker.recorder.stop_recording("")
    kept = worker.store.summaries()
    assert len(kept) == KEPT_RECORDINGS == len(list(worker.store.folder.glob("*.kvrec")))
    assert first.recording_id not in [each.recording_id for each in kept]
    replays = [open_recording(path_of(worker, each.recording_id)) for each in reversed(kept)]
    for earlier, later in pairwise(replays):
        earlier.run()
        assert later.header.first_number == earlier.ledger.revision, "nothing lies between two"
    replays[-1].run()
    assert replays[-1].ledger.revision == worker.scheduler.cache.events.number


def test_no_recording_follows_one_whose_map_alone_fills_it(worker: RecordedWorker) -> None:
    """It would be full at once, too: a map of the whole pool would be written in every turn, for ever."""
    worker.recorder.start_recording(RecordingOptions(max_bytes=1000, rotate=True))
    run(worker, 100, every=5)
    (ended,) = worker.store.summaries()
    assert ended.cause is EndCause.SIZE
    assert worker.recorder.running is None


def test_one_recording_runs_at_a_time(worker: RecordedWorker) -> None:
    info = worker.recorder.start_recording(RecordingOptions())
    with pytest.raises(RecorderBusy) as busy:
        worker.recorder.start_recording(RecordingOptions())
    assert busy.value.recording_id == info.recording_id
    worker.recorder.stop_recording("")
    assert worker.recorder.stop_recording("").recording_id == info.recording_id, "stopping is idempotent"
    with pytest.raises(NoSuchRecording):
        worker.recorder.stop_recording("another")


def test_events_that_were_overwritten_are_a_gap_with_a_map_behind_it(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60, event_capacity=256), tmp_path)
    worker.recorder.start_recording(RecordingOptions())
    run(worker, 20, every=1)
    load = RandomLoad(worker)
    for _ in range(100):
        load.turn()
    worker.recorder.turn()
    assert len(worker.asked) == 1, "it asks the observer once"
    fresh = Ledger(48, 4)
    fresh.restore(worker.scheduler.snapshot())
    worker.asked.pop()(fresh)
    run(worker, 20, every=1)
    info = worker.recorder.stop_recording("")
    assert info.dropped_events == worker.recorder.dropped_events > 100
    replay = open_recording(path_of(worker, info.recording_id))
    report = replay.run()
    assert (report.lost_events, len(report.gaps)) == (info.dropped_events, 1)
    assert replay.ledger.refs.tobytes() == worker.scheduler.snapshot().ref_counts.tobytes()


def test_a_map_older_than_what_is_written_is_asked_for_again(tmp_path: Path) -> None:
    """The observer may lag more than the recorder: its map before it has started over is of no use."""
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60, event_capacity=256), tmp_path)
    older = Ledger(48, 4)
    older.restore(worker.scheduler.snapshot())
    worker.recorder.start_recording(RecordingOptions())
    run(worker, 20, every=1)
    load = RandomLoad(worker)
    for _ in range(100):
        load.turn()
    worker.recorder.turn()
    worker.asked.pop()(older)
    worker.recorder.turn()
    assert worker.recorder.dropped_events == 0
    assert len(worker.asked) == 1, "it asks again"
    fresh = Ledger(48, 4)
    fresh.restore(worker.scheduler.snapshot())
    worker.asked.pop()(fresh)
    worker.recorder.turn()
    info = worker.recorder.stop_recording("")
    assert info.cause is EndCause.STOPPED
    assert info.dropped_events > 100
    replay = open_recording(path_of(worker, info.recording_id))
    assert replay.run().lost_events == info.dropped_events


def test_records_that_found_no_room_are_counted_in_the_file(tmp_path: Path) -> None:
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60), tmp_path, traffic_limit=8)
    worker.recorder.start_recording(RecordingOptions())
    run(worker, 100, every=50)
    refused = worker.traffic.refused
    assert refused > 0
    info = worker.recorder.stop_recording("")
    assert open_recording(path_of(worker, info.recording_id)).run().lost_records == refused


def test_a_full_disk_ends_the_recording_with_what_the_system_said(worker: RecordedWorker) -> None:
    info = worker.recorder.start_recording(RecordingOptions())
    run(worker, 50)
    recording = worker.recorder._recording
    assert recording is not None
    recording._writer._file.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        recording._writer._file = full  # type: ignore[assignment]
        run(worker, 50)
    ended = worker.store.find(info.recording_id)
    assert (ended.cause, ended.message) == (EndCause.DISK, "No space left on device")
    assert worker.recorder.running is None
    replay = open_recording(path_of(worker, info.recording_id))
    assert replay.run().end.startswith("missing"), "what was written before is whole"
    assert worker.recorder.start_recording(RecordingOptions()).recording_id != info.recording_id
    worker.recorder.stop_recording("")


def test_a_file_that_fails_when_it_is_closed_ends_that_recording_and_nothing_else(
    worker: RecordedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    info = worker.recorder.start_recording(RecordingOptions())
    recording = worker.recorder._recording
    assert recording is not None
    os.close(recording._writer._file.fileno())
    done: list[str] = []
    worker.recorder.submit(lambda recorder: done.append("the next call"))
    RandomLoad(worker, arrivals=1.0).turn()
    worker.recorder._turn_safely()
    ended = worker.store.find(info.recording_id)
    assert (ended.cause, ended.message) == (EndCause.DISK, os.strerror(errno.EBADF))
    assert done == ["the next call"]
    assert "event=recorder_failed" not in caplog.text


def test_a_folder_that_cannot_be_made_refuses_the_start_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    worker = RecordedWorker(small_config(48, 4, 6, 24, 60), tmp_path / "file" / "folder")
    with pytest.raises(OSError, match="Not a directory"):
        worker.recorder.start_recording(RecordingOptions())
    run(worker, 20)
    assert worker.recorder.running is None


def test_a_failed_audit_leaves_a_recording_of_what_just_was(worker: RecordedWorker) -> None:
    run(worker, 100)
    violation = cache_pb2.IntegrityViolation(subject="references of page 7", expected="2", found="3")
    worker.recorder.found([violation], "refcount: references of page 7: expected 2, found 3")
    worker.recorder.found([violation], "again")
    worker.recorder.turn()
    (info,) = worker.store.summaries()
    assert info.cause is EndCause.AUDIT
    assert info.note == "refcount: references of page 7: expected 2, found 3"
    replay = open_recording(path_of(worker, info.recording_id))
    report = replay.run()
    assert report.num_events == worker.scheduler.cache.events.number, "from the first event on"
    assert ["references of page 7" in each for each in report.violations] == [True]


def test_a_worker_that_slept_for_hours_is_recorded_with_the_times_of_its_events(
    worker: RecordedWorker,
) -> None:
    """The recording of a failed audit takes in all that the ring holds, however old."""
    for _ in range(3):
        run(worker, 20)
        worker.now += 5000.0
    worker.recorder.found([cache_pb2.IntegrityViolation(subject="page 3")], "trie: page 3")
    worker.recorder.turn()
    (info,) = worker.store.summaries()
    replay = open_recording(path_of(worker, info.recording_id))
    assert replay.run().num_events == worker.scheduler.cache.events.number
    assert replay.time_us == worker.scheduler.cache.events.time_us


def test_a_disk_that_fills_up_under_the_recording_of_an_audit_takes_no_other_call_along(
    worker: RecordedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    run(worker, 100)
    done: list[str] = []
    worker.recorder.found([cache_pb2.IntegrityViolation(subject="page 3")], "trie: page 3")
    worker.recorder.submit(lambda recorder: done.append("the next call"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the map fits, the events do not
    try:
        worker.recorder._turn_safely()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (info,) = worker.store.summaries()
    assert (info.cause, info.message) == (EndCause.DISK, os.strerror(errno.EFBIG))
    assert done == ["the next call"]
    assert "event=recorder_failed" not in caplog.text


def test_work_that_breaks_takes_no_other_along(worker: RecordedWorker) -> None:
    done: list[str] = []
    worker.recorder.submit(lambda recorder: done.remove("nothing is there"))
    worker.recorder.submit(lambda recorder: done.append("the next call"))
    worker.recorder._turn_safely()
    assert done == ["the next call"]


def test_a_ledger_that_is_broken_costs_its_recording_and_is_replaced(
    worker: RecordedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Even the end of the recording breaks on it; the thread went with that, and every call after it."""
    run(worker, 20)
    info = worker.recorder.start_recording(RecordingOptions())
    recording = worker.recorder._recording
    assert recording is not None
    sound = copy.deepcopy(worker.recorder._ledger)
    worker.recorder._ledger.states = None  # type: ignore[assignment]
    done: list[str] = []
    worker.recorder.submit(lambda recorder: done.append("the next call"))
    load = RandomLoad(worker, arrivals=1.0)
    load.turn()
    worker.recorder._turn_safely()
    assert caplog.text.count("event=recorder_failed") == 2
    assert worker.recorder.running is None
    assert recording._writer._file.closed
    assert worker.store.find(info.recording_id).cause is EndCause.LOST
    worker.recorder._turn_safely()
    assert done == ["the next call"], "it need not wait for another ledger"
    load.turn()
    events = worker.scheduler.cache.events.read(sound.revision)
    assert events is not None
    sound.fold(events)
    (give,) = worker.asked
    give(sound)
    run(worker, 50)
    worker.recorder.start_recording(RecordingOptions())
    run(worker, 50)
    ended = worker.recorder.stop_recording("")
    assert open_recording(path_of(worker, ended.recording_id)).run().violations == []
    assert caplog.text.count("event=recorder_failed") == 2


def test_a_recording_that_runs_notes_what_an_audit_finds(worker: RecordedWorker) -> None:
    worker.recorder.start_recording(RecordingOptions())
    worker.recorder.found([cache_pb2.IntegrityViolation(subject="page 3")], "trie: page 3")
    run(worker, 20)
    info = worker.recorder.stop_recording("")
    assert [each.recording_id for each in worker.store.summaries()] == [info.recording_id]
    assert open_recording(path_of(worker, info.recording_id)).run().violations == ['subject: "page 3"']


def test_too_much_work_is_refused(worker: RecordedWorker) -> None:
    taken = [worker.recorder.submit(lambda recorder: None) for _ in range(MAX_WAITING_CALLS + 1)]
    assert taken == [True] * MAX_WAITING_CALLS + [False]


def test_the_thread_ends_a_recording_when_the_worker_ends(worker: RecordedWorker) -> None:
    run(worker, 50)
    worker.recorder.start_recording(RecordingOptions())
    worker.recorder.start()
    worker.recorder.close()
    worker.recorder.close()
    (info,) = worker.store.summaries()
    assert info.cause is EndCause.SHUTDOWN
    assert not worker.recorder.thread.is_alive()


def test_files_of_an_earlier_life_are_listed_with_their_end(worker: RecordedWorker, tmp_path: Path) -> None:
    info = worker.recorder.start_recording(RecordingOptions(note="kept"))
    run(worker, 30)
    info = worker.recorder.stop_recording("")
    worker.store.close()
    path = path_of(worker, info.recording_id)
    (found,) = listed(tmp_path, "worker-0")
    assert (found.cause, found.num_events, found.note) == (EndCause.STOPPED, info.num_events, "kept")
    path.write_bytes(path.read_bytes()[:-30])
    (found,) = listed(tmp_path, "worker-0")
    assert found.cause is EndCause.LOST
    path.write_bytes(b"something else")
    assert listed(tmp_path, "worker-0") == []
    assert listed(tmp_path, "worker") == [], "another worker's"


def listed(folder: Path, worker_id: str) -> list[RecordingSummary]:
    with closing(RecordingStore(folder, worker_id)) as store:
        return store.summaries()


def test_two_live_workers_of_one_id_leave_each_other_s_recordings_alone(tmp_path: Path) -> None:
    """Two `kvatlas serve` of one user are both worker-0 and keep their recordings in one folder."""
    with closing(RecordingStore(tmp_path, "worker-0")) as first:
        own = first.new_path()
        own.touch()
        with closing(RecordingStore(tmp_path, "worker-0")) as second:
            for _ in range(KEPT_RECORDINGS + 2):
                path = second.new_path()
                path.touch()
                assert path.name.startswith("worker-0.2-")
            assert len(list(tmp_path.glob("worker-0.2-*"))) == KEPT_RECORDINGS
        assert own.exists()
    with closing(RecordingStore(tmp_path, "worker-0")) as next_life:
        assert next_life.new_path().name.startswith("worker-0-"), "the name is free again"


def test_recordings_in_a_folder_that_can_only_be_read_are_listed(
    worker: RecordedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = worker.recorder.start_recording(RecordingOptions())
    run(worker, 10)
    worker.recorder.stop_recording("")
    worker.store.close()

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        raise PermissionError(errno.EACCES, "read only")

    monkeypatch.setattr("worker.folder_name.os.open", refuse)
    (found,) = listed(tmp_path, "worker-0")
    assert found.recording_id == info.recording_id
    with pytest.raises(PermissionError):
        RecordingStore(tmp_path, "worker-0").new_path()


def raw_frame(content: bytes) -> bytes:
    """With a right checksum, whatever it holds."""
    body = content + CHECKSUM_TAG + zlib.crc32(content).to_bytes(4, "little")
    return bytes((len(body),)) + body


@pytest.mark.parametrize(
    ("damage", "why", "place"),
    [
        (lambda data: data[:-3], "the file ends within a frame", -1),
        (lambda data: data + b"\x85", "the file ends within the length of a frame", None),
        (lambda data: data[:200] + bytes([data[200] ^ 4]) + data[201:], "checksum [0-9a-f]{8}, the frame", 1),
        (lambda data: data + b"\x06" + bytes(6), "a frame without a checksum", None),
        (lambda data: data + raw_frame(b"\xff\xff"), "a frame that cannot be parsed", None),
        (lambda data: data + b"\x04" + bytes(4), "a frame of 4 bytes is not possible", None),
        (lambda data: b"", "no header", 0),
        (lambda data: b"\xff\xff\xff\xff\xff" + data, "is not possible: this is no recording, or its beg", 0),
        (lambda data: b"export PATH\n" * 99, "a frame without a checksum: this is no recording, or its", 0),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_by_the_byte(
    worker: RecordedWorker, damage: Callable[[bytes], bytes], why: str, place: int | None
) -> None:
    """At which the frame begins; ``place``: of which frame, None: of what comes behind all of them."""
    worker.recorder.start_recording(RecordingOptions())
    run(worker, 30)
    path = path_of(worker, worker.recorder.stop_recording("").recording_id)
    data, offsets = path.read_bytes(), [each.offset for each in read_frames(path)]
    if place == 1:
        place = bisect_right(offsets, 200) - 1
    path.write_bytes(damage(data))
    with pytest.raises(DamagedRecording, match=why) as damaged:
        open_recording(path).run()
    assert damaged.value.offset == (len(data) if place is None else offsets[place])


def test_header_and_end_are_found_without_reading_what_is_between(worker: RecordedWorker) -> None:
    worker.recorder.start_recording(RecordingOptions())
    run(worker, 30)
    info = worker.recorder.stop_recording("")
    header, end = read_ends(path_of(worker, info.recording_id))
    assert header.recording_id == info.recording_id
    assert end is not None
    assert end.event_count == info.num_events


def test_a_recording_without_a_whole_end_has_a_header_alone(worker: RecordedWorker) -> None:
    worker.recorder.start_recording(RecordingOptions())
    run(worker, 30)
    path = path_of(worker, worker.recorder.stop_recording("").recording_id)
    data, (*_, before, last) = path.read_bytes(), [each.offset for each in read_frames(path)]
    cuts = [data[:before], data[:last], data[:-1], data + b"\x06", data + b"\x85"]
    for cut in (*cuts, data[:-1] + bytes([data[-1] ^ 1])):
        path.write_bytes(cut)
        header, end = read_ends(path)
        assert (header.recording_id, end) == (path.stem, None)
    for none in (b"", data[last:]):
        path.write_bytes(none)
        with pytest.raises(DamagedRecording, match="no header"):
            read_ends(path)


def arrival(number: int, prompt: int) -> Arrival:
    return Arrival(number, 0, number, f"r{number}", numbers(number, prompt), 1, 8, 0, True, True, b"")  # type: ignore[arg-type]


def departure(number: int, tokens: int) -> Departure:
    return Departure(number, 0, number, number, numbers(number, tokens), 3, 0, None, 0)  # type: ignore[arg-type]


def test_the_log_is_bounded_in_requests_and_in_keys() -> None:
    log = RequestLog(PrefixKeys(KEY, 16), max_requests=10, max_keys=100)
    assert log.is_whole
    for number in range(1, 30):
        log.arrive(arrival(number, 80))
        if number % 2:
            log.depart(departure(number, 120))
        assert len(log.requests) <= 10
        assert sum(request.num_keys for request in log.requests) <= 100
    assert not log.is_whole
    assert len(log.live) == 14
    found = log.depart(departure(2, 100))
    assert found is not None
    assert len(found[1].keys) == 2, "a live one is known however old"
    assert log.depart(departure(2, 100)) is None


def test_a_sample_of_the_log_does_not_change_any_more() -> None:
    log = RequestLog(PrefixKeys(KEY, 16))
    log.arrive(arrival(1, 20))
    sample = log.sample(5)
    log.depart(departure(1, 24))
    log.arrive(arrival(2, 20))
    assert [len(request.ends) for request in sample.requests] == [0]
    assert [len(request.ends) for request in log.sample(6).requests] == [1, 0]
