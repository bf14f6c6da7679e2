"""How a decode step's contexts are cut into tiles: the list on the device, and the scratch that goes with it.

A *chunk* is a run of tokens of one sequence, a *tile* one chunk for one KV head. The list is made on the
device, once per step, and read by every layer, so a CUDA graph can hold both. With a `chunk_scale` chunks of
a sequence are equal and a function of its own length, so its result does not depend on its company, bit for
bit. Without one they follow the tokens of the whole batch: one *wave* of tiles that run all at once where the
lengths allow it. Else programs take tiles from a queue, or each has a *stretch*: an equal part of the line
that all sequences make, cut without regard to where one of them ends.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kernels.dependent_launch import dependent_launch, fence

GRAIN = 64
"""Chunks have at least so many tokens, and by length they are multiples of it."""
MAX_CHUNKS = 64
"""Chunks of one sequence: one program merges them."""
RECORD = 8
"""int32 of an entry of the list: span, row, first token, end, index among the span's chunks, their number,
position of the span's last token; the rest is padding."""

NO_ROW = -1
"""In place of the dummy row: there is no padding."""

FEW_SPANS = 4
ROOM = 48
"""Tokens that a tile could have read while it begins: a span takes so much more of a stretch."""
UNEQUAL = 256
"""Tokens that a chunk may have more than an equal share, for one wave: a program whose stretch ends one span
and begins the next does twice what precedes a loop."""
SIZES = 8
"""Classes of chunks by size: the list has the large ones first, so that the last to end are small."""


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Launch shape; timings of the choices in docs/kernels/decode-attention.md."""

    block: int  # tokens a loop turn
    warps: int
    stages: int
    programs_per_sm: int
    wave_per_sm: int  # tiles of a wave
    product_stages: int | None = None  # of the form that takes the qkv product, if others
    is_stretched: bool = False  # more tiles than a wave: an equal stretch for every program, and no queue
    is_next_late: bool = False  # a dependent launch begins when programs end, not when they begin


FEW = DecodeLaunch(block=64, warps=4, stages=3, programs_per_sm=2, wave_per_sm=2, product_stages=2)
"""For FEW_SPANS or fewer: what counts is the time of one turn."""
SOME = DecodeLaunch(block=64, warps=2, stages=3, programs_per_sm=2, wave_per_sm=2)
"""For two to FEW_SPANS where the kernel takes the qkv product; the list is the same as for FEW."""
MANY = DecodeLaunch(block=32, warps=1, stages=4, programs_per_sm=4, wave_per_sm=4, is_stretched=True)
"""For more: what counts is the number of bytes under way, and a warp waits for no other."""
BESIDE = DecodeLaunch(
    block=32, warps=1, stages=3, programs_per_sm=3, wave_per_sm=3, is_stretched=True, is_next_late=True
)
"""For MANY of a group of rows beside others (worker/execution/row_groups.py): two of its size and no product
fit a multiprocessor, so half of them attend to one group while the other group's products have the rest; and
a product that waited for its attention would hold a multiprocessor that another group could use."""
WIDE = DecodeLaunch(block=32, warps=4, stages=3, programs_per_sm=2, wave_per_sm=2)
"""For rows of K of more than WIDE_BYTES: one warp's registers would not hold them."""
WIDE_BYTES = 256


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Chunk list and scratch of decode attention; buffers are made once and live in the CUDA graph."""

    spans: Tensor  # int32 [max_spans, 2]: row and length of each
    chunks: Tensor  # int32 [capacity, RECORD]
    num_chunks: Tensor  # int32 [1]
    stretches: Tensor  # int32 [capacity + 1]: of each stretch its first entry; behind them their number
    queue: Tensor  # int32 [1]: tiles taken beyond each program's first; zero between launches
    partial: Tensor  # fp32 [capacity, num_heads, head_dim]
    partial_lse: Tensor  # fp32 [capacity, num_heads]
    arrived: Tensor  # int32 [max_spans, num_kv_heads], zero between launches
    multiprocessors: int
    most_tokens: int  # of a span, as far as the host knows: more are slower, not wrong
    chunk_scale: int | None
    launch: DecodeLaunch | None

    @property
    def follows_batch(self) -> bool:
        """Whether chunks and launch shapes are chosen by the batch, none of them given."""
        return self.chunk_scale is None and self.launch is None

    def launch_of(self, num_spans: int, row_bytes: int = 0, *, of_product: bool = False) -> DecodeLaunch:
        """The launch shape of a batch; row_bytes: of a query of one head, padded to a power of two."""
        # With a chunk_scale a sequence alone and in company have the same shape.
        few = SOME if of_product and num_spans > 1 and self.chunk_scale is None else FEW
        usual = few if num_spans <= FEW_SPANS else MANY
        return self.launch or (WIDE if row_bytes > WIDE_BYTES else usual)

    def is_stretched(self, num_spans: int, row_bytes: int = 0) -> bool:
        """Whether every program has its stretch of the list, not a tile and then others from the queue."""
        return self.chunk_scale is None and self.launch_of(num_spans, row_bytes).is_stretched

    def num_stretches(self, num_spans: int, row_bytes: int = 0) -> int:
        """Of a batch: each is taken by a program for every KV head."""
        programs = self.launch_of(num_spans, row_bytes).programs_per_sm * self.multiprocessors
        return max(1, programs // self.arrived.shape[1])

    def num_programs(self, num_spans: int, row_bytes: int = 0) -> int:
        """Programs of a batch: as many as run at once, or as many as there can be tiles."""
        if self.is_stretched(num_spans, row_bytes):
            return self.num_stretches(num_spans, row_bytes) * self.arrived.shape[1]
        most = self.chunks.shape[0] * self.arrived.shape[1]
        return min(most, self.launch_of(num_spans, row_bytes).programs_per_sm * self.multiprocessors)


def make_plan(
    num_spans: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_kv_len: int,
    device: torch.device,
    *,
    chunk_scale: int | None = None,
    launch: DecodeLaunch | None = None,
) -> DecodePlan:
    """Allocates the buffers for batches of at most `num_spans` spans of at most `max_kv_len` tokens.

    chunk_scale: a power of two; chunks have at least GRAIN times as many tokens. None: by the batch. launch:
    a shape for every batch; None: by the number of spans.
    """
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if chunk_scale is None:
        # What _chunk_by_batch can list: 16 tiles a multiprocessor, one short chunk more for each span.
        capacity = 16 * multiprocessors // num_kv_heads + 2 * num_spans + 64
    else:
        capacity = num_spans * min(MAX_CHUNKS, -(-max_kv_len // (GRAIN * chunk_scale)))
    return DecodePlan(
        spans=torch.zeros(num_spans, 2, dtype=torch.int32, device=device),
        chunks=torch.zeros(capacity, RECORD, dtype=torch.int32, device=device),
        num_chunks=torch.zeros(1, dtype=torch.int32, device=device),
        stretches=torch.zeros(capacity + 1, dtype=torch.int32, device=device),
        queue=torch.zeros(1, dtype=torch.int32, device=device),
        partial=torch.empty(capacity, num_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(capacity, num_heads, dtype=torch.float32, device=device),
        arrived=torch.zeros(num_spans, num_kv_heads, dtype=torch.int32, device=device),
        multiprocessors=multiprocessors,
        most_tokens=max_kv_len,
        chunk_scale=chunk_scale,
        launch=launch,
    )


def plan_decode(plan: DecodePlan, rows: Tensor, kv_lens: Tensor, *, dummy_row: int = NO_ROW) -> None:
    """Lists the chunks of a batch into the plan, on the device. rows, kv_lens int32 [num_spans]. Spans of the
    dummy row, padding, have none: nothing is stored for them, and their results are left as they were.
    """
    num_spans, (max_spans, num_kv_heads) = kv_lens.shape[0], plan.arrived.shape
    assert num_spans <= max_spans, f"plan is for {max_spans} spans, got {num_spans}"
    is_by_batch = plan.chunk_scale is None
    head_dim = plan.partial.shape[2]
    row_bytes = 2 * triton.next_power_of_2(head_dim)
    launch = plan.launch_of(num_spans, row_bytes)
    num_stretches = plan.num_stretches(num_spans, row_bytes)
    _plan_kernel[(1,)](
        rows,
        kv_lens,
        plan.spans,
        plan.chunks,
        plan.num_chunks,
        plan.stretches,
        dummy_row,
        num_spans,
        num_stretches,
        plan.multiprocessors,
        launch.wave_per_sm * plan.multiprocessors,
        launch.programs_per_sm * plan.multiprocessors,
        GRAIN * (plan.chunk_scale or 0),
        launch.block if is_by_batch else GRAIN,
        SPANS=triton.next_power_of_2(max_spans),
        KV_HEADS=num_kv_heads,
        MAX_CHUNKS=MAX_CHUNKS,
        SIZES=SIZES,
        ROOM=ROOM,
        SHORTEST=GRAIN,
        RECORD=RECORD,
        STRETCHES=triton.next_power_of_2(num_stretches + 1),
        BY_BATCH=is_by_batch,
        STRETCHED=plan.is_stretched(num_spans, row_bytes),
        UNEQUAL=UNEQUAL,
        **dependent_launch(kv_lens.device),
    )


@triton.jit
def _chunk_by_batch(length, multiprocessors, wave, most, KV_HEADS: tl.constexpr, SHORTEST: tl.constexpr):
    """Tokens of a chunk, and whether the tiles are one wave: where the lengths are such that `wave`, or up to
    `most`, hold them. Else for a queue: two tiles a multiprocessor while there are few tokens; where there
    are many 16, fewer where that leaves 1,024 tokens a tile, or 8 with up to 2,048. The last token of a span
    is not counted.
    """
    others = tl.maximum(length - 1, 0)
    tokens = tl.sum(others.to(tl.int64), 0) * KV_HEADS
    # A little more than an equal share: a few programs may stay without a tile.
    share = tokens // wave
    at_once = tl.maximum(share + share // 32 + SHORTEST // 4, SHORTEST)
    tiles = tl.sum((others + at_once - 1) // at_once, 0) * KV_HEADS
    half = tokens // (2 * multiprocessors)
    large = tl.maximum(tl.maximum(half // 8, 1024), tl.minimum(half // 4, 2048))
    queued = tl.where(half <= 2048, tl.maximum(half, 2 * SHORTEST), large)
    return tl.where(tiles <= most, at_once, queued).to(tl.int32)


@triton.jit
def _chunk_of_wave(
    length,
    real,
    num_stretches,
    multiple,
    MAX_CHUNKS: tl.constexpr,
    SHORTEST: tl.constexpr,
    UNEQUAL: tl.constexpr,
):
    """The least tokens of a chunk with which there are no more chunks than stretches, and whether there are
    any: at most UNEQUAL more than an equal share.
    """
    share = (tl.sum(length.to(tl.int64), 0) // num_stretches).to(tl.int32)
    chunk = tl.maximum(share + share // 32 + SHORTEST // 4, SHORTEST)
    most = chunk + UNEQUAL
    _, count = _even_chunks(length, real, chunk, multiple, MAX_CHUNKS)
    listed = tl.sum(count, 0)
    has_room = tl.sum(real.to(tl.int32), 0) <= num_stretches
    while (listed > num_stretches) & has_room & (chunk < most):
        chunk += multiple
        _, count = _even_chunks(length, real, chunk, multiple, MAX_CHUNKS)
        listed = tl.sum(count, 0)
    return chunk, listed <= num_stretches


@triton.jit
def _even_chunks(length, real, chunk, multiple, MAX_CHUNKS: tl.constexpr):
    """Spans in chunks of about `chunk` tokens at most, equal ones of a span: their tokens, and how many."""
    chunk = tl.maximum(chunk, (length + MAX_CHUNKS - 1) // MAX_CHUNKS)
    count = tl.maximum((length + chunk - 1) // chunk, 1)
    even = (length + count - 1) // count
    chunk = tl.maximum((even + multiple - 1) // multiple * multiple, multiple)
    return chunk, tl.where(real, (length + chunk - 1) // chunk, 0)


@triton.jit
def _stretches(
    length, real, num_stretches, MAX_CHUNKS: tl.constexpr, SHORTEST: tl.constexpr, ROOM: tl.constexpr
):
    """Length of a stretch of the line that all spans make, one behind the other, each with ROOM before it; of
    each span the place of its first token in that line, and the first and the last stretch that it is in. A
    piece of few tokens at an end of a span goes to its neighbour.
    """
    counted = tl.where(real, length + ROOM, 0)
    share = (tl.sum(counted, 0) + num_stretches - 1) // num_stretches
    share = tl.maximum(tl.maximum(share, SHORTEST + ROOM), tl.max(counted, 0) // (MAX_CHUNKS - 2) + 1)
    behind = tl.cumsum(counted, 0)
    place = behind - counted
    first = tl.minimum(place // share, num_stretches - 1)
    last = tl.minimum((behind - 1) // share, num_stretches - 1)
    few = tl.minimum(share // 4, ROOM)
    first += ((last > first) & ((first + 1) * share - place < few + ROOM)).to(tl.int32)
    last -= ((last > first) & (behind - last * share < few)).to(tl.int32)
    return share, place + ROOM, first, last


@triton.jit
def _chunk_by_length(length, shortest, MAX_CHUNKS: tl.constexpr):
    """The least shortest * 2^k of at most MAX_CHUNKS chunks that is at least twice the root of the length:
    the merge reads one part for each chunk, so both grow together.
    """
    chunk = tl.zeros_like(length) + shortest
    for _ in range(12):
        chunk = tl.where((chunk * MAX_CHUNKS < length) | (chunk * chunk < length * 4), chunk * 2, chunk)
    return chunk


@triton.jit(
    do_not_specialize=[
        "dummy_row",
        "num_spans",
        "num_stretches",
        "multiprocessors",
        "wave",
        "most",
        "shortest",
        "multiple",
    ]
)
def _plan_kernel(
    rows,
    kv_lens,
    spans,
    chunks,
    num_chunks,
    stretches,
    dummy_row,
    num_spans,
    num_stretches,
    multiprocessors,
    wave,
    most,
    shortest,
    multiple,
    SPANS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    SIZES: tl.constexpr,
    ROOM: tl.constexpr,
    SHORTEST: tl.constexpr,
    RECORD: tl.constexpr,
    STRETCHES: tl.constexpr,
    BY_BATCH: tl.constexpr,
    STRETCHED: tl.constexpr,
    UNEQUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    # No gdc_launch_dependents: what follows starts when the list is there, so kernels may read it before
    # they wait. They would see it complete only behind a wait, but for the fence.
    if PDL:
        gdc_wait()
    span = tl.arange(0, SPANS)
    real = span < num_spans
    length = tl.load(kv_lens + span, mask=real, other=0)
    row = tl.load(rows + span, mask=real, other=0)
    tl.store(spans + 2 * span, row, mask=real)
    tl.store(spans + 2 * span + 1, length, mask=real)
    real &= row != dummy_row
    length = tl.where(real, length, 0)
    if STRETCHED:
        chunk, is_wave = _chunk_of_wave(length, real, num_stretches, multiple, MAX_CHUNKS, SHORTEST, UNEQUAL)
    elif BY_BATCH:
        chunk = _chunk_by_batch(length, multiprocessors, wave, most, KV_HEADS, SHORTEST)
    else:
        chunk = _chunk_by_length(length, shortest, MAX_CHUNKS)
    chunk, count = _even_chunks(length, real, chunk, multiple, MAX_CHUNKS)
    if STRETCHED:
        share, place, first_stretch, last_stretch = _stretches(
            length, real, num_stretches, MAX_CHUNKS, SHORTEST, ROOM
        )
        count = tl.where(real & (is_wave == 0), last_stretch - first_stretch + 1, count)
        first = tl.cumsum(count, 0) - count
        listed = tl.sum(count, 0)
        numbers = tl.arange(0, STRETCHES)
        tl.store(stretches + numbers, listed, mask=numbers <= num_stretches)
        tl.debug_barrier()  # the least of the entries of each stretch comes below
    else:
        size = chunk * SIZES // (tl.max(tl.where(real, chunk, 0), 0) + 1)
        first = tl.zeros([SPANS], tl.int32)
        listed = 0
        for smaller in tl.static_range(SIZES):
            mine = tl.where(size == SIZES - 1 - smaller, count, 0)
            first = tl.where(mine > 0, listed + tl.cumsum(mine, 0) - mine, first)
            listed += tl.sum(mine, 0)
    for index in range(tl.max(count, 0)):
        here = index < count
        begin = index * chunk
        end = tl.minimum(begin + chunk, length)
        if STRETCHED:
            stretch = first_stretch + index
            cut = stretch * share - place
            begin = tl.where(is_wave, begin, tl.where(index == 0, 0, cut))
            end = tl.where(is_wave, end, tl.where(index == count - 1, length, cut + share))
            stretch = tl.where(is_wave, first + index, stretch)
            tl.atomic_min(stretches + stretch, first + index, mask=here, sem="relaxed")
        record = chunks + (first + index) * RECORD
        tl.store(record, span, mask=here)
        tl.store(record + 1, row, mask=here)
        tl.store(record + 2, begin, mask=here)
        tl.store(record + 3, end, mask=here)
        tl.store(record + 4, index, mask=here)
        tl.store(record + 5, count, mask=here)
        tl.store(record + 6, length - 1, mask=here)
    tl.store(num_chunks, listed)
    if PDL:
        fence()
