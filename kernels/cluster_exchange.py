"""The end of decode attention by clusters: sums of warps become those of programs, and these a result.

A program adds up its warps' sums and gives to each program of the cluster a slice of V's dimensions: a store
into the shared memory of another, which a barrier there counts (PTX ISA, st.async), so none waits but for
what it needs. Triton 3.6 knows none of this, hence the instructions of our own, and places in shared memory
by its name; kernels.cluster_decode has the kernel.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.cluster_layouts import merged_layout, multiplied_layout, sums_layout

KNOWN = ((3, 6), (3, 9))
"""Of Triton: the first and the last whose name and layout of shared memory `give` was tried with."""
if not KNOWN[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= KNOWN[1]:
    raise ImportError(f"Triton {triton.__version__} may lay out shared memory otherwise than 3.6 to 3.9")

# Triton 3.9 has the first name, 3.6 the second.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def expect(barrier, size):
    """The barrier, an offset in this program's shared memory, waits for so many bytes from the cluster."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 at; .reg .u32 thread; .reg .pred p; mov.u32 at, global_smem; add.u32 at, at, $1;"
        " mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0; @p mbarrier.init.shared::cta.b64 [at], 1;"
        " @p fence.mbarrier_init.release.cluster;"
        " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], $2;"
        " barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0; }",
        "=r,r,r", [barrier, size], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def all_expect():
    """Every program of the cluster has begun, and its barrier is there."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_all(barrier):
    gl.inline_asm_elementwise(
        "{ .reg .u32 at; .reg .pred p; mov.u32 at, global_smem; add.u32 at, at, $1; AGAIN:"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [at], 0; @!p bra AGAIN; mov.u32 $0, 0; }",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _memory_of(program):
    """Where the shared memory of a program of the cluster begins, which Triton calls global_smem."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 at; mov.u32 at, global_smem; mapa.shared::cluster.u32 $0, at, $1; }",
        "=r,r", [program], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _put4(offset, ok, value):
    """Each four of a thread, which lie side by side, into this program's shared memory where `ok`, which the
    four have in common.
    """
    gl.inline_asm_elementwise(
        "{ .reg .u32 at; .reg .pred p; setp.ne.u32 p, $8, 0; mov.u32 at, global_smem; add.u32 at, at, $4;"
        " @p st.shared.v4.f32 [at], {$12, $13, $14, $15};"
        " mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,f,f,f,f", [offset, ok, value],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _put2(offset, ok, first, second):
    """The same of two numbers."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 at; .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 at, global_smem; add.u32 at, at, $1;"
        " @p st.shared.v2.f32 [at], {$3, $4}; mov.u32 $0, 0; }",
        "=r,r,r,f,f", [offset, ok, first, second], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _give4(at, barrier, ok, value):
    """Each four of a thread, which lie side by side, into shared memory of the cluster, and as many bytes to
    the barrier that is there; where `ok`. What is not the value, the four have in common.
    """
    gl.inline_asm_elementwise(
        "{ .reg .u32 at; .reg .pred p; mov.u32 at, $4; setp.ne.u32 p, $12, 0;"
        " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
        " [at], {$16, $17, $18, $19}, [$8];"
        " mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", [at, barrier, ok, value],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _give2(at, barrier, ok, first, second):
    """The same of two numbers."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 at; .reg .pred p; mov.u32 at, $1; setp.ne.u32 p, $3, 0;"
        " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
        " [at], {$4, $5}, [$2];"
        " mov.u32 $0, 0; }",
        "=r,r,r,r,f,f", [at, barrier, ok, first, second], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _thread():
    return gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _take(offset):
    """What was given to this program."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 at; mov.u32 at, global_smem; add.u32 at, at, $1; ld.shared.f32 $0, [at]; }",
        "=f,r", [offset], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _take4(offset):
    """The same, each four of a thread lying side by side."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 at; mov.u32 at, global_smem; add.u32 at, at, $4;"
        " ld.shared.v4.f32 {$0, $1, $2, $3}, [at]; }",
        "=f,=f,=f,=f,r,r,r,r", [offset], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def add_up(
    acc, top, weight,
    GROUP: gl.constexpr, DIM: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr,
    added: gl.constexpr,
):  # fmt: skip
    """The sums of this program's warps: [fours, 4] of V, top scores and weights [fours]."""
    sums: gl.constexpr = sums_layout(WARPS, DIM, PROGRAMS)
    multiplied: gl.constexpr = multiplied_layout(WARPS, PROGRAMS)
    acc = acc.reshape([WARPS, DIM // 64, 8, 8, 8]).permute((0, 1, 3, 2, 4)).reshape([WARPS, DIM, 8])
    acc = gl.convert_layout(acc, sums)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, sums)))[:, None, None]
    dim = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(2, sums)))[None, :, None]
    member = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, sums)))[None, None, :]
    at = ((warp * GROUP + member) * DIM + dim) * 4
    _put4(at, (member < GROUP).to(gl.int32) + 0 * at, acc)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, multiplied)))[:, None, None]
    token = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, multiplied)))[None, :, None]
    member = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, multiplied)))[None, None, :]
    at = (WARPS * GROUP * DIM + (warp * GROUP + member) * 2) * 4 + 0 * token
    ok = ((member < GROUP) & (token == 0)).to(gl.int32) + 0 * at
    _put2(at, ok, top[:, None, :] + 0.0 * at, gl.sum(weight, 1)[:, None, :] + 0.0 * at)
    _barrier()
    fours: gl.constexpr = gl.SliceLayout(2, added)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, fours))[:, None]
    four = gl.arange(0, GROUP * DIM // 4, gl.SliceLayout(0, fours))[None, :]
    one = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, added)))[None, None, :]
    acc = _take4(((warp * (GROUP * DIM) + four * 4)[:, :, None] + one) * 4)
    at = (WARPS * GROUP * DIM + (warp * GROUP + four * 4 // DIM) * 2) * 4
    tops, weights = _take(at), _take(at + 4)
    top = gl.max(tops, 0)
    share = gl.exp2(tops - top[None, :])
    return gl.sum(acc * share[:, :, None], 0), top, gl.sum(weights * share, 0)


@gluon.jit
def give(
    acc, top, weight, rank, base, barrier,
    GROUP: gl.constexpr, DIM: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr,
    added: gl.constexpr,
):  # fmt: skip
    """To all programs of the cluster this one's sums, of V each its slice of the dimensions."""
    SLICE: gl.constexpr = DIM // PROGRAMS
    STRIDE: gl.constexpr = GROUP * SLICE + 4
    FOURS: gl.constexpr = GROUP * DIM // 4
    output: gl.constexpr = gl.SliceLayout(0, added)
    once = _thread() < FOURS  # threads beyond hold the same again
    four = gl.arange(0, FOURS, gl.SliceLayout(1, output))[:, None]
    none = 0 * gl.arange(0, 4, gl.SliceLayout(0, output))[None, :]
    dim, member = four * 4 % DIM, four * 4 // DIM
    to = _memory_of(dim // SLICE + none)
    at = base + (rank * STRIDE + member * SLICE + dim % SLICE) * 4
    _give4(to + at, to + barrier, once.to(gl.int32) + 0 * to, acc)
    four = gl.arange(0, FOURS, gl.SliceLayout(0, gl.SliceLayout(2, added)))
    dim, member = four * 4 % DIM, four * 4 // DIM
    to = _memory_of(dim // SLICE)
    at = base + (PROGRAMS * STRIDE + (rank * GROUP + member) * 2) * 4
    _give2(to + at, to + barrier, (once & (dim % SLICE == 0)).to(gl.int32), top, weight)


@gluon.jit
def merge(out, base, GROUP: gl.constexpr, DIM: gl.constexpr, PROGRAMS: gl.constexpr, WARPS: gl.constexpr):
    """Each program's slice of what all have given to it, to the heads at `out`."""
    SLICE: gl.constexpr = DIM // PROGRAMS
    STRIDE: gl.constexpr = GROUP * SLICE + 4
    FOURS: gl.constexpr = GROUP * SLICE // 4
    merged: gl.constexpr = merged_layout(WARPS, PROGRAMS)
    parts: gl.constexpr = gl.SliceLayout(3, merged)
    program = gl.arange(0, PROGRAMS, gl.SliceLayout(1, gl.SliceLayout(2, parts)))[:, None, None]
    part = gl.arange(0, PROGRAMS, gl.SliceLayout(0, gl.SliceLayout(2, parts)))[None, :, None] + 0 * program
    four = gl.arange(0, FOURS, gl.SliceLayout(0, gl.SliceLayout(1, parts)))[None, None, :]
    last: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, merged)))
    one = gl.arange(0, 4, last)[None, None, None, :]
    at = base + (PROGRAMS * STRIDE + (part * GROUP + four * 4 // SLICE) * 2) * 4
    top, weight = _take(at), _take(at + 4)
    acc = _take4(base + ((part * STRIDE + four * 4)[:, :, :, None] + one) * 4)
    share = gl.exp2(top - gl.max(top, 1)[:, None, :])
    share *= (1.0 / gl.sum(weight * share, 1))[:, None, :]
    total = gl.sum(acc * share[:, :, :, None], 1)
    output: gl.constexpr = gl.SliceLayout(1, merged)
    program = gl.arange(0, PROGRAMS, gl.SliceLayout(1, gl.SliceLayout(2, output)))[:, None, None]
    four = gl.arange(0, FOURS, gl.SliceLayout(0, gl.SliceLayout(2, output)))[None, :, None]
    one = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, output)))[None, None, :]
    to = four * 4 // SLICE * DIM + program * SLICE + four * 4 % SLICE + one
    gl.store(out + to, total.to(gl.bfloat16))
