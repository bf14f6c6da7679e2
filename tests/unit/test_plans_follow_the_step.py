"""What a step planned is its own: the next does not overwrite it, and nothing of the last is used again."""

import random
from array import array

import pytest
import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.cpu_backend import CpuBackend
from kernels.reference import ReferenceBackend
from worker.execution.graph_sizes import capture_sizes, padded_size
from worker.execution.page_table import PageTable
from worker.execution.step_tensors import build_step_tensors
from worker.execution.token_pool import TokenPool
from worker.ids import SequenceId
from worker.scheduling.step import Step

CPU = torch.device("cpu")
PAGE_SIZE, NUM_ROWS, NUM_PAGES = 4, 8, 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def tables() -> tuple[PageTable, TokenPool]:
    table = PageTable(
        max_running=NUM_ROWS, max_context=32, num_pages=NUM_PAGES, page_size=PAGE_SIZE, device=CPU
    )
    for row in range(NUM_ROWS):
        table.write_pages([row] * 8, list(range(8)), list(range(8 * row, 8 * row + 8)))
    return table, TokenPool(num_rows=NUM_ROWS + 1, width=table.slots.shape[1], device=CPU)


def mixed_step(spans: list[tuple[int, int, int]]) -> Step:
    """Spans (row, start, end); those of one token must come first."""
    rows, starts, ends = zip(*spans, strict=True)
    return Step(
        number=1,
        sequence_ids=[SequenceId(row) for row in rows],
        rows=array("i", rows),
        starts=array("i", starts),
        ends=array("i", ends),
        sampled=range(len(spans)),
        num_decode=sum(end - start == 1 for _, start, end in spans),
    )


def filled_layer() -> KvLayer:
    draw = torch.Generator().manual_seed(1)
    shape = ((NUM_PAGES + 1) * PAGE_SIZE, KV_HEADS, HEAD_DIM)
    return KvLayer(k=torch.randn(shape, generator=draw), v=torch.randn(shape, generator=draw))


def test_the_next_step_does_not_write_where_the_last_one_still_reads() -> None:
    """H9: a step in flight keeps its index tensors while the one after it is built and copied."""
    table, pool = tables()
    first = build_step_tensors(mixed_step([(1, 4, 5), (2, 0, 9)]), table, pool)
    kept = {name: getattr(first.batch, name).clone() for name in ("rows", "kv_lens", "positions", "q_indptr")}
    kept["write_slots"] = first.batch.write_slots.clone()
    build_step_tensors(mixed_step([(5, 7, 8), (6, 0, 9)]), table, pool)
    table.write_pages([0, 1], [0, 0], [40, 41])
    for name, before in kept.items():
        assert torch.equal(getattr(first.batch, name), before), name


def test_each_scatter_has_a_staging_buffer_of_its_own() -> None:
    """H9: memory that a copy to the device may still read is never written again."""
    table, _ = tables()
    first, second = table._staging(8), table._staging(8)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("backend_type", [ReferenceBackend, CpuBackend])
def test_a_backend_that_is_planned_again_forgets_the_last_plan(
    backend_type: type[ReferenceBackend] | type[CpuBackend],
) -> None:
    """B083 on a CPU: one backend over 60 steps of other lengths and sizes equals a new one for each."""
    rng, draw = random.Random(7), torch.Generator().manual_seed(7)
    table, pool = tables()
    sizes = capture_sizes(NUM_ROWS)
    used = backend_type()
    for _ in range(60):
        rows = rng.sample(range(NUM_ROWS), rng.randrange(1, NUM_ROWS + 1))
        ends = [rng.choice([1, 3, 4, 5, 17, 32]) for _ in rows]
        size = padded_size(len(rows), sizes)
        assert size is not None
        padding = [(table.dummy_row, 0, 1)] * (size - len(rows))
        spans = [(row, end - 1, end) for row, end in zip(rows, ends, strict=True)]
        batch = build_step_tensors(mixed_step(spans + padding), table, pool).batch
        q, k, v = (
            torch.randn(size, heads, HEAD_DIM, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        results: list[Tensor] = []
        for backend in (used, ReferenceBackend()):
            backend.plan(batch)
            results.append(backend.run(filled_layer(), q, k, v, scale=0.25)[: len(rows)])
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
