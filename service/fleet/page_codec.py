"""Page feed, snapshot parts and events of a worker -> our types. Planes are read as they lie.

Owns nothing. Raises ValueError for planes whose lengths do not fit together.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from kvatlas.v1 import cache_pb2
from kvatlas.worker.v1 import worker_pb2
from service.fleet.feed import (
    MAX_OWNER,
    PLANES,
    EndedSequence,
    EventColumns,
    MapDelta,
    Plane,
    PoolTotals,
    Revision,
    SequenceChange,
    SequenceRecord,
    SnapshotPart,
)

DELTAS, EVENTS = b"d", b"e"
"""Topics of the pages socket."""

_TOTALS = tuple(PoolTotals.__dataclass_fields__)
_EVENT_WIRE: Mapping[str, str] = {
    "types": "<u1",
    "page_ids": "<u4",
    "owners": "<u2",
    "ref_counts": "<u2",
    "step_offsets": "<u4",
    "time_offsets_us": "<u4",
    "other_page_ids": "<u4",
    "fingerprints": "<u8",
}


def decode_delta(payload: bytes) -> MapDelta:
    """A message of topic "d"."""
    return map_delta(worker_pb2.PageFeed.FromString(payload))


def map_delta(feed: worker_pb2.PageFeed) -> MapDelta:
    """The change of the map in a message of topic "d"."""
    delta = feed.delta
    page_ids: Any = np.frombuffer(delta.page_ids, "<u4")
    changed, ended = _split(delta.sequences)
    owners: Any = np.frombuffer(delta.progress.owners, "<u2")
    tokens: Any = np.frombuffer(delta.progress.token_counts, "<u4")
    if len(owners) != len(tokens):
        raise ValueError(f"{len(owners)} owners with {len(tokens)} token counts")
    return MapDelta(
        base_number=feed.base_number,
        revision=decode_revision(feed.revision),
        observe_time_ns=to_ns(feed.publish_time),
        totals=decode_totals(feed.stats),
        page_ids=page_ids,
        planes=_planes(delta.pages, len(page_ids)) if len(page_ids) else {},
        sequences=changed,
        progress_owners=owners,
        progress_tokens=tokens,
        ended_owners=np.frombuffer(delta.ended_owners, "<u2").tolist(),
        ended=ended,
    )


def decode_event_feed(payload: bytes) -> tuple[int, EventColumns]:
    """A message of topic "e": the epoch and the events."""
    feed = worker_pb2.PageFeed.FromString(payload)
    return feed.revision.epoch, decode_events(feed.events)


def decode_events(batch: cache_pb2.PageEventBatch) -> EventColumns:
    """A batch of page events, steps and times made absolute."""
    wire: dict[str, Any] = {
        name: np.frombuffer(getattr(batch, name), kind) for name, kind in _EVENT_WIRE.items()
    }
    if len({len(plane) for plane in wire.values()}) > 1:
        raise ValueError(f"planes of events differ in length at {batch.first_number}")
    wire["steps"] = wire.pop("step_offsets").astype(np.uint64) + np.uint64(batch.first_step)
    start = np.uint64(to_ns(batch.first_time) // 1000)
    wire["times_us"] = wire.pop("time_offsets_us").astype(np.uint64) + start
    started = [decode_sequence(info).record for info in batch.started_sequences]
    ended = np.frombuffer(batch.ended_owners, "<u2").tolist()
    return EventColumns(batch.first_number, wire, started, ended)


def decode_part(reply: worker_pb2.SnapshotReply) -> SnapshotPart:
    """A part of a snapshot."""
    chunk = reply.chunk
    return SnapshotPart(
        revision=decode_revision(reply.revision),
        parts_left=chunk.chunks_left,
        first_page=chunk.first_page_id,
        planes=_planes(chunk.pages, chunk.page_count) if chunk.page_count else {},
        sequences=[decode_sequence(info) for info in chunk.sequences],
        totals=decode_totals(reply.stats) if reply.HasField("stats") else None,
        observe_time_ns=to_ns(reply.publish_time),
    )


def decode_revision(revision: cache_pb2.Revision) -> Revision:
    """A moment in a pool's history."""
    return Revision(revision.epoch, revision.number, revision.step)


def decode_totals(stats: cache_pb2.PoolStats) -> PoolTotals:
    """Totals of a pool."""
    return PoolTotals(*[getattr(stats, name) for name in _TOTALS])


def decode_sequence(info: cache_pb2.SequenceInfo) -> SequenceChange:
    """A live sequence with the pages that changed."""
    prefix = None
    if info.owner > MAX_OWNER:
        raise ValueError(f"owner {info.owner} of sequence {info.request_id!r}, at most {MAX_OWNER}")
    if info.HasField("prefix"):
        found = info.prefix
        prefix = (found.hit_tokens, found.miss_cold_tokens, found.miss_evicted_tokens, found.unaligned_tokens)
    pages: Any = np.frombuffer(info.page_ids, "<u4")
    record = SequenceRecord(
        request_id=info.request_id,
        choice_index=info.choice_index,
        owner=info.owner,
        row=info.row if info.HasField("row") else None,
        state=info.state,
        pages=pages,
        token_count=info.token_count,
        prompt_tokens=info.prompt_tokens,
        prefix=prefix,
        priority=info.priority,
        preemptions=info.preemptions,
        receive_time_ns=to_ns(info.receive_time),
        wait_reason=info.wait_reason,
        needed_pages=info.needed_pages,
        tenant=info.tenant,
        labels=dict(info.labels) if info.labels else {},
    )
    return SequenceChange(record, info.first_page_index)


def to_ns(time: Timestamp) -> int:
    """Nanoseconds since 1970."""
    return time.seconds * 1_000_000_000 + time.nanos


def _split(
    infos: Iterable[cache_pb2.SequenceInfo],
) -> tuple[list[SequenceChange], list[EndedSequence]]:
    """Changed sequences, and those that ended while they waited: they come without a state."""
    changed: list[SequenceChange] = []
    ended: list[EndedSequence] = []
    for info in infos:
        if info.state == cache_pb2.SEQUENCE_STATE_UNSPECIFIED:
            ended.append(EndedSequence(info.request_id, info.choice_index))
        else:
            changed.append(decode_sequence(info))
    return changed, ended


def _planes(pages: cache_pb2.PageMap, count: int) -> dict[str, Plane]:
    planes: dict[str, Plane] = {
        name: np.frombuffer(getattr(pages, name), kind) for name, kind in PLANES.items()
    }
    wrong = [name for name, plane in planes.items() if len(plane) != count]
    if wrong:
        raise ValueError(f"planes {', '.join(wrong)} do not have {count} entries")
    return planes
