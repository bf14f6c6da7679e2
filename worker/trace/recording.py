"""A recording as our own types: read frame by frame, with its gaps.

Protobuf stops here. Owns nothing but the file that it reads.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvatlas.v1 import cache_pb2
from worker.pages.events import EventColumns, PageState
from worker.pages.snapshot import PoolSnapshot
from worker.readers.recording_file import FORMAT_VERSION, DamagedRecording, FrameAt, read_frames


@dataclass(frozen=True, slots=True)
class Header:
    """Who was recorded, and from where on."""

    recording_id: str
    worker_id: str
    model: str
    note: str
    epoch_ns: int
    num_pages: int  # without the dummy page
    page_size: int
    policy: str
    first_number: int  # revision of the snapshot
    first_step: int
    start_us: int  # since the start of the epoch
    granularity: int
    limits: cache_pb2.SchedulerLimits


@dataclass(frozen=True, slots=True)
class MapAt:
    """The whole map at a revision, and who shares pages; after a gap as well as at the beginning."""

    planes: cache_pb2.PageMap
    sharers: dict[int, list[int]] = field(default_factory=dict)


Item = (
    MapAt
    | EventColumns
    | cache_pb2.RequestRecord
    | cache_pb2.SequenceRecord
    | cache_pb2.StepBatch
    | cache_pb2.RecordingGap
    | cache_pb2.IntegrityViolation
    | cache_pb2.RecordingEnd
)


class Recording:
    """A file of the flight recorder. Raises DamagedRecording where it is cut or changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frames = read_frames(path)
        first = _first(self._frames)
        if first is None or first.frame.WhichOneof("frame") != "header":
            raise DamagedRecording(0, "no header: this is no recording")
        message = first.frame.header
        if message.format_version != FORMAT_VERSION:
            raise DamagedRecording(0, f"format {message.format_version}, this program reads {FORMAT_VERSION}")
        self.header = _header(message)
        self.offset = 0  # of the frame read last

    def items(self) -> Iterator[Item]:
        """Everything after the header, in order. May be called once."""
        parts: list[FrameAt] = []  # of a map: its pages, then who shares them
        for at in self._frames:
            kind = at.frame.WhichOneof("frame")
            if _has_sharers(parts) and kind != "sharers":
                yield self._map(parts)
                parts = []
            self.offset = at.offset
            match kind:
                case "snapshot" | "sharers":
                    parts.append(at)
                case "events":
                    yield self._events(at)
                case "request":
                    yield at.frame.request
                case "sequence":
                    yield at.frame.sequence
                case "steps":
                    yield at.frame.steps
                case "gap":
                    yield at.frame.gap
                case "violation":
                    yield at.frame.violation
                case "end":
                    yield at.frame.end
                case None:
                    pass  # of a later release
        if _has_sharers(parts):
            yield self._map(parts)

    def _map(self, parts: Sequence[FrameAt]) -> MapAt:
        planes = cache_pb2.PageMap()
        for name in cache_pb2.PageMap.DESCRIPTOR.fields_by_name:
            setattr(planes, name, b"".join(getattr(part.frame.snapshot.pages, name) for part in parts))
        if len(planes.states) != self.header.num_pages + 1:
            text = f"the map has {len(planes.states)} pages, the pool {self.header.num_pages + 1}"
            raise DamagedRecording(parts[-1].offset, text)
        sharers: dict[int, list[int]] = {}
        for part in parts:
            pages, owners = array("I", part.frame.sharers.page_ids), array("H", part.frame.sharers.owners)
            for page, owner in zip(pages, owners, strict=True):
                sharers.setdefault(page, []).append(owner)
        return MapAt(planes, sharers)

    def _events(self, at: FrameAt) -> EventColumns:
        batch = at.frame.events
        count = len(batch.types)
        first_us = (batch.first_time.ToNanoseconds() - self.header.epoch_ns) // 1000
        steps = np.frombuffer(batch.step_offsets, dtype=np.uint32).astype(np.uint64) + np.uint64(
            batch.first_step
        )
        times = np.frombuffer(batch.time_offsets_us, dtype=np.uint32).astype(np.uint64) + np.uint64(first_us)
        columns = EventColumns(
            first_number=batch.first_number,
            kinds=batch.types,
            pages=array("I", batch.page_ids),
            owners=array("H", batch.owners),
            refs=array("H", batch.ref_counts),
            others=array("I", batch.other_page_ids),
            tags=array("Q", batch.fingerprints),
            steps=array("Q", steps.tobytes()),
            times_us=array("Q", times.tobytes()),
            tokens=(),
        )
        lengths = {len(each) for each in (columns.pages, columns.owners, columns.refs, columns.others)}
        if lengths | {len(columns.tags), len(columns.steps), len(columns.times_us)} != {count}:
            raise DamagedRecording(at.offset, f"planes of {count} events differ in length")
        return columns


def _has_sharers(parts: Sequence[FrameAt]) -> bool:
    """Whether these frames may be a whole map: its sharers come last, in as many frames as they need."""
    return bool(parts) and parts[-1].frame.WhichOneof("frame") == "sharers"


def _first(frames: Iterator[FrameAt]) -> FrameAt | None:
    """The first frame; what has none in its place is some other file, or one that is damaged there."""
    try:
        return next(frames, None)
    except DamagedRecording as damaged:
        raise DamagedRecording(0, f"{damaged.why}: this is no recording, or its beginning is lost") from None


def _header(message: cache_pb2.RecordingHeader) -> Header:
    geometry = message.geometry
    return Header(
        recording_id=message.recording_id,
        worker_id=geometry.worker_id,
        model=message.model,
        note=message.note,
        epoch_ns=geometry.epoch,
        num_pages=geometry.page_count - 1,
        page_size=geometry.page_size,
        policy=geometry.eviction_policy,
        first_number=message.revision.number,
        first_step=message.revision.step,
        start_us=(message.start_time.ToNanoseconds() - geometry.epoch) // 1000,
        granularity=message.token_granularity,
        limits=message.scheduler,
    )


def snapshot_of(found: MapAt, number: int, step: int, page_size: int) -> PoolSnapshot:
    """The map as the ledger takes it."""
    planes = found.planes
    states = planes.states
    return PoolSnapshot(
        number=number,
        step=step,
        time_us=0,
        page_size=page_size,
        states=states,
        flags=planes.flags,
        ref_counts=array("H", planes.ref_counts),
        filled_slots=array("H", planes.filled_slots),
        owners=array("H", planes.owners),
        hit_counts=array("H", planes.hit_counts),
        parent_page_ids=array("I", planes.parent_page_ids),
        born_ms=array("I", planes.born_ms),
        used_ms=array("I", planes.used_ms),
        fingerprints=array("Q", planes.fingerprints),
        counts={state: states.count(state) for state in PageState},
        sequences=(),
    )
