"""What is ours of the FlashInfer backend: page numbers, plans by step, and refusals; over a fake library."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import KvLayer, PagedBatch
from kernels.flashinfer_backend import LEAST_PAIRS, check_shape, is_worth
from kernels.flashinfer_decode import FlashInferStaticDecode, StalePlanError
from kernels.flashinfer_plans import Planner
from kernels.page_indices import page_indices

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 64


class FakeWrapper:
    """FlashInfer's decode wrapper in plain torch: lengths go through the plan's memory, pages do not."""

    def __init__(self, workspace: Tensor, layout: str, *, use_tensor_cores: bool, **buffers: Any) -> None:
        assert (layout, use_tensor_cores) == ("NHD", True)
        self._int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)
        self._buffers = buffers
        self._indices = buffers.get("paged_kv_indices_buffer")
        self.layout = (1, 2, 3)

    def plan(self, indptr: Tensor, indices: Tensor, last_page: Tensor, *shape: int, **kinds: Any) -> None:
        *heads, page_size = shape
        assert heads == [HEADS, KV_HEADS, DIM]
        if self._buffers:
            assert len(last_page) == len(self._buffers["paged_kv_last_page_len_buffer"])
            self._buffers["paged_kv_indptr_buffer"].copy_(indptr)
        else:
            self._indices = indices
        self._indptr, self._page_size = indptr, page_size
        counts = indptr.diff()
        lens = ((counts - 1) * page_size + last_page).to(torch.int32)
        size = 4 * len(lens)
        self._pin_memory_int_workspace_buffer[:size] = lens.view(torch.uint8)
        self._int_workspace_buffer[:size] = self._pin_memory_int_workspace_buffer[:size]
        self._count, self._plan_info = len(lens), self.layout

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], *, q_scale: float, out: Tensor | None = None
    ) -> Tensor:
        lens = self._int_workspace_buffer[: 4 * self._count].view(torch.int32).tolist()
        out = torch.empty_like(q) if out is None else out
        for i, length in enumerate(lens):
            mine = self._indices[int(self._indptr[i]) : int(self._indptr[i + 1])].long()
            k, v = (part[mine].reshape(-1, KV_HEADS, DIM)[:length] for part in pages)
            out[i] = reference.attention(q[i : i + 1], k, v, torch.tensor([length - 1]), scale=q_scale)[0]
        return out


class FakeLibrary:
    """Keeps the wrappers it made."""

    def __init__(self) -> None:
        self.wrappers: list[FakeWrapper] = []

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> FakeWrapper:
        self.wrappers.append(FakeWrapper(*args, **kwargs))
        return self.wrappers[-1]


def planner(page_size: int, library: FakeLibrary | None = None) -> Planner:
    return Planner(library or FakeLibrary(), (HEADS, KV_HEADS, DIM), page_size, torch.float32, CPU)


def table_of(num_rows: int, pages_each: int, page_size: int) -> Tensor:
    """int32 [num_rows + 1, width]: random pages, then the dummy row."""
    draw = torch.Generator().manual_seed(num_rows)
    pages = torch.randperm(num_rows * pages_each, generator=draw).view(num_rows, pages_each, 1)
    slots = (pages * page_size + torch.arange(page_size)).view(num_rows, -1)
    dummy = torch.full((1, slots.shape[1]), num_rows * pages_each * page_size)
    return torch.cat([slots, dummy]).to(torch.int32)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_page_numbers_come_from_the_rows_of_the_page_table(page_size: int) -> None:
    """M-27, M-28: those of each row up to its length, one after another; slots themselves at page size 1."""
    table = table_of(5, 7, page_size)
    rows, counts = torch.tensor([3, 0, 5, 3], dtype=torch.int32), [7, 1, 1, 4]
    indptr = torch.tensor([0, 7, 8, 9, 13], dtype=torch.int32)
    out = torch.full((20,), -1, dtype=torch.int32)
    page_indices(table, rows, indptr, out, page_size)
    wanted = [
        slot // page_size
        for row, count in zip(rows.tolist(), counts, strict=True)
        for slot in table[row, ::page_size][:count].tolist()
    ]
    assert out.tolist() == wanted + [-1] * 7


def test_lengths_become_pages_and_the_tokens_of_the_last() -> None:
    """Both sides of a page's edge."""
    indptr, last_page = planner(4).page_columns([1, 3, 4, 5, 8])
    assert indptr.tolist() == [0, 1, 2, 3, 5, 7]
    assert last_page.tolist() == [1, 3, 4, 1, 4]


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_step_attends_by_its_own_lengths_and_pages(is_captured: bool) -> None:
    """B083, B081: plans of other sizes and lengths between two steps of one size leave nothing behind."""
    page_size, table = 4, table_of(6, 5, 4)
    decode = FlashInferStaticDecode(planner(page_size), table, 4, is_captured=is_captured)
    draw = torch.Generator().manual_seed(3)
    pool = torch.randn(2, (6 * 5 + 1) * page_size, KV_HEADS, DIM, generator=draw)
    kv = KvLayer(pool[0], pool[1])
    steps: Sequence[tuple[int, list[int], list[int]]] = [
        (4, [0, 1, 2, 3], [20, 1, 9, 4]),
        (2, [5, 4], [3, 17]),
        (4, [3, 5], [5, 6]),  # two rows of padding
        (1, [2], [20]),
        (4, [1, 0, 5, 2], [2, 2, 2, 2]),
    ]
    for size, rows, lens in steps:
        q = torch.randn(size, HEADS, DIM, generator=draw)
        padded_rows = torch.tensor(rows + [6] * (size - len(rows)), dtype=torch.int32)
        padded_lens = torch.tensor(lens + [1] * (size - len(lens)), dtype=torch.int32)
        decode.prepare(size, lens)
        decode.begin(padded_rows, padded_lens)
        own = torch.full_like(q, 7.0)
        assert decode.attend(kv, q, scale=0.3, out=own) is own
        out = decode.attend(kv, q, scale=0.3)
        assert torch.equal(out, own)
        for i, (row, length) in enumerate(zip(padded_rows.tolist(), padded_lens.tolist(), strict=True)):
            slots = table[row, :length].long()
            at = torch.tensor([length - 1])
            exact = reference.attention(q[i : i + 1], kv.k[slots], kv.v[slots], at, scale=0.3)
            torch.testing.assert_close(out[i : i + 1], exact)


def test_a_plan_laid_out_otherwise_than_the_captured_one_is_refused() -> None:
    """B083: a graph reads the schedule where it was at the capture; elsewhere it is an error, no result."""
    library = FakeLibrary()
    decode = FlashInferStaticDecode(planner(4, library), table_of(4, 4, 4), 4, is_captured=True)
    decode.prepare(4, [1, 1, 1, 1])
    decode.prepare(4, [16, 2, 9])
    library.wrappers[0].layout = (1, 2, 4)
    with pytest.raises(StalePlanError, match="4 rows"):
        decode.prepare(4, [16, 2, 9])
    decode.prepare(2, [5])  # another size is another graph


def test_a_step_of_another_size_than_planned_is_our_own_bug() -> None:
    decode = FlashInferStaticDecode(planner(4), table_of(4, 4, 4), 4, is_captured=True)
    decode.prepare(2, [3, 3])
    with pytest.raises(AssertionError, match="prepared for 2 rows"):
        decode.begin(torch.zeros(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32))


def test_a_library_without_the_memory_that_is_given_to_plans_is_refused() -> None:
    """H9: another version may keep its pinned memory elsewhere; then nothing would own it."""

    class Other:
        def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> object:
            return object()

    decode = FlashInferStaticDecode(planner(4, Other()), table_of(2, 2, 4), 2, is_captured=False)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="_int_workspace_buffer"):
        decode.prepare(1, [1])


@pytest.mark.parametrize(
    ("q_lens", "cached", "expected"),
    [
        ([512], 0, False),
        ([2048], 0, False),
        ([2048] * 4, 0, True),
        ([8192], 0, True),
        ([2048], 30_720, True),
        ([64] * 32, 1024, False),
        ([256] * 40, 8192, False),
        ([1, 1, 4096], 0, True),  # decode spans are another kernel's
        ([1, 1], 100_000, False),
    ],
)
def test_long_prompts_are_worth_a_plan_and_short_ones_are_not(
    q_lens: list[int], cached: int, expected: bool
) -> None:
    num_decode = sum(q == 1 for q in q_lens)
    nothing = torch.zeros(0, dtype=torch.int32)
    batch = PagedBatch(
        page_table=nothing, rows=nothing, kv_lens=nothing, q_indptr=nothing, positions=nothing,
        write_slots=nothing, num_decode=num_decode, max_q_len=0, max_kv_len=0, page_size=16,
        rows_host=[], kv_lens_host=[q + cached for q in q_lens], q_lens_host=q_lens,
    )  # fmt: skip
    assert is_worth(batch, LEAST_PAIRS) is expected
    assert is_worth(batch, 0)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "device", "named"),
    [
        (128, torch.bfloat16, "cpu", "CUDA device"),
        (80, torch.bfloat16, "cuda", "head_dim 80"),
        (128, torch.float32, "cuda", "float32"),
        (128, torch.float8_e4m3fn, "cuda", "float8"),
    ],
)
def test_what_flashinfer_cannot_do_is_named(
    head_dim: int, dtype: torch.dtype, device: str, named: str
) -> None:
    """B085: at the start, not at the first request."""
    with pytest.raises(ValueError, match=named):
        check_shape(head_dim, dtype, torch.device(device))
