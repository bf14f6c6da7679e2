"""What FlashInfer's wrappers share: shapes, workspaces, and the memory that plans are written into.

A schedule belongs to one step in flight (kernels/plan_buffers.py): FlashInfer alone would write the next one
into the same pinned memory while the last is still being copied. Knows no attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.plan_buffers import PlanBuffers, new_event

_FLOAT_BYTES = 256 << 20  # partial results of split contexts
_INT_BYTES = 8 << 20  # a schedule; FlashInfer's own size
_PLANS_IN_FLIGHT = 6  # three a step, one for its last layer, and no more than two steps are ever queued
_INT32 = torch.int32


class Planner:
    """Makes wrappers and what their plans are given."""

    def __init__(
        self,
        library: Any,
        shape: tuple[int, int, int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._library = library
        self.shape = shape  # num_heads, num_kv_heads, head_dim
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.plans = PlanBuffers(_PLANS_IN_FLIGHT, _INT_BYTES, lambda: new_event(device))
        # Zeros: FlashInfer asks for that before first use. Steps follow one another on one stream, so all
        # wrappers may share the memory of partial results, and all decode wrappers that of the schedule.
        self._partial = torch.zeros(_FLOAT_BYTES, dtype=torch.uint8, device=device)
        self._decode_schedule = torch.zeros(_INT_BYTES, dtype=torch.uint8, device=device)

    def prefill_wrapper(self, family: str) -> Any:
        """A wrapper of its own schedule."""
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._partial, "NHD", backend=family)
        return _checked(wrapper)

    def decode_wrapper(self, **buffers: Any) -> Any:
        """A wrapper of the shared schedule. Its tensor-core kernels know every group size (B085)."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._partial, "NHD", use_tensor_cores=True, **buffers
        )
        _checked(wrapper)._int_workspace_buffer = self._decode_schedule
        return wrapper

    def page_columns(self, kv_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """On the host, int32: where each span's pages begin [n + 1], and tokens in its last page [n]."""
        lens = torch.tensor(kv_lens, dtype=_INT32)
        indptr = torch.zeros(len(kv_lens) + 1, dtype=_INT32)
        torch.cumsum((lens + self.page_size - 1) // self.page_size, 0, dtype=_INT32, out=indptr[1:])
        return indptr, (lens - 1) % self.page_size + 1

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device."""
        return host.to(self.device, non_blocking=True)

    def pages(self, kv: KvLayer) -> tuple[Tensor, Tensor]:
        """K and V by page."""
        by_page = (-1, self.page_size, *kv.k.shape[1:])
        return kv.k.view(by_page), kv.v.view(by_page)


def _checked(wrapper: Any) -> Any:
    """The wrapper, if its plan memory is where this module puts it."""
    for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
        if not hasattr(wrapper, name):
            raise RuntimeError(f"flashinfer: a wrapper without {name}; made for 0.6.12")
    return wrapper
