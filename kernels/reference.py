"""Every operation in plain torch: the specification of the kernels.

Clear before fast; accumulates in fp32; runs on any device. Each function allocates its result, except
the two that write pages (store_kv, copy_pages). Owns the backend `reference`.
"""

import torch
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch
from kernels.fp8 import read_slots, to_pages


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis, in fp32, rounded once to x's dtype.

    x [..., width], weight [width]. Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    exact = x.float()
    scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
    return (exact * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm: (rms_norm(residual + x), residual + x). All [..., width]."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: turns element i of a head with element i + head_dim / 2.

    x [num_tokens, num_heads, head_dim], heads may be strided; cos, sin fp32 [num_tokens, head_dim / 2],
    one row per token. In fp32, rounded once. Source: Su et al., arXiv:2104.09864, halves not pairs.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Gated activation: silu(first half) * second half. gate_up [num_tokens, 2 * width] -> [.., width]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def store_kv(k: Tensor, v: Tensor, kv: KvLayer, write_slots: Tensor) -> None:
    """Copies row i of k and v to slot write_slots[i]; every other slot keeps its bits.

    k, v [num_tokens, num_kv_heads, head_dim], rows may be slices of a fused product;
    write_slots int32 or int64 [num_tokens], distinct outside the dummy page. A pool of e4m3 gets k / k_scale
    and v / v_scale, see kernels.fp8.
    """
    slots = write_slots.long()
    kv.k[slots] = to_pages(k, kv.k.dtype, kv.k_scale)
    kv.v[slots] = to_pages(v, kv.v.dtype, kv.v_scale)


def gather_rows(page_table: Tensor, rows: Tensor, kv_lens: Tensor) -> Tensor:
    """Slots of all tokens of all spans, one after another: int32 [sum(kv_lens)]."""
    parts = [page_table[row, :length] for row, length in zip(rows.tolist(), kv_lens.tolist(), strict=True)]
    return torch.cat(parts) if parts else page_table.new_empty(0)


def paged_attention(q: Tensor, kv: KvLayer, batch: PagedBatch, *, scale: float) -> Tensor:
    """Causal attention of each span's queries over its row's slots, span by span.

    q and result [num_tokens, num_heads, head_dim]. The query at position p of its sequence sees the
    slots of positions 0..p. Reads no other slot: what lies there, NaN included, cannot matter.
    """
    out = torch.empty_like(q)
    firsts, rows, lengths = batch.q_indptr.tolist(), batch.rows.tolist(), batch.kv_lens.tolist()
    for span, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        queries = slice(firsts[span], firsts[span + 1])
        slots = batch.page_table[row, :length].long()
        positions = batch.positions[queries]
        k, v = read_slots(kv.k, slots, kv.k_scale), read_slots(kv.v, slots, kv.v_scale)
        out[queries] = attention(q[queries], k, v, positions, scale=scale)
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float) -> Tensor:
    """Causal attention over one sequence's K and V in order of position.

    q and result [num_queries, num_heads, head_dim]; k, v [num_kv, num_kv_heads, head_dim]; positions
    [num_queries]: query i sees keys 0..positions[i]. Query head h reads KV head h // (heads per KV head).
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv, num_kv_heads, _ = k.shape
    grouped = q.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * scale
    visible = torch.arange(num_kv, device=q.device) <= positions[:, None]  # [num_queries, num_kv]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.float()).reshape(q.shape).to(q.dtype)


def copy_pages(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies whole pages, K and V of all layers. Targets are distinct and none is also a source.

    kv [2, num_layers, num_pages + 1, page_size, num_kv_heads, head_dim]; sources, targets int [num_copies].
    """
    kv[:, :, targets.long()] = kv[:, :, sources.long()]


class ReferenceBackend:
    """The backend `reference`: an AttentionBackend that does what the functions above say."""

    name = "reference"

    def __init__(self) -> None:
        self._batch: PagedBatch | None = None

    def plan(self, batch: PagedBatch) -> None:
        """Keeps the batch; there is nothing to prepare."""
        self._batch = batch

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Stores, then attends."""
        assert self._batch is not None, "run before plan"
        store_kv(k, v, kv, self._batch.write_slots)
        return paged_attention(q, kv, self._batch, scale=scale)
