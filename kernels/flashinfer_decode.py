"""FlashInfer's decode attention over buffers that stay where they are: inside graphs and outside.

A graph is replayed only after a plan for the lengths of that very replay, laid out as it was at the capture:
the launches of a graph read the schedule at the places, and in the sizes, that they were recorded with.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.flashinfer_plans import Planner
from kernels.page_indices import page_indices

_INT32 = torch.int32


class StalePlanError(RuntimeError):
    """A plan would not fit the graph that was captured: a replay would read another layout."""


class FlashInferStaticDecode:
    """See kernels.backend.StaticDecode: one wrapper for each captured size, over shared buffers.

    Without capture, one wrapper for all sizes.
    """

    def __init__(self, planner: Planner, page_table: Tensor, max_batch: int, *, is_captured: bool) -> None:
        self._planner = planner
        self._page_table = page_table
        self._is_captured = is_captured
        device, max_pages = planner.device, -(-page_table.shape[1] // planner.page_size)
        self._indptr = torch.zeros(max_batch + 1, dtype=_INT32, device=device)
        self._last_page = torch.zeros(max_batch, dtype=_INT32, device=device)
        self._indices = torch.zeros(max_batch * max_pages, dtype=_INT32, device=device)
        self._wrappers: dict[int, Any] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}  # of the schedule, by captured size
        self._size = 0

    def prepare(self, size: int, kv_lens: Sequence[int]) -> None:
        """Plans for these lengths. Raises StalePlanError where the plan does not fit the captured one."""
        planner, wrapper = self._planner, self._wrapper(size)
        indptr, last_page = planner.page_columns([*kv_lens, *[1] * (size - len(kv_lens))])
        if not self._is_captured:
            self._indptr[: size + 1].copy_(indptr, non_blocking=True)
        with planner.plans.piece() as piece:
            wrapper._pin_memory_int_workspace_buffer = piece
            wrapper.plan(
                indptr,
                self._indices if not self._is_captured else self._indices[:0],  # filled by `begin`
                last_page,
                *planner.shape,
                planner.page_size,
                sm_scale=1.0,
                q_data_type=planner.dtype,
                kv_data_type=planner.dtype,
            )
        self._size = size
        if self._is_captured:
            layout = tuple(int(value) for value in wrapper._plan_info)
            captured = self._layouts.setdefault(size, layout)
            if layout != captured:
                raise StalePlanError(f"a plan for {size} rows is laid out as {layout}, not as {captured}")

    def begin(self, rows: Tensor, kv_lens: Tensor) -> None:
        """Reads the page numbers of the rows."""
        size = rows.shape[0]
        assert size == self._size, f"prepared for {self._size} rows, not for {size}"
        indptr = self._indptr[: size + 1]
        page_indices(self._page_table, rows, indptr, self._indices, self._planner.page_size)

    def attend(self, kv: KvLayer, q: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """One layer."""
        attended: Tensor = self._wrapper(self._size).run(q, self._planner.pages(kv), q_scale=scale, out=out)
        return attended

    def _wrapper(self, size: int) -> Any:
        key = size if self._is_captured else 0
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            buffers: dict[str, Any] = {}
            if self._is_captured:
                buffers = {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": self._indptr[: size + 1],
                    "paged_kv_indices_buffer": self._indices,
                    "paged_kv_last_page_len_buffer": self._last_page[:size],
                }
            wrapper = self._wrappers[key] = self._planner.decode_wrapper(**buffers)
        return wrapper
