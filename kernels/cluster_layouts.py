"""How what kernels.cluster_decode works with lies in the threads of a cluster, and in shared memory.

All programs of a cluster hold the same, as far as these say, but for `merged_layout`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _same(programs: int, rank: int) -> list[list[int]]:
    """All programs of a cluster hold the same."""
    return [[0] * rank for _ in range(programs.bit_length() - 1)]


@gluon.constexpr_function
def _bits(first: int, end: int, rank: int, axis: int) -> list[list[int]]:
    """Of a linear layout: first, 2 * first, .. below end along an axis."""
    steps = [first << bit for bit in range((end // first).bit_length() - 1)]
    return [[step if at == axis else 0 for at in range(rank)] for step in steps]


@gluon.constexpr_function
def multiplied_layout(warps: int, programs: int) -> gl.NVMMADistributedLayout:
    """[warps, 16, 8] or [warps, DIM, 8]: a product a warp."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8], cga_layout=_same(programs, 3))


@gluon.constexpr_function
def values_layout(warps: int, dim: int, programs: int) -> gl.DistributedLinearLayout:
    """V [warps, 16 tokens, DIM]: 16 bytes of a token a load, tokens as the tensor cores take them."""
    registers = [*_bits(1, 8, 3, 2), *_bits(64, dim, 3, 2), [0, 1, 0], [0, 8, 0]]
    lanes = [*_bits(2, 8, 3, 1), *_bits(8, 64, 3, 2)]
    return gl.DistributedLinearLayout(
        registers, lanes, _bits(1, warps, 3, 0), _same(programs, 3), [warps, 16, dim]
    )


@gluon.constexpr_function
def sums_layout(warps: int, dim: int, programs: int) -> gl.DistributedLinearLayout:
    """Sums of V [warps, DIM, 8] as the products leave them, four dimensions of a thread side by side."""
    registers = [*_bits(1, 8, 3, 1), [0, 0, 1], *_bits(64, dim, 3, 1)]
    lanes = [*_bits(2, 8, 3, 2), *_bits(8, 64, 3, 1)]
    return gl.DistributedLinearLayout(
        registers, lanes, _bits(1, warps, 3, 0), _same(programs, 3), [warps, dim, 8]
    )


@gluon.constexpr_function
def halves_layout(warps: int, dim: int, programs: int) -> gl.DistributedLinearLayout:
    """Queries [warps, DIM / 2, 8] as the tensor cores take them: a thread has partners of both halves."""
    registers = [*_bits(1, 8, 3, 1), *_bits(32, dim // 2, 3, 1)]
    lanes = [*_bits(8, 32, 3, 1), *_bits(1, 8, 3, 2)]
    return gl.DistributedLinearLayout(
        registers, lanes, _bits(1, warps, 3, 0), _same(programs, 3), [warps, dim // 2, 8]
    )


@gluon.constexpr_function
def new_value_layout(warps: int, dim: int, programs: int) -> gl.DistributedLinearLayout:
    """V of the new token [warps, DIM], as `values_layout` has that of one."""
    registers = [*_bits(1, 8, 2, 1), *_bits(64, dim, 2, 1)]
    lanes = [[0, 0], [0, 0], *_bits(8, 64, 2, 1)]
    return gl.DistributedLinearLayout(
        registers, lanes, _bits(1, warps, 2, 0), _same(programs, 2), [warps, dim]
    )


@gluon.constexpr_function
def added_layout(warps: int, programs: int) -> gl.BlockedLayout:
    """[warps, fours, 4] of a program's sums: what is added up lies in one thread."""
    same = _same(programs, 3)
    return gl.BlockedLayout([warps, 1, 4], [1, 32, 1], [1, warps, 1], [2, 1, 0], cga_layout=same)


@gluon.constexpr_function
def merged_layout(warps: int, programs: int) -> gl.BlockedLayout:
    """[programs, parts, fours, 4], to each program its own: what is added up lies in one warp."""
    cluster = [[1 << bit, 0, 0, 0] for bit in range(programs.bit_length() - 1)]
    threads = [1, programs, 32 // programs, 1]
    return gl.BlockedLayout([1, 1, 1, 4], threads, [1, 1, warps, 1], [3, 2, 1, 0], cga_layout=cluster)


@gluon.constexpr_function
def shared_layout(programs: int) -> gl.SwizzledSharedLayout:
    return gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=_same(programs, 1))


@gluon.constexpr_function
def line_layout(warps: int, programs: int) -> gl.BlockedLayout:
    return gl.BlockedLayout([1], [32], [warps], [0], cga_layout=_same(programs, 1))


@gluon.constexpr_function
def power_of_two(number: int) -> int:
    """Of two, the least that is as large."""
    return 1 << (number - 1).bit_length()
