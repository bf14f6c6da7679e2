"""The functions of one built library, on tensors: store, v1, v2.

Owns the binding: pointers, strides, device, stream, error codes. Knows the caches' layout, not who owns them.
"""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.checks import check_tensor
from kernels.paged_cuda.build import DEFAULT_ARCHITECTURE, Specialization, build
from kernels.paged_cuda.shape import FETCH_BYTES

PARTITION_TOKENS = 512
CONSTANTS = (
    *("head_size", "block_size", "itemsize", "num_threads", "partition_tokens", "thread_group_size", "x"),
    *("vec_size", "num_vecs_per_thread", "v_vec_size", "num_v_vecs_per_row", "num_rows_per_iter"),
    "num_rows_per_thread",
)
_SIGNATURES = {
    "paged_cuda_store": [*[c_void_p] * 5, c_int, c_int, c_int64, c_int64, c_int, c_void_p],
    "paged_cuda_v1": [*[c_void_p] * 6, *[c_int] * 5, c_int64, c_float, c_int, c_void_p],
    "paged_cuda_v2": [*[c_void_p] * 9, *[c_int] * 5, c_int64, c_float, c_int, c_void_p],
}


@dataclass(frozen=True, slots=True)
class BlockCache:
    """K and V of one layer as the document lays them out; x elements are 16 bytes."""

    k: Tensor  # [num_blocks, num_kv_heads, head_size / x, block_size, x]
    v: Tensor  # [num_blocks, num_kv_heads, head_size, block_size]


@dataclass(frozen=True, slots=True)
class Context:
    """What the sequences of a decode step attend to."""

    physical_blocks: Tensor  # int32 [>= num_seqs, max_blocks]: block number of each logical block
    lens: Tensor  # int32 [num_seqs]
    max_len: int  # no sequence is longer
    scale: float


@dataclass(frozen=True, slots=True)
class Partitions:
    """What v2 leaves for its reduce kernel. Memory of [num_seqs, num_heads, max_num_partitions] and more."""

    out: Tensor  # [capacity, head_size]
    max_logits: Tensor  # fp32 [capacity]
    exp_sums: Tensor  # fp32 [capacity]


class PagedCudaLibrary:
    """kernel.cu, compiled for one head size, block size and type."""

    def __init__(self, shape: Specialization, path: Path) -> None:
        self.shape = shape
        self.dtype: torch.dtype = getattr(torch, shape.scalar)
        self._functions = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            getattr(self._functions, name).argtypes = arguments
        self._functions.paged_cuda_error_text.restype = ctypes.c_char_p

    def constants(self) -> dict[str, int]:
        """The compile-time constants, by the names of shape.py."""
        values = (c_int * len(CONSTANTS))()
        self._functions.paged_cuda_constants(values)
        return dict(zip(CONSTANTS, values, strict=True))

    def new_cache(self, num_blocks: int, num_kv_heads: int, device: torch.device) -> BlockCache:
        """Uninitialised memory: what was never stored may be anything."""
        head_size, block_size = self.shape.head_size, self.shape.block_size
        x = FETCH_BYTES // self.dtype.itemsize
        k_shape = (num_blocks, num_kv_heads, head_size // x, block_size, x)
        return BlockCache(
            k=torch.empty(k_shape, dtype=self.dtype, device=device),
            v=torch.empty(num_blocks, num_kv_heads, head_size, block_size, dtype=self.dtype, device=device),
        )

    def new_partitions(self, capacity: int, device: torch.device) -> Partitions:
        """Scratch of v2 for `capacity` partitions: of all sequences times heads, together."""
        return Partitions(
            out=torch.empty(capacity, self.shape.head_size, dtype=self.dtype, device=device),
            max_logits=torch.empty(capacity, device=device),
            exp_sums=torch.empty(capacity, device=device),
        )

    def store(self, cache: BlockCache, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """k, v [num_tokens, num_kv_heads, head_size], any row stride; slots int32, those below 0 left out."""
        self._check_rows("k", k, cache.k.shape[1])
        self._check_rows("v", v, cache.k.shape[1])
        check_tensor("slots", slots, shape=(k.shape[0],), dtype=torch.int32, device=cache.k.device)
        self._call(
            "paged_cuda_store",
            *(k, v, cache.k, cache.v, slots, k.shape[0], k.shape[1], k.stride(0), v.stride(0)),
        )

    def v1(self, q: Tensor, cache: BlockCache, context: Context) -> Tensor:
        """One thread block per head and sequence, however long the context.

        q and result [num_seqs, num_heads, head_size]; sequences of q may be slices of a fused product.
        """
        out, q = self._begin(q, cache, context)
        self._call(
            "paged_cuda_v1",
            *(out, q, cache.k, cache.v, context.physical_blocks, context.lens),
            *(q.shape[0], q.shape[1], cache.k.shape[1], context.max_len, context.physical_blocks.stride(0)),
            *(q.stride(0), context.scale),
        )
        return out

    def v2(self, q: Tensor, cache: BlockCache, context: Context, partitions: Partitions) -> Tensor:
        """The context in partitions, side by side, merged by a second kernel. Shapes as in v1."""
        out, q = self._begin(q, cache, context)
        count = num_partitions(context.max_len)
        assert partitions.out.numel() >= q.numel() * count, "scratch was made for fewer partitions"
        self._call(
            "paged_cuda_v2",
            *(out, partitions.out, partitions.max_logits, partitions.exp_sums, q, cache.k, cache.v),
            *(context.physical_blocks, context.lens),
            *(q.shape[0], q.shape[1], cache.k.shape[1], count, context.physical_blocks.stride(0)),
            *(q.stride(0), context.scale),
        )
        return out

    def _begin(self, q: Tensor, cache: BlockCache, context: Context) -> tuple[Tensor, Tensor]:
        num_seqs, num_heads, _ = q.shape
        self._check_rows("q", q, num_heads)
        if num_heads % cache.k.shape[1]:
            raise ValueError(
                f"q has {num_heads} heads, not a multiple of the {cache.k.shape[1]} of the cache"
            )
        check_tensor("context.lens", context.lens, shape=(num_seqs,), dtype=torch.int32, device=q.device)
        blocks = context.physical_blocks
        if blocks.dtype != torch.int32 or blocks.shape[0] < num_seqs or blocks.stride(1) != 1:
            raise ValueError(
                f"physical_blocks must be int32 [{num_seqs}, ..], not {blocks.dtype} {blocks.shape}"
            )
        if (q.data_ptr() | q.stride(0) * q.element_size()) % FETCH_BYTES:
            q = q.contiguous()  # vecs of q are read whole
        return torch.empty_like(q, memory_format=torch.contiguous_format), q

    def _check_rows(self, name: str, rows: Tensor, num_heads: int) -> None:
        head_size = self.shape.head_size
        check_tensor(name, rows, shape=(None, num_heads, head_size), dtype=self.dtype)
        if rows.shape[1] > 1 and rows.stride(1) != head_size:
            raise ValueError(f"heads of {name} must be contiguous, not {rows.stride(1)} elements apart")

    def _call(self, name: str, *arguments: Tensor | int | float) -> None:
        device = next(a.device for a in arguments if isinstance(a, Tensor))
        stream = torch.cuda.current_stream(device).cuda_stream
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        code = getattr(self._functions, name)(*plain, device.index or 0, stream)
        if code != 0:
            text = self._functions.paged_cuda_error_text(code).decode()
            raise RuntimeError(f"{name} could not be launched on {device}: {text}")


def num_partitions(context_len: int) -> int:
    """Partitions of v2 that a context needs."""
    return max(1, -(-context_len // PARTITION_TOKENS))


@cache
def load(shape: Specialization, architecture: str = DEFAULT_ARCHITECTURE) -> PagedCudaLibrary:
    """The library for this shape, built if it is not in the cache. Raises BuildError."""
    return PagedCudaLibrary(shape, build(shape, architecture=architecture))
