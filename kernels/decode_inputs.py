"""What a decode step reads of the tables: ids, positions, slots and the embedding rows, in one launch.

Bytes: one embedding row per sequence, and a few integers. Runs inside the CUDA graph, so the host sends rows
and lengths only.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.dependent_launch import dependent_launch


def decode_inputs(
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    token_ids: Tensor,
    embedding: Tensor,
    positions: Tensor,
    slots: Tensor,
    hidden: Tensor,
) -> None:
    """Fills positions, slots int32 [num_spans] and hidden [num_spans, width] for each row's last token.

    rows, kv_lens int32 [num_spans]: the token at position kv_lens[i] - 1 of row rows[i] is computed;
    page_table, token_ids int32 [num_rows, row_width]; embedding [vocab, width]. Padding points at the
    dummy row.
    """
    width = embedding.shape[1]
    assert page_table.stride(0) == token_ids.stride(0), "tables of one shape"
    _inputs_kernel[(rows.shape[0],)](
        rows,
        kv_lens,
        page_table,
        token_ids,
        embedding,
        positions,
        slots,
        hidden,
        page_table.stride(0),
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        PDL=dependent_launch(rows.device)["PDL"],
        num_warps=4,
    )


@triton.jit
def _inputs_kernel(
    rows,
    kv_lens,
    page_table,
    token_ids,
    embedding,
    positions,
    slots,
    hidden,
    row_width,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    span = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + span).to(tl.int64)
    position = tl.load(kv_lens + span) - 1
    at = row * row_width + position
    tl.store(positions + span, position)
    tl.store(slots + span, tl.load(page_table + at))
    token = tl.load(token_ids + at).to(tl.int64)
    dims = tl.arange(0, WIDTH_PADDED)
    mask = dims < WIDTH
    tl.store(hidden + span * WIDTH + dims, tl.load(embedding + token * WIDTH + dims, mask=mask), mask=mask)
