"""A step's columns as the index tensors that every layer reads: built in numpy, moved in one copy.

Owns no state. No loop over tokens or spans here: a step of 256 sequences has 400 us of host time in all.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.batch import LastQueries, PagedBatch
from worker.execution.page_table import PageTable
from worker.execution.token_pool import TokenPool
from worker.scheduling.step import Step

HostColumn = NDArray[np.int32]
ALIGNMENT = 4  # int32 entries


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What the forward pass and the sampler need of a step, on the device."""

    batch: PagedBatch
    input_ids: Tensor  # int32 [num_tokens]
    sampled_tokens: Tensor  # int32 [num_sampled]: index of the last token of each sampled span
    sampled_rows: Tensor  # int32 [num_sampled]
    sampled_ends: Tensor  # int32 [num_sampled]: absolute position of the token to be sampled
    last: LastQueries | None  # the sampled tokens; None where they are all that the step has
    # On the host:
    q_indptr_host: HostColumn  # [num_spans + 1]
    sampled_rows_host: HostColumn  # [num_sampled]
    sampled_ends_host: HostColumn  # [num_sampled]


@dataclass(frozen=True, slots=True)
class HostColumns:
    """A step before the copy, all int32. Names as in PagedBatch and StepTensors."""

    rows: HostColumn
    kv_lens: HostColumn
    q_indptr: HostColumn
    token_rows: HostColumn  # row of each token
    positions: HostColumn
    sampled_tokens: HostColumn
    sampled_rows: HostColumn
    sampled_ends: HostColumn
    sampled_positions: HostColumn  # of the sampled tokens
    sampled_indptr: HostColumn  # [num_sampled + 1]: a span each

    @classmethod
    def of(cls, step: Step) -> "HostColumns":
        """Expands spans to tokens."""
        rows, starts, ends = (np.frombuffer(c, dtype=np.int32) for c in (step.rows, step.starts, step.ends))
        lens = ends - starts
        q_indptr = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lens, out=q_indptr[1:])
        first = np.repeat(starts - q_indptr[:-1], lens)  # position minus index, constant over a span
        sampled = np.asarray(step.sampled, dtype=np.int64)
        return cls(
            rows=rows,
            kv_lens=ends,
            q_indptr=q_indptr,
            token_rows=np.repeat(rows, lens),
            positions=first + np.arange(q_indptr[-1], dtype=np.int32),
            sampled_tokens=q_indptr[sampled + 1] - 1,
            sampled_rows=rows[sampled],
            sampled_ends=ends[sampled],
            sampled_positions=ends[sampled] - 1,
            sampled_indptr=np.arange(len(sampled) + 1, dtype=np.int32),
        )

    def to_device(self, device: torch.device) -> dict[str, Tensor]:
        """All columns by name, moved in one copy and cut apart there.

        Each begins at a multiple of 16 bytes: kernels are compiled for aligned addresses, and would be
        compiled anew for others.
        """
        columns = {name: getattr(self, name) for name in self.__slots__}
        rooms = [-(-len(column) // ALIGNMENT) * ALIGNMENT for column in columns.values()]
        host = torch.empty(sum(rooms), dtype=torch.int32, pin_memory=device.type == "cuda")
        for part, column in zip(torch.split(host, rooms), columns.values(), strict=True):
            part.numpy()[: len(column)] = column
        parts = torch.split(host.to(device, non_blocking=True), rooms)
        return {
            name: part[: len(column)] for (name, column), part in zip(columns.items(), parts, strict=True)
        }


def build_step_tensors(step: Step, page_table: PageTable, token_pool: TokenPool) -> StepTensors:
    """Step → device. Reads slots and ids through the tables, so both must hold this step's pages already."""
    host = HostColumns.of(step)
    moved = host.to_device(page_table.slots.device)
    q_lens = np.diff(host.q_indptr)
    batch = PagedBatch(
        page_table=page_table.slots,
        rows=moved["rows"],
        kv_lens=moved["kv_lens"],
        q_indptr=moved["q_indptr"],
        positions=moved["positions"],
        write_slots=page_table.slots[moved["token_rows"], moved["positions"]],
        num_decode=step.num_decode,
        max_q_len=int(q_lens.max(initial=0)),
        max_kv_len=int(host.kv_lens.max(initial=0)),
        page_size=page_table.page_size,
        rows_host=host.rows.tolist(),
        kv_lens_host=host.kv_lens.tolist(),
        q_lens_host=q_lens.tolist(),
    )
    return StepTensors(
        batch=batch,
        input_ids=token_pool.read(moved["token_rows"], moved["positions"]),
        sampled_tokens=moved["sampled_tokens"],
        sampled_rows=moved["sampled_rows"],
        sampled_ends=moved["sampled_ends"],
        last=_last_queries(host, moved, batch) if len(host.sampled_tokens) < len(host.positions) else None,
        q_indptr_host=host.q_indptr,
        sampled_rows_host=host.sampled_rows,
        sampled_ends_host=host.sampled_ends,
    )


def _last_queries(host: HostColumns, moved: dict[str, Tensor], batch: PagedBatch) -> LastQueries:
    ends = host.sampled_ends.tolist()
    spans = PagedBatch(
        page_table=batch.page_table,
        rows=moved["sampled_rows"],
        kv_lens=moved["sampled_ends"],
        q_indptr=moved["sampled_indptr"],
        positions=moved["sampled_positions"],
        write_slots=moved["sampled_positions"],  # not read
        num_decode=len(ends),
        max_q_len=min(1, len(ends)),
        max_kv_len=max(ends, default=0),
        page_size=batch.page_size,
        rows_host=host.sampled_rows.tolist(),
        kv_lens_host=ends,
        q_lens_host=[1] * len(ends),
    )
    return LastQueries(moved["sampled_tokens"], spans)
