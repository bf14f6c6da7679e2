"""The attention kernels on a GPU: every shape, ragged batches, big pools; against exact arithmetic.

Small enough for compute-sanitizer, but for what is marked slow: `make memcheck` runs the rest under it.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import KvLayer
from kernels.reference import ReferenceBackend
from kernels.rotary_store import Rotary, rotary_store
from kernels.store_kv import store_kv
from kernels.testing import PagedProblem, assert_no_worse, random_paged_problem
from kernels.triton_backend import TritonBackend

pytestmark = pytest.mark.gpu
HEADS = [(9, 3), (14, 2), (12, 2), (28, 4), (40, 8), (24, 8), (16, 1), (4, 4)]
HEAD_DIMS = [64, 80, 96, 128, 256]
PAGE_SIZES = [1, 16, 64, 256]
MAX_CONTEXT = 4096


def run(problem: PagedProblem) -> Tensor:
    """By the Triton kernels; K and V of the step are stored on the way."""
    num_heads, num_kv_heads = problem.q.shape[1], problem.k.shape[1]
    backend = TritonBackend(num_heads, num_kv_heads, problem.q.shape[2], MAX_CONTEXT)
    backend.plan(problem.batch)
    return backend.run(problem.copy_of_kv(), problem.q, problem.k, problem.v, scale=problem.scale)


def exact(problem: PagedProblem) -> Tensor:
    """In fp64 over the same numbers, span by span."""
    batch, kv = problem.batch, problem.copy_of_kv()
    reference.store_kv(problem.k, problem.v, kv, batch.write_slots)
    firsts = batch.q_indptr.tolist()
    out = torch.empty_like(problem.q, dtype=torch.float64)
    for span, (row, length) in enumerate(zip(batch.rows_host, batch.kv_lens_host, strict=True)):
        queries = slice(firsts[span], firsts[span + 1])
        slots = batch.page_table[row, :length].long()
        q, k, v = (part.double() for part in (problem.q[queries], kv.k[slots], kv.v[slots]))
        grouped = q.view(len(q), k.shape[1], q.shape[1] // k.shape[1], k.shape[2])
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * problem.scale
        hidden = torch.arange(length, device=q.device) > batch.positions[queries][:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[queries] = torch.einsum("hgqk,khd->qhgd", weights, v).reshape(q.shape)
    return out


def plain(problem: PagedProblem) -> Tensor:
    """The reference in the dtype of the problem."""
    backend = ReferenceBackend()
    backend.plan(problem.batch)
    return backend.run(problem.copy_of_kv(), problem.q, problem.k, problem.v, scale=problem.scale)


def check(problem: PagedProblem) -> None:
    ours = run(problem)
    assert ours.isfinite().all()
    assert_no_worse(ours, plain=plain(problem), exact=exact(problem))


def spans(problem: PagedProblem, numbers: list[int]) -> PagedProblem:
    """Some spans of a problem, over the same pool."""
    batch = problem.batch
    firsts = batch.q_indptr.tolist()
    tokens = [t for i in numbers for t in range(firsts[i], firsts[i + 1])]
    lens = [batch.q_lens_host[i] for i in numbers]
    index = torch.tensor(numbers, device=batch.rows.device, dtype=torch.long)
    where = torch.tensor(tokens, device=batch.rows.device, dtype=torch.long)
    part = replace(
        batch,
        rows=batch.rows[index],
        kv_lens=batch.kv_lens[index],
        q_indptr=torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32).cuda(),
        positions=batch.positions[where],
        write_slots=batch.write_slots[where],
        num_decode=sum(i < batch.num_decode for i in numbers),
        rows_host=[batch.rows_host[i] for i in numbers],
        kv_lens_host=[batch.kv_lens_host[i] for i in numbers],
        q_lens_host=lens,
    )
    return replace(problem, batch=part, q=problem.q[where], k=problem.k[where], v=problem.v[where])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS, ids=lambda n: str(n))
def test_every_group_and_head_size_equals_exact_attention(num_heads, num_kv_heads, head_dim):
    """B085, H12: groups of 1 to 16; decode and prefill spans in one batch over a NaN-filled pool."""
    size = PAGE_SIZES[(num_heads + head_dim // 16) % len(PAGE_SIZES)]
    check(
        random_paged_problem(
            q_lens=[1, 1, 1, 37, 5],
            kv_lens=[1, 130, 700, 37, 261],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=size,
            seed=num_heads * 1000 + head_dim,
            dtype=torch.bfloat16,
            device="cuda",
        )
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lengths_at_every_edge_equal_exact_attention(page_size, dtype):
    """B086, B087: around pages, loop turns and chunks; long contexts are split, short ones are not."""
    edges = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 2049, 4096]
    check(
        random_paged_problem(
            q_lens=[1] * len(edges),
            kv_lens=edges,
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            page_size=page_size,
            dtype=dtype,
            device="cuda",
        )
    )


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("case", ["one", "ones", "edges", "empty", "mixed"])
def test_a_ragged_batch_gives_each_row_what_it_gets_alone(case, page_size):
    """B088: sequences shorter than a page, spans without tokens, prefill beside decode."""
    edges = [page_size - 1, 1, page_size, page_size + 1]
    q_lens, kv_lens = {
        "one": ([1], [1]),
        "ones": ([1, 1], [1, 1]),
        "edges": (edges, edges),
        "empty": ([0, 5], [3, 5]),
        "mixed": ([1, 1, 3, page_size, 200], [1, 500, 3, 3 * page_size, 450]),
    }[case]
    problem = random_paged_problem(
        q_lens=q_lens,
        kv_lens=kv_lens,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    check(problem)
    together = run(problem).split(q_lens)
    for number, (q_len, row) in enumerate(zip(q_lens, together, strict=True)):
        if q_len:
            torch.testing.assert_close(run(spans(problem, [number])), row, rtol=0, atol=0)


def test_uniform_scores_over_one_hot_values_count_every_key_once():
    """B087: with equal keys each output element is the share of the keys that have it."""
    problem = random_paged_problem(
        q_lens=[1, 1, 1, 1],
        kv_lens=[3, 129, 1000, 4095],
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        dtype=torch.float32,
        device="cuda",
    )
    table, kv = problem.batch.page_table, problem.kv
    for row, length in zip(problem.batch.rows_host, problem.batch.kv_lens_host, strict=True):
        slots = table[row, :length].long()
        kv.k[slots] = 0.0
        kv.v[slots] = torch.nn.functional.one_hot(torch.arange(length) % 128, 128).float()[:, None].cuda()
    problem.k.zero_()
    for span, length in enumerate(problem.batch.kv_lens_host):
        problem.v[span] = torch.nn.functional.one_hot(torch.tensor((length - 1) % 128), 128).float().cuda()
    counts = [[len(range(d, n, 128)) / n for d in range(128)] for n in problem.batch.kv_lens_host]
    expected = torch.tensor(counts, device="cuda")[:, None, :].expand(4, 4, 128)
    torch.testing.assert_close(run(problem), expected, rtol=1e-5, atol=1e-7)


def test_store_and_rotary_store_write_their_slots_and_nothing_else():
    """S1-13..S1-15: every other slot keeps its bits."""
    num_slots, heads, kv_heads, dim = 320, 6, 2, 80
    draw = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(7, (heads + 2 * kv_heads) * dim, generator=draw, device="cuda").bfloat16()
    slots = torch.tensor([319, 0, 5, 6, 100, 17, 200], dtype=torch.int32, device="cuda")
    positions = torch.tensor([0, 1, 2, 3, 500, 511, 9], dtype=torch.int32, device="cuda")
    angles = torch.randn(512, dim, generator=draw, device="cuda")
    split = qkv.view(7, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    pool = torch.randn(2, num_slots, kv_heads, dim, generator=draw, device="cuda").bfloat16()
    others = [slot for slot in range(num_slots) if slot not in slots.tolist()]

    stored = KvLayer(*pool.clone())
    store_kv(stored, slots, split[1], split[2])
    assert torch.equal(stored.k[slots.long()], split[1])
    assert torch.equal(stored.v[slots.long()], split[2])
    assert torch.equal(stored.k[others], pool[0, others])
    assert torch.equal(stored.v[others], pool[1, others])

    rotated = KvLayer(*pool.clone())
    out_q = torch.empty(7, heads, dim, dtype=torch.bfloat16, device="cuda")
    rotary_store(qkv, rotated, slots, positions, Rotary(angles), out_q)
    cos, sin = angles[positions.long()].chunk(2, dim=1)
    torch.testing.assert_close(out_q, reference.rotary(split[0], cos, sin), rtol=8e-3, atol=1e-2)
    k = reference.rotary(split[1], cos, sin)
    torch.testing.assert_close(rotated.k[slots.long()], k, rtol=8e-3, atol=1e-2)
    assert torch.equal(rotated.v[slots.long()], split[2])
    assert torch.equal(rotated.k[others], pool[0, others])
    assert torch.equal(rotated.v[others], pool[1, others])


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_last_pages_of_a_pool_beyond_two_to_the_31_elements_are_right(page_size):
    """B084: K and V of a layer with 2.2e9 elements each; store, decode and prefill at both ends of it."""
    kv_heads, dim = 8, 128
    num_slots = (2_200_000_000 // (kv_heads * dim)) // 64 * 64
    problem = random_paged_problem(
        q_lens=[1, 1, 90],
        kv_lens=[700, 65, 300],
        num_heads=16,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    first = run(problem)
    small = problem.kv
    kept = len(small.k) // page_size * page_size
    shift = num_slots - kept
    pool = torch.full((2, num_slots, kv_heads, dim), float("nan"), dtype=torch.bfloat16, device="cuda")
    pool[0, shift:], pool[1, shift:] = small.k[:kept], small.v[:kept]
    batch = problem.batch
    moved = replace(
        batch,
        page_table=batch.page_table + shift,
        write_slots=batch.write_slots + shift,
    )
    big = KvLayer(k=pool[0], v=pool[1])
    assert big.k.numel() > 2**31
    assert int(moved.write_slots.max()) > 2**31 // (kv_heads * dim)
    backend = TritonBackend(16, kv_heads, dim, MAX_CONTEXT)
    backend.plan(moved)
    last = backend.run(big, problem.q, problem.k, problem.v, scale=problem.scale)
    assert torch.equal(last, first)
    assert big.k[:shift].isnan().all()
    written = moved.write_slots.long()
    assert torch.equal(big.k[written], problem.k)
    assert torch.equal(big.v[written], problem.v)
