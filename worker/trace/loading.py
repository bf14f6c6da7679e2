"""A recording's file → a trace, with the model of its steps and what was counted then."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvatlas.v1 import cache_pb2
from worker.ids import NO_PAGE
from worker.pages.events import EventColumns, PageFlag
from worker.pages.events import PageEventKind as Kind
from worker.readers.samples import LoggedEnd, LoggedRequest
from worker.scheduling.settings import SchedulerConfig
from worker.trace.building import trace_requests
from worker.trace.observed import Observed, observe
from worker.trace.recording import MapAt, Recording
from worker.trace.step_time import StepTime, fit
from worker.trace.workload import CachedPage, Limits, Trace

EVICTED = int(Kind.EVICTED)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a recording gives to what-if."""

    trace: Trace
    step_time: StepTime | None  # None: too few steps
    observed: Observed
    lost_records: int
    lost_events: int


class _Reader:
    """Collects the frames of one recording."""

    def __init__(self, recording: Recording) -> None:
        self.header = recording.header
        self.requests: dict[int, LoggedRequest] = {}  # by id of sample 0
        self.first_map: MapAt | None = None
        self.end_us = self.header.start_us
        self.num_evictions = 0
        self.lost_records = self.lost_events = 0
        self.seconds: array[float] = array("d")
        self.prefill, self.decode, self.context = array("I"), array("I"), array("Q")
        self._firsts: dict[int, int] = {}  # sequence → sample 0 of its request
        for item in recording.items():
            self._take(item)

    def _take(self, item: object) -> None:
        match item:
            case MapAt() if self.first_map is None:
                self.first_map = item
            case EventColumns():
                self.num_evictions += _for_room(item)
                self.end_us = max(self.end_us, item.times_us[-1])
            case cache_pb2.RequestRecord():
                self._request(item)
            case cache_pb2.SequenceRecord():
                self._sequence(item)
            case cache_pb2.StepBatch():
                self._steps(item)
            case cache_pb2.RecordingGap():
                self.lost_records += item.lost_records
                self.lost_events += item.lost_events

    def _time_us(self, nanoseconds: int) -> int:
        return (nanoseconds - self.header.epoch_ns) // 1000

    def _request(self, record: cache_pb2.RequestRecord) -> None:
        time_us = self._time_us(record.time.ToNanoseconds())
        self.end_us = max(self.end_us, time_us)
        self.requests[record.sequence_id] = LoggedRequest(
            time_us=time_us,
            number=record.number,
            sequence_id=record.sequence_id,  # type: ignore[arg-type]
            request_id=record.request_id,
            sample_count=record.sample_count,
            num_prompt=record.prompt_tokens,
            max_tokens=record.max_tokens,
            priority=record.priority,
            cache_read=record.cache_read,
            cache_write=record.cache_write,
            keys=array("Q", record.fingerprints),
        )
        for sample in range(record.sample_count):
            self._firsts[record.sequence_id + sample] = record.sequence_id

    def _sequence(self, record: cache_pb2.SequenceRecord) -> None:
        first = self._firsts.get(record.sequence_id)
        if first is None:
            return  # its request was lost, and the gap counts it
        prefix = record.prefix
        time_us = self._time_us(record.time.ToNanoseconds())
        self.end_us = max(self.end_us, time_us)
        self.requests[first].ends.append(
            LoggedEnd(
                time_us=time_us,
                number=record.number,
                sequence_id=record.sequence_id,  # type: ignore[arg-type]
                num_output=record.completion_tokens,
                finish_code=record.finish_code,
                preemptions=record.preemptions,
                prefix=(
                    prefix.hit_tokens,
                    prefix.miss_cold_tokens,
                    prefix.miss_evicted_tokens,
                    prefix.unaligned_tokens,
                )
                if record.HasField("prefix")
                else None,
                queue_us=record.queue_us,
                keys=array("Q", record.fingerprints),
            )
        )

    def _steps(self, batch: cache_pb2.StepBatch) -> None:
        self.seconds.extend([duration / 1e6 for duration in array("I", batch.durations_us)])
        self.prefill.extend(array("I", batch.prefill_tokens))
        self.decode.extend(array("I", batch.decode_tokens))
        self.context.extend(array("Q", batch.context_tokens))


def _for_room(events: EventColumns) -> int:
    """Evictions but those of a flush, which are for nobody: nothing was short, and what-if has none."""
    kinds, owners = np.frombuffer(events.kinds, np.uint8), np.frombuffer(events.owners, np.uint16)
    return int(np.count_nonzero((kinds == EVICTED) & (owners != 0)))


def load(path: Path) -> Loaded:
    """Reads a recording. Raises DamagedRecording, OSError."""
    reader = _Reader(Recording(path))
    header = reader.header
    requests = sorted(reader.requests.values(), key=lambda request: request.time_us)
    limits = limits_of(header.limits, header.num_pages)
    trace = Trace(
        requests=trace_requests(requests, header.start_us, limits.max_context_tokens),
        granularity=header.granularity,
        page_size=header.page_size,
        num_pages=header.num_pages,
        policy=header.policy,
        limits=limits,
        seconds=(reader.end_us - header.start_us) / 1e6,
        cached=_cached(reader.first_map),
        name=header.recording_id or path.name,
    )
    return Loaded(
        trace=trace,
        step_time=fit(reader.seconds, reader.prefill, reader.decode, reader.context),
        observed=observe(requests, header.start_us, reader.end_us, evictions=reader.num_evictions),
        lost_records=reader.lost_records,
        lost_events=reader.lost_events,
    )


def limits_message(config: SchedulerConfig, *, overlap: bool = False) -> cache_pb2.SchedulerLimits:
    """What a recording says of the scheduler."""
    return cache_pb2.SchedulerLimits(
        max_running_sequences=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_context_tokens=config.max_context_tokens,
        max_queued_requests=config.max_queued_requests,
        max_chunk_tokens=config.max_chunk_tokens,
        watermark_pages=config.num_watermark_pages,
        overlap=overlap,
        prefix_cache=config.cache.sharing,
        doubling_context_tokens=config.doubling_context,
    )


def limits_of(limits: cache_pb2.SchedulerLimits, num_pages: int) -> Limits:
    """The recorded limits; the watermark as a share, since the pool will be another."""
    return Limits(
        max_running=limits.max_running_sequences,
        max_step_tokens=limits.max_step_tokens,
        max_context_tokens=limits.max_context_tokens,
        max_queued_requests=limits.max_queued_requests,
        max_chunk_tokens=limits.max_chunk_tokens,
        watermark_share=limits.watermark_pages / num_pages,
        overlap=limits.overlap,
        prefix_cache=limits.prefix_cache,
        doubling_context=limits.doubling_context_tokens,
    )


def _cached(found: MapAt | None) -> Sequence[CachedPage]:
    """Sealed pages at the beginning, by key."""
    if found is None:
        return ()
    planes = found.planes
    keys, parents = array("Q", planes.fingerprints), array("I", planes.parent_page_ids)
    used = array("I", planes.used_ms)
    return [
        CachedPage(keys[page], None if parents[page] == NO_PAGE else keys[parents[page]], used[page])
        for page, flags in enumerate(planes.flags)
        if flags & PageFlag.SEALED
    ]
