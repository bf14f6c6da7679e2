"""Who the worker is, how loaded it is, and its page table rows ⇄ messages of the seam."""

from array import array

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from kvatlas.v1 import cache_pb2, server_pb2
from kvatlas.worker.v1 import worker_pb2
from worker.description import VERSION, ModelDescription, WorkerDescription
from worker.link.codec import PROTOCOL, milliseconds
from worker.messages import FlushAnswer, PageSlots, PinAnswer, PinnedPrefix, RowsAnswer
from worker.stats import EngineCounts, PoolTotals
from worker.status import StatusBoard


def timestamp(nanoseconds: int) -> Timestamp:
    """A Unix time in ns."""
    return Timestamp(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)


def duration(seconds: float) -> Duration:
    """A length of time."""
    nanoseconds = int(seconds * 1e9)
    return Duration(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)


def config(board: StatusBoard) -> worker_pb2.Config:
    """The welcome to a service."""
    description = board.description
    return worker_pb2.Config(
        protocol=PROTOCOL,
        worker=worker_info(board),
        model=model(description.model),
        geometry=geometry(description),
        max_running_sequences=description.pool.max_running,
        max_queued_requests=description.max_queued,
        max_context_tokens=description.max_context,
        max_pinned_pages=description.max_pinned_pages,
        features=description.features,
        pages_address=description.pages_address,
        fingerprint_key=description.fingerprint_key,
    )


def worker_info(board: StatusBoard) -> server_pb2.WorkerInfo:
    """Name, life and device."""
    description = board.description
    return server_pb2.WorkerInfo(
        worker_id=description.worker_id,
        epoch=description.epoch,
        state=int(board.state),  # type: ignore[arg-type]  # the numbers are the enum's
        model_id=description.model.model_id,
        version=VERSION,
        device_name=description.device_name,
        device_memory_bytes=description.device_memory_bytes,
        compute_capability=description.compute_capability,
        attention_backend=description.attention_backend,
        attention_backend_reason=description.attention_backend_reason,
        versions=description.versions,
    )


def model(description: ModelDescription) -> server_pb2.Model:
    """The served model."""
    return server_pb2.Model(
        model_id=description.model_id,
        revision=description.revision,
        architecture=description.architecture,
        max_context_tokens=description.max_context_tokens,
        vocab_size=description.vocab_size,
        eos_token_ids=description.eos_token_ids,
        dtype=description.dtype,
        parameter_count=description.parameter_count,
        has_chat_template=description.has_chat_template,
        tokenizer_sha256=description.tokenizer_sha256,
        defaults=server_pb2.DefaultSampling(
            temperature=description.default_temperature,
            top_p=description.default_top_p,
            top_k=description.default_top_k,
            repetition_penalty=description.default_repetition_penalty,
        ),
    )


def geometry(description: WorkerDescription) -> cache_pb2.PoolGeometry:
    """The pool; the dummy page is the last one and counts."""
    pool = description.pool
    return cache_pb2.PoolGeometry(
        worker_id=description.worker_id,
        epoch=description.epoch,
        start_time=timestamp(description.epoch),
        page_count=pool.num_pages + 1,
        page_size=pool.page_size,
        page_bytes=pool.page_bytes,
        layer_count=pool.layer_count,
        kv_head_count=pool.kv_head_count,
        head_dim=pool.head_dim,
        dtype=pool.dtype,
        device=pool.device,
        rank_count=pool.rank_count,
        row_count=pool.max_running + 1,
        row_width=pool.row_width,
        dummy_page_id=pool.num_pages,
        eviction_policy=pool.eviction_policy,
    )


def heartbeat(board: StatusBoard, now: float) -> worker_pb2.Heartbeat:
    """Sign of life: what the observer saw last, with the age of the engine's last step."""
    load, mark = board.load, board.step
    return worker_pb2.Heartbeat(
        step=mark.number,
        load=server_pb2.WorkerLoad(
            worker_id=board.description.worker_id,
            state=int(board.state),  # type: ignore[arg-type]
            running_sequences=load.counts.running_sequences,
            waiting_requests=load.counts.waiting_requests,
            waiting_uncached_tokens=load.counts.waiting_uncached_tokens,
            available_pages=load.pool.available_pages,
            total_pages=load.pool.total_pages,
            output_tokens_per_second=load.output_tokens_per_second,
            prompt_tokens_per_second=load.prompt_tokens_per_second,
            prefix_hit_rate=load.prefix_hit_rate,
            mean_step_time=duration(load.mean_step_seconds),
            last_step_age=duration(max(0.0, now - mark.ended)),
        ),
        pool=pool_stats(load.pool, load.counts),
        revision=revision(board.description.epoch, load.pool),
        estimated_wait_ms=milliseconds(load.counts.estimated_wait_seconds),
        pin_pages=load.counts.pin_pages,
    )


def pool_stats(pool: PoolTotals, counts: EngineCounts) -> cache_pb2.PoolStats:
    """Totals at one revision."""
    return cache_pb2.PoolStats(
        free_pages=pool.free_pages,
        active_pages=pool.active_pages,
        cached_pages=pool.cached_pages,
        pinned_pages=pool.pinned_pages,
        reserved_pages=pool.reserved_pages,
        shared_pages=pool.shared_pages,
        references=pool.references,
        wasted_slots=pool.unfilled_slots,
        allocations_total=pool.allocations_total,
        evictions_total=pool.evictions_total,
        copies_total=pool.copies_total,
        hit_tokens_total=counts.hit_tokens_total,
        miss_cold_tokens_total=counts.miss_cold_tokens_total,
        miss_evicted_tokens_total=counts.miss_evicted_tokens_total,
        unaligned_tokens_total=counts.unaligned_tokens_total,
        preemptions_total=counts.preemptions_total,
    )


def revision(epoch: int, pool: PoolTotals) -> cache_pb2.Revision:
    """Where the pool stands."""
    return cache_pb2.Revision(epoch=epoch, number=pool.revision, step=pool.step)


def row_replies(answer: RowsAnswer) -> list[worker_pb2.CommandReply]:
    """One reply per row; an empty one when there are none."""
    command_id = answer.ticket.command_id
    if not answer.rows:
        return [worker_pb2.CommandReply(command_id=command_id)]
    replies = []
    for left, row in zip(range(len(answer.rows) - 1, -1, -1), answer.rows, strict=True):
        table = cache_pb2.GetPageTableResponse(
            row=row.row,
            owner=row.owner,
            request_id=row.request_id,
            choice_index=row.choice_index,
            token_count=row.token_count,
            slots=_written_out(row.slots),
            step=row.step,
            rows_left=left,
        )
        replies.append(worker_pb2.CommandReply(command_id=command_id, more=left > 0, page_table=table))
    return replies


def _written_out(slots: "PageSlots | array[int]") -> bytes:
    """Slots as i32."""
    if not isinstance(slots, PageSlots):
        return slots.tobytes()
    first = np.frombuffer(slots.pages, dtype=np.int32) * np.int32(slots.page_size)
    return (first[:, None] + np.arange(slots.page_size, dtype=np.int32)).tobytes()


def flush_reply(answer: FlushAnswer) -> worker_pb2.CommandReply:
    """What a flush did."""
    flush = server_pb2.FlushPrefixCacheResponse(
        freed_pages=answer.freed_pages, unindexed_pages=answer.unindexed_pages
    )
    return worker_pb2.CommandReply(command_id=answer.ticket.command_id, flush=flush)


def pin_reply(answer: PinAnswer, worker_id: str, now_ns: int) -> worker_pb2.CommandReply:
    """A pin, or all of them; an unset pin after a removal."""
    pins = [_pin(pin, worker_id, now_ns) for pin in answer.pins]
    command_id = answer.ticket.command_id
    if answer.is_list:
        listed = server_pb2.ListPinnedPrefixesResponse(pins=pins)
        return worker_pb2.CommandReply(command_id=command_id, pins=listed)
    return worker_pb2.CommandReply(command_id=command_id, pin=pins[0] if pins else None)


def _pin(pin: PinnedPrefix, worker_id: str, now_ns: int) -> server_pb2.PinnedPrefix:
    tenant, _, salt = pin.salt.partition(b"\0")
    left = pin.seconds_left
    return server_pb2.PinnedPrefix(
        name=pin.name,
        worker_id=worker_id,
        token_count=pin.token_count,
        pinned_tokens=pin.pinned_tokens,
        pinned_pages=pin.pinned_pages,
        computed_tokens=pin.computed_tokens,
        hit_tokens=pin.hit_tokens,
        tenant=tenant.decode(errors="replace"),
        salt=salt.decode(errors="replace"),
        expire_time=None if left is None else timestamp(now_ns + int(left * 1e9)),
    )
