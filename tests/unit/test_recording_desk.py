"""Calls about recordings and estimates at the worker: each is answered once, and with its reason."""

import errno
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from tests.desk_answers import answers_told
from worker.channels import OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.execution.testing import small_config
from worker.link import estimates, recordings
from worker.link.commands import CallRefused
from worker.link.estimates import FACTORS, MAX_PAGE_SIZE, EstimateDesk
from worker.link.recordings import RecordingDesk
from worker.messages import CallError, CallFailure, CallReason, LinkMessage, Ticket
from worker.readers.recorder import Recorder, Work
from worker.readers.recording_store import EndCause
from worker.trace.counts import Setting
from worker.trace.estimator import Answer, Estimate, EstimateBroken, EstimateLate
from worker.trace.loading import limits_message
from worker.trace.testing import RandomLoad, RecordedWorker
from worker.trace.what_if import MAX_PAGES, MAX_SETTINGS

TICKET = Ticket("service#1", 7)
EPOCH = 1_700_000_000_000_000_000
PAGES, PAGE_SIZE = 48, 4


class Asked:
    """The estimator's place: what it was asked, and of what nobody waits any more."""

    def __init__(self) -> None:
        self.estimates: list[Estimate] = []
        self.cancelled: list[object] = []
        self.has_room = True
        self.on_submit: Callable[[], None] = lambda: None
        self.on_cancel: Callable[[], None] = lambda: None

    def submit(self, estimate: Estimate) -> bool:
        self.on_submit()
        if self.has_room:
            self.estimates.append(estimate)
        return self.has_room

    def cancel(self, key: object) -> None:
        self.on_cancel()
        self.cancelled.append(key)


class Queue:
    """The recorder's queue of work, which a test does by itself."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.waiting: list[Work] = []
        self.has_room = True

    def submit(self, work: Work) -> bool:
        if self.has_room:
            self.waiting.append(work)
        return self.has_room

    def do(self) -> None:
        while self.waiting:
            self.waiting.pop(0)(self.recorder)


class Bench:
    """A desk with a real recorder, whose thread is the test."""

    def __init__(self, folder: Path) -> None:
        config = small_config(PAGES, PAGE_SIZE, 6, 24, 60)
        self.worker = RecordedWorker(config, folder)
        self.queue = Queue(self.worker.recorder)
        self.answers: OutputQueue[LinkMessage] = OutputQueue(1000)
        self.estimator = Asked()
        self.now = 100.0
        pool = PoolDescription(PAGES, PAGE_SIZE, 6, 60, "lru")
        description = WorkerDescription("w", EPOCH, ModelDescription("m", 9, 60), pool, 9, 60, 0, (), "", b"")
        desk = EstimateDesk(
            self.estimator,  # type: ignore[arg-type]
            self.answers,
            description,
            limits_message(config),
            lambda: self.now,
        )
        self.desk = RecordingDesk(self.queue, desk, self.answers, "w")  # type: ignore[arg-type]

    def run(self, turns: int = 100) -> None:
        load = RandomLoad(self.worker)
        for _ in range(turns):
            load.turn()
        self.worker.recorder.turn()

    def ask(self, kind: str, *, seconds: float = 10.0, ticket: Ticket = TICKET, **fields: Any) -> None:
        command = worker_pb2.Command(command_id=ticket.command_id, **{kind: fields})  # type: ignore[arg-type]
        self.desk.take(ticket, command, seconds)

    def told(self) -> list[worker_pb2.CommandReply | CallFailure]:
        """Answers so far, each checked to be the last of its call where it says so."""
        self.queue.do()
        told = answers_told(self.answers)
        assert all(answer.ticket == TICKET for answer in told if isinstance(answer, CallFailure))
        return told

    def reply(self, kind: str, **fields: Any) -> worker_pb2.CommandReply:
        self.ask(kind, **fields)
        (reply,) = self.told()
        assert isinstance(reply, worker_pb2.CommandReply), reply
        return reply

    def failure(self, kind: str, **fields: Any) -> CallFailure:
        self.ask(kind, **fields)
        return self.told_failure()

    def told_failure(self) -> CallFailure:
        (failure,) = self.told()
        assert isinstance(failure, CallFailure), failure
        return failure

    def recorded(self) -> server_pb2.RecordingInfo:
        """A recording that has ended."""
        self.reply("start_recording", note="n" * 300)
        self.run()
        return self.reply("stop_recording").stop_recording.recording

    def estimate(self, **fields: Any) -> Estimate:
        """What the estimator is asked."""
        self.ask("estimate", **fields)
        assert self.told() == []
        return self.estimator.estimates.pop()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    if made.worker.recorder.running is not None:
        made.worker.recorder.stop_recording("")
    made.answers.close()


# Recordings


def test_a_recording_begins_is_listed_and_ends(bench: Bench) -> None:
    started = bench.reply("start_recording").start_recording.recording
    assert (started.worker_id, started.end_cause) == ("w", 0)
    busy = bench.failure("start_recording")
    assert (busy.error, busy.reason) == (CallError.FAILED_PRECONDITION, CallReason.RECORDING_RUNNING)
    assert busy.metadata == {"recording_id": started.recording_id}
    bench.run()
    (running,) = bench.reply("list_recordings").list_recordings.recordings
    assert (running.recording_id, running.end_cause) == (started.recording_id, started.end_cause)
    assert running.event_count > 0
    stopped = bench.reply("stop_recording", recording_id=started.recording_id).stop_recording.recording
    assert stopped.end_cause == EndCause.STOPPED
    (summary,) = bench.worker.store.summaries()
    assert stopped.start_time.ToNanoseconds() == summary.start_ns > 0
    assert stopped.duration.ToMicroseconds() == round(summary.seconds * 1e6) > 0
    assert list(bench.reply("list_recordings").list_recordings.recordings) == [stopped]
    second = bench.recorded()
    newest_first = [each.recording_id for each in bench.reply("list_recordings").list_recordings.recordings]
    assert set(newest_first) == {second.recording_id, stopped.recording_id}
    assert len(second.note) == 256


def test_a_running_recording_is_not_fetched_and_the_newest_that_ended_is(bench: Bench) -> None:
    ended = bench.recorded()
    running = bench.reply("start_recording").start_recording.recording
    refused = bench.failure("get_recording", recording_id=running.recording_id)
    assert (refused.error, refused.reason) == (CallError.FAILED_PRECONDITION, CallReason.RECORDING_RUNNING)
    piece = bench.reply("get_recording").get_recording
    assert piece.recording == ended
    assert len(piece.data) == ended.byte_count


def test_a_file_comes_in_pieces_and_a_few_of_them_in_a_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "PIECE_BYTES", 1000)
    monkeypatch.setattr(recordings, "PIECES_PER_CALL", 2)
    info = bench.recorded()
    assert info.byte_count > 3000
    found, calls = b"", 0
    while len(found) < info.byte_count:
        bench.ask("get_recording", recording_id=info.recording_id, first_byte=len(found))
        replies = bench.told()
        calls += 1
        assert len(replies) <= 2
        for number, reply in enumerate(replies):
            assert isinstance(reply, worker_pb2.CommandReply)
            piece = reply.get_recording
            assert piece.first_byte == len(found)
            assert piece.HasField("recording") == (number == 0)
            assert 0 < len(piece.data) <= 1000
            found += piece.data
    assert calls == -(-info.byte_count // 2000)
    assert found == (bench.worker.store.folder / f"{info.recording_id}.kvrec").read_bytes()
    behind = bench.reply("get_recording", first_byte=info.byte_count).get_recording
    assert behind.data == b""
    refused = bench.failure("get_recording", first_byte=info.byte_count + 1)
    assert (refused.error, refused.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert refused.message.startswith("first_byte: ")


@pytest.mark.parametrize("kind", ["stop_recording", "get_recording"])
def test_a_recording_that_is_not_held_is_not_found(bench: Bench, kind: str) -> None:
    for recording_id, words in (("", "no recording is held"), ("x" * 1000, "no recording 'xxx")):
        failure = bench.failure(kind, recording_id=recording_id)
        assert (failure.error, failure.reason) == (CallError.NOT_FOUND, CallReason.RECORDING_NOT_FOUND)
        assert failure.message.startswith(words)
        assert len(failure.message) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lookback", Duration(seconds=3600, nanos=1)),
        ("lookback", Duration(seconds=-1)),
        ("max_duration", Duration(nanos=99_999_999)),
        ("max_duration", Duration(seconds=2**62)),
        ("max_bytes", (64 << 10) - 1),
        ("max_bytes", (1 << 30) + 1),
    ],
)
def test_a_bound_that_is_out_of_its_range_is_named(bench: Bench, field: str, value: object) -> None:
    failure = bench.failure("start_recording", **{field: value})
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert failure.message.startswith(f"{field}: ")
    assert bench.worker.recorder.running is None


@pytest.mark.parametrize(
    "fields",
    [
        {"lookback": Duration(seconds=3600)},
        {"max_duration": Duration(nanos=100_000_000)},
        {"max_duration": Duration(seconds=3600), "max_bytes": 1 << 30},
        {"max_bytes": 64 << 10},
    ],
)
def test_bounds_at_their_edges_are_taken(bench: Bench, fields: Mapping[str, object]) -> None:
    assert bench.reply("start_recording", **fields).HasField("start_recording")


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            CallError.FAILED_PRECONDITION,
            CallReason.RECORDING_FAILED,
        ),
        (KeyError("a bug"), CallError.INTERNAL, CallReason.INTERNAL),
    ],
)
def test_a_disk_that_cannot_be_written_and_a_bug_have_their_reasons(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, code: CallError, reason: CallReason
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(bench.worker.recorder, "start_recording", fail)
    failure = bench.failure("start_recording")
    assert (failure.error, failure.reason) == (code, reason)
    assert "a bug" not in failure.message
    assert ("No space left on device" in failure.message) == isinstance(error, OSError)
    assert bench.reply("list_recordings").HasField("list_recordings"), "the next call is served"


def test_a_recorder_that_takes_no_more_is_told_of_at_once(bench: Bench) -> None:
    bench.queue.has_room = False
    with pytest.raises(CallRefused) as refused:
        bench.ask("list_recordings")
    assert (refused.value.error, refused.value.reason) == (
        CallError.RESOURCE_EXHAUSTED,
        CallReason.QUOTA_EXCEEDED,
    )
    assert not bench.desk._wanted


def test_what_nobody_waits_for_any_more_is_not_begun(bench: Bench) -> None:
    """A recording began whose caller had been told that it was too late, and estimates ran for nobody."""
    other = Ticket("service#1", 8)
    for kind in ("start_recording", "estimate"):
        bench.ask(kind)
        bench.ask("list_recordings", ticket=other)
        bench.desk.cancel(TICKET)
        (reply,) = bench.told()
        assert isinstance(reply, worker_pb2.CommandReply)
        assert reply.command_id == other.command_id
        bench.desk.cancel(other)
    assert bench.worker.recorder.running is None
    assert bench.estimator.estimates == []
    assert not bench.desk._wanted


# Estimates


def test_an_estimate_that_is_given_up_while_it_is_asked_for_ends(bench: Bench) -> None:
    seen: list[set[Ticket]] = []
    bench.estimator.on_submit = lambda: bench.desk.cancel(TICKET)
    bench.estimator.on_cancel = lambda: seen.append(set(bench.desk._wanted))
    bench.estimate()
    assert seen == [set(), set()], "known before the queue is asked, which may not have it yet"
    assert bench.estimator.cancelled == [TICKET, TICKET], "by the caller, and behind the queue"


def test_an_estimate_is_of_every_combination_or_of_sizes_around_today_s(bench: Bench) -> None:
    bench.run()
    task = bench.estimate(seconds=3.0)
    assert [each.num_slots for each in task.task.settings] == [round(each * 192) for each in FACTORS]
    assert {(each.page_size, each.policy) for each in task.task.settings} == {(4, "lru")}
    assert (task.key, task.deadline) == (TICKET, 103.0)
    assert (task.task.window_us, len(task.requests)) == (0, task.task.num_requests)
    given = bench.estimate(
        pool_slots=[64, 96], page_sizes=[4, 8], eviction_policies=["lru", "fifo"], window=Duration(seconds=2)
    )
    assert set(given.task.settings) == {
        Setting(slots // size, size, policy)
        for slots in (64, 96)
        for size in (4, 8)
        for policy in ("lru", "fifo")
    }
    assert given.task.window_us == 2_000_000


@pytest.mark.parametrize(("num_settings", "num_requests"), [(1, 4), (4, 3), (8, 2)])
def test_an_estimate_is_of_the_newest_requests_and_of_fewer_where_there_are_many_settings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, num_settings: int, num_requests: int
) -> None:
    slots = [64 + 4 * number for number in range(num_settings)]
    bench.run()
    whole = bench.estimate(pool_slots=slots)
    assert whole.task.is_whole
    for name, value in (("MIN_REQUESTS", 2), ("MAX_REQUESTS", 4), ("MAX_ESTIMATED", 12)):
        monkeypatch.setattr(estimates, name, value)
    cut = bench.estimate(pool_slots=slots)
    assert list(cut.requests) == list(whole.requests)[-num_requests:]
    assert (cut.task.num_requests, cut.task.is_whole) == (num_requests, False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pool_slots": range(100, 100 + MAX_SETTINGS + 1)}, "pool_slots, page_sizes, eviction_policies: "),
        ({"page_sizes": [4, 0]}, "page_sizes: 0 is not in"),
        ({"page_sizes": [MAX_PAGE_SIZE + 4]}, "page_sizes: "),
        ({"page_sizes": [6]}, "page_sizes: 6 is no multiple of 4 tokens"),
        ({"eviction_policies": ["lru", "x" * 1000]}, "eviction_policies: "),
        ({"pool_slots": [7], "page_sizes": [8]}, "pool_slots: 7 slots"),
        ({"pool_slots": [4 * (MAX_PAGES + 1)]}, "pool_slots: "),
    ],
)
def test_settings_that_are_none_are_named(bench: Bench, fields: Mapping[str, object], words: str) -> None:
    failure = bench.failure("estimate", **fields)
    assert (failure.error, failure.reason) == (CallError.INVALID_ARGUMENT, CallReason.INVALID_FIELD)
    assert failure.message.startswith(words)
    assert len(failure.message) < 300
    assert bench.estimator.estimates == []


def test_as_many_settings_as_may_be_are_taken(bench: Bench) -> None:
    asked = bench.estimate(pool_slots=range(100, 100 + MAX_SETTINGS))
    assert len(asked.task.settings) == MAX_SETTINGS
    assert bench.estimate(pool_slots=[4 * MAX_PAGES]).task.settings == [Setting(MAX_PAGES, 4, "lru")]
    assert bench.estimate(page_sizes=[MAX_PAGE_SIZE], pool_slots=[MAX_PAGE_SIZE]).task.settings == [
        Setting(1, MAX_PAGE_SIZE, "lru")
    ]


def test_an_estimator_that_takes_no_more_is_told_of(bench: Bench) -> None:
    bench.estimator.has_room = False
    failure = bench.failure("estimate")
    assert (failure.error, failure.reason) == (CallError.RESOURCE_EXHAUSTED, CallReason.QUOTA_EXCEEDED)


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (EstimateLate(), CallError.DEADLINE_EXCEEDED, CallReason.DEADLINE_PASSED),
        (EstimateBroken("which nobody may read"), CallError.INTERNAL, CallReason.INTERNAL),
        ({}, CallError.INTERNAL, CallReason.INTERNAL),
        ({"observed": None, "estimates": []}, CallError.INTERNAL, CallReason.INTERNAL),
    ],
)
def test_an_estimate_that_is_none_is_answered_with_its_reason(
    bench: Bench, answer: Answer, error: CallError, reason: CallReason
) -> None:
    """Figures that made no message were answered by nobody: the caller waited to the end of its time."""
    bench.estimate().on_answer(answer)
    failure = bench.told_failure()
    assert (failure.error, failure.reason) == (error, reason)
    assert "which nobody may read" not in failure.message


@pytest.mark.parametrize(("evictions", "wasted"), [(None, None), (0, 0.0), (3, 2.5)])
def test_figures_arrive_as_they_were_computed(
    bench: Bench, evictions: int | None, wasted: float | None
) -> None:
    """What nobody looked at was told as 0."""
    figures: dict[str, Any] = {
        "num_pages": 12,
        "page_size": 8,
        "policy": "fifo",
        "hit_tokens": 30,
        "miss_cold_tokens": 10,
        "miss_evicted_tokens": 40,
        "unaligned_tokens": 20,
        "hit_ratio": 0.25,
        "hit_ratio_error": 0.125,
        "evictions": 5,
        "mean_wasted_slots": 1.5,
        "preemptions": 6,
        "mean_queue_seconds": 0.5,
    }
    observed = {**figures, "evictions": evictions, "mean_wasted_slots": wasted, "hit_tokens": 10}
    bench.estimate().on_answer(
        {
            "estimates": [figures],
            "observed": observed,
            "request_count": 3,
            "token_count": 99,
            "start_us": 2_000_000,
            "duration_us": 4_500_000,
        }
    )
    (reply,) = bench.told()
    assert isinstance(reply, worker_pb2.CommandReply)
    told = reply.estimate.observed
    assert (told.HasField("evictions"), told.HasField("mean_wasted_slots")) == (evictions is not None,) * 2
    prefix = {"hit_tokens": 30, "miss_cold_tokens": 10, "miss_evicted_tokens": 40, "unaligned_tokens": 20}
    half = Duration(nanos=500_000_000)
    sample = cache_pb2.EstimateSample(
        sampling_rate=1.0,
        request_count=3,
        token_count=99,
        duration=Duration(seconds=4, nanos=500_000_000),
        token_granularity=4,
    )
    sample.start_time.FromNanoseconds(EPOCH + 2_000_000_000)
    assert reply.estimate == cache_pb2.EstimateCacheResponse(
        estimates=[
            cache_pb2.CacheEstimate(
                pool_slots=96,
                page_size=8,
                eviction_policy="fifo",
                prefix=cache_pb2.PrefixLookupTotals(**prefix),
                hit_ratio=0.25,
                hit_ratio_error=0.125,
                evictions=5,
                mean_wasted_slots=1.5,
                preemptions=6,
                mean_queue_time=half,
            )
        ],
        observed=cache_pb2.CacheEstimate(
            pool_slots=192,
            page_size=4,
            eviction_policy="lru",
            prefix=cache_pb2.PrefixLookupTotals(**{**prefix, "hit_tokens": 10}),
            hit_ratio=0.125,
            evictions=evictions,
            mean_wasted_slots=wasted,
            preemptions=6,
            mean_queue_time=half,
        ),
        sample=sample,
    )
