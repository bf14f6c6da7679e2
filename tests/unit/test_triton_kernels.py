"""The Triton kernels on CPU tensors, through Triton's interpreter, against the reference operations."""

import dataclasses
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import fp8, reference  # noqa: E402
from kernels.batch import KvLayer, PagedBatch  # noqa: E402
from kernels.decode_plan import BESIDE, FEW, MANY, MAX_CHUNKS, SOME, WIDE, make_plan, plan_decode  # noqa: E402
from kernels.matvec import matvec  # noqa: E402
from kernels.paged_decode import paged_decode  # noqa: E402
from kernels.paged_prefill import paged_prefill  # noqa: E402
from kernels.prefill_plan import list_tiles, make_split  # noqa: E402
from kernels.rms_norm import add_rms_norm, rms_norm  # noqa: E402
from kernels.rotary_store import Rotary, rotary_store  # noqa: E402
from kernels.silu_mul import silu_mul  # noqa: E402
from kernels.store_kv import store_kv  # noqa: E402
from kernels.triton_backend import TritonBackend  # noqa: E402

SHAPES = [  # heads, KV heads, head_dim, page size, kv lengths, query lengths
    (4, 2, 64, 16, [1, 130, 300], [1, 130, 7]),
    (7, 1, 80, 1, [129, 65], [100, 1]),
    (9, 3, 32, 4, [5, 64, 128, 100], [5, 3, 1, 50]),
    (2, 2, 128, 64, [63, 64, 65], [1, 1, 65]),
]


def nan_pool(num_slots: int, kv_heads: int, dim: int) -> KvLayer:
    return KvLayer(*(torch.full((num_slots, kv_heads, dim), float("nan")) for _ in range(2)))


def problem(heads: int, kv_heads: int, dim: int, page: int, kv_lens: list[int], q_lens: list[int]):
    """A NaN-filled pool with random K and V in the slots of random pages."""
    generator = torch.Generator().manual_seed(heads * 1000 + dim)
    pages = torch.randperm(sum(-(-n // page) for n in kv_lens) + 3, generator=generator).tolist()
    kv = nan_pool(len(pages) * page, kv_heads, dim)
    table = torch.zeros(len(kv_lens) + 1, 320, dtype=torch.int32)
    for row, length in enumerate(kv_lens):
        for index in range(-(-length // page)):
            first = pages.pop() * page
            table[row, index * page : (index + 1) * page] = torch.arange(first, first + page)
        slots = table[row, :length].long()
        kv.k[slots] = torch.randn(length, kv_heads, dim, generator=generator)
        kv.v[slots] = torch.randn(length, kv_heads, dim, generator=generator)
    num_tokens = sum(q_lens)
    batch = PagedBatch(
        page_table=table,
        rows=torch.arange(len(kv_lens), dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        q_indptr=torch.tensor([0, *q_lens]).cumsum(0).int(),
        positions=torch.cat([torch.arange(n - m, n) for n, m in zip(kv_lens, q_lens, strict=True)]).int(),
        write_slots=torch.zeros(num_tokens, dtype=torch.int32),
        num_decode=0,
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        page_size=page,
        rows_host=list(range(len(kv_lens))),
        kv_lens_host=kv_lens,
        q_lens_host=q_lens,
    )
    return torch.randn(num_tokens, heads, dim, generator=generator), kv, batch


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "kv_lens", "q_lens"), SHAPES)
def test_paged_prefill_equals_the_reference_on_a_nan_filled_pool(heads, kv_heads, dim, page, kv_lens, q_lens):
    """H12, S2-29."""
    q, kv, batch = problem(heads, kv_heads, dim, page, kv_lens, q_lens)
    tiles = torch.tensor(list_tiles(q_lens, heads // kv_heads), dtype=torch.int32)
    ours = paged_prefill(q, kv, batch, tiles, scale=dim**-0.5)
    torch.testing.assert_close(
        ours, reference.paged_attention(q, kv, batch, scale=dim**-0.5), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("launch", [None, MANY])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "kv_lens", "q_lens"), SHAPES)
def test_paged_decode_equals_the_reference_and_leaves_its_counters_at_zero(
    heads, kv_heads, dim, page, kv_lens, q_lens, launch
):
    """H12, S2-29; B086, B087: lengths around the chunk edge, several chunks merged by the last to arrive."""
    q, kv, batch = problem(heads, kv_heads, dim, page, kv_lens, [1] * len(kv_lens))
    plan = make_plan(len(kv_lens), heads, kv_heads, dim, 320, q.device, chunk_scale=1, launch=launch)
    for _ in range(2):
        plan_decode(plan, batch.rows, batch.kv_lens)
        ours = paged_decode(q, kv, batch.page_table, plan, scale=dim**-0.5)
    expected = reference.paged_attention(q, kv, batch, scale=dim**-0.5)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert plan.arrived.count_nonzero() == 0
    assert plan.queue.item() == 0


@pytest.mark.parametrize("chunk_scale", [1, 8])
def test_chunks_cover_each_sequence_once_and_do_not_depend_on_the_batch(chunk_scale):
    lengths = [1, 63, 64, 65, 640, 1000, 4096, 8191, 100_000]
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    rows = torch.arange(len(lengths), dtype=torch.int32).flip(0).contiguous()
    plan = make_plan(len(lengths), 2, 1, 16, 100_000, kv_lens.device, chunk_scale=chunk_scale)

    def listed(rows: torch.Tensor, kv_lens: torch.Tensor) -> list[list[int]]:
        plan_decode(plan, rows, kv_lens)
        return plan.chunks[: int(plan.num_chunks), :6].tolist()

    together = listed(rows, kv_lens)
    sizes = [end - begin for _, _, begin, end, index, count in together if index + 1 < count]
    assert sizes[0] == max(sizes)  # the large ones come first
    for span, length in enumerate(lengths):
        mine = [record[1:] for record in together if record[0] == span]
        ends = [end for _, _, end, _, _ in mine]
        assert [begin for _, begin, _, _, _ in mine] == [0, *ends[:-1]]
        assert ends[-1] == length
        assert [(row, index, count) for row, _, _, index, count in mine] == [
            (rows[span], index, len(mine)) for index in range(len(mine))
        ]
        assert len(mine) <= MAX_CHUNKS
        alone = listed(rows[span : span + 1], kv_lens[span : span + 1])
        assert [record[1:] for record in alone] == mine


def test_the_shape_of_a_launch_is_that_of_its_spans_and_form():
    plan = make_plan(5, 4, 2, 64, 320, torch.device("cpu"))
    assert [plan.launch_of(spans) for spans in (1, 2, 4, 5)] == [FEW, FEW, FEW, MANY]
    assert [plan.launch_of(spans, of_product=True) for spans in (1, 2, 4, 5)] == [FEW, SOME, SOME, MANY]


@pytest.mark.parametrize(("head_dim", "alone", "beside"), [(128, MANY, BESIDE), (256, WIDE, WIDE)])
def test_rows_beside_others_leave_room_for_them(head_dim, alone, beside):
    """But for heads whose rows a single warp's registers would not hold."""
    backend, table = TritonBackend(4, 2, head_dim, 320), torch.zeros(65, 320, dtype=torch.int32)
    plans = [backend.static_decode(table, 64, is_beside=is_beside)._plan for is_beside in (False, True)]
    assert [plan.launch_of(64, 2 * head_dim, of_product=True) for plan in plans] == [alone, beside]


def test_a_sequence_has_the_same_bits_alone_as_in_company():
    """A fixed chunk_scale, one program or more than there are tiles."""
    heads, kv_heads, dim = 4, 2, 64
    q, kv, batch = problem(heads, kv_heads, dim, 16, [200, 130, 300], [1, 1, 1])
    plan = make_plan(3, heads, kv_heads, dim, 320, q.device, chunk_scale=1)
    assert plan.launch_of(3) == plan.launch_of(3, of_product=True) == FEW
    plan_decode(plan, batch.rows, batch.kv_lens)
    together = paged_decode(q, kv, batch.page_table, plan, scale=dim**-0.5)
    for one in range(3):
        span = slice(one, one + 1)
        for programs in (1, 6):
            lonely = dataclasses.replace(plan, launch=dataclasses.replace(FEW, programs_per_sm=programs))
            plan_decode(lonely, batch.rows[span], batch.kv_lens[span])
            alone = paged_decode(q[span], kv, batch.page_table, lonely, scale=dim**-0.5)
            torch.testing.assert_close(alone, together[span], rtol=0, atol=0)
            assert lonely.queue.item() == 0


@pytest.mark.parametrize(("num_spans", "length"), [(1, 100_000), (1, 2), (3, 1000), (40, 4096), (40, 70)])
def test_chunks_by_batch_fit_the_scratch_and_padding_changes_none(num_spans, length):
    queued = dataclasses.replace(MANY, is_stretched=False)
    plan = make_plan(64, 16, 8, 16, 100_000, torch.device("cpu"), launch=queued)
    kv_lens = torch.full((num_spans,), length, dtype=torch.int32)
    kv_lens[0] = 100_000
    plan_decode(plan, torch.zeros_like(kv_lens), kv_lens)
    used = int(plan.num_chunks)
    assert 0 < used <= plan.chunks.shape[0]
    mine = plan.chunks[:used, 2:].tolist()
    padded = torch.cat([kv_lens, torch.ones(24, dtype=torch.int32)])
    plan_decode(plan, torch.zeros_like(padded), padded)
    assert int(plan.num_chunks) == used + 24
    assert plan.chunks[:used, 2:].tolist() == mine


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([1024], {64}),  # the shortest chunks: a turn of the kernel
        ([32768], {1024}),  # 256 tiles on 132 multiprocessors, two each
        ([640] * 8, {96, 64}),  # six of 96 and the rest of 64: 448 of 528 programs
        ([8192] * 64, {8192}),  # 512 tiles
    ],
)
def test_a_batch_is_one_wave_of_tiles_where_its_lengths_allow_it(lengths, sizes):
    """With the multiprocessors of an H200 and eight KV heads."""
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    roomy = make_plan(len(lengths), 16, 8, 16, 65536, kv_lens.device, chunk_scale=1)
    plan = dataclasses.replace(roomy, multiprocessors=132, chunk_scale=None)
    plan_decode(plan, torch.zeros_like(kv_lens), kv_lens)
    listed = plan.chunks[: int(plan.num_chunks)]
    assert set((listed[:, 3] - listed[:, 2]).tolist()) == sizes


def test_e4m3_pools_are_read_with_their_scales():
    """Decode and prefill over scaled pages equal the reference over the same pages."""
    heads, kv_heads, dim = 4, 2, 64
    q, kv, batch = problem(heads, kv_heads, dim, 16, [1, 130, 200], [1, 1, 5])
    scaled = KvLayer(fp8.to_fp8(kv.k, 0.02), fp8.to_fp8(kv.v, 0.05), 0.02, 0.05)
    tiles = torch.tensor(list_tiles([1, 1, 5], heads // kv_heads), dtype=torch.int32)
    expected = reference.paged_attention(q, scaled, batch, scale=dim**-0.5)
    ours = paged_prefill(q, scaled, batch, tiles, scale=dim**-0.5)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    plan = make_plan(2, heads, kv_heads, dim, 320, q.device, chunk_scale=1)
    plan_decode(plan, batch.rows[:2], batch.kv_lens[:2])
    ours = paged_decode(q[:2], scaled, batch.page_table, plan, scale=dim**-0.5)
    torch.testing.assert_close(ours, expected[:2], rtol=1e-4, atol=1e-4)


def test_e4m3_pages_are_multiplied_in_fp16_and_no_query_leaves_its_range():
    """A bf16 query beyond fp16's largest is cut off: infinity times a zero would be no number."""
    heads, kv_heads, dim = 4, 2, 64
    q, kv, batch = problem(heads, kv_heads, dim, 16, [130, 200], [1, 1])
    scaled = KvLayer(fp8.to_fp8(kv.k, 0.02), fp8.to_fp8(kv.v, 0.05), 0.02, 0.05)
    scaled.k[:, :, 0] = 0
    q = q.bfloat16()
    expected = reference.paged_attention(q.float(), scaled, batch, scale=dim**-0.5)
    q[:, :, 0] = 1e30  # times zero
    plan = make_plan(2, heads, kv_heads, dim, 320, q.device, chunk_scale=1)
    plan_decode(plan, batch.rows, batch.kv_lens)
    ours = paged_decode(q, scaled, batch.page_table, plan, scale=dim**-0.5)
    torch.testing.assert_close(ours.float(), expected, rtol=0.02, atol=0.02)


def test_store_copies_strided_rows_and_nothing_else():
    """S1-14, S1-15: slices of a fused product, int32 and int64 slots."""
    fused = torch.randn(5, 3 * 2 * 24)
    k, v = fused[:, 48:96].view(5, 2, 24), fused[:, 96:].view(5, 2, 24)
    for dtype in (torch.int32, torch.int64):
        kv = nan_pool(12, 2, 24)
        slots = torch.tensor([7, 0, 11, 3, 4], dtype=dtype)
        store_kv(kv, slots, k, v)
        torch.testing.assert_close(kv.k[slots.long()], k, rtol=0, atol=0)
        torch.testing.assert_close(kv.v[slots.long()], v, rtol=0, atol=0)
        others = [slot for slot in range(12) if slot not in slots.tolist()]
        assert kv.k[others].isnan().all()
        assert kv.v[others].isnan().all()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (7, 1, 80), (9, 3, 32)])
def test_rotary_store_equals_norm_then_rotary_then_store(heads, kv_heads, dim, with_norm):
    num_tokens = 6
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim)
    kv, slots = nan_pool(20, kv_heads, dim), torch.randperm(20)[:num_tokens].int()
    positions, cos_sin = torch.tensor([0, 1, 2, 30, 31, 7]).int(), torch.randn(32, dim)
    norms = (torch.randn(dim), torch.randn(dim)) if with_norm else (None, None)
    out_q = torch.empty(num_tokens, heads, dim)
    rotary_store(qkv, kv, slots, positions, Rotary(cos_sin, *norms, eps=1e-6), out_q)
    q, k, v = (
        part.reshape(num_tokens, -1, dim)
        for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    )
    if with_norm:
        q, k = reference.rms_norm(q, norms[0], 1e-6), reference.rms_norm(k, norms[1], 1e-6)
    cos, sin = cos_sin[positions.long()].chunk(2, dim=1)
    torch.testing.assert_close(out_q, reference.rotary(q, cos, sin), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv.k[slots.long()], reference.rotary(k, cos, sin), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv.v[slots.long()], v, rtol=0, atol=0)


def test_norms_and_the_gated_activation_equal_the_reference():
    x, residual, weight = torch.randn(3, 576), torch.randn(3, 576), torch.randn(576)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-5
    )
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-5), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(residual, total)
    gate_up = torch.randn(2, 2 * 1100)
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_outputs", "width"), [(100, 576), (34, 5000)])
def test_matvec_with_its_prologue_and_epilogues_equals_the_plain_product(num_outputs, width):
    num_rows = 1
    x, bias = torch.randn(num_rows, width), torch.randn(num_outputs)
    weight = torch.randn(num_outputs, width) / width**0.5
    norm, residual = torch.randn(width), torch.randn(num_rows, num_outputs)
    normed = reference.rms_norm(x, norm, 1e-5)
    close = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(matvec(x, weight, bias=bias), x @ weight.T + bias, **close)
    torch.testing.assert_close(matvec(x, weight, norm=norm, eps=1e-5), normed @ weight.T, **close)
    expected = residual + x @ weight.T
    torch.testing.assert_close(matvec(x, weight, residual=residual), expected, **close)
    gated = matvec(x, weight, norm=norm, eps=1e-5, gated=True)
    torch.testing.assert_close(gated, reference.silu_mul(normed @ weight.T), rtol=1e-4, atol=1e-2)


def test_the_backend_runs_mixed_steps_like_the_reference_backend():
    """B088: ragged spans of decode and prefill in one step; M-31: a token attends to itself."""
    heads, kv_heads, dim, page = 6, 2, 32, 4
    q, kv, batch = problem(heads, kv_heads, dim, page, [130, 9, 64, 7], [1, 1, 10, 7])
    slots = [batch.page_table[i, n - m : n] for i, (n, m) in enumerate([(130, 1), (9, 1), (64, 10), (7, 7)])]
    batch = dataclasses.replace(batch, num_decode=2, write_slots=torch.cat(slots))
    k, v = torch.randn(19, kv_heads, dim), torch.randn(19, kv_heads, dim)
    copy = KvLayer(kv.k.clone(), kv.v.clone())
    backends = (TritonBackend(heads, kv_heads, dim, max_context=320), reference.ReferenceBackend())
    results = []
    for backend, pool in zip(backends, (kv, copy), strict=True):
        backend.plan(batch)
        results.append(backend.run(pool, q, k, v, scale=dim**-0.5))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv.k.nan_to_num(), copy.k.nan_to_num(), rtol=0, atol=0)


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "kv_lens", "q_lens"), SHAPES[2:])
def test_prefill_split_in_parts_equals_the_reference(heads, kv_heads, dim, page, kv_lens, q_lens, parts):
    """Parts without a key, and parts that some queries of a tile do not see."""
    q, kv, batch = problem(heads, kv_heads, dim, page, kv_lens, q_lens)
    tiles = torch.tensor(list_tiles(q_lens, heads // kv_heads), dtype=torch.int32)
    split = make_split(torch.tensor([parts], dtype=torch.int32), tiles.shape[0] * kv_heads * parts, dim)
    ours = paged_prefill(q, kv, batch, tiles, scale=dim**-0.5, split=split)
    expected = reference.paged_attention(q, kv, batch, scale=dim**-0.5)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
