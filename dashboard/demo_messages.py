"""A demo pool as messages of WatchPageMap: what a service would send."""

from collections.abc import Iterator

import numpy as np

from dashboard.demo_pool import START_MS, DemoPool, DemoSequence
from dashboard.frames import PAGES_PER_PART
from kvatlas.client.page_map import PLANES
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.v1 import generation_pb2

WORKER_ID = "demo-0"


def geometry(pool: DemoPool) -> pb.PoolGeometry:
    """A small model on a made-up device."""
    shape = pb.PoolGeometry(
        worker_id=WORKER_ID,
        epoch=pool.epoch,
        page_count=pool.page_count,
        page_size=pool.page_size,
        page_bytes=pool.page_size * 30 * 3 * 64 * 2 * 2,
        layer_count=30,
        kv_head_count=3,
        head_dim=64,
        dtype="bf16",
        device="simulated",
        rank_count=1,
        row_count=65,
        row_width=2048,
        dummy_page_id=pool.dummy_page,
        eviction_policy="lru",
    )
    shape.start_time.FromMilliseconds(START_MS)
    return shape


def stats(pool: DemoPool) -> pb.PoolStats:
    """Totals, counted in the planes."""
    states = np.bincount(pool.planes["states"].astype(np.int64), minlength=6)
    refs = pool.planes["ref_counts"].astype(np.int64)
    active = pool.planes["states"] == pb.PAGE_STATE_ACTIVE
    wasted = pool.page_size * int(states[2]) - int(pool.planes["filled_slots"][active].sum(dtype=np.int64))
    counted = {
        "free_pages": int(states[1]),
        "active_pages": int(states[2]),
        "cached_pages": int(states[3]),
        "pinned_pages": int(states[4]),
        "reserved_pages": int(states[5]),
        "shared_pages": int((refs > 1).sum()),
        "references": int(refs.sum()),
        "wasted_slots": wasted,
    }
    return pb.PoolStats(**(pool.totals | counted))


def snapshot(pool: DemoPool, cause: int = pb.SNAPSHOT_CAUSE_INITIAL) -> Iterator[pb.WatchPageMapResponse]:
    """All parts."""
    count = -(-pool.page_count // PAGES_PER_PART)
    for number in range(count):
        first = number * PAGES_PER_PART
        end = min(first + PAGES_PER_PART, pool.page_count)
        part = pb.SnapshotChunk(first_page_id=first, page_count=end - first, chunks_left=count - 1 - number)
        part.cause = cause  # type: ignore[assignment]
        for name in PLANES:
            setattr(part.pages, name, pool.planes[name][first:end].tobytes())
        if not number:
            part.geometry.CopyFrom(geometry(pool))
        if number == count - 1:
            part.sequences.extend(sequence(each, all_pages=True) for each in (*pool.running, *pool.waiting))
        message = _message(pool)
        message.snapshot.CopyFrom(part)
        yield message


def delta(pool: DemoPool, base_number: int) -> pb.WatchPageMapResponse:
    """What changed since the last call; resets the pool's notes."""
    page_ids = np.array(sorted(pool.dirty), "<u4")
    change = pb.PageDelta(page_ids=page_ids.tobytes(), merged_events=pool.number - base_number)
    for name in PLANES:
        setattr(change.pages, name, pool.planes[name][page_ids].tobytes())
    change.ended_owners = np.array(pool.ended, "<u2").tobytes()
    change.sequences.extend(
        sequence(each) for each in pool.running if each.num_kept < len(each.pages) or not each.num_kept
    )
    change.sequences.extend(sequence(each) for each in pool.waiting)
    change.progress.owners = np.array([each.owner for each in pool.running], "<u2").tobytes()
    change.progress.token_counts = np.array([each.token_count for each in pool.running], "<u4").tobytes()
    forget_changes(pool)
    message = _message(pool)
    message.base_number = base_number
    message.delta.CopyFrom(change)
    return message


def forget_changes(pool: DemoPool) -> int:
    """Everything up to now has been told; the number to go on from."""
    for each in pool.running:
        each.num_kept = len(each.pages)
    pool.dirty.clear()
    pool.ended.clear()
    pool.left_queue.clear()
    return pool.number


def sequence(one: DemoSequence, *, all_pages: bool = False) -> pb.SequenceInfo:
    """A sequence with the pages that watchers do not know yet."""
    first = 0 if all_pages else one.num_kept
    info = pb.SequenceInfo(
        request_id=one.request_id,
        owner=one.owner,
        state=_state(one),
        page_ids=np.array(one.pages[first:], "<u4").tobytes(),
        first_page_index=first,
        token_count=one.token_count,
        prompt_tokens=one.prompt_tokens,
        preemptions=one.preemptions,
        needed_pages=0 if one.owner else one.needed_pages,
        wait_reason=pb.WAIT_REASON_UNSPECIFIED if one.owner else pb.WAIT_REASON_PAGES,
        tenant="demo",
    )
    if one.owner:
        info.row = one.owner % 64
        hit, cold, evicted, unaligned = one.result_tokens
        info.prefix.CopyFrom(
            generation_pb2.PrefixLookup(
                hit_tokens=hit,
                miss_cold_tokens=cold,
                miss_evicted_tokens=evicted,
                unaligned_tokens=unaligned,
            )
        )
    info.receive_time.FromMilliseconds(one.receive_ms)
    return info


def _state(one: DemoSequence) -> pb.SequenceState:
    if one.owner:
        return pb.SEQUENCE_STATE_PREFILL if one.is_prefill else pb.SEQUENCE_STATE_DECODE
    return pb.SEQUENCE_STATE_PREEMPTED if one.preemptions else pb.SEQUENCE_STATE_WAITING


def heartbeat(pool: DemoPool) -> pb.WatchPageMapResponse:
    """A sign of life."""
    message = _message(pool)
    message.base_number = pool.number
    message.heartbeat.SetInParent()
    return message


def _message(pool: DemoPool) -> pb.WatchPageMapResponse:
    message = pb.WatchPageMapResponse(
        revision=pb.Revision(epoch=pool.epoch, number=pool.number, step=pool.step), stats=stats(pool)
    )
    message.observe_time.FromMilliseconds(pool.now_ms)
    return message
