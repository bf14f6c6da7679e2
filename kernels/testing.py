"""Random paged problems, and the one way to judge a result: no worse than plain arithmetic of its dtype.

For tests and benchmarks of every backend. Pools are filled with NaN except where a span's K and V lie.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.batch import KvLayer, LastQueries, PagedBatch


@dataclass(frozen=True, slots=True)
class PagedProblem:
    """Inputs of AttentionBackend.run; K and V of earlier positions are in the pool, new ones are not."""

    batch: PagedBatch
    kv: KvLayer
    q: Tensor  # [num_tokens, num_heads, head_dim], rows are slices of one fused product
    k: Tensor  # [num_tokens, num_kv_heads, head_dim], likewise
    v: Tensor
    scale: float

    def copy_of_kv(self) -> KvLayer:
        """The pool as it is before the step, for one more run of the same problem."""
        return KvLayer(k=self.kv.k.clone(), v=self.kv.v.clone())

    def last_queries(self, spans: list[int]) -> LastQueries:
        """The last token of each of these spans."""
        batch = self.batch
        tokens = batch.q_indptr[torch.tensor(spans, dtype=torch.long) + 1] - 1
        queries = replace(
            batch,
            rows=batch.rows[spans],
            kv_lens=batch.kv_lens[spans],
            q_indptr=torch.arange(len(spans) + 1, dtype=torch.int32),
            positions=batch.positions[tokens.long()],
            num_decode=len(spans),
            rows_host=[batch.rows_host[span] for span in spans],
            kv_lens_host=[batch.kv_lens_host[span] for span in spans],
            q_lens_host=[1] * len(spans),
        )
        return LastQueries(tokens, queries)


def random_paged_problem(
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    unused: float = math.nan,
) -> PagedProblem:
    """Spans with q_lens[i] new tokens of kv_lens[i] in all, over pages in random order.

    Leading spans of one token are decode spans. `unused` fills every slot that holds no earlier position.
    """
    draw = torch.Generator().manual_seed(seed)
    batch, num_pages = _batch(q_lens, kv_lens, page_size, draw)
    num_tokens = sum(q_lens)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=draw)
    pool = torch.full((2, num_pages * page_size, num_kv_heads, head_dim), unused)
    for span, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        old = batch.page_table[batch.rows_host[span], : kv_len - q_len].long()
        pool[:, old] = torch.randn(2, len(old), num_kv_heads, head_dim, generator=draw)
    pool, fused = pool.to(device, dtype), fused.to(device, dtype)
    heads = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = torch.split(fused, heads, dim=1)
    return PagedProblem(_moved(batch, device), KvLayer(k=pool[0], v=pool[1]), q, k, v, head_dim**-0.5)


def assert_no_worse(ours: Tensor, *, plain: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """|ours - exact| <= factor * |plain - exact| + the rounding noise of exact, in the largest element.

    plain: the same in the dtype of ours by the reference; exact: the same in a better dtype.
    """
    assert ours.shape == exact.shape, f"{list(ours.shape)} instead of {list(exact.shape)}"
    exact64 = exact.double()
    error = (ours.double() - exact64).abs().max().item() if ours.numel() else 0.0
    allowed = factor * (plain.double() - exact64).abs().max().item() if ours.numel() else 0.0
    noise = torch.finfo(ours.dtype).eps * exact64.abs().max().item() if ours.numel() else 0.0
    assert error <= allowed + noise, (
        f"error {error:.3e}, plain arithmetic {allowed / factor:.3e} + {noise:.3e}"
    )


def _batch(
    q_lens: Sequence[int], kv_lens: Sequence[int], page_size: int, draw: torch.Generator
) -> tuple[PagedBatch, int]:
    num_spans, width = len(q_lens), math.lcm(32, page_size)
    width *= -(-max(kv_lens, default=1) // width)
    pages_each = [-(-kv_len // page_size) for kv_len in kv_lens]
    num_pages = sum(pages_each) + 3  # some that nobody has
    order = torch.randperm(num_pages, generator=draw).tolist()
    table = torch.zeros(num_spans + 2, width, dtype=torch.int32)
    table[-1] = num_pages * page_size
    rows = torch.randperm(num_spans + 1, generator=draw)[:num_spans].tolist()
    for row, count in zip(rows, pages_each, strict=True):
        for index in range(count):
            first = order.pop() * page_size
            table[row, index * page_size : (index + 1) * page_size] = torch.arange(first, first + page_size)
    token_rows = [row for row, q_len in zip(rows, q_lens, strict=True) for _ in range(q_len)]
    spans = zip(q_lens, kv_lens, strict=True)
    positions = [position for q_len, kv_len in spans for position in range(kv_len - q_len, kv_len)]
    num_decode = next((i for i, q_len in enumerate(q_lens) if q_len != 1), num_spans)
    return PagedBatch(
        page_table=table,
        rows=_int32(rows),
        kv_lens=_int32(kv_lens),
        q_indptr=_int32([sum(q_lens[:i]) for i in range(num_spans + 1)]),
        positions=_int32(positions),
        write_slots=table[torch.tensor(token_rows, dtype=torch.long), torch.tensor(positions).long()],
        num_decode=num_decode,
        max_q_len=max(q_lens, default=0),
        max_kv_len=max(kv_lens, default=0),
        page_size=page_size,
        rows_host=rows,
        kv_lens_host=list(kv_lens),
        q_lens_host=list(q_lens),
    ), num_pages + 1  # and the dummy page


def _moved(batch: PagedBatch, device: torch.device | str) -> PagedBatch:
    return PagedBatch(
        page_table=batch.page_table.to(device),
        rows=batch.rows.to(device),
        kv_lens=batch.kv_lens.to(device),
        q_indptr=batch.q_indptr.to(device),
        positions=batch.positions.to(device),
        write_slots=batch.write_slots.to(device),
        num_decode=batch.num_decode,
        max_q_len=batch.max_q_len,
        max_kv_len=batch.max_kv_len,
        page_size=batch.page_size,
        rows_host=batch.rows_host,
        kv_lens_host=batch.kv_lens_host,
        q_lens_host=batch.q_lens_host,
    )


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
