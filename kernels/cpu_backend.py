"""The backend `cpu`: attention in C++ over the flat slot view, or in plain torch where it cannot be built.

Owns the choice between the two, made once and logged by the library's loader. The C++ wants K and V in fp32:
a pool of another dtype goes through torch.
"""

import torch
from torch import Tensor

from kernels import reference
from kernels.batch import KvLayer, PagedBatch
from kernels.checks import check_attention_inputs
from kernels.cpu.library import CpuLibrary, cpu_library
from kernels.fp8 import read_slots

_HEAD_DIM_MULTIPLE = 8


class CpuBackend:
    """An AttentionBackend for processors."""

    name = "cpu"

    def __init__(self, library: CpuLibrary | None = None, *, compiled: bool = True) -> None:
        self.library = (library or cpu_library()) if compiled else None
        self._batch: PagedBatch | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether the C++ is in use."""
        return self.library is not None

    def plan(self, batch: PagedBatch) -> None:
        """Keeps the batch, and follows torch's number of threads."""
        self._batch = batch
        if self.library is not None:
            self.library.use_torch_threads()

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Stores, then attends."""
        batch = self._batch
        assert batch is not None, "run before plan"
        check_attention_inputs(batch, kv, q, k, v)
        library = self.library
        if library is None or kv.k.dtype != torch.float32 or q.shape[-1] % _HEAD_DIM_MULTIPLE != 0:
            reference.store_kv(k, v, kv, batch.write_slots)
            return torch_attention(q, kv, batch, scale=scale)
        library.store(_by_token(k), _by_token(v), kv, batch.write_slots)
        return library.attention(_by_token(q), kv, batch, scale)


def torch_attention(q: Tensor, kv: KvLayer, batch: PagedBatch, *, scale: float) -> Tensor:
    """Decode spans in one batch, prefill spans one by one; shapes as in AttentionBackend.run."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_decode = batch.num_decode
    if num_decode:
        out[:num_decode] = _decode(q[:num_decode], kv, batch, scale)
    first = num_decode
    for span in range(num_decode, len(batch.q_lens_host)):
        queries = slice(first, first + batch.q_lens_host[span])
        first = queries.stop
        slots = batch.page_table[batch.rows_host[span], : batch.kv_lens_host[span]].long()
        k, v = read_slots(kv.k, slots, kv.k_scale), read_slots(kv.v, slots, kv.v_scale)
        out[queries] = reference.attention(q[queries], k, v, batch.positions[queries], scale=scale)
    return out


def _decode(q: Tensor, kv: KvLayer, batch: PagedBatch, scale: float) -> Tensor:
    """One query per span, all spans padded to the longest: [num_decode, num_heads, head_dim]."""
    num_spans, num_heads, head_dim = q.shape
    lens = batch.kv_lens[:num_spans]
    width = max(batch.kv_lens_host[:num_spans])
    is_past = torch.arange(width, device=q.device) >= lens[:, None]  # [num_spans, width]
    slots = batch.page_table[batch.rows[:num_spans].long(), :width].long()
    slots = slots.masked_fill(is_past, 0)  # entries past the length are anything
    # What lies in slots past the length may be NaN, which no weight of 0 can mend.
    k = read_slots(kv.k, slots, kv.k_scale).float().masked_fill(is_past[:, :, None, None], 0.0)
    v = read_slots(kv.v, slots, kv.v_scale).float().masked_fill(is_past[:, :, None, None], 0.0)
    num_kv_heads = k.shape[2]
    grouped = q.float().view(num_spans, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("shgd,sthd->shgt", grouped, k) * scale
    weights = scores.masked_fill(is_past[:, None, None, :], float("-inf")).softmax(dim=-1)
    return torch.einsum("shgt,sthd->shgd", weights, v).reshape(q.shape).to(q.dtype)


def _by_token(x: Tensor) -> Tensor:
    """x [n, heads, head_dim] as it is when each token's part is contiguous, which slices of a product are."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
