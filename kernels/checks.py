"""Shapes, dtypes, devices and strides: a sentence that names the tensor, what is expected and what came.

Raises ValueError. Knows no operation but attention, whose inputs all backends share.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.batch import KvLayer, PagedBatch


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None],
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
) -> None:
    """Refuses another shape (None: any size), dtype or device, and rows that are not contiguous."""
    fits = tensor.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted_shape = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted_shape}], not {list(tensor.shape)}")
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if allowed is not None and tensor.dtype not in allowed:
        wanted_dtype = " or ".join(str(one) for one in allowed)
        raise ValueError(f"{name} must be {wanted_dtype}, not {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, not on {tensor.device}")
    if tensor.dim() and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous along its last axis, not with stride {tensor.stride(-1)}"
        )


def check_attention_inputs(batch: PagedBatch, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses tensors that do not fit one another. Cheap: it runs once a layer."""
    num_tokens, device = batch.positions.shape[0], kv.k.device
    if kv.k.dim() != 3 or kv.k.shape != kv.v.shape or not (kv.k.is_contiguous() and kv.v.is_contiguous()):
        raise ValueError(
            "kv.k and kv.v must be contiguous and alike, [num_slots, num_kv_heads, head_dim], "
            f"not {list(kv.k.shape)} and {list(kv.v.shape)}"
        )
    _, num_kv_heads, head_dim = kv.k.shape
    check_tensor("q", q, shape=(num_tokens, None, head_dim), device=device)
    if q.shape[1] % num_kv_heads != 0:
        raise ValueError(f"q must have a multiple of {num_kv_heads} heads, not {q.shape[1]}")
    check_tensor("k", k, shape=(num_tokens, num_kv_heads, head_dim), device=device, dtype=q.dtype)
    check_tensor("v", v, shape=(num_tokens, num_kv_heads, head_dim), device=device, dtype=q.dtype)


def check_batch(batch: PagedBatch) -> None:
    """Refuses index tensors that contradict one another or reach past a row. Reads them all."""
    num_spans, num_tokens = batch.rows.shape[0], batch.positions.shape[0]
    for name, tensor, size in (
        ("rows", batch.rows, num_spans),
        ("kv_lens", batch.kv_lens, num_spans),
        ("q_indptr", batch.q_indptr, num_spans + 1),
        ("positions", batch.positions, num_tokens),
        ("write_slots", batch.write_slots, num_tokens),
    ):
        check_tensor(name, tensor, shape=(size,), dtype=torch.int32)
    num_rows, width = batch.page_table.shape
    if num_spans and not 0 <= int(batch.rows.min()) <= int(batch.rows.max()) < num_rows:
        raise ValueError(f"rows must lie in 0 .. {num_rows - 1}, not {batch.rows.tolist()}")
    if num_spans and int(batch.kv_lens.max()) > width:
        raise ValueError(f"kv_lens must be at most {width}, not {int(batch.kv_lens.max())}")
    q_lens = batch.q_indptr.diff()
    if int(batch.q_indptr[0]) != 0 or int(batch.q_indptr[-1]) != num_tokens or bool((q_lens < 0).any()):
        raise ValueError(f"q_indptr must rise from 0 to {num_tokens}, not {batch.q_indptr.tolist()}")
    if bool((q_lens[: batch.num_decode] != 1).any()):
        raise ValueError(f"the first {batch.num_decode} spans must have one token, not {q_lens.tolist()}")
