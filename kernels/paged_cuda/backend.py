"""The backend `paged_cuda`: decode with the historical kernel, in the cache layouts of its document.

Those layouts are not that of the slot pool, so this backend needs storage of its own: for each layer one K
and one V cache, as large as the pool's layer, made when the layer is first seen. A block there is a page
here, of the same number. New K and V are written to both: to the slot pool because prefill, which the
historical kernel does not do, reads it through kernels/paged_prefill.py, and to the caches for decode. Twice
the memory is the price of comparing; it is not the default backend of anything.

Whoever changes pages of the slot pool other than through `run` (copies a page, restores it from the host)
must call `refresh_pages`, or decode goes on with what the caches held.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch
from kernels.paged_cuda.build import HEAD_SIZES, Specialization
from kernels.paged_cuda.library import (
    PARTITION_TOKENS,
    BlockCache,
    Context,
    PagedCudaLibrary,
    Partitions,
    load,
    num_partitions,
)
from kernels.paged_cuda.shape import BLOCK_SIZES
from kernels.paged_prefill import paged_prefill
from kernels.prefill_plan import list_tiles
from kernels.store_kv import store_kv

# v1 keeps all logits of a context in shared memory, and leaves multiprocessors idle when few thread blocks
# have long contexts. Both limits are those that vLLM used with this kernel.
_MOST_TOKENS_OF_V1 = 8192
_ENOUGH_THREAD_BLOCKS = 512
_PAGES_AT_ONCE = 512  # of a conversion between layouts


@dataclass(frozen=True, slots=True)
class _Layer:
    kv: KvLayer
    cache: BlockCache


class PagedCudaBackend:
    """An AttentionBackend that owns block caches beside the slot pool.

    Choices that depend on lengths (v1 or v2, how many partitions) are taken by `plan` from max_kv_len: a CUDA
    graph must be planned with the longest context that it will be replayed with.
    """

    name = "paged_cuda"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Builds the kernel if need be. Raises ValueError for a shape it does not have, and BuildError."""
        check_shape(num_heads, num_kv_heads, head_dim, page_size, dtype, device)
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._page_size, self._device = page_size, device
        major, minor = torch.cuda.get_device_capability(device)
        shape = Specialization(head_dim, page_size, str(dtype).removeprefix("torch."))
        self.library: PagedCudaLibrary = load(shape, f"sm_{major}{minor}")
        self._layers: dict[int, _Layer] = {}  # by address of the pool's K
        self._blocks = torch.zeros(0, 0, dtype=torch.int32, device=device)  # [capacity, max_blocks]
        self._partitions: Partitions | None = None
        self._batch: PagedBatch | None = None
        self._tiles: Tensor | None = None  # int32 [num_tiles, 2]: of prefill spans

    def plan(self, batch: PagedBatch) -> None:
        """Block numbers of decode rows, tiles of prefill spans, scratch of v2."""
        if batch.page_size != self._page_size:
            raise ValueError(f"paged_cuda was made for page size {self._page_size}, not {batch.page_size}")
        self._batch = batch
        if batch.num_decode:
            self._plan_decode(batch)
        lens = [0 if i < batch.num_decode else n for i, n in enumerate(batch.q_lens_host)]
        tiles = list_tiles(lens, self._num_heads // self._num_kv_heads)
        self._tiles = torch.tensor(tiles, dtype=torch.int32).to(self._device) if tiles else None

    def run(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Stores in both layouts, then attends: decode spans first, as the batch is ordered."""
        batch = self._batch
        assert batch is not None, "run before plan"
        store_kv(kv, batch.write_slots, k, v)
        cache = self._cache_of(kv)
        self.library.store(cache, k, v, batch.write_slots)
        if self._tiles is None:
            return self._decode(q, cache, batch, scale)
        out = paged_prefill(q, kv, batch, self._tiles, scale=scale)
        if batch.num_decode:
            out[: batch.num_decode] = self._decode(q[: batch.num_decode], cache, batch, scale)
        return out

    def refresh_pages(self, page_ids: Tensor) -> None:
        """Takes these pages over from the slot pool, all layers that were seen. int [num_pages]."""
        for layer in self._layers.values():
            self._convert(layer, page_ids)

    def _plan_decode(self, batch: PagedBatch) -> None:
        count, page_size = batch.num_decode, self._page_size
        max_blocks = -(-batch.page_table.shape[1] // page_size)
        if self._blocks.shape[0] < count or self._blocks.shape[1] != max_blocks:
            capacity = 1 << (count - 1).bit_length()
            self._blocks = torch.zeros(capacity, max_blocks, dtype=torch.int32, device=self._device)
        # The first slot of a page is its number times the page size.
        first_slots = batch.page_table[:, ::page_size][batch.rows[:count].long()]
        self._blocks[:count] = first_slots // page_size
        if is_partitioned(batch.max_kv_len, count * self._num_heads):
            needed = count * self._num_heads * num_partitions(batch.max_kv_len)
            if self._partitions is None or self._partitions.max_logits.numel() < needed:
                capacity = 1 << (needed - 1).bit_length()
                self._partitions = self.library.new_partitions(capacity, self._device)

    def _decode(self, q: Tensor, cache: BlockCache, batch: PagedBatch, scale: float) -> Tensor:
        count = batch.num_decode
        context = Context(self._blocks, batch.kv_lens[:count], batch.max_kv_len, scale)
        if is_partitioned(batch.max_kv_len, count * self._num_heads):
            assert self._partitions is not None, "made by plan"
            return self.library.v2(q, cache, context, self._partitions)
        return self.library.v1(q, cache, context)

    def _cache_of(self, kv: KvLayer) -> BlockCache:
        layer = self._layers.get(kv.k.data_ptr())
        if layer is None:
            num_pages = kv.k.shape[0] // self._page_size
            cache = self.library.new_cache(num_pages, self._num_kv_heads, self._device)
            layer = self._layers[kv.k.data_ptr()] = _Layer(kv, cache)
            self._convert(layer, torch.arange(num_pages, device=self._device))
        return layer.cache

    def _convert(self, layer: _Layer, page_ids: Tensor) -> None:
        k_cache, v_cache = layer.cache.k, layer.cache.v
        _, num_kv_heads, num_splits, page_size, x = k_cache.shape
        by_page = (-1, page_size, num_kv_heads, num_splits * x)
        k_pool, v_pool = layer.kv.k.view(by_page), layer.kv.v.view(by_page)
        for part in torch.split(page_ids.to(self._device).long(), _PAGES_AT_ONCE):
            k = k_pool[part].view(-1, page_size, num_kv_heads, num_splits, x)
            k_cache[part] = k.permute(0, 2, 3, 1, 4)
            v_cache[part] = v_pool[part].permute(0, 2, 3, 1)


def is_partitioned(max_context_len: int, num_thread_blocks: int) -> bool:
    """Whether v2 is to be used: `num_thread_blocks` is what v1 would launch, heads times sequences."""
    if max_context_len > _MOST_TOKENS_OF_V1:
        return True
    return max_context_len > PARTITION_TOKENS and num_thread_blocks <= _ENOUGH_THREAD_BLOCKS


def check_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError that names what paged_cuda cannot do, and what it can."""
    if device.type != "cuda":
        raise ValueError(f"paged_cuda needs a CUDA device, not {device}")
    if page_size not in BLOCK_SIZES:
        raise ValueError(f"page size {page_size}: paged_cuda exists for {BLOCK_SIZES}")
    if head_dim not in HEAD_SIZES:
        raise ValueError(f"head_dim {head_dim}: paged_cuda exists for {HEAD_SIZES}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are not a multiple of {num_kv_heads} KV heads")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{dtype}: paged_cuda exists for float16, bfloat16 and float32")
