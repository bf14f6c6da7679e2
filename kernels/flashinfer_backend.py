"""The backend `flashinfer`: prefill by FlashInfer (FlashAttention-3 on Hopper), decode by it or by another.

FlashInfer plans on the host: each step, lengths become a schedule that is copied to the device before the
first layer (kernels/flashinfer_plans.py). Page numbers are read from the page table on the device. Imported
only where it is asked for or known to be there.
"""

from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.backend import GraphBackend, StaticDecode, StaticPrefill
from kernels.batch import HostSpans, KvLayer, PagedBatch
from kernels.flashinfer_decode import FlashInferStaticDecode
from kernels.flashinfer_plans import Planner
from kernels.page_indices import page_indices
from kernels.store_kv import store_kv

HEAD_DIMS = (64, 128, 256)
LEAST_PAIRS = 4 << 20
"""Pairs of query and key from which FlashInfer's prefill gains more than its plan costs; figures in
docs/kernels/backends.md."""
LEAST_QUERIES = 512  # a span, on average: its tiles are 128 queries of one head
_INT32 = torch.int32


class FlashInferBackend:
    """A GraphBackend. K and V stay where they lie: [num_pages, page_size, num_kv_heads, head_dim] views."""

    name = "flashinfer"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        beside: GraphBackend | None = None,
        least_pairs: int = LEAST_PAIRS,
        prefill: str = "auto",
        library: Any = None,
    ) -> None:
        """`beside`: who decodes, and takes prefill of fewer than `least_pairs` pairs of query and key; none:
        FlashInfer does all. `prefill`: fa2, fa3, or auto for the best one of the device, compiled if need
        be. `library`: the flashinfer module.

        Raises ValueError for shapes that FlashInfer does not have.
        """
        check_shape(head_dim, dtype, device)
        self._planner = Planner(
            library or import_module("flashinfer"),
            (num_heads, num_kv_heads, head_dim),
            page_size,
            dtype,
            device,
        )
        self._beside = beside
        self._least_pairs = least_pairs
        self._takes_all: GraphBackend | None = None  # the other one, where it takes the whole step
        if beside is not None:
            self.name = f"flashinfer+{beside.name}"
        self._prefill = self._planner.prefill_wrapper(prefill)
        self._decode: StaticDecode | None = None  # of mixed steps, for the page table last seen
        self._decode_table: Tensor | None = None
        self._capacity = 0  # spans that its buffers hold
        self._batch: PagedBatch | None = None
        self._has_prefill = False

    def plan(self, batch: PagedBatch) -> None:
        """Schedules both parts of the step; page numbers on the device."""
        self._batch = batch
        self._takes_all = None if is_worth(batch, self._least_pairs) else self._beside
        if self._takes_all is not None:
            self._takes_all.plan(batch)
            return
        count = batch.num_decode
        if count:
            decode = self._decode_for(batch.page_table, count)
            decode.prepare(count, batch.kv_lens_host[:count])
            decode.begin(batch.rows[:count], batch.kv_lens[:count])
        self._has_prefill = len(batch.q_lens_host) > count
        if self._has_prefill:
            self._plan_prefill(batch)

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Stores, then attends."""
        assert self._batch is not None, "run before plan"
        store_kv(kv, self._batch.write_slots, k, v)
        return self.attend(kv, q.contiguous(), scale=scale)

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """Attends to what is stored: decode spans first, as the batch is ordered."""
        batch = self._batch
        assert batch is not None, "attend before plan"
        if self._takes_all is not None:
            return self._takes_all.attend(kv, q, scale=scale, out=out)
        count = batch.num_decode
        if not self._has_prefill:
            assert self._decode is not None, "a batch without spans"
            attended = self._decode.attend(kv, q, scale=scale)
            return attended if out is None else out.copy_(attended)
        if out is None:
            out = torch.empty_like(q)
        self._prefill.run(q[count:], self._planner.pages(kv), q_scale=scale, out=out[count:])
        if count:
            assert self._decode is not None, "planned above"
            out[:count] = self._decode.attend(kv, q[:count], scale=scale)
        return out

    def static_decode(self, page_table: Tensor, max_batch: int, *, is_beside: bool = False) -> StaticDecode:
        """See kernels.backend.GraphBackend."""
        if self._beside is not None:
            return self._beside.static_decode(page_table, max_batch, is_beside=is_beside)
        return FlashInferStaticDecode(self._planner, page_table, max_batch, is_captured=True)

    def static_prefill(self, page_table: Tensor, max_tokens: int) -> StaticPrefill | None:
        """See kernels.backend.GraphBackend: the other one's, for the steps that it gets whole."""
        inner = self._beside.static_prefill(page_table, max_tokens) if self._beside is not None else None
        return ShortPrefill(inner, self._least_pairs) if inner is not None else None

    def _decode_for(self, page_table: Tensor, count: int) -> StaticDecode:
        """Decode attention of mixed steps. Batches past the largest so far get buffers of twice the size."""
        if self._decode is None or self._decode_table is not page_table or count > self._capacity:
            self._capacity = max(16, 1 << (count - 1).bit_length())
            self._decode_table = page_table
            if self._beside is not None:
                self._decode = self._beside.static_decode(page_table, self._capacity)
            else:
                self._decode = FlashInferStaticDecode(
                    self._planner, page_table, self._capacity, is_captured=False
                )
        return self._decode

    def _plan_prefill(self, batch: PagedBatch) -> None:
        planner, first = self._planner, batch.num_decode
        kv_lens, q_lens = batch.kv_lens_host[first:], batch.q_lens_host[first:]
        q_indptr = torch.tensor([0, *accumulate(q_lens)], dtype=_INT32)
        indptr, last_page = planner.page_columns(kv_lens)
        indices = torch.empty(int(indptr[-1]), dtype=_INT32, device=planner.device)
        rows = batch.rows[first:]
        page_indices(batch.page_table, rows, planner.to_device(indptr), indices, planner.page_size)
        with planner.plans.piece() as piece:
            self._prefill._pin_memory_int_workspace_buffer = piece
            self._prefill.plan(
                q_indptr,
                indptr,
                indices,
                last_page,
                *planner.shape,
                planner.page_size,
                causal=True,
                sm_scale=1.0,
                q_data_type=planner.dtype,
                kv_data_type=planner.dtype,
            )


class ShortPrefill:
    """A StaticPrefill without the steps that are worth FlashInfer's plan."""

    def __init__(self, inner: StaticPrefill, least_pairs: int) -> None:
        self._inner = inner
        self._least_pairs = least_pairs
        self.words = inner.words

    def num_words(self, size: int) -> int:
        """See StaticPrefill."""
        return self._inner.num_words(size)

    def num_parts(self, spans: HostSpans) -> int:
        """See StaticPrefill."""
        return 0 if is_worth(spans, self._least_pairs) else self._inner.num_parts(spans)

    def fill(self, spans: HostSpans, size: int, into: NDArray[np.int32]) -> None:
        """See StaticPrefill."""
        self._inner.fill(spans, size, into)

    def prepare(self, batch: PagedBatch, size: int) -> None:
        """See StaticPrefill."""
        self._inner.prepare(batch, size)

    def attend(self, kv: KvLayer, q: Tensor, out: Tensor, *, scale: float, is_split: bool) -> None:
        """See StaticPrefill."""
        self._inner.attend(kv, q, out, scale=scale, is_split=is_split)


def is_worth(batch: HostSpans, least_pairs: int) -> bool:
    """Whether the prefill spans of a step are long enough for FlashInfer."""
    q_lens, kv_lens = batch.q_lens_host[batch.num_decode :], batch.kv_lens_host[batch.num_decode :]
    if least_pairs == 0:
        return True
    pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(q_lens, kv_lens, strict=True))
    return pairs >= least_pairs and sum(q_lens) >= LEAST_QUERIES * len(q_lens)


def check_shape(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError that names what FlashInfer cannot do here, and what it can."""
    if device.type != "cuda":
        raise ValueError(f"flashinfer needs a CUDA device, not {device}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim}: flashinfer exists for {HEAD_DIMS}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{dtype}: flashinfer is used with bfloat16 and float16 pages")


def is_installed() -> bool:
    """Whether the package is there; imports nothing."""
    return find_spec("flashinfer") is not None


def compiled_kernels(head_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Which of FlashInfer's kernel families for this shape are compiled already; compiles nothing.

    fa2: decode, and prefill anywhere. fa3: prefill on Hopper. Compiling one takes a minute or two of nvcc.
    """
    modules = import_module("flashinfer.jit.attention.modules")
    shape = (dtype, dtype, dtype, _INT32, head_dim, head_dim, 0, False, False, False)
    families = ("fa2", "fa3")
    return tuple(f for f in families if bool(modules.gen_batch_prefill_module(f, *shape).is_compiled))


def prefill_family(device: torch.device) -> str:
    """The fastest family for prefill on this device."""
    return "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
