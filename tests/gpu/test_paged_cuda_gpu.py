"""The historical kernel on a GPU: every shape against exact attention, its emulation, and its backend."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import KvLayer, PagedBatch
from kernels.paged_cuda import cache_layout
from kernels.paged_cuda.backend import PagedCudaBackend, is_partitioned
from kernels.paged_cuda.build import HEAD_SIZES, Specialization
from kernels.paged_cuda.emulation import paged_attention_v1, paged_attention_v2
from kernels.paged_cuda.library import BlockCache, Context, PagedCudaLibrary, load, num_partitions
from kernels.paged_cuda.shape import BLOCK_SIZES, KernelShape
from kernels.paged_cuda.thread_block import KernelInputs
from kernels.testing import assert_no_worse, random_paged_problem

pytestmark = pytest.mark.gpu
SCALARS = ("float16", "bfloat16", "float32")
Library = Callable[[int, int, str], PagedCudaLibrary]


@pytest.fixture(scope="module")
def library() -> Library:
    """Libraries by shape; all are built first, side by side: one takes a few seconds."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}"
    shapes = [Specialization(h, b, s) for h in HEAD_SIZES for b in BLOCK_SIZES for s in SCALARS]
    with ThreadPoolExecutor(16) as pool:
        for future in [pool.submit(load, shape, architecture) for shape in shapes]:
            future.result()
    return lambda head_size, block_size, scalar: load(
        Specialization(head_size, block_size, scalar), architecture
    )


@dataclass
class Decode:
    """Sequences of these lengths in random blocks of a cache that is NaN where nothing was stored."""

    q: Tensor  # [num_seqs, num_heads, head_size]: slices of a fused product
    cache: BlockCache
    context: Context
    keys: list[Tensor]  # of each sequence, [len, num_kv_heads, head_size]
    values: list[Tensor]

    @property
    def exact(self) -> list[Tensor]:
        """In fp64."""
        return [
            attention(self.q[i].double(), k.double(), v.double(), self.context.scale)
            for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
        ]

    @property
    def plain(self) -> list[Tensor]:
        """Scores and sums in fp32, weights and result in the type of the cache, as the kernel has them."""
        dtype = self.q.dtype
        return [
            attention(self.q[i].float(), k.float(), v.float(), self.context.scale, weights_in=dtype).to(dtype)
            for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
        ]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, weights_in: torch.dtype | None = None) -> Tensor:
    num_heads, head_size = q.shape
    grouped = q.view(k.shape[1], -1, head_size)
    weights = (torch.einsum("hgd,khd->hgk", grouped, k) * scale).softmax(dim=-1)
    if weights_in is not None:
        weights = weights.to(weights_in).to(q.dtype)
    return torch.einsum("hgk,khd->hgd", weights, v).reshape(num_heads, head_size)


def decode(
    lib: PagedCudaLibrary, lens: list[int], num_heads: int, num_kv_heads: int, seed: int = 0
) -> Decode:
    shape, device = lib.shape, torch.device("cuda")
    torch.manual_seed(seed)
    counts = [-(-length // shape.block_size) for length in lens]
    order = torch.randperm(sum(counts) + 3).tolist()
    table = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    cache = lib.new_cache(len(order), num_kv_heads, device)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    keys, values = [], []
    for i, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        slots = table[i, :count, None] * shape.block_size + torch.arange(shape.block_size)
        fused = torch.randn(length, 2 * num_kv_heads + 1, shape.head_size, device=device).to(lib.dtype)
        k, v = fused[:, :num_kv_heads], fused[:, num_kv_heads : 2 * num_kv_heads]
        lib.store(cache, k, v, slots.flatten()[:length].int().to(device))
        keys.append(k)
        values.append(v)
    fused = torch.randn(len(lens), num_heads + 2 * num_kv_heads, shape.head_size, device=device)
    context = Context(
        physical_blocks=table.to(device),
        lens=torch.tensor(lens, dtype=torch.int32, device=device),
        max_len=max(lens),
        scale=shape.head_size**-0.5,
    )
    return Decode(fused.to(lib.dtype)[:, :num_heads], cache, context, keys, values)


def run_v2(lib: PagedCudaLibrary, problem: Decode) -> Tensor:
    num_seqs, num_heads, _ = problem.q.shape
    capacity = num_seqs * num_heads * num_partitions(problem.context.max_len)
    scratch = lib.new_partitions(capacity, problem.q.device)
    scratch.out.fill_(torch.nan)
    scratch.max_logits.fill_(torch.nan)
    scratch.exp_sums.fill_(torch.nan)
    return lib.v2(problem.q, problem.cache, problem.context, scratch)


def check(ours: Tensor, problem: Decode) -> None:
    assert ours.isfinite().all()
    for i, (plain, exact) in enumerate(zip(problem.plain, problem.exact, strict=True)):
        if ours.dtype == torch.float32:
            # exp and division of the device are good to about 2^-21; the guard of the sums adds 1e-6.
            torch.testing.assert_close(ours[i].double(), exact, rtol=1e-5, atol=1e-5)
        else:
            assert_no_worse(ours[i], plain=plain, exact=exact)


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_shape_equals_exact_attention_on_a_nan_filled_cache(library, head_size, block_size, scalar):
    """S2-01..S2-29, S2-32, H12, B085: v1 and v2, block edges, ragged lengths, groups of 1, 3, 4 and 7."""
    lib = library(head_size, block_size, scalar)
    lens = [1, 5, block_size - 1, block_size, block_size + 1, 4 * block_size + 3, 511, 512, 513, 1100]
    for num_heads, num_kv_heads in ((4, 4), (9, 3), (8, 2), (7, 1)):
        problem = decode(lib, lens, num_heads, num_kv_heads)
        check(lib.v1(problem.q, problem.cache, problem.context), problem)
        check(run_v2(lib, problem), problem)


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("length", [1, 511, 512, 513, 4096])
def test_v2_equals_v1_equals_exact(library, length, scalar):
    """S2-28; B086, B087: no partition is empty, none is counted twice."""
    lib = library(128, 16, scalar)
    problem = decode(lib, [length, 1, length], 8, 2)
    one, two = lib.v1(problem.q, problem.cache, problem.context), run_v2(lib, problem)
    check(one, problem)
    check(two, problem)
    if length <= 512:
        torch.testing.assert_close(two, one, rtol=0, atol=0)


@pytest.mark.parametrize("length", [3, 600, 4096])
def test_equal_keys_give_the_mean_of_the_values(library, length):
    """B087: with one-hot values each token counts once and as much as any other."""
    lib = library(64, 16, "float32")
    problem = decode(lib, [length], 2, 1)
    problem.q.zero_()
    for out in (lib.v1(problem.q, problem.cache, problem.context), run_v2(lib, problem)):
        mean = problem.values[0].mean(dim=0).expand(2, -1)
        torch.testing.assert_close(out[0], mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head_size", "block_size", "scalar"), [(128, 16, "float16"), (80, 8, "float16"), (64, 32, "float32")]
)
def test_the_kernel_does_what_its_emulation_does(library, head_size, block_size, scalar):
    """S2-08..S2-26: the same tokens to the same threads; sums differ in the order of a lane's terms alone."""
    lib = library(head_size, block_size, scalar)
    problem = decode(lib, [1, 37, 520], 4, 2)
    inputs = KernelInputs(
        q=problem.q.cpu().numpy(),
        k_cache=problem.cache.k.cpu().numpy(),
        v_cache=problem.cache.v.cpu().numpy(),
        physical_blocks=problem.context.physical_blocks.cpu().numpy(),
        context_lens=problem.context.lens.cpu().numpy(),
        scale=problem.context.scale,
    )
    shape = KernelShape(head_size, block_size, itemsize=lib.dtype.itemsize)
    partitioned = KernelShape(head_size, block_size, partition_size=512, itemsize=lib.dtype.itemsize)
    close = {"rtol": 2e-3, "atol": 1e-3} if scalar == "float16" else {"rtol": 1e-5, "atol": 1e-5}
    with np.errstate(invalid="ignore"):
        expected = paged_attention_v1(shape, inputs), paged_attention_v2(partitioned, inputs)
    ours = lib.v1(problem.q, problem.cache, problem.context), run_v2(lib, problem)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.cpu(), torch.from_numpy(wanted), **close)


@pytest.mark.parametrize("scalar", ["float16", "float32"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_store_fills_the_layout_of_the_document_and_nothing_else(library, block_size, scalar):
    """S2-02, S2-04, S1-15; B079: a slot below 0 is padding and writes nowhere."""
    lib, num_kv_heads, num_blocks = library(96, block_size, scalar), 3, 5
    cache = lib.new_cache(num_blocks, num_kv_heads, torch.device("cuda"))
    before = torch.randn(2, num_blocks * block_size, num_kv_heads, 96).to(lib.dtype)
    layouts = (cache_layout.key_cache, cache_layout.value_cache)
    for target, rows, layout in zip((cache.k, cache.v), before, layouts, strict=True):
        target.copy_(torch.from_numpy(layout(rows.numpy(), block_size)))
    fused = torch.randn(7, 2 * num_kv_heads + 4, 96, device="cuda").to(lib.dtype)
    k, v = fused[:, 4 : 4 + num_kv_heads], fused[:, 4 + num_kv_heads :]
    slots = torch.tensor([3, -1, 0, num_blocks * block_size - 1, 9, -1, 17], dtype=torch.int32)
    lib.store(cache, k, v, slots.cuda())
    kept = slots >= 0
    for target, rows, new, layout in zip((cache.k, cache.v), before, (k, v), layouts, strict=True):
        rows[slots[kept].long()] = new.cpu()[kept]
        assert torch.equal(target.cpu(), torch.from_numpy(layout(rows.numpy(), block_size)))


def test_blocks_beyond_two_to_the_31_elements_are_reached(library):
    """S2-30, H13, B084: the same sequence in the first and in the last blocks of a large pool."""
    lib = library(128, 16, "float16")
    num_kv_heads = 8
    num_blocks = 2**31 // (num_kv_heads * 128 * 16) + 64
    cache = lib.new_cache(num_blocks, num_kv_heads, torch.device("cuda"))
    assert cache.k.numel() > 2**31
    length, count = 300, 19
    first = torch.arange(count, dtype=torch.int32, device="cuda")
    table = torch.stack([first, num_blocks - 1 - first])
    k, v = torch.randn(2, length, num_kv_heads, 128, device="cuda").half()
    for row in table:
        slots = (row[:, None] * 16 + torch.arange(16, dtype=torch.int32, device="cuda")).flatten()[:length]
        lib.store(cache, k, v, slots)
    q = torch.randn(1, 32, 128, device="cuda").half().expand(2, -1, -1).contiguous()
    context = Context(table, torch.full((2,), length, dtype=torch.int32, device="cuda"), length, 0.1)
    out = lib.v1(q, cache, context)
    torch.testing.assert_close(
        out[0].double(), attention(q[0].double(), k.double(), v.double(), 0.1), rtol=5e-3, atol=5e-3
    )
    assert torch.equal(out[0], out[1])


def test_results_are_the_same_every_time(library):
    """S2-31: shared memory is used twice, with a barrier between; no thread block depends on another."""
    lib = library(128, 16, "bfloat16")
    problem = decode(lib, [700] * 64, 32, 8)
    one, two = lib.v1(problem.q, problem.cache, problem.context), run_v2(lib, problem)
    for _ in range(50):
        assert torch.equal(lib.v1(problem.q, problem.cache, problem.context), one)
        assert torch.equal(run_v2(lib, problem), two)


# -- the backend -----------------------------------------------------------------------------------------


def backend(page_size: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> PagedCudaBackend:
    device = torch.device("cuda", torch.cuda.current_device())
    return PagedCudaBackend(8, 2, head_dim, page_size=page_size, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page_size", BLOCK_SIZES)
def test_the_backend_runs_mixed_steps_like_the_reference_backend(page_size, dtype):
    """B080, B088, M-31: decode and prefill spans, several layers, unused slots NaN, v1 and v2."""
    ours = backend(page_size, dtype)
    for seed, kv_lens in enumerate(([1, 130, 9, 64, 7], [700, 17, 1, 33, 520])):
        q_lens = [1, 1, 1, 10, 7]
        kv_lens = [max(a, b) for a, b in zip(kv_lens, q_lens, strict=True)]
        for layer in range(2):
            problem = random_paged_problem(
                q_lens=q_lens, kv_lens=kv_lens, num_heads=8, num_kv_heads=2, head_dim=64,
                page_size=page_size, seed=10 * seed + layer, dtype=dtype, device="cuda",
            )  # fmt: skip
            ours.plan(problem.batch)
            kv = problem.copy_of_kv()
            out = ours.run(kv, problem.q, problem.k, problem.v, scale=problem.scale)
            plain = reference.ReferenceBackend()
            plain.plan(problem.batch)
            expected = plain.run(problem.kv, problem.q, problem.k, problem.v, scale=problem.scale)
            bound = 2e-2 if dtype == torch.bfloat16 else 4e-3
            if dtype == torch.float32:
                bound = 5e-3  # products of prefill are in TF32
            torch.testing.assert_close(out, expected, rtol=bound, atol=bound)
            torch.testing.assert_close(kv.k.nan_to_num(), problem.kv.k.nan_to_num(), rtol=0, atol=0)


def test_pages_changed_behind_the_backend_are_seen_after_a_refresh():
    ours, page_size = backend(16), 16
    problem = random_paged_problem(
        q_lens=[1, 1], kv_lens=[40, 50], num_heads=8, num_kv_heads=2, head_dim=64,
        page_size=page_size, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    ours.plan(problem.batch)
    ours.run(problem.kv, problem.q, problem.k, problem.v, scale=problem.scale)
    page = int(problem.batch.page_table[problem.batch.rows[0].long(), 0]) // page_size
    problem.kv.k[page * page_size : (page + 1) * page_size] = 1.0
    problem.kv.v[page * page_size : (page + 1) * page_size] = 2.0
    ours.refresh_pages(torch.tensor([page]))
    out = ours.run(problem.kv, problem.q, problem.k, problem.v, scale=problem.scale)
    expected = reference.paged_attention(problem.q, problem.kv, problem.batch, scale=problem.scale)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_another_page_size_is_refused():
    ours = backend(16)
    problem = random_paged_problem(
        q_lens=[1], kv_lens=[9], num_heads=8, num_kv_heads=2, head_dim=64, page_size=32, device="cuda"
    )
    with pytest.raises(ValueError, match="page size 16, not 32"):
        ours.plan(problem.batch)


def test_a_captured_decode_step_follows_lengths_and_pages_at_replay():
    """B081, B083: planned with the longest context, replayed with shorter ones and other pages."""
    ours, num_seqs, page_size = backend(16), 4, 16
    longest = random_paged_problem(
        q_lens=[1] * num_seqs, kv_lens=[1500] * num_seqs, num_heads=8, num_kv_heads=2, head_dim=64,
        page_size=page_size, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    assert is_partitioned(1500, num_seqs * 8)
    kv = KvLayer(longest.kv.k.clone(), longest.kv.v.clone())
    batch = longest.batch

    def step() -> Tensor:
        ours.plan(batch)
        return ours.run(kv, longest.q, longest.k, longest.v, scale=longest.scale)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([1, 40, 511, 1500], [513, 512, 7, 1], [900] * 4):
        batch.kv_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        batch.page_table[batch.rows.long()] = batch.page_table[batch.rows.long().roll(1)]
        last = torch.tensor(lengths, device="cuda") - 1
        batch.positions.copy_(last)
        batch.write_slots.copy_(batch.page_table[batch.rows.long(), last])
        graph.replay()
        expected = reference.paged_attention(longest.q, kv, of_lengths(batch, lengths), scale=longest.scale)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def of_lengths(batch: PagedBatch, lengths: list[int]) -> PagedBatch:
    """The device columns already say so; the reference reads no other."""
    assert batch.kv_lens.tolist() == lengths
    return batch
