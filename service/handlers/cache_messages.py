"""What the cache service says, out of what the mirrors hold; and what a caller may not see.

Owns the rules of privacy: no labels and tenants without the `admin` scope, no request ids of other tenants.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import generation_pb2
from service.fleet.feed import (
    NO_PAGE,
    PLANES,
    EventColumns,
    Plane,
    PoolTotals,
    Revision,
    SequenceRecord,
)
from service.fleet.page_watch import MapChange
from service.handlers.convert import to_timestamp
from service.server_options import MAX_MESSAGE_BYTES

MAX_PART_BYTES = 2 * 1024 * 1024 - 16_384  # of sequences in one message, with room for the rest of it
MAX_DELTA_BYTES = MAX_MESSAGE_BYTES - 65_536
_SEQUENCE_BYTES = 128  # of a SequenceInfo without texts and pages, generously


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks."""

    tenant: str = ""
    is_admin: bool = False

    def may_name(self, record: SequenceRecord) -> bool:
        """Whether he may see whose sequence it is."""
        return self.is_admin or record.tenant == self.tenant


@dataclass(frozen=True, slots=True)
class PageRun:
    """A sequence with some of its pages: those from `first` to before `end`."""

    record: SequenceRecord
    first: int
    end: int


def revision(at: Revision) -> pb.Revision:
    """A moment in a pool's history."""
    return pb.Revision(epoch=at.epoch, number=at.number, step=at.step)


def stats(totals: PoolTotals) -> pb.PoolStats:
    """Totals."""
    return pb.PoolStats(**{name: getattr(totals, name) for name in PoolTotals.__dataclass_fields__})


def page_map(planes: Mapping[str, Plane]) -> pb.PageMap:
    """The planes that are there."""
    return pb.PageMap(**{name: plane.tobytes() for name, plane in planes.items()})


def sequence(
    record: SequenceRecord,
    viewer: Viewer,
    token_count: int,
    *,
    pages: bool = True,
    first: int = 0,
    end: int | None = None,
) -> pb.SequenceInfo:
    """A live sequence, with its pages from index `first` to before `end`."""
    info = pb.SequenceInfo(
        choice_index=record.choice_index,
        owner=record.owner,
        row=record.row,
        state=record.state,  # type: ignore[arg-type]  # the enum's numbers
        page_ids=record.pages[first:end].tobytes() if pages else b"",
        first_page_index=first if pages else 0,
        token_count=token_count,
        prompt_tokens=record.prompt_tokens,
        priority=record.priority,
        preemptions=record.preemptions,
        receive_time=to_timestamp(record.receive_time_ns),
        wait_reason=record.wait_reason,  # type: ignore[arg-type]
        needed_pages=record.needed_pages,
    )
    if record.prefix is not None:
        info.prefix.CopyFrom(_prefix(record.prefix))
    if viewer.may_name(record):
        info.request_id = record.request_id
    if viewer.is_admin:
        info.tenant = record.tenant
        info.labels.update(record.labels)
    return info


def delta(change: MapChange, viewer: Viewer, *, with_sequences: bool, merged_events: int) -> pb.PageDelta:
    """Pages and sequences that changed."""
    message = pb.PageDelta(
        page_ids=change.page_ids.tobytes(),
        pages=page_map(change.planes) if len(change.page_ids) else None,
        merged_events=merged_events,
    )
    if not with_sequences:
        return message
    message.sequences.extend(
        sequence(record, viewer, count, first=first)
        for record, first, count in change.sequences
        if is_followed(record, viewer)
    )
    message.sequences.extend(  # without a state: that is how an end without an owner number is told
        pb.SequenceInfo(request_id=ended.request_id, choice_index=ended.choice_index)
        for ended in change.ended
        if viewer.is_admin or ended.tenant == viewer.tenant
    )
    message.ended_owners = change.ended_owners.tobytes()
    if len(change.progress_owners):
        message.progress.owners = change.progress_owners.tobytes()
        message.progress.token_counts = change.progress_tokens.tobytes()
    return message


def delta_bytes(change: MapChange, *, with_sequences: bool) -> int:
    """What `delta` needs at most."""
    size = change.page_ids.nbytes + sum(plane.nbytes for plane in change.planes.values())
    if not with_sequences:
        return size
    size += change.ended_owners.nbytes + change.progress_owners.nbytes + change.progress_tokens.nbytes
    size += sum(_text_bytes(record) + record.pages[first:].nbytes for record, first, _ in change.sequences)
    return size + sum(len(ended.request_id) * 4 + 16 for ended in change.ended)


def _text_bytes(record: SequenceRecord) -> int:
    """What a SequenceInfo needs at most without its pages."""
    texts = len(record.request_id) * 4 + len(record.tenant) * 4 + _SEQUENCE_BYTES
    return texts + sum((len(key) + len(value)) * 4 + 8 for key, value in record.labels.items())


def is_followed(record: SequenceRecord, viewer: Viewer) -> bool:
    """Whether a watcher is told of it: one that waits has no name but its request id."""
    return bool(record.owner) or viewer.may_name(record)


def parts_of_sequences(records: Iterable[SequenceRecord]) -> list[list[PageRun]]:
    """Sequences in groups that fit one message; one with many pages goes on in the next."""
    groups: list[list[PageRun]] = []
    room = 0
    for record in records:
        texts = _text_bytes(record)
        first, count = 0, len(record.pages)
        while True:
            if room < texts + 4:
                groups.append([])
                room = MAX_PART_BYTES
            end = min(count, first + (room - texts) // 4)
            groups[-1].append(PageRun(record, first, end))
            room -= texts + 4 * (end - first)
            first = end
            if first >= count:
                break
    return groups


def events(columns: EventColumns, viewer: Viewer) -> pb.PageEventBatch:
    """Page events as planes, steps and times relative to the first."""
    planes = columns.planes
    first_step = int(planes["steps"][0]) if len(columns) else 0
    first_us = int(planes["times_us"][0]) if len(columns) else 0
    relative = {
        "step_offsets": (planes["steps"] - np.uint64(first_step)).astype(np.uint32),
        "time_offsets_us": (planes["times_us"] - np.uint64(first_us)).astype(np.uint32),
    }
    kept = {name: plane for name, plane in planes.items() if name not in ("steps", "times_us")}
    return pb.PageEventBatch(
        first_number=columns.first_number,
        first_step=first_step,
        first_time=to_timestamp(first_us * 1000),
        **{name: plane.tobytes() for name, plane in (kept | relative).items()},
        started_sequences=[
            sequence(record, viewer, record.token_count, pages=False) for record in columns.started
        ],
        ended_owners=np.array(columns.ended_owners, dtype=np.uint16).tobytes(),
    )


def page_event(number: int, columns: Mapping[str, int], request_id: str) -> pb.PageEvent:
    """One event in words."""
    other = columns["other_page_ids"]
    return pb.PageEvent(
        number=number,
        type=columns["types"],  # type: ignore[arg-type]
        step=columns["steps"],
        time=to_timestamp(columns["times_us"] * 1000),
        owner=columns["owners"],
        request_id=request_id,
        ref_count=columns["ref_counts"],
        other_page_id=None if other == NO_PAGE else other,
    )


def wanted_planes(names: Sequence[str]) -> list[str]:
    """Planes by name, all of them where none is named."""
    return [name for name in PLANES if name in names] if names else list(PLANES)


def within_bytes(infos: Iterable[pb.SequenceInfo], limit: int) -> Iterator[pb.SequenceInfo]:
    """As many as fit a message; at least one."""
    total = 0
    for info in infos:
        total += info.ByteSize() + 8
        if total > limit and total > info.ByteSize() + 8:
            return
        yield info


def _prefix(counts: tuple[int, int, int, int]) -> generation_pb2.PrefixLookup:
    hit, cold, evicted, unaligned = counts
    return generation_pb2.PrefixLookup(
        hit_tokens=hit, miss_cold_tokens=cold, miss_evicted_tokens=evicted, unaligned_tokens=unaligned
    )
