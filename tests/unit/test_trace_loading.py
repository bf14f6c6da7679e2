"""What of a recording becomes a trace, and what of its first map is in the cache when the trace begins."""

from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvatlas.v1 import cache_pb2
from worker.ids import NO_PAGE
from worker.pages.events import EventColumns, PageFlag, PageState
from worker.pages.events import PageEventKind as Kind
from worker.pages.page_cache import CacheConfig, PageCache
from worker.trace import loading
from worker.trace.marks import Marks
from worker.trace.recording import Header, Item, MapAt
from worker.trace.warm_start import cached_prefixes, fill_cache
from worker.trace.workload import CachedPage, Limits, Trace, TraceRequest

EPOCH_NS = 1_000_000_000
SECOND_US = 1_000_000


@dataclass(frozen=True)
class FakeRecording:
    """Frames as a test says them."""

    header: Header
    frames: list[Item]

    def items(self) -> list[Item]:
        return self.frames


def header() -> Header:
    return Header(
        recording_id="r",
        worker_id="w",
        model="m",
        note="",
        epoch_ns=EPOCH_NS,
        num_pages=3,
        page_size=16,
        policy="lru",
        first_number=0,
        first_step=0,
        start_us=SECOND_US,
        granularity=16,
        limits=cache_pb2.SchedulerLimits(
            max_running_sequences=2, max_step_tokens=64, max_context_tokens=99, watermark_pages=2
        ),
    )


def loaded(monkeypatch: pytest.MonkeyPatch, *frames: Item) -> loading.Loaded:
    monkeypatch.setattr(loading, "Recording", lambda path: FakeRecording(header(), list(frames)))
    return loading.load(Path("any.kvrec"))


def request(sequence_id: int, seconds: int, samples: int = 1) -> cache_pb2.RequestRecord:
    record = cache_pb2.RequestRecord(
        sequence_id=sequence_id, sample_count=samples, prompt_tokens=5, max_tokens=9
    )
    record.time.FromNanoseconds(EPOCH_NS + seconds * 1_000_000_000)
    return record


def ended(sequence_id: int, seconds: int, tokens: int) -> cache_pb2.SequenceRecord:
    record = cache_pb2.SequenceRecord(sequence_id=sequence_id, completion_tokens=tokens, finish_code=3)
    record.time.FromNanoseconds(EPOCH_NS + seconds * 1_000_000_000)
    return record


def events(*seconds: int) -> EventColumns:
    count = len(seconds)
    return EventColumns(
        first_number=1,
        kinds=bytes([Kind.EVICTED]) * count,
        pages=array("I", bytes(4 * count)),
        owners=array("H", [7] * count),
        refs=array("H", bytes(2 * count)),
        others=array("I", bytes(4 * count)),
        tags=array("Q", bytes(8 * count)),
        steps=array("Q", bytes(8 * count)),
        times_us=array("Q", [each * SECOND_US for each in seconds]),
        tokens=(),
    )


def map_of(key: int) -> MapAt:
    """Of three pages and the dummy: the second is sealed behind the first, which is not in the index."""
    planes = cache_pb2.PageMap(
        states=bytes([PageState.CACHED] * 2 + [PageState.FREE] * 2),
        flags=bytes([0, PageFlag.SEALED, 0, 0]),
        fingerprints=array("Q", [key - 1, key, 0, 0]).tobytes(),
        parent_page_ids=array("I", [NO_PAGE, 0, NO_PAGE, NO_PAGE]).tobytes(),
        used_ms=array("I", [0, 40, 0, 0]).tobytes(),
    )
    return MapAt(planes, {})


@pytest.mark.parametrize(
    ("last", "seconds"),
    [(events(3, 8), 7), (request(50, 6), 5), (ended(10, 5, 1), 4)],
    ids=["events", "a request", "an end"],
)
def test_a_trace_lasts_from_its_beginning_to_the_last_thing_that_is_known(
    monkeypatch: pytest.MonkeyPatch, last: Item, seconds: int
) -> None:
    found = loaded(monkeypatch, request(10, 2), last, ended(10, 3, 1), events(2, 4), request(60, 2))
    assert found.trace.seconds == seconds


def test_what_was_lost_adds_up_and_an_end_without_its_request_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaps = [cache_pb2.RecordingGap(lost_records=n, lost_events=10 * n) for n in (2, 3)]
    found = loaded(monkeypatch, request(10, 2, samples=2), gaps[0], ended(99, 3, 1), ended(11, 3, 4), gaps[1])
    assert (found.lost_records, found.lost_events) == (5, 50)
    (only,) = found.trace.requests
    assert [output.num_tokens for output in only.outputs] == [9, 4]
    assert [output.is_cut for output in only.outputs] == [True, False]
    assert found.step_time is None


def test_the_cache_begins_as_the_first_map_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = loaded(monkeypatch, map_of(100), events(2, 3), map_of(200))
    assert found.trace.cached == [CachedPage(100, 99, 40)]
    assert found.observed.evictions == 2
    assert loaded(monkeypatch, events(2)).trace.cached == ()


def trace_of(cached: list[CachedPage], *prompts: list[int], granularity: int = 16) -> Trace:
    requests = [TraceRequest(0.0, 16 * len(keys), 1, array("Q", keys), ()) for keys in prompts]
    return Trace(requests, granularity, 16, 9, "lru", Limits(4, 64, 999), 1.0, cached)


def prefixes(trace: Trace) -> tuple[Marks, list[list[int]]]:
    """Marks of the trace, and those of each prefix that its cache begins with."""
    marks = Marks([request.keys for request in trace.requests], 2)
    return marks, [list(found) for found in cached_prefixes(trace, marks)]


def marks_of(marks: Marks, *keys: int) -> list[int]:
    return list(array("I", marks.of(array("Q", keys))))


def test_prefixes_end_at_leaves_and_where_one_was_used_after_all_that_hangs_on_it() -> None:
    root, early, late = CachedPage(1, None, 8), CachedPage(2, 1, 3), CachedPage(3, 1, 9)
    trace = trace_of([root, late, early], [1, 2], [1, 3])
    marks, found = prefixes(trace)
    assert found == [marks_of(marks, 1, 2), marks_of(marks, 1, 3)], "the one used last at the end"
    used_again = trace_of([CachedPage(1, None, 10), late, early], [1, 2], [1, 3])
    marks, found = prefixes(used_again)
    assert found == [marks_of(marks, 1, 2), marks_of(marks, 1, 3), marks_of(marks, 1)]
    at_once = trace_of([CachedPage(1, None, 9), late], [1, 3])
    marks, found = prefixes(at_once)
    assert found == [marks_of(marks, 1, 3)], "used with its child, for its child"
    assert prefixes(trace_of([], [1, 2]))[1] == []


def test_a_prefix_whose_beginning_is_gone_begins_later_and_what_nobody_knows_is_like_nothing_else() -> None:
    trace = trace_of([CachedPage(3, 2, 9), CachedPage(7, None, 5)], [1, 2, 3])
    marks, found = prefixes(trace)
    unknown, known = found
    assert known == marks_of(marks, 3)
    assert len(unknown) == 2
    assert not set(unknown) & set(marks_of(marks, 1, 2, 3))


def test_keys_within_a_page_are_those_of_the_request_that_knows_its_end() -> None:
    trace = trace_of([CachedPage(4, 2, 9), CachedPage(2, None, 9)], [1, 2, 3, 4, 5], granularity=8)
    marks, found = prefixes(trace)
    assert found == [marks_of(marks, 1, 2, 3, 4)]
    cache = PageCache(CacheConfig(num_pages=9, page_size=4))
    fill_cache(cache, cached_prefixes(trace, marks))
    tokens = array("I", marks.of(array("Q", [1, 2, 3, 4])))
    assert len(cache.lookup(tokens, b"", 2).pages) == 2


def test_steps_give_the_time_of_each_of_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = array("I", [0, 10, 40, 5, 0, 80, 0, 20, 30, 60, 0, 15])
    decode = array("I", [1, 2, 0, 8, 5, 1, 3, 4, 9, 2, 6, 7])
    context = array("Q", [100, 900, 50, 4000, 700, 90, 2500, 300, 10, 800, 60, 1200])
    taken = [2000 + 30 * a + 50 * b + round(0.5 * c) for a, b, c in zip(prompt, decode, context, strict=True)]
    half = len(taken) // 2
    batches = [
        cache_pb2.StepBatch(
            durations_us=array("I", taken[part]).tobytes(),
            prefill_tokens=prompt[part].tobytes(),
            decode_tokens=decode[part].tobytes(),
            context_tokens=context[part].tobytes(),
        )
        for part in (slice(half), slice(half, None))
    ]
    found = loaded(monkeypatch, *batches).step_time
    assert found is not None
    parts = (found.base, found.per_prompt_token, found.per_sequence, found.per_context_token)
    assert parts == pytest.approx((2e-3, 30e-6, 50e-6, 0.5e-6), rel=0.01)


def test_limits_and_name_are_those_of_the_recording_or_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = loaded(monkeypatch).trace
    assert (trace.name, trace.num_pages, trace.page_size, trace.policy) == ("r", 3, 16, "lru")
    assert trace.limits == loading.limits_of(header().limits, 3)
    assert trace.limits.watermark_share == 2 / 3
    nameless = replace(header(), recording_id="")
    monkeypatch.setattr(loading, "Recording", lambda path: FakeRecording(nameless, []))
    assert loading.load(Path("folder/any.kvrec")).trace.name == "any.kvrec"
