"""The kernel of products of 33 to 64 rows on Hopper: one warp loads, the others multiply.

Bytes: the weight, once, and the input once a tile of outputs. The loading warp fills a ring in shared memory
by the tensor copy engine: weights of the first turns before it waits for the kernel before this one, their
input behind that wait. The others multiply by warp groups (wgmma), the weight on the tall side, and ask
before the loop for what the end needs. What a product stands for, norms, activation and residual, is as in
kernels.few_rows, which launches this kernel; so is how parts of a sum are added up.

What each hand-over rests on. A slot to who multiplies: `ready` is told the bytes of all its copies before
the first is asked for, so its phase ends when all have come, and who waited for it sees them. A slot back:
wgmma ends warp by warp, so the warps meet before one of them arrives on `free` (the compiler's barrier; a
test looks for it), and no turn is handed back whose products may still run. The ring's memory for something
else (layouts, reductions): each copy has been waited for by then, and both kinds of warps have met at the end
of warp_specialize; the barriers' memory is nothing else's. Parts: stores, barrier, a count that releases and
acquires for the device, barrier, loads through the L2 cache. Residual: each program reads its tile before it
counts, and only the last one writes it. The count is zero again before the grid ends, which the next launch
waits for.

It is written in Gluon, Triton's lower level (triton/experimental/gluon), which has no interpreter;
kernels.ring_launch says where it is used.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.ring_launch import RingLaunch

REGISTERS = 65_536  # of a multiprocessor
LOADING_WARPS = 4  # one that loads; registers are given out to four at a time
_LOADING_REGISTERS = gl.constexpr(40)

# Triton 3.9 has the first names, 3.6 the second.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def launch_ring(
    x: Tensor,
    weight: Tensor,
    arguments: tuple[Tensor, ...],
    numbers: tuple[int, int, int, float],
    constants: dict[str, int | bool],
    launch: RingLaunch,
    grid: tuple[int, int],
) -> None:
    """The kernel below; arguments, numbers and constants in its order. Only kernels.few_rows calls this."""
    options: dict[str, int] = {}
    if launch.programs > 1:
        threads = launch.programs * 32 * (launch.warps + LOADING_WARPS)
        options["maxnreg"] = REGISTERS // threads // 8 * 8
    ring_kernel[grid](
        _described(x, int(constants["ROWS"]), launch.block),
        _described(weight, launch.outputs, launch.block),
        *arguments,
        *numbers,
        **constants,
        OUTPUTS=launch.outputs,
        BLOCK=launch.block,
        STAGES=launch.stages,
        WARPS=launch.warps,
        **dependent_launch(x.device),
        **options,
        num_warps=launch.warps,
    )


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """For the tensor copy engine, in boxes of rows by columns; what is beyond the matrix is zero."""
    box = [rows, columns]
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))


@gluon.jit
def _load_weight(weight, weights, ups, ready, slot, first, num_outputs, column, GATED: gl.constexpr):
    _copy(weight, [first, column], ready.index(slot), weights.index(slot))
    if GATED:
        _copy(weight, [first + num_outputs, column], ready.index(slot), ups.index(slot))


@gluon.jit
def _load(
    weight, x, weights, ups, inputs, ready, free, first, num_outputs, begin, turns,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: a turn after the other, each into a slot that is free."""
    ahead = gl.minimum(turns, STAGES)
    for turn in range(ahead):
        mbarrier.expect(ready.index(turn), BYTES)
        _load_weight(weight, weights, ups, ready, turn, first, num_outputs, begin + turn * BLOCK, GATED)
    if PDL:
        gdc_wait()  # no kernel writes weights
    for turn in range(ahead):
        _copy(x, [0, begin + turn * BLOCK], ready.index(turn), inputs.index(turn))
    for turn in range(ahead, turns):
        slot = turn % STAGES
        mbarrier.wait(free.index(slot), ((turn // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(slot), BYTES)
        _load_weight(weight, weights, ups, ready, slot, first, num_outputs, begin + turn * BLOCK, GATED)
        _copy(x, [0, begin + turn * BLOCK], ready.index(slot), inputs.index(slot))


@gluon.jit
def _own(first, num_rows, num_outputs, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Where a tile lies in a result [num_rows, num_outputs]: offsets [outputs, rows], and which are there."""
    outputs = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    ok = (outputs < num_outputs)[:, None] & (rows < num_rows)[None, :]
    return rows[None, :] * num_outputs + outputs[:, None], ok


@gluon.jit
def _multiply(
    weights, ups, inputs, ready, free, turns, residual, squares, first, num_rows, num_outputs, num_squares,
    eps, WIDTH: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, SQUARES: gl.constexpr, SQUARES_STRIDE: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr, mma: gl.constexpr, flat: gl.constexpr,
):  # fmt: skip
    """The other warps: sums [outputs, rows] of all, or of gates and of ups, and what the end needs."""
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, mma)
    up = gl.zeros([OUTPUTS, ROWS] if GATED else [64, 8], gl.float32, mma)
    if PDL:
        gdc_wait()
    factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, mma))
    if SQUARES:
        spread: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
        part = gl.arange(0, SQUARES, gl.SliceLayout(1, spread))
        row = gl.arange(0, ROWS, gl.SliceLayout(0, spread))
        ok = (part < num_squares)[:, None] & (row < num_rows)[None, :]
        parts = gl.load(squares + part[:, None] * SQUARES_STRIDE + row[None, :], mask=ok, other=0.0)
        factor = 1.0 / gl.sqrt(gl.sum(parts, 0) / WIDTH + eps)
        factor = gl.convert_layout(factor, gl.SliceLayout(0, mma))
    kept = gl.zeros([OUTPUTS, ROWS] if HAS_RESIDUAL else [OUTPUTS, 16], gl.bfloat16, flat)
    if HAS_RESIDUAL:
        own, own_ok = _own(first, num_rows, num_outputs, OUTPUTS, ROWS, flat)
        kept = gl.load(residual + own, mask=own_ok, other=0.0)
    for turn in range(turns):
        slot = turn % STAGES
        mbarrier.wait(ready.index(slot), (turn // STAGES) & 1)
        x = inputs.index(slot).permute((1, 0))
        acc = warpgroup_mma(weights.index(slot), x, acc, is_async=True)
        if GATED:
            up = warpgroup_mma(ups.index(slot), x, up, is_async=True)
            acc, up = warpgroup_mma_wait(num_outstanding=2, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        # Products of the turn before have ended, so its slot is free.
        mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), pred=turn > 0)
    if GATED:
        acc, up = warpgroup_mma_wait(num_outstanding=0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    return acc, up, factor, kept


@gluon.jit
def _finish(
    acc, up, factor, kept, out, residual, gain, bias, squares_out, tile, first, num_rows, num_outputs,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, SQUARES: gl.constexpr, SQUARES_STRIDE: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, mma: gl.constexpr,
    flat: gl.constexpr,
):  # fmt: skip
    """What follows the sums, as in kernels.few_rows."""
    own, own_ok = _own(first, num_rows, num_outputs, OUTPUTS, ROWS, flat)
    if SQUARES:
        acc *= factor[None, :]
        if GATED:
            up *= factor[None, :]
    if GATED:
        acc = acc / (1.0 + gl.exp(-acc)) * up
    if HAS_BIAS:
        at = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, mma))
        acc += gl.load(bias + at, mask=at < num_outputs, other=0.0).to(gl.float32)[:, None]
    if HAS_RESIDUAL:
        acc = gl.convert_layout(acc, flat)
        total = (acc + kept.to(gl.float32)).to(gl.bfloat16)
        gl.store(residual + own, total, mask=own_ok)
        wide = gl.where(own_ok, total.to(gl.float32), 0.0)
        rows = gl.arange(0, ROWS, gl.SliceLayout(0, flat))
        gl.store(squares_out + tile * SQUARES_STRIDE + rows, gl.sum(wide * wide, 0))
        at = first + gl.arange(0, OUTPUTS, gl.SliceLayout(1, flat))
        gains = gl.load(gain + at, mask=at < num_outputs, other=0.0).to(gl.float32)
        gl.store(out + own, (wide * gains[:, None]).to(gl.bfloat16), mask=own_ok)
    else:
        gl.store(out + own, gl.convert_layout(acc.to(gl.bfloat16), flat), mask=own_ok)


@gluon.jit(do_not_specialize=["num_rows", "num_squares"])
def ring_kernel(
    x, weight, out, residual, gain, bias, squares, squares_out, partial, arrived,
    num_rows, num_outputs, num_squares, eps,
    WIDTH: gl.constexpr, ROWS: gl.constexpr, SPLITS: gl.constexpr, SQUARES: gl.constexpr,
    SQUARES_STRIDE: gl.constexpr, HAS_RESIDUAL: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    OUTPUTS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    tile, split = gl.program_id(0), gl.program_id(1)
    TURNS: gl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    SHARE: gl.constexpr = (TURNS + SPLITS - 1) // SPLITS
    begin = split * SHARE
    turns = gl.minimum(SHARE, TURNS - begin)
    first = tile * OUTPUTS
    if PDL:
        gdc_launch_dependents()
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    # Outputs side by side, as they lie in a row of the result: 16 bytes a thread.
    flat: gl.constexpr = gl.BlockedLayout([8, 1], [OUTPUTS // 8, 256 // OUTPUTS], [1, WARPS], [0, 1])
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, BLOCK], weight.layout)
    ups = weights
    if GATED:
        ups = gl.allocate_shared_memory(gl.bfloat16, [STAGES, OUTPUTS, BLOCK], weight.layout)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    BYTES: gl.constexpr = 2 * BLOCK * (ROWS + (2 * OUTPUTS if GATED else OUTPUTS))
    acc, up, factor, kept = gl.warp_specialize(
        [
            (
                _multiply,
                (
                    weights, ups, inputs, ready, free, turns, residual, squares, first, num_rows, num_outputs,
                    num_squares, eps, WIDTH, ROWS, OUTPUTS, STAGES, WARPS, SQUARES, SQUARES_STRIDE,
                    HAS_RESIDUAL, GATED, PDL, mma, flat,
                ),
            ),
            (
                _load,
                (
                    weight, x, weights, ups, inputs, ready, free, first, num_outputs, begin * BLOCK, turns,
                    BLOCK, STAGES, BYTES, GATED, PDL,
                ),
            ),
        ],
        [1],
        [_LOADING_REGISTERS],
    )  # fmt: skip
    if SPLITS == 1:
        _finish(
            acc, up, factor, kept, out, residual, gain, bias, squares_out, tile, first, num_rows, num_outputs,
            ROWS, OUTPUTS, SQUARES, SQUARES_STRIDE, HAS_RESIDUAL, HAS_BIAS, GATED, mma, flat,
        )  # fmt: skip
    else:
        HALVES: gl.constexpr = 2 if GATED else 1
        size: gl.constexpr = OUTPUTS * ROWS
        here = gl.arange(0, OUTPUTS, gl.SliceLayout(1, mma))[:, None] * ROWS
        here += gl.arange(0, ROWS, gl.SliceLayout(0, mma))[None, :]
        parts = partial + tile * SPLITS * HALVES * size + here
        gl.store(parts + split * HALVES * size, acc)
        if GATED:
            gl.store(parts + (split * HALVES + 1) * size, up)
        # The last program to arrive adds up: the barrier orders this program's stores before the count.
        _barrier()
        if gl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            _barrier()
            gl.store(arrived + tile, 0)
            total = gl.zeros([OUTPUTS, ROWS], gl.float32, mma)
            up_total = gl.zeros([OUTPUTS, ROWS] if GATED else [64, 8], gl.float32, mma)
            for part in gl.static_range(SPLITS):
                total += gl.load(parts + part * HALVES * size, cache_modifier=".cg")
                if GATED:
                    up_total += gl.load(parts + (part * HALVES + 1) * size, cache_modifier=".cg")
            _finish(
                total, up_total, factor, kept, out, residual, gain, bias, squares_out, tile, first, num_rows,
                num_outputs, ROWS, OUTPUTS, SQUARES, SQUARES_STRIDE, HAS_RESIDUAL, HAS_BIAS, GATED, mma, flat,
            )  # fmt: skip
    # Until here the barriers' memory is nothing else's, as it must be (PTX ISA, mbarrier.inval); when layouts
    # were changed there, some numbers of a tile were wrong in one of 150 launches.
    mbarrier.invalidate(ready.index(0))
    mbarrier.invalidate(free.index(0))
