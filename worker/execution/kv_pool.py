"""K and V of all layers in one allocation, viewed by slot; how many pages fit.

Owns the memory of the pages. Knows nothing of who holds a page, of sequences or of tokens.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.cpu.memory import empty_tensor
from kernels.fp8 import E4M3, LARGEST, NAN_BYTE
from worker.execution.on_the_way import to_device
from worker.scheduling.step import PageCopy

DUMMY_CANARY = -7.0e4
"""What poison mode writes into the dummy page; finite in bf16, absurd as a key or value (fp16: -inf)."""

KvScales = Sequence[tuple[float, float]]
"""(k_scale, v_scale) of each layer of an fp8 pool, see kernels.batch.KvLayer; empty: all are 1."""


def local_kv_heads(num_kv_heads: int, tp_size: int) -> int:
    """KV heads of one rank: an even share, or one replicated head when there are more ranks than heads."""
    if num_kv_heads % tp_size == 0:
        return num_kv_heads // tp_size
    if tp_size % num_kv_heads == 0:
        return 1
    raise ValueError(f"{num_kv_heads} KV heads cannot be shared evenly among {tp_size} ranks")


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return empty_tensor(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def bytes_per_page(
    *, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of K and V of one page over all layers."""
    return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


def pages_that_fit(
    *, memory_ratio: float, free_bytes: int, model_bytes: int, page_bytes: int, step_bytes: int = 0
) -> int:
    """Pages to manage beside a model, of the memory that was free before the model was loaded.

    At least `step_bytes` are left for steps, whatever the ratio says. The dummy page is taken off first.
    Raises ValueError when not even one page fits.
    """
    usable = min(memory_ratio * free_bytes, free_bytes - step_bytes)
    num_pages = int(usable - model_bytes) // page_bytes - 1
    if num_pages < 1:
        raise ValueError(
            f"no room for one page of {page_bytes} bytes: {memory_ratio:.2f} of {free_bytes} free bytes, "
            f"less {model_bytes} of the model, {step_bytes} left for steps"
        )
    return num_pages


class KvPool:
    """`num_pages` managed pages and, behind them, the dummy page that nobody is ever given.

    On a CPU the memory is not touched until a slot is written: a large pool costs what is used of it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
        scales: KvScales = (),
    ) -> None:
        shape = (2, num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.is_poisoned = poison
        # [2 (K, V), layer, page, token in page, KV head of this rank, head_dim]
        self.buffer = _empty(shape, dtype, device)
        # Bytes of fp8 pages are moved and filled as such: not every device has these operations for fp8.
        self._storage = self.buffer.view(torch.uint8) if dtype == E4M3 else self.buffer
        self._poison_value = NAN_BYTE if dtype == E4M3 else math.nan
        if poison:
            self._storage.fill_(self._poison_value)
        # Padding rows read the dummy page, so it must hold numbers from the start.
        self.buffer[:, :, num_pages] = self._canary if poison else 0.0
        self._scales = tuple(scales) or ((1.0, 1.0),) * num_layers
        self.layers = [self._view_by_slot(layer) for layer in range(num_layers)]

    @property
    def num_slots(self) -> int:
        """Slots of the managed pages; also the first slot of the dummy page."""
        return self.num_pages * self.page_size

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies whole pages, all layers at once; every source is read before any target is written."""
        if not copies:
            return
        sources = self._page_indexes([copy.source for copy in copies])
        targets = self._page_indexes([copy.target for copy in copies])
        self._storage.index_copy_(2, targets, self._storage.index_select(2, sources))

    def poison_pages(self, pages: Sequence[int]) -> None:
        """Fills freed pages with NaN, so that whoever still reads them shows. For poison mode."""
        if pages:
            self._storage.index_fill_(2, self._page_indexes(pages), self._poison_value)

    def damaged_dummy_slots(self) -> list[int]:
        """Offsets in the dummy page whose canary is gone. For poison mode; padding may write offset 0."""
        page = self.buffer[:, :, self.num_pages].float()
        intact = (
            (page == torch.tensor(self._canary).to(self.buffer.dtype).float())
            .all(dim=0)
            .all(dim=0)
            .flatten(1)
            .all(dim=1)
        )
        return (~intact).nonzero().flatten().tolist()

    @property
    def _canary(self) -> float:
        return -LARGEST if self.buffer.dtype == E4M3 else DUMMY_CANARY

    def _view_by_slot(self, layer: int) -> KvLayer:
        _, _, num_pages, page_size, num_heads, head_dim = self.buffer.shape
        slots = (num_pages * page_size, num_heads, head_dim)
        # view() and not reshape(): it fails rather than copies.
        k, v = self.buffer[0, layer].view(slots), self.buffer[1, layer].view(slots)
        return KvLayer(k, v, *self._scales[layer])

    def _page_indexes(self, pages: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(pages, dtype=torch.int64), self.buffer.device)
