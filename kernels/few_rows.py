"""Products of 2 to 128 rows with a weight matrix, and what stands around them in a decode step.

Bytes: num_outputs * width * itemsize of the weight, once. The weight is the left operand of the tensor cores,
64 of its rows or more a program; the rows of the input, padded to a power of two from 16 on, are the columns
on the right. Where outputs alone make too few programs the width is split over several; the last to arrive
adds their sums up in a fixed order, so a result never depends on who was first.

Its first weights are on their way before the input is there. Up to 16 rows the loop itself asks for them,
some turns ahead, and waits for the kernel before it in its first turn; so the input comes one turn ahead,
through registers. That costs too much where the input is as many bytes as the weight: there a part of the
weight is brought into the L2 cache before the wait.

RMSNorm needs no kernel of its own: who adds to the residual leaves it times the norm's gain, and the sum of
its squares by tile; the next product is one of that, times one factor a row. The factor is applied to sums in
fp32, so an input is rounded once, as it is by a norm kernel.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dependent_launch import dependent_launch, prefetch, wait_in_loop
from kernels.ring_launch import RingLaunch, ring_launch
from kernels.sliced_launch import SlicedLaunch, sliced_launch

MAX_ROWS = 128
MAX_TILES = 4096  # that can be split
PIPELINE_BYTES = 212 << 10  # of shared memory for what the programs of a multiprocessor load ahead
MULTIPROCESSORS = 132
FEW_PROGRAMS = 96  # that split a small product enough
HEAD_OUTPUTS = 65_536  # so many that a program's beginning and end no longer count


@dataclass(frozen=True, slots=True)
class FewRowsLaunch:
    """Launch shape; timings of the choices in docs/kernels/products.md."""

    outputs: int = 64  # a program; gated: of each half
    block: int = 128  # elements of the width a loop turn
    splits: int = 1  # programs that share the width of one tile
    warps: int = 4
    stages: int = 4
    is_early: bool = True  # the wait stands in the loop, behind the loads of the first turns' weights
    ahead: int = 0  # else: turns of the weight into the L2 cache before the wait


Launch = FewRowsLaunch | RingLaunch | SlicedLaunch


@dataclass(frozen=True, slots=True)
class Scaled:
    """The input of a norm times the norm's gain; what is missing is one factor a row."""

    values: Tensor  # [num_rows, width]
    squares: Tensor  # fp32 [num_tiles, MAX_ROWS]: sums of squares of the norm's input over parts of the width


def product(
    x: Tensor | Scaled,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    gated: bool = False,
    launch: Launch | None = None,
) -> Tensor:
    """x @ weight.T, normed first where x is `Scaled`.

    x [num_rows, width], num_rows <= 128; weight [num_outputs, width]; both contiguous. `gated`: weight holds
    gate rows, then up rows; the result is silu(gate) * up [num_rows, num_outputs / 2].
    """
    values = x.values if isinstance(x, Scaled) else x
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    launch = launch or ring_launch(values, weight, gated=gated) or sliced_launch(values, weight, gated=gated)
    launch = launch or choose_launch(values.shape[0], num_outputs, values.shape[1], gated)
    out = torch.empty(values.shape[0], num_outputs, dtype=values.dtype, device=values.device)
    squares = x.squares if isinstance(x, Scaled) else None
    _launch(values, weight, out, launch, num_outputs, eps=eps, squares=squares, bias=bias, gated=gated)
    return out


def add_product(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    gain: Tensor,
    *,
    bias: Tensor | None = None,
    launch: Launch | None = None,
) -> Scaled:
    """Adds x @ weight.T to `residual` in place, and prepares its norm with `gain`.

    x [num_rows, width], weight [num_outputs, width], residual [num_rows, num_outputs], gain [num_outputs].
    """
    num_rows, width = x.shape
    num_outputs = weight.shape[0]
    assert residual.shape == (num_rows, num_outputs), f"residual {tuple(residual.shape)}"
    assert residual.is_contiguous(), "residual must be contiguous"
    launch = launch or ring_launch(x, weight, adds=True) or sliced_launch(x, weight, adds=True)
    launch = launch or choose_launch(num_rows, num_outputs, width, False)
    parts = triton.cdiv(num_outputs, launch.outputs)
    if isinstance(launch, SlicedLaunch):
        parts *= launch.programs
    out = Scaled(
        torch.empty_like(residual), torch.empty(parts, MAX_ROWS, dtype=torch.float32, device=x.device)
    )
    _launch(x, weight, out.values, launch, num_outputs, bias=bias, add=(residual, gain, out.squares))
    return out


def runs_beside(weight: Tensor, *, gated: bool = False, adds: bool = False) -> bool:
    """Whether products of 17 to 128 rows with this weight may run on several streams at once. Kernels whose
    programs share a tile may not: they count who has arrived, in one place for all launches.
    """
    for num_rows in (32, 64, 128):
        x = torch.empty(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        ring = ring_launch(x, weight, gated=gated, adds=adds)
        if ring is not None and ring.splits > 1:
            return False
        if ring is None and sliced_launch(x, weight, gated=gated, adds=adds) is None:
            return False
    return True


def choose_launch(num_rows: int, num_outputs: int, width: int, gated: bool) -> FewRowsLaunch:
    """The fastest launch shape of those tried for products of this kind (docs/kernels/products.md)."""
    outputs = 32 if gated and num_outputs <= 8192 else 64
    if gated and outputs == 64:
        return FewRowsLaunch(outputs=outputs, block=128, stages=3)
    if num_rows <= 16 and num_outputs < HEAD_OUTPUTS:
        return _early(outputs, num_outputs, width, gated)
    return _waiting(num_rows, outputs, num_outputs, width, gated)


def _early(outputs: int, num_outputs: int, width: int, gated: bool) -> FewRowsLaunch:
    """Turns of 32 KB of the weight; one program a multiprocessor where that is all there are, or else two."""
    tiles, block, splits = triton.cdiv(num_outputs, outputs), 256, 1
    if tiles * triton.cdiv(width, block) < 2 * FEW_PROGRAMS:
        block = 128
    if not gated:
        turns = triton.cdiv(width, block)
        wanted = max(turns // 4, min(turns // 2, FEW_PROGRAMS // tiles))
        splits = max(1, min(wanted, 2 * MULTIPROCESSORS // tiles))
    turn_bytes = 2 * block * (2 * outputs if gated else outputs)
    stages = min(8, (_room(tiles * splits) - 2 * block * 16) // turn_bytes)
    return FewRowsLaunch(outputs=outputs, block=block, splits=splits, stages=stages)


def _waiting(num_rows: int, outputs: int, num_outputs: int, width: int, gated: bool) -> FewRowsLaunch:
    """Few parts a tile, and long ones: their sums are bytes, too."""
    tiles, block, splits = triton.cdiv(num_outputs, outputs), 128, 1
    turns = triton.cdiv(width, block)
    while not gated and (turns_left := turns // (2 * splits)) >= 2:
        most = 2 * MULTIPROCESSORS if turns_left >= 24 else MULTIPROCESSORS if turns_left >= 16 else 64
        if 2 * tiles * splits > most:
            break
        splits *= 2
    padded = max(16, int(triton.next_power_of_2(num_rows)))
    turn_bytes = 2 * block * (padded + (2 * outputs if gated else outputs))
    ahead = triton.cdiv(turns, splits) if num_outputs * width <= 5_000_000 else 2
    return FewRowsLaunch(
        outputs=outputs,
        block=block,
        splits=splits,
        stages=min(5, _room(tiles * splits) // turn_bytes),
        is_early=False,
        ahead=0 if gated or num_outputs >= HEAD_OUTPUTS else ahead,
    )


def _room(programs: int) -> int:
    """Bytes of shared memory for what a program loads ahead."""
    return PIPELINE_BYTES if programs <= MULTIPROCESSORS else PIPELINE_BYTES // 2


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters of programs that share a tile, int32, zero between launches. One stream at a time."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    launch: Launch,
    num_outputs: int,
    *,
    eps: float = 0.0,
    squares: Tensor | None = None,
    bias: Tensor | None = None,
    gated: bool = False,
    add: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    num_rows, width = x.shape
    assert 0 < num_rows <= MAX_ROWS, f"{num_rows} rows; at most {MAX_ROWS}"
    assert weight.shape[1] == width, f"x is {tuple(x.shape)}, weight {tuple(weight.shape)}"
    assert weight.is_contiguous(), "weight must be contiguous"
    assert x.is_contiguous(), "x must be contiguous"
    tiles, padded = triton.cdiv(num_outputs, launch.outputs), max(16, triton.next_power_of_2(num_rows))
    residual, gain, squares_out = add or (x, x, x)
    tensors = out, residual, gain, bias if bias is not None else x, squares if squares is not None else x
    numbers = num_rows, num_outputs, squares.shape[0] if squares is not None else 0, eps
    constants: dict[str, int | bool] = {
        "WIDTH": width,
        "ROWS": padded,
        "SQUARES": triton.next_power_of_2(squares.shape[0]) if squares is not None else 0,
        "SQUARES_STRIDE": MAX_ROWS,
        "HAS_RESIDUAL": add is not None,
        "HAS_BIAS": bias is not None,
        "GATED": gated,
    }
    # What the other kernels are written in is not everywhere.
    if isinstance(launch, SlicedLaunch):
        from kernels.sliced_product import launch_sliced

        launch_sliced((x, weight, *tensors, squares_out), numbers, constants, launch, tiles)
        return
    turns = triton.cdiv(width, launch.block)
    splits = triton.cdiv(turns, triton.cdiv(turns, launch.splits))  # each has a turn, in which it waits
    partial, arrived = x, x
    if splits > 1:
        assert tiles <= MAX_TILES, f"{tiles} tiles to split"
        room = tiles * splits * launch.outputs * padded * (2 if gated else 1)
        partial = torch.empty(room, dtype=torch.float32, device=x.device)
        arrived = _arrivals(x.device)
    arguments = *tensors, squares_out, partial, arrived
    constants["SPLITS"] = splits
    if isinstance(launch, RingLaunch):
        from kernels.ring_product import launch_ring

        launch_ring(x, weight, arguments, numbers, constants, launch, (tiles, splits))
        return
    _few_rows_kernel[(tiles, splits)](
        x,
        weight,
        *arguments,
        *numbers,
        **constants,
        OUTPUTS=launch.outputs,
        BLOCK=launch.block,
        EARLY=launch.is_early,
        AHEAD=launch.ahead * launch.block if width * weight.element_size() % 16 == 0 else 0,
        THREADS=32 * launch.warps,
        **dependent_launch(x.device),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


@triton.jit
def _weight_tile(weight, outputs, output_ok, k, WIDTH: tl.constexpr):
    """Rows `outputs` at columns k: [outputs, k]."""
    at = weight + outputs.to(tl.int64)[:, None] * WIDTH + k[None, :]
    return tl.load(at, mask=output_ok[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit
def _input_tile(x, rows, row_ok, k, WIDTH: tl.constexpr):
    """Columns k of the input: [rows, k]."""
    at = x + rows[:, None] * WIDTH + k[None, :]
    return tl.load(at, mask=row_ok[:, None] & (k < WIDTH)[None, :], other=0.0)


@triton.jit
def _tile_sums(squares, rows, row_ok, num_squares, SQUARES: tl.constexpr, STRIDE: tl.constexpr):
    """Sums of squares of each row: [parts, rows]."""
    part = tl.arange(0, SQUARES)
    at = squares + part[:, None] * STRIDE + rows[None, :]
    return tl.load(at, mask=(part < num_squares)[:, None] & row_ok[None, :], other=0.0)


@triton.jit
def _finish(
    acc,
    kept,
    out,
    residual,
    gain,
    bias,
    squares_out,
    tile,
    own,
    own_ok,
    outputs,
    output_ok,
    rows,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SQUARES_STRIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    """What follows the sums: [outputs, rows], or gates and then as many ups, [2 * outputs, rows]."""
    if GATED:
        halves = tl.permute(tl.reshape(acc, [2, OUTPUTS, ROWS]), (1, 2, 0))
        gate, up = tl.split(halves)
        acc = gate / (1.0 + tl.exp(-gate)) * up
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=output_ok, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        total = (acc + kept.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(residual + own, total, mask=own_ok)
        wide = tl.where(own_ok, total.to(tl.float32), 0.0)
        tl.store(squares_out + tile * SQUARES_STRIDE + rows, tl.sum(wide * wide, 0))
        acc = wide * tl.load(gain + outputs, mask=output_ok, other=0.0).to(tl.float32)[:, None]
    tl.store(out + own, acc.to(out.dtype.element_ty), mask=own_ok)


@triton.jit(do_not_specialize=["num_rows", "num_squares"])
def _few_rows_kernel(
    x,
    weight,
    out,
    residual,
    gain,
    bias,
    squares,
    squares_out,
    partial,
    arrived,
    num_rows,
    num_outputs,
    num_squares,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_STRIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    share: tl.constexpr = (WIDTH + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    begin = split * share
    first = tile * OUTPUTS
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            if AHEAD:
                prefetch(weight, first, num_outputs, begin, WIDTH, AHEAD, OUTPUTS, THREADS)
                if GATED:
                    ups = 2 * num_outputs
                    prefetch(weight, first + num_outputs, ups, begin, WIDTH, AHEAD, OUTPUTS, THREADS)
            gdc_wait()
    outputs = first + tl.arange(0, OUTPUTS)
    output_ok = outputs < num_outputs
    # The tile's rows of the weight: those of the outputs, or their gates and behind them their ups.
    TILE: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    taken = tl.arange(0, TILE)
    of_weight = first + taken % OUTPUTS
    of_weight_ok = of_weight < num_outputs
    of_weight += (taken // OUTPUTS) * num_outputs
    rows = tl.arange(0, ROWS)
    row_ok = rows < num_rows
    own = rows[None, :] * num_outputs + outputs[:, None]
    own_ok = output_ok[:, None] & row_ok[None, :]
    # What the end needs is asked for before the loop, or in its first turn.
    sums = tl.zeros([SQUARES if SQUARES else 1, ROWS], tl.float32)
    kept = tl.zeros([OUTPUTS if HAS_RESIDUAL else 1, ROWS], residual.dtype.element_ty)
    if not EARLY:
        if SQUARES:
            sums = _tile_sums(squares, rows, row_ok, num_squares, SQUARES, SQUARES_STRIDE)
        if HAS_RESIDUAL:
            kept = tl.load(residual + own, mask=own_ok, other=0.0)
    acc = tl.zeros([TILE, ROWS], tl.float32)
    value = tl.zeros([ROWS, BLOCK], x.dtype.element_ty)
    for start in range(begin, tl.minimum(begin + share, WIDTH), BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = _weight_tile(weight, of_weight, of_weight_ok, k, WIDTH)
        following = value
        if EARLY:
            if start == begin:
                # By now the weights of the first turns are asked for: no kernel writes weights.
                if PDL:
                    wait_in_loop()
                value = _input_tile(x, rows, row_ok, k, WIDTH)
                if SQUARES:
                    sums = _tile_sums(squares, rows, row_ok, num_squares, SQUARES, SQUARES_STRIDE)
                if HAS_RESIDUAL:
                    kept = tl.load(residual + own, mask=own_ok, other=0.0)
            following = _input_tile(x, rows, row_ok, k + BLOCK, WIDTH)
        else:
            value = _input_tile(x, rows, row_ok, k, WIDTH)
        acc = tl.dot(w, tl.trans(value), acc, input_precision="ieee")
        value = following
    is_last = True
    if SPLITS > 1:
        size: tl.constexpr = TILE * ROWS
        here = tl.arange(0, TILE)[:, None] * ROWS + rows[None, :]
        tl.store(partial + (tile * SPLITS + split) * size + here, acc)
        # The last program to arrive adds up: the barrier orders this program's stores before the count.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.debug_barrier()
            tl.store(arrived + tile, 0)
            acc = tl.zeros([TILE, ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                acc += tl.load(partial + (tile * SPLITS + part) * size + here, cache_modifier=".cg")
    if is_last:
        if SQUARES:
            acc *= (1.0 / tl.sqrt(tl.sum(sums, 0) / WIDTH + eps))[None, :]
        _finish(
            acc, kept, out, residual, gain, bias, squares_out, tile, own, own_ok, outputs, output_ok, rows,
            ROWS, OUTPUTS, SQUARES_STRIDE, HAS_RESIDUAL, HAS_BIAS, GATED,
        )  # fmt: skip
