"""The reference operations against torch's own and against loops that follow the definition."""

import math

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.batch import KvLayer, PagedBatch

NAN = float("nan")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


def make_batch(spans: list[tuple[int, int]], *, page_size: int, num_pages: int, seed: int = 0) -> PagedBatch:
    """A batch of spans (tokens computed before, tokens computed now) whose pages lie in random order.

    Row i holds span i; the last row is the dummy row and points at the dummy page.
    """
    generator = torch.Generator().manual_seed(seed)
    free = (torch.randperm(num_pages, generator=generator) * page_size).tolist()
    width = max(math.ceil((old + new) / page_size) for old, new in spans) * page_size
    table = torch.full((len(spans) + 1, width), num_pages * page_size, dtype=torch.int32)
    positions, slots = [], []
    for row, (old, new) in enumerate(spans):
        for page in range(math.ceil((old + new) / page_size)):
            first = free.pop()
            table[row, page * page_size : (page + 1) * page_size] = torch.arange(first, first + page_size)
        positions += range(old, old + new)
        slots += table[row, old : old + new].tolist()
    q_lens, kv_lens = [new for _, new in spans], [old + new for old, new in spans]
    return PagedBatch(
        page_table=table,
        rows=torch.arange(len(spans), dtype=torch.int32),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
        q_indptr=torch.tensor([0, *q_lens]).cumsum(0).int(),
        positions=torch.tensor(positions, dtype=torch.int32),
        write_slots=torch.tensor(slots, dtype=torch.int32),
        num_decode=0,
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        page_size=page_size,
        rows_host=list(range(len(spans))),
        kv_lens_host=kv_lens,
        q_lens_host=q_lens,
    )


def random_layer(batch: PagedBatch, num_pages: int, kv_heads: int, head_dim: int) -> KvLayer:
    """NaN everywhere except in the slots of tokens that were computed before this step."""
    shape = ((num_pages + 1) * batch.page_size, kv_heads, head_dim)
    k, v = torch.full(shape, NAN), torch.full(shape, NAN)
    for row, (kv_len, q_len) in enumerate(zip(batch.kv_lens_host, batch.q_lens_host, strict=True)):
        old = batch.page_table[row, : kv_len - q_len].long()
        k[old], v[old] = torch.randn(len(old), *shape[1:]), torch.randn(len(old), *shape[1:])
    return KvLayer(k, v)


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """One query and one head at a time, in fp64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i, position in enumerate(positions.tolist()):
        for head in range(q.shape[1]):
            keys, values = (
                k[: position + 1, head // group].double(),
                v[: position + 1, head // group].double(),
            )
            logits = keys @ q[i, head].double() * scale
            weights = (logits - logits.max()).exp()
            out[i, head] = weights @ values / weights.sum()
    return out


def test_rms_norm_equals_torch() -> None:
    x, weight = torch.randn(3, 5, 16), torch.rand(16) + 0.5
    expected = torch.nn.functional.rms_norm(x, (16,), weight, eps=1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_rounds_once() -> None:
    """In bf16 the result is the fp32 result, rounded: no intermediate is."""
    x, weight = torch.randn(7, 64).bfloat16(), (torch.rand(64) + 0.5).bfloat16()
    exact = reference.rms_norm(x.float(), weight.float(), 1e-6)
    assert torch.equal(reference.rms_norm(x, weight, 1e-6), exact.bfloat16())


def test_rms_norm_of_large_values_stays_finite() -> None:
    """B090: squares of bf16 activations pass the range of fp16, not of fp32."""
    assert (
        reference.rms_norm(torch.full((1, 8), 7e4).bfloat16(), torch.ones(8).bfloat16(), 1e-6)
        .isfinite()
        .all()
    )


def test_add_rms_norm_returns_the_sum_too() -> None:
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.rand(8)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-5))


def test_rotary_turns_halves_as_complex_numbers() -> None:
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 1, 4), angles[:, None])
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(reference.rotary(x, angles.cos(), angles.sin()), expected)


def test_rotary_takes_strided_heads() -> None:
    fused, angles = torch.randn(5, 7, 8), torch.randn(5, 4)
    sliced = fused[:, 4:6]
    expected = reference.rotary(sliced.contiguous(), angles.cos(), angles.sin())
    assert torch.equal(reference.rotary(sliced, angles.cos(), angles.sin()), expected)


def test_silu_mul_gates_the_second_half() -> None:
    gate, up = torch.randn(3, 6), torch.randn(3, 6)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(reference.silu_mul(torch.cat([gate, up], dim=1)), expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["contiguous", "fused"])
def test_store_kv_copies_rows_and_touches_nothing_else(index_dtype: torch.dtype, layout: str) -> None:
    """S1-14, S1-15: a store is a row copy by slot, from slices of a fused product too."""
    num_slots, tokens, heads, head_dim = 40, 9, 3, 4
    pool = torch.randn(2, num_slots, heads, head_dim)
    before, slots = pool.clone(), torch.randperm(num_slots)[:tokens].to(index_dtype)
    fused = torch.randn(tokens, 2 + 2 * heads, head_dim)
    k, v = fused[:, 2 : 2 + heads], fused[:, 2 + heads :]
    if layout == "contiguous":
        k, v = k.contiguous(), v.contiguous()
    reference.store_kv(k, v, KvLayer(pool[0], pool[1]), slots)
    assert torch.equal(pool[0, slots.long()], k)
    assert torch.equal(pool[1, slots.long()], v)
    others = [slot for slot in range(num_slots) if slot not in slots.tolist()]
    assert torch.equal(pool[:, others], before[:, others])


def test_store_kv_writes_through_the_flat_view() -> None:
    """S1-13: the view by slot shares the pool's memory; slot = page * page_size + offset."""
    pool = torch.zeros(2, 2, 5, 4, 1, 2)  # K and V, layers, pages, page_size, heads, head_dim
    layer = KvLayer(pool[0, 1].view(-1, 1, 2), pool[1, 1].view(-1, 1, 2))
    reference.store_kv(torch.ones(1, 1, 2), torch.full((1, 1, 2), 2.0), layer, torch.tensor([3 * 4 + 2]))
    assert pool[0, 1, 3, 2].tolist() == [[1.0, 1.0]]
    assert pool[1, 1, 3, 2].tolist() == [[2.0, 2.0]]
    assert pool.sum() == 6.0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("group", [1, 3, 5, 7])
def test_paged_attention_follows_the_definition(page_size: int, group: int) -> None:
    """S2-14, S2-15, S2-21, M-31: decode and prefill spans, page edges, a token attends to itself."""
    spans = [(4, 1), (15, 1), (16, 1), (0, 1), (0, 6), (3, 5), (16, 16)]
    num_pages, kv_heads, head_dim = 120, 2, 8
    batch = make_batch(spans, page_size=page_size, num_pages=num_pages)
    layer = random_layer(batch, num_pages, kv_heads, head_dim)
    num_tokens = sum(new for _, new in spans)
    q = torch.randn(num_tokens, kv_heads * group, head_dim)
    k, v = torch.randn(num_tokens, kv_heads, head_dim), torch.randn(num_tokens, kv_heads, head_dim)
    backend = reference.ReferenceBackend()
    backend.plan(batch)
    out = backend.run(layer, q, k, v, scale=0.3)
    first = 0
    for row, (old, new) in enumerate(spans):
        slots, queries = batch.page_table[row, : old + new].long(), slice(first, first + new)
        expected = attend_by_definition(
            q[queries], layer.k[slots], layer.v[slots], batch.positions[queries], 0.3
        )
        torch.testing.assert_close(out[queries].double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(layer.k[slots[old:]], k[queries])
        first += new


def test_nan_in_unused_slots_does_not_leak() -> None:
    """H12, S2-29: the rest of the last page, free pages and the dummy page hold NaN."""
    batch = make_batch([(5, 1), (0, 3)], page_size=8, num_pages=9)
    layer = random_layer(batch, 9, 1, 4)
    k, v = torch.randn(4, 1, 4), torch.randn(4, 1, 4)
    reference.store_kv(k, v, layer, batch.write_slots)
    assert layer.k.isnan().any()
    assert reference.paged_attention(torch.randn(4, 2, 4), layer, batch, scale=1.0).isfinite().all()


def test_attention_of_large_logits_does_not_overflow() -> None:
    """S2-18: the largest logit is subtracted before the exponential."""
    q = torch.full((1, 1, 4), 300.0)
    k, v = (
        torch.stack([torch.full((1, 4), 300.0), torch.full((1, 4), 299.0)]),
        torch.tensor([[[1.0]], [[2.0]]]),
    )
    out = reference.attention(q, k, v.expand(2, 1, 4), torch.tensor([1]), scale=1.0)
    torch.testing.assert_close(out, torch.ones(1, 1, 4))


def test_gather_rows_lists_slots_in_order() -> None:
    batch = make_batch([(5, 1), (0, 3)], page_size=4, num_pages=9)
    slots = reference.gather_rows(batch.page_table, batch.rows, batch.kv_lens)
    assert slots.tolist() == batch.page_table[0, :6].tolist() + batch.page_table[1, :3].tolist()


def test_copy_pages_copies_all_layers_and_nothing_else() -> None:
    pool = torch.randn(2, 3, 6, 4, 1, 2)
    before = pool.clone()
    reference.copy_pages(
        pool, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5, 1], dtype=torch.int32)
    )
    assert torch.equal(pool[:, :, 5], before[:, :, 0])
    assert torch.equal(pool[:, :, 1], before[:, :, 2])
    assert torch.equal(pool[:, :, [0, 2, 3, 4]], before[:, :, [0, 2, 3, 4]])
