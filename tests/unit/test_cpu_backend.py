"""The cpu backend against the reference: shapes, pages, poison, and the same answer in any company."""

import math
import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.batch import KvLayer, PagedBatch
from kernels.checks import check_batch
from kernels.cpu_backend import CpuBackend
from kernels.testing import PagedProblem, assert_no_worse, random_paged_problem
from tests import needs

MAP_NORESERVE = 0x4000  # Linux; the mmap module does not name it


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return compiled() if request.param == "compiled" else CpuBackend(compiled=False)


def compiled() -> CpuBackend:
    needs.compiled()
    backend = CpuBackend()
    assert backend.is_compiled
    return backend


def run(backend: CpuBackend, problem: PagedProblem, kv: KvLayer | None = None) -> torch.Tensor:
    backend.plan(problem.batch)
    return backend.run(kv or problem.copy_of_kv(), problem.q, problem.k, problem.v, scale=problem.scale)


def expect_reference(backend: CpuBackend, problem: PagedProblem) -> None:
    check_batch(problem.batch)
    kv = problem.copy_of_kv()
    ours = run(backend, problem, kv)
    plain, exact = (reference_result(problem, dtype) for dtype in (torch.float32, torch.float64))
    assert_no_worse(ours, plain=plain, exact=exact, factor=4)
    expected = problem.copy_of_kv()
    reference.store_kv(problem.k, problem.v, expected, problem.batch.write_slots)
    assert torch.equal(kv.k.nan_to_num(7.0), expected.k.nan_to_num(7.0))
    assert torch.equal(kv.v.nan_to_num(7.0), expected.v.nan_to_num(7.0))


def reference_result(problem: PagedProblem, dtype: torch.dtype) -> torch.Tensor:
    kv = problem.copy_of_kv()
    reference.store_kv(problem.k, problem.v, kv, problem.batch.write_slots)
    if dtype == torch.float32:
        return reference.paged_attention(problem.q, kv, problem.batch, scale=problem.scale)
    return exact_attention(problem, kv)


def exact_attention(problem: PagedProblem, kv: KvLayer) -> torch.Tensor:
    """One query at a time in float64."""
    batch, out = problem.batch, torch.empty(problem.q.shape, dtype=torch.float64)
    group = problem.q.shape[1] // problem.k.shape[1]
    for span, row in enumerate(batch.rows_host):
        for token in range(int(batch.q_indptr[span]), int(batch.q_indptr[span + 1])):
            slots = batch.page_table[row, : int(batch.positions[token]) + 1].long()
            k = kv.k[slots].double().repeat_interleave(group, dim=1)
            v = kv.v[slots].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,thd->ht", problem.q[token].double(), k) * problem.scale
            out[token] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
    return out


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ([1], [1]),
        ([1, 1], [1, 1]),
        ([15, 1, 16, 17], [15, 1, 16, 17]),
        ([1, 1, 1], [63, 64, 65]),
        ([1, 1, 5, 33], [300, 17, 5, 290]),
        ([130], [700]),
        ([1, 1], [255, 257]),
        ([1, 0, 1, 0, 1, 4], [9, 40, 65, 7, 3, 20]),
    ],
)
def test_every_span_equals_the_reference(
    backend: CpuBackend, q_lens: list[int], kv_lens: list[int], page_size: int
) -> None:
    """H12, B088, B080: spans shorter than a page, mixed with decode, in a pool filled with NaN."""
    problem = random_paged_problem(
        q_lens=q_lens, kv_lens=kv_lens, num_heads=6, num_kv_heads=2, head_dim=64, page_size=page_size, seed=3
    )
    expect_reference(backend, problem)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(9, 3), (14, 2), (12, 2), (28, 4), (40, 8), (24, 8), (16, 1), (4, 4), (10, 2), (100, 1)],
)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 8, 40])
def test_every_group_size_and_head_dim(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """B085: group sizes 1 to 16 and beyond what one task holds, head dims that fill no whole vector."""
    problem = random_paged_problem(
        q_lens=[1, 1, 7],
        kv_lens=[37, 5, 21],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    expect_reference(compiled(), problem)


@pytest.mark.parametrize("kv_len", [1, 2, 255, 256, 257, 511, 512, 513, 1100])
def test_each_key_counts_once_at_chunk_edges(backend: CpuBackend, kv_len: int) -> None:
    """B086, B087: equal scores and one-hot values give 1 / length everywhere: none twice, none lost."""
    problem = random_paged_problem(
        q_lens=[1], kv_lens=[kv_len], num_heads=2, num_kv_heads=2, head_dim=8, page_size=4
    )
    kv = problem.copy_of_kv()
    slots = problem.batch.page_table[problem.batch.rows_host[0], :kv_len].long()
    for start in range(0, kv_len, 8):
        kv.k[slots] = 0.0
        kv.v[slots] = 0.0
        for d, slot in enumerate(slots[start : start + 8].tolist()):
            kv.v[slot, :, d] = 1.0
        new = KvLayer(k=kv.k.clone(), v=kv.v.clone())
        backend.plan(problem.batch)
        out = backend.run(new, problem.q, new.k[slots[-1:]], new.v[slots[-1:]], scale=1.0)
        width = min(8, kv_len - start)
        torch.testing.assert_close(out[0, :, :width], torch.full((2, width), 1 / kv_len))
        assert out[0, :, width:].abs().max() == 0 if width < 8 else True


def test_many_threads_agree_bit_for_bit_with_one() -> None:
    """Few tasks over a long context are split over threads; the split must not show."""
    problem = random_paged_problem(
        q_lens=[1], kv_lens=[2000], num_heads=3, num_kv_heads=1, head_dim=64, page_size=16
    )
    library, before = needs.compiled(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(compiled(), problem)
        torch.set_num_threads(4)
        split = run(compiled(), problem)
    finally:
        torch.set_num_threads(before)
        library.use_torch_threads()
    assert torch.equal(alone, split)


def test_a_token_is_the_same_in_decode_in_prefill_and_in_any_company() -> None:
    """B088: bitwise, whatever shares the step."""
    problem = random_paged_problem(
        q_lens=[40, 30], kv_lens=[340, 30], num_heads=6, num_kv_heads=2, head_dim=64, page_size=16
    )
    kv = problem.copy_of_kv()
    together = run(compiled(), problem, kv)
    for token in (0, 17, 39):
        alone = one_token(problem, span=0, token=token)
        backend = compiled()
        backend.plan(alone)
        rows = slice(token, token + 1)
        out = backend.run(kv, problem.q[rows], problem.k[rows], problem.v[rows], scale=problem.scale)
        assert torch.equal(out[0], together[token])


def one_token(problem: PagedProblem, *, span: int, token: int) -> PagedBatch:
    batch = problem.batch
    position = int(batch.positions[token])
    return replace(
        batch,
        rows=batch.rows[span : span + 1],
        kv_lens=torch.tensor([position + 1], dtype=torch.int32),
        q_indptr=torch.tensor([0, 1], dtype=torch.int32),
        positions=batch.positions[token : token + 1],
        write_slots=batch.write_slots[token : token + 1],
        num_decode=1,
        rows_host=[batch.rows_host[span]],
        kv_lens_host=[position + 1],
        q_lens_host=[1],
    )


def test_a_token_attends_to_itself(backend: CpuBackend) -> None:
    """M-31: K and V of the step are stored before attention reads them."""
    problem = random_paged_problem(q_lens=[1], kv_lens=[1], num_heads=2, num_kv_heads=2, head_dim=16)
    torch.testing.assert_close(run(backend, problem)[0], problem.v[0])


def test_a_pool_of_nan_and_a_pool_of_zeros_give_the_same_bits(backend: CpuBackend) -> None:
    """H12, B080."""
    shape = {"q_lens": [1, 9], "kv_lens": [21, 30], "num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
    poisoned = random_paged_problem(**shape, page_size=8)  # type: ignore[arg-type]
    clean = random_paged_problem(**shape, page_size=8, unused=0.0)  # type: ignore[arg-type]
    assert torch.equal(run(backend, poisoned), run(backend, clean))


def test_nan_of_one_span_stays_in_that_span(backend: CpuBackend) -> None:
    problem = random_paged_problem(
        q_lens=[1, 1, 4], kv_lens=[9, 9, 4], num_heads=4, num_kv_heads=2, head_dim=16
    )
    clean = run(backend, problem)
    problem.k[1] = float("nan")
    out = run(backend, problem)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2, 3, 4, 5]], clean[[0, 2, 3, 4, 5]])


def test_addresses_past_two_to_the_31_are_64_bit(backend: CpuBackend) -> None:
    """H13, B084: the same request on the first and on the last pages of a pool of 2**31 + 2**20 elements."""
    num_heads, head_dim, page_size = 8, 128, 16
    num_slots = (2**31 + 2**20) // (num_heads * head_dim)
    kv = KvLayer(
        k=promised_memory(num_slots, num_heads, head_dim), v=promised_memory(num_slots, num_heads, head_dim)
    )
    problem = random_paged_problem(
        q_lens=[1, 5], kv_lens=[20, 9], num_heads=8, num_kv_heads=8, head_dim=head_dim, page_size=page_size
    )
    num_near = problem.kv.k.shape[0]
    shift = (num_slots - num_near) // page_size * page_size
    outputs = []
    for offset in (0, shift):
        kv.k[offset : offset + num_near] = problem.kv.k
        kv.v[offset : offset + num_near] = problem.kv.v
        batch = problem.batch
        moved = replace(batch, page_table=batch.page_table + offset, write_slots=batch.write_slots + offset)
        backend.plan(moved)
        outputs.append(backend.run(kv, problem.q, problem.k, problem.v, scale=problem.scale))
    assert int(moved.write_slots.max()) * num_heads * head_dim > 2**31
    assert torch.equal(*outputs)


def promised_memory(*shape: int) -> torch.Tensor:
    """Zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, math.prod(shape) * 4, flags=flags)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.float32).reshape(shape))


@pytest.mark.parametrize("slot", [-1, 10_000])
def test_a_slot_outside_the_pool_is_refused_and_nothing_is_written(slot: int) -> None:
    """B079: a negative slot must not reach the last page by counting backwards."""
    problem = random_paged_problem(q_lens=[1, 1], kv_lens=[3, 3], num_heads=2, num_kv_heads=2, head_dim=16)
    problem.batch.write_slots[1] = slot
    kv = problem.copy_of_kv()
    with pytest.raises(AssertionError, match="outside the pool"):
        run(compiled(), problem, kv)
    assert torch.equal(kv.k.nan_to_num(7.0), problem.kv.k.nan_to_num(7.0))


def test_a_pool_of_another_dtype_goes_through_torch() -> None:
    problem = random_paged_problem(
        q_lens=[1, 6], kv_lens=[12, 6], num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16
    )
    ours = run(compiled(), problem)
    plain = reference_result(problem, torch.float32)
    assert_no_worse(ours, plain=plain, exact=reference_result(problem, torch.float64))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": torch.zeros(2, 4, 8)}, r"q must have shape \[2, any, 16\], not \[2, 4, 8\]"),
        ({"k": torch.zeros(2, 3, 16)}, r"k must have shape \[2, 2, 16\], not \[2, 3, 16\]"),
        ({"v": torch.zeros(2, 2, 16, dtype=torch.float64)}, "v must be torch.float32, not torch.float64"),
        ({"q": torch.zeros(2, 5, 16)}, "q must have a multiple of 2 heads, not 5"),
        ({"q": torch.zeros(2, 16, 4).transpose(1, 2)}, "q must be contiguous along its last axis"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    backend: CpuBackend, change: dict[str, torch.Tensor], sentence: str
) -> None:
    problem = random_paged_problem(q_lens=[1, 1], kv_lens=[3, 3], num_heads=4, num_kv_heads=2, head_dim=16)
    with pytest.raises(ValueError, match=sentence):
        run(backend, replace(problem, **change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": [0, 9]}, "rows must lie in"),
        ({"kv_lens": [3, 900]}, "kv_lens must be at most"),
        ({"q_indptr": [0, 1, 3]}, "q_indptr must rise from 0 to 2"),
        ({"positions": [1]}, r"positions must have shape|write_slots must have shape"),
    ],
)
def test_index_tensors_that_contradict_one_another_are_named(
    change: dict[str, list[int]], sentence: str
) -> None:
    problem = random_paged_problem(q_lens=[1, 1], kv_lens=[3, 3], num_heads=4, num_kv_heads=2, head_dim=16)
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in change.items()}
    with pytest.raises(ValueError, match=sentence):
        check_batch(replace(problem.batch, **tensors))
