"""The historical PagedAttention kernel, executed in NumPy thread by thread: a document that runs.

Attention of one query token per sequence over a cache of blocks, as vLLM computed it after Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023. Vocabulary
and data layout are those of vLLM's description of its kernel (a historical document; the sources were
csrc/attention/attention_kernels.cuh, paged_attention_v1.cu and paged_attention_v2.cu). "Block" is its
word for a page. It is slow on purpose: every address is computed per lane and every reduction goes
through the shuffles and the shared memory that a GPU would use, so that each number can be checked.

    grid      (num_heads, num_seqs, max_num_partitions): a thread block is one head, sequence, partition
    warp      32 lanes; takes whole blocks of the context, round robin
    QK        a thread group multiplies the query with one key token; K in registers, q in shared memory
    softmax   two passes over fp32 logits in shared memory: qk_max, then exp_sum
    LV        a lane owns tokens (columns) and head positions (rows) of V; sums over lanes, then warps

Constants and mapping: shape.py. Cache layouts: cache_layout.py. One thread block: thread_block.py.
"""

import numpy as np

from kernels.paged_cuda.shape import KernelShape
from kernels.paged_cuda.thread_block import SUM_GUARD, Array, KernelInputs, KernelOutputs, ThreadBlock


def launch(
    shape: KernelShape, inputs: KernelInputs, block_type: type[ThreadBlock] = ThreadBlock
) -> KernelOutputs:
    """Runs the grid (num_heads, num_seqs, max_num_partitions). Unwritten output stays NaN."""
    check_inputs(shape, inputs)
    num_seqs, num_heads, _ = inputs.q.shape
    max_num_partitions = shape.num_partitions(int(inputs.context_lens.max()))
    grid = (num_seqs, num_heads, max_num_partitions)
    outputs = KernelOutputs(
        out=np.full((*grid, shape.head_size), np.nan, inputs.q.dtype),
        max_logits=np.full(grid, np.nan, np.float32),
        exp_sums=np.full(grid, np.nan, np.float32),
    )
    for seq_idx, head_idx, partition_idx in np.ndindex(grid):
        block_type(shape, inputs, head_idx, seq_idx, partition_idx).run(outputs)
    return outputs


def reduce_partitions(shape: KernelShape, inputs: KernelInputs, parts: KernelOutputs) -> Array:
    """Second kernel, grid (num_heads, num_seqs): merges partitions. [num_seqs, num_heads, head_size]."""
    num_seqs, num_heads, _, head_size = parts.out.shape
    out = np.empty((num_seqs, num_heads, head_size), parts.out.dtype)
    for seq_idx, head_idx in np.ndindex(num_seqs, num_heads):
        count = shape.num_partitions(int(inputs.context_lens[seq_idx]))
        part_out = parts.out[seq_idx, head_idx, :count]
        if count == 1:
            out[seq_idx, head_idx] = part_out[0]
            continue
        part_max = parts.max_logits[seq_idx, head_idx, :count]
        sums = parts.exp_sums[seq_idx, head_idx, :count] * np.exp(part_max - part_max.max())
        weights = sums / (sums.sum(dtype=np.float32) + SUM_GUARD)
        out[seq_idx, head_idx] = (part_out.astype(np.float32) * weights[:, None]).sum(axis=0)
    return out


def paged_attention_v1(shape: KernelShape, inputs: KernelInputs) -> Array:
    """One thread block per head and sequence, however long the context. [num_seqs, num_heads, head_size]."""
    assert shape.partition_size == 0, "v1 does not partition the context"
    return launch(shape, inputs).out[:, :, 0]


def paged_attention_v2(shape: KernelShape, inputs: KernelInputs) -> Array:
    """The context in partitions, side by side, then merged. [num_seqs, num_heads, head_size]."""
    assert shape.partition_size > 0, "v2 partitions the context"
    return reduce_partitions(shape, inputs, launch(shape, inputs))


def check_inputs(shape: KernelShape, inputs: KernelInputs) -> None:
    """Raises ValueError that names the array that does not fit."""
    num_seqs, num_heads, head_size = inputs.q.shape
    num_blocks, num_kv_heads = inputs.k_cache.shape[:2]
    expected = {
        "q": (inputs.q.shape, (num_seqs, num_heads, shape.head_size)),
        "k_cache": (
            inputs.k_cache.shape,
            (num_blocks, num_kv_heads, shape.head_size // shape.x, shape.block_size, shape.x),
        ),
        "v_cache": (inputs.v_cache.shape, (num_blocks, num_kv_heads, shape.head_size, shape.block_size)),
        "context_lens": (inputs.context_lens.shape, (num_seqs,)),
    }
    for name, (actual, wanted) in expected.items():
        if actual != wanted:
            raise ValueError(f"{name} has shape {actual}, the kernel needs {wanted}")
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, not a multiple of the {num_kv_heads} of k_cache")
    if inputs.q.strides[1:] != (head_size * inputs.q.itemsize, inputs.q.itemsize):
        raise ValueError(f"q has strides {inputs.q.strides}: heads of one sequence must be contiguous")
    if not inputs.q.itemsize == inputs.k_cache.itemsize == inputs.v_cache.itemsize == shape.itemsize:
        raise ValueError(f"q, k_cache and v_cache must have elements of {shape.itemsize} bytes")
    most = inputs.physical_blocks.shape[1] * shape.block_size
    if not (inputs.context_lens >= 1).all() or not (inputs.context_lens <= most).all():
        raise ValueError(f"context_lens must be in 1..{most}, the room of physical_blocks")
