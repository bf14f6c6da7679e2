"""Page deltas, snapshots and events → messages of the feed. Called on the observer's thread.

Planes are copied as they lie in memory: 30 bytes a page, no message per page.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvatlas.v1 import cache_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.description import WorkerDescription
from worker.link.status_codec import geometry, pool_stats, revision, timestamp
from worker.pages.events import EventColumns, PageEventKind
from worker.readers.delta import FeedDelta, PagePlanes, SnapshotPart
from worker.stats import EngineCounts, PoolTotals, SequenceView

_PREFIX_FIELDS = ("hit_tokens", "miss_cold_tokens", "miss_evicted_tokens", "unaligned_tokens")


def page_map(planes: PagePlanes) -> cache_pb2.PageMap:
    """Planes as bytes."""
    return cache_pb2.PageMap(
        states=planes.states.tobytes(),
        flags=planes.flags.tobytes(),
        ref_counts=planes.refs.tobytes(),
        filled_slots=planes.filled.tobytes(),
        owners=planes.owners.tobytes(),
        hit_counts=planes.hits.tobytes(),
        parent_page_ids=planes.parents.tobytes(),
        born_ms=planes.born_ms.tobytes(),
        used_ms=planes.used_ms.tobytes(),
        fingerprints=planes.fingerprints.tobytes(),
    )


def sequence_info(view: SequenceView) -> cache_pb2.SequenceInfo:
    """A live sequence. In one call, without an empty map: 256 of them are made ten times a second."""
    seconds, nanos = divmod(view.receive_time_ns, 1_000_000_000)
    return cache_pb2.SequenceInfo(
        request_id=view.request_id,
        choice_index=view.choice_index,
        owner=view.owner,
        row=view.row,
        state=view.state,  # type: ignore[arg-type]  # the numbers are the enum's
        page_ids=array("I", view.page_ids).tobytes(),
        first_page_index=view.first_page_index,
        token_count=view.token_count,
        prompt_tokens=view.prompt_tokens,
        prefix=None if view.prefix is None else dict(zip(_PREFIX_FIELDS, view.prefix, strict=True)),
        priority=view.priority,
        preemptions=view.preemptions,
        receive_time={"seconds": seconds, "nanos": nanos},
        wait_reason=view.wait_reason,  # type: ignore[arg-type]
        needed_pages=view.needed_pages,
        tenant=view.tenant,
        labels=view.labels or None,
    )


def ended_info(view: SequenceView) -> cache_pb2.SequenceInfo:
    """A sequence that ended while it waited: it has no owner number by which it could be named."""
    return cache_pb2.SequenceInfo(request_id=view.request_id, choice_index=view.choice_index)


def delta_feed(
    delta: FeedDelta,
    *,
    description: WorkerDescription,
    pool: PoolTotals,
    counts: EngineCounts,
    num_events: int,
    time_ns: int,
) -> worker_pb2.PageFeed:
    """Topic "d". A delta without content is the feed's sign of life."""
    infos = [sequence_info(view) for view in delta.sequences]
    infos += [ended_info(view) for view in delta.ended_waiting]
    message = cache_pb2.PageDelta(
        page_ids=delta.page_ids.tobytes(),
        pages=page_map(delta.pages) if len(delta.page_ids) else None,
        sequences=infos,
        ended_owners=_u16(delta.ended_owners),
        merged_events=num_events,
    )
    if len(delta.progress_owners):
        message.progress.owners = delta.progress_owners.tobytes()
        message.progress.token_counts = delta.progress_tokens.tobytes()
    return worker_pb2.PageFeed(
        revision=revision(description.epoch, pool),
        base_number=delta.base_number,
        delta=message,
        stats=pool_stats(pool, counts),
        publish_time=timestamp(time_ns),
    )


def event_feed(
    batch: cache_pb2.PageEventBatch,
    *,
    description: WorkerDescription,
    pool: PoolTotals,
    counts: EngineCounts,
    time_ns: int,
) -> worker_pb2.PageFeed:
    """Topic "e"."""
    return worker_pb2.PageFeed(
        revision=revision(description.epoch, pool),
        base_number=batch.first_number - 1,
        events=batch,
        stats=pool_stats(pool, counts),
        publish_time=timestamp(time_ns),
    )


def event_batch(
    events: EventColumns,
    *,
    epoch_ns: int,
    page_size: int,
    started: Sequence[SequenceView] = (),
    ended_owners: Sequence[int] = (),
) -> cache_pb2.PageEventBatch:
    """Consecutive page events as planes; with token ids where the columns have them."""
    steps = np.frombuffer(events.steps, dtype=np.uint64)
    times = np.frombuffer(events.times_us, dtype=np.uint64)
    kinds = np.frombuffer(events.kinds, dtype=np.uint8)
    tags = np.frombuffer(events.tags, dtype=np.uint64)
    sealed_tokens = [
        tokens
        for kind, tokens in zip(events.kinds, events.tokens, strict=False)
        if kind == PageEventKind.SEALED
    ]
    first_step = int(steps[0]) if len(steps) else 0
    first_time = int(times[0]) if len(times) else 0
    return cache_pb2.PageEventBatch(
        first_number=events.first_number,
        first_step=first_step,
        first_time=timestamp(epoch_ns + first_time * 1000),
        types=events.kinds,
        page_ids=events.pages.tobytes(),
        owners=events.owners.tobytes(),
        ref_counts=events.refs.tobytes(),
        step_offsets=_offsets(steps, first_step),
        time_offsets_us=_offsets(times, first_time),
        other_page_ids=events.others.tobytes(),
        fingerprints=np.where(kinds == PageEventKind.SEALED, tags, np.uint64(0)).tobytes(),
        token_ids=b"".join(tokens or bytes(4 * page_size) for tokens in sealed_tokens),
        started_sequences=[sequence_info(replace(view, page_ids=())) for view in started],
        ended_owners=_u16(ended_owners),
    )


def _offsets(values: npt.NDArray[np.uint64], first: int) -> bytes:
    return (values - np.uint64(first)).astype(np.uint32).tobytes()


def snapshot_reply(
    command_id: int,
    part: SnapshotPart,
    *,
    description: WorkerDescription,
    pool: PoolTotals,
    counts: EngineCounts,
    time_ns: int,
    is_first: bool,
) -> worker_pb2.CommandReply:
    """One part of the map; geometry in the first, totals in the last."""
    chunk = cache_pb2.SnapshotChunk(
        geometry=geometry(description) if is_first else None,
        first_page_id=part.first_page,
        page_count=0 if part.pages is None else len(part.pages.states),
        pages=None if part.pages is None else page_map(part.pages),
        sequences=[sequence_info(view) for view in part.sequences],
        chunks_left=part.parts_left,
    )
    return worker_pb2.CommandReply(
        command_id=command_id,
        more=part.parts_left > 0,
        snapshot=worker_pb2.SnapshotReply(
            revision=revision(description.epoch, pool),
            chunk=chunk,
            stats=None if part.parts_left else pool_stats(pool, counts),
            publish_time=timestamp(time_ns),
        ),
    )


def _u16(values: Sequence[int]) -> bytes:
    return array("H", values).tobytes()


def replay_reply(
    command_id: int, events: EventColumns, *, description: WorkerDescription, more: bool
) -> worker_pb2.CommandReply:
    """Page events that a service asked for again."""
    batch = event_batch(events, epoch_ns=description.epoch, page_size=description.pool.page_size)
    return worker_pb2.CommandReply(command_id=command_id, more=more, events=batch)
