"""The kernel of products of few rows with a small weight on Hopper: a cluster of programs shares the width.

Bytes: the weight and the input, once each over the whole device but for the input's once a tile. Each
program asks for its part of the weight, all of it, before it waits for the kernel before this one; behind
the wait its part of the input comes, and is multiplied by warp groups (wgmma), the weight on the tall side.
Then every program adds up a slice of the outputs out of the sums that all hold in shared memory, in one
order, so that a result never depends on who was first. What a product stands for, norms, activation and
residual, is as in kernels.few_rows, which launches this kernel.

What each hand-over rests on. Sums over weight and input: products have ended in all warps, which then meet.
Sums to the cluster: each thread's stores are released by its own arrival, and acquired by whoever waits. No
program leaves before all have arrived a second time, and one arrives when what it read has been used.

It is written in Gluon, Triton's lower level (triton/experimental/gluon), which has no interpreter;
kernels.sliced_launch says where it is used. A program of Triton's is a whole cluster, and what is told apart
by its rank among the CTAs of it is not known to the compiler: layouts say that all hold the same. Triton 3.6
moves nothing from one CTA of a cluster to another, hence the instructions of our own (PTX ISA, mapa,
ld.shared::cluster, barrier.cluster).
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch
from kernels.sliced_launch import SHARED_BYTES, SlicedLaunch

KNOWN = ((3, 6), (3, 9))
"""Of Triton: the first and the last whose name and layout of shared memory `_put` was tried with."""
if not KNOWN[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= KNOWN[1]:
    raise ImportError(f"Triton {triton.__version__} may lay out shared memory otherwise than 3.6 to 3.9")

PADDING = gl.constexpr(4)  # floats behind a row of sums in shared memory: no two lanes in one bank

# Triton 3.9 has the first names, 3.6 the second.
_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def launch_sliced(
    arguments: tuple[Tensor, ...],
    numbers: tuple[int, int, int, float],
    constants: dict[str, int | bool],
    launch: SlicedLaunch,
    tiles: int,
) -> None:
    """The kernel below; arguments, numbers and constants in its order. Only kernels.few_rows calls this."""
    tile = 2 * launch.outputs if constants["GATED"] else launch.outputs
    squares, share = int(constants["SQUARES"]), int(constants["WIDTH"]) // launch.programs
    assert numbers[1] % launch.outputs == 0, f"{numbers[1]} outputs in tiles of {launch.outputs}"
    assert share * launch.programs == constants["WIDTH"], f"{launch.programs} parts of {constants['WIDTH']}"
    block = next((block for block in (512, 256, 128) if share % block == 0), 0)
    assert block, f"a part of {share} columns; a multiple of 128"
    rows = int(constants["ROWS"])
    size, sums = 2 * (tile + rows) * share, 4 * rows * (tile + int(PADDING.value) + 1)
    assert sums <= size <= SHARED_BYTES, f"{sums} bytes of sums over {size} of weight and input"
    sliced_kernel[(tiles,)](
        *arguments,
        *numbers,
        **{**constants, "SQUARES": max(squares, launch.programs) if squares else 0},
        TILE=tile,
        PROGRAMS=launch.programs,
        BLOCK=block,
        WARPS=launch.warps,
        **dependent_launch(arguments[0].device),
        num_warps=launch.warps,
        num_ctas=launch.programs,
    )


@gluon.constexpr_function
def _copied(warps: int, block: int, programs: int) -> gl.BlockedLayout:
    """[rows, width], 16 bytes a thread. Here and below: all programs of a cluster hold the same."""
    return gl.BlockedLayout(
        [1, 8], [max(1, 256 // block), min(32, block // 8)], [warps, 1], [1, 0], cga_layout=_same(programs)
    )


@gluon.constexpr_function
def _summed(warps: int, programs: int) -> gl.BlockedLayout:
    """[parts, rows] of sums of squares."""
    return gl.BlockedLayout([1, 1], [4, 8], [1, warps], [0, 1], cga_layout=_same(programs))


@gluon.constexpr_function
def _shared(programs: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 16, 2, cga_layout=_same(programs))


@gluon.constexpr_function
def _multiplied(warps: int, tile: int, rows: int, programs: int) -> gl.NVMMADistributedLayout:
    """[rows of the weight, rows]: a warp has 16 of the weight's; where warps are left, a part of the rows."""
    along = min(warps, tile // 16)
    shape = [16, rows * along // warps, 16]
    return gl.NVMMADistributedLayout([3, 0], [along, warps // along], shape, cga_layout=_same(programs))


@gluon.constexpr_function
def _sliced(slice_outputs: int, warps: int, programs: int) -> gl.BlockedLayout:
    """[programs, outputs, rows]: to each program its own, 4 outputs side by side a thread."""
    cluster = [[1 << bit, 0, 0] for bit in range(programs.bit_length() - 1)]
    threads = [1, slice_outputs // 4, 128 // slice_outputs]
    return gl.BlockedLayout([1, 4, 1], threads, [1, 1, warps], [1, 2, 0], cga_layout=cluster)


@gluon.constexpr_function
def _same(programs: int) -> list[list[int]]:
    return [[0, 0] for _ in range(programs.bit_length() - 1)]


@gluon.jit
def _rank():
    """Of this program in its cluster."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _wait_for_sums():
    """What each program of the cluster has put into its shared memory before can be read by the others."""
    gl.inline_asm_elementwise(
        "fence.release.sync_restrict::shared::cta.cluster; barrier.cluster.arrive.relaxed.aligned;"
        " barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _wait_for_readers():
    """Nobody leaves while others read what it holds: each has used what it read by then."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _put(offset, value):
    """Into this program's shared memory, whose start Triton calls global_smem; offset in bytes.

    By then nothing in it is needed any more: what Triton lays there are weights and input, and no reduction
    or change of layout in this kernel leaves a warp. A test holds what it asks for against these two.
    """
    gl.inline_asm_elementwise(
        "{ .reg .u32 at; mov.u32 at, global_smem; add.u32 at, at, $1;"
        " st.shared.f32 [at], $2; mov.u32 $0, 0; }",
        "=r,r,f", [offset, value], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _take(offset, rank):
    """What a program of the cluster has put there."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 at; mov.u32 at, global_smem; add.u32 at, at, $1; mapa.shared::cluster.u32 at, at, $2;"
        " ld.shared::cluster.f32 $0, [at]; }",
        "=f,r,r", [offset, rank], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _take4(offset, rank):
    """The same, each four of a thread lying side by side."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 at; mov.u32 at, global_smem; add.u32 at, at, $4; mapa.shared::cluster.u32 at, at, $8;"
        " ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [at]; }",
        "=f,=f,=f,=f,r,r,r,r,r,r,r,r", [offset, rank], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _ask(
    weights, weight, first, begin, num_outputs,
    WIDTH: gl.constexpr, TILE: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK: gl.constexpr, BLOCKS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """For the program's part of a tile's weights: rows of the outputs, or their gates and then their ups."""
    taken = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    of_weight = first + taken % OUTPUTS + (taken // OUTPUTS) * num_outputs
    at = (
        weight
        + of_weight[:, None] * WIDTH
        + (begin + gl.arange(0, BLOCK, gl.SliceLayout(0, layout)))[None, :]
    )
    for block in gl.static_range(BLOCKS):
        _load(weights.index(block), at + block * BLOCK)
    async_copy.commit_group()


@gluon.jit
def _multiply(
    weights, inputs,
    TILE: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """This program's part of the sums [rows of the weight, rows]; what was asked for has come by then."""
    async_copy.wait_group(0)
    fence_async_shared()
    _barrier()
    acc = gl.zeros([TILE, ROWS], gl.float32, layout)
    for block in gl.static_range(BLOCKS):
        acc = warpgroup_mma(weights.index(block), inputs.index(block).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(acc,))


@gluon.jit(do_not_specialize=["num_rows", "num_squares"])
def sliced_kernel(
    x, weight, out, residual, gain, bias, squares, squares_out,
    num_rows, num_outputs, num_squares, eps,
    WIDTH: gl.constexpr, ROWS: gl.constexpr, SQUARES: gl.constexpr, SQUARES_STRIDE: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, TILE: gl.constexpr,
    PROGRAMS: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    OUTPUTS: gl.constexpr = TILE // 2 if GATED else TILE
    SLICE: gl.constexpr = OUTPUTS // PROGRAMS
    BLOCKS: gl.constexpr = WIDTH // PROGRAMS // BLOCK
    STRIDE: gl.constexpr = TILE + PADDING
    copied: gl.constexpr = _copied(WARPS, BLOCK, PROGRAMS)
    multiplied: gl.constexpr = _multiplied(WARPS, TILE, ROWS, PROGRAMS)
    own: gl.constexpr = _sliced(SLICE, WARPS, PROGRAMS)
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, own))
    tile, rank = gl.program_id(0), _rank()
    first, begin = tile * OUTPUTS, rank * (BLOCKS * BLOCK)
    if PDL:
        gdc_launch_dependents()
    weights = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, TILE, BLOCK], _shared(PROGRAMS))
    inputs = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, ROWS, BLOCK], _shared(PROGRAMS))
    _ask(weights, weight, first, begin, num_outputs, WIDTH, TILE, OUTPUTS, BLOCK, BLOCKS, copied)
    # What can be reckoned before the wait is.
    input_row = gl.arange(0, ROWS, gl.SliceLayout(1, copied))[:, None]
    input_at = x + input_row * WIDTH + (begin + gl.arange(0, BLOCK, gl.SliceLayout(0, copied)))[None, :]
    summed: gl.constexpr = _summed(WARPS, PROGRAMS)
    SHARE: gl.constexpr = SQUARES // PROGRAMS if SQUARES else 1
    part = rank * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, summed))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, summed))
    squares_at = squares + part[:, None] * SQUARES_STRIDE + row[None, :]
    if PDL:
        gdc_wait()  # no kernel writes weights
    for block in gl.static_range(BLOCKS):
        _load(inputs.index(block), input_at + block * BLOCK, mask=input_row < num_rows)
    async_copy.commit_group()
    if SQUARES:  # this program's share of each row's
        there = (part < num_squares)[:, None] & (row < num_rows)[None, :]
        share = gl.sum(gl.load(squares_at, mask=there, other=0.0), 0)
    # Outputs of a tile that are this program's, by what layouts say; [programs, outputs, rows].
    program = gl.arange(0, PROGRAMS, gl.SliceLayout(1, gl.SliceLayout(2, own)))[:, None, None]
    output = program * SLICE + gl.arange(0, SLICE, gl.SliceLayout(0, gl.SliceLayout(2, own)))[None, :, None]
    row_of = gl.arange(0, ROWS, by_row)
    rows = row_of[None, None, :]
    at_own = rows * num_outputs + (first + output)
    ok = (rows < num_rows) & (output < OUTPUTS)
    kept = gl.zeros([PROGRAMS, SLICE, ROWS], gl.bfloat16, own)
    if HAS_RESIDUAL:
        kept = gl.load(residual + at_own, mask=ok, other=0.0)
    acc = _multiply(weights, inputs, TILE, ROWS, BLOCKS, multiplied)
    _barrier()  # all have read weights and input, over which sums are put
    of_weight = gl.arange(0, TILE, gl.SliceLayout(1, multiplied))[:, None]
    _put((gl.arange(0, ROWS, gl.SliceLayout(0, multiplied))[None, :] * STRIDE + of_weight) * 4, acc)
    if SQUARES:
        _put((ROWS * STRIDE + row) * 4, share)
    _wait_for_sums()
    total = gl.zeros([PROGRAMS, SLICE, ROWS], gl.float32, own)
    up = gl.zeros([PROGRAMS, SLICE, ROWS], gl.float32, own)
    row_sum = gl.zeros([ROWS], gl.float32, by_row)
    at = (rows * STRIDE + output) * 4
    for other in gl.static_range(PROGRAMS):
        whose = gl.full([PROGRAMS, SLICE, ROWS], other, gl.int32, own)
        total += _take4(at, whose)
        if GATED:
            up += _take4(at + OUTPUTS * 4, whose)
        if SQUARES:
            row_sum += _take((ROWS * STRIDE + row_of) * 4, gl.full([ROWS], other, gl.int32, by_row))
    if SQUARES:
        factor = (1.0 / gl.sqrt(row_sum / WIDTH + eps))[None, None, :]
        total *= factor
        up *= factor
    if GATED:
        total = total / (1.0 + gl.exp(-total)) * up
    if HAS_BIAS:
        total += gl.load(bias + first + output).to(gl.float32)
    if HAS_RESIDUAL:
        whole = (total + kept.to(gl.float32)).to(gl.bfloat16)
        gl.store(residual + at_own, whole, mask=ok)
        total = gl.where(ok, whole.to(gl.float32), 0.0)
        layout: gl.constexpr = gl.SliceLayout(1, own)
        parts = tile * PROGRAMS + gl.arange(0, PROGRAMS, gl.SliceLayout(1, layout))[:, None]
        at_sum = parts * SQUARES_STRIDE + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
        gl.store(squares_out + at_sum, gl.sum(total * total, 1))
        total *= gl.load(gain + first + output).to(gl.float32)
    gl.store(out + at_own, total.to(gl.bfloat16), mask=ok)
    _wait_for_readers()
