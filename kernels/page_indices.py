"""Page numbers of the spans of a batch, one after another: what kernels that think in pages are told.

Bytes: 8 per page. The first slot of a page over the page size is its number.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def page_indices(page_table: Tensor, rows: Tensor, indptr: Tensor, out: Tensor, page_size: int) -> None:
    """Writes the first indptr[i + 1] - indptr[i] pages of row rows[i] to out[indptr[i] :].

    page_table int32 [num_rows, width]: slots; rows int32 [n]; indptr int32 [n + 1]; out int32, large enough.
    """
    num_spans = rows.shape[0]
    if num_spans == 0:
        return
    _page_indices_kernel[(num_spans,)](
        page_table, rows, indptr, out, page_table.stride(0), PAGE=page_size, BLOCK=_BLOCK
    )


@triton.jit
def _page_indices_kernel(page_table, rows, indptr, out, width, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    span = tl.program_id(0)
    first = tl.load(indptr + span)
    count = tl.load(indptr + span + 1) - first
    row = page_table + tl.load(rows + span).to(tl.int64) * width
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        slots = tl.load(row + at * PAGE, mask=inside, other=0)
        tl.store(out + first + at, slots // PAGE, mask=inside)
