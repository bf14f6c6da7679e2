"""Step to device: ids and slots are read through the tables, for the whole batch at once."""

from array import array
from collections.abc import Sequence

import torch

from kernels.checks import check_batch
from worker.execution.page_table import PageTable
from worker.execution.step_tensors import build_step_tensors
from worker.execution.token_pool import TokenPool
from worker.ids import Row, SequenceId
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart, Step

CPU = torch.device("cpu")


def tables(page_size: int = 4) -> tuple[PageTable, TokenPool]:
    table = PageTable(max_running=4, max_context=40, num_pages=40, page_size=page_size, device=CPU)
    return table, TokenPool(num_rows=5, width=table.slots.shape[1], device=CPU)


def step(spans: Sequence[tuple[int, int, int]], sampled: Sequence[int], num_decode: int) -> Step:
    rows, starts, ends = zip(*spans, strict=True)
    return Step(
        number=1,
        sequence_ids=[SequenceId(row) for row in rows],
        rows=array("i", rows),
        starts=array("i", starts),
        ends=array("i", ends),
        sampled=sampled,
        num_decode=num_decode,
    )


def row_start(row: int, token_ids: Sequence[int]) -> RowStart:
    return RowStart(Row(row), SequenceId(row), 0, token_ids, len(token_ids), SamplingParams(), frozenset())


def test_a_mixed_step_reads_ids_and_slots_through_the_tables() -> None:
    """M-03, M-01: positions are start .. end - 1 of each span, out slots page_table[row, position]."""
    table, pool = tables()
    table.write_pages([3, 3, 0, 1, 1, 1], [0, 1, 0, 0, 1, 2], [9, 4, 2, 7, 30, 31])
    pool.start_rows([row_start(3, [10, 11, 12, 13, 14]), row_start(0, [20, 21]), row_start(1, range(50, 60))])
    built = build_step_tensors(step([(3, 4, 5), (0, 1, 2), (1, 2, 9)], [0, 1], 2), table, pool)
    batch = built.batch
    check_batch(batch)
    assert batch.positions.tolist() == [4, 1, 2, 3, 4, 5, 6, 7, 8]
    assert built.input_ids.tolist() == [14, 21, 52, 53, 54, 55, 56, 57, 58]
    assert batch.write_slots.tolist() == [16, 9, 30, 31, 120, 121, 122, 123, 124]
    assert batch.rows.tolist() == batch.rows_host == [3, 0, 1]
    assert batch.kv_lens.tolist() == batch.kv_lens_host == [5, 2, 9]
    assert batch.q_indptr.tolist() == [0, 1, 2, 9]
    assert batch.q_lens_host == [1, 1, 7]
    assert (batch.num_decode, batch.max_q_len, batch.max_kv_len) == (2, 7, 9)


def test_sampled_tokens_are_spans_of_their_own_where_a_step_has_others() -> None:
    """What the last layer is asked for: none of an inner chunk, and no list where every token is sampled."""
    table, pool = tables()
    built = build_step_tensors(step([(3, 4, 5), (0, 1, 4), (1, 2, 9)], [0, 2], 1), table, pool)
    assert built.last is not None
    check_batch(built.last.batch)
    assert built.last.tokens.tolist() == [0, 10]
    batch = built.last.batch
    assert batch.rows.tolist() == batch.rows_host == [3, 1]
    assert batch.kv_lens.tolist() == batch.kv_lens_host == [5, 9]
    assert batch.positions.tolist() == [4, 8]
    assert batch.q_indptr.tolist() == [0, 1, 2]
    assert (batch.num_decode, batch.max_q_len, batch.max_kv_len, batch.q_lens_host) == (2, 1, 9, [1, 1])
    nothing = build_step_tensors(step([(1, 2, 9)], [], 0), table, pool).last
    assert nothing is not None
    assert (nothing.tokens.tolist(), nothing.batch.num_decode) == ([], 0)
    assert build_step_tensors(step([(3, 4, 5), (0, 1, 2)], [0, 1], 2), table, pool).last is None


def test_only_sampled_spans_have_a_token_to_sample() -> None:
    """B064: an inner chunk samples nothing."""
    table, pool = tables()
    built = build_step_tensors(step([(2, 0, 3), (0, 5, 9)], [1], 0), table, pool)
    assert built.sampled_tokens.tolist() == [6]
    assert built.sampled_rows.tolist() == built.sampled_rows_host.tolist() == [0]
    assert built.sampled_ends.tolist() == built.sampled_ends_host.tolist() == [9]


def test_a_step_without_samples_is_whole() -> None:
    table, pool = tables()
    built = build_step_tensors(step([(2, 0, 3)], [], 0), table, pool)
    assert built.sampled_tokens.tolist() == []
    assert built.batch.positions.tolist() == [0, 1, 2]


def test_index_tensors_are_parts_of_one_copy() -> None:
    """One transfer a step: all columns lie in one storage."""
    table, pool = tables()
    batch = build_step_tensors(step([(2, 0, 3), (1, 0, 4)], [0, 1], 0), table, pool).batch
    columns = (batch.rows, batch.kv_lens, batch.q_indptr, batch.positions)
    assert len({column.untyped_storage().data_ptr() for column in columns}) == 1


def test_write_slots_are_unique_and_their_rows_distinct() -> None:
    """Step to PagedBatch: no slot is written twice, q_indptr never falls."""
    table, pool = tables(page_size=1)
    for row in range(4):
        table.write_pages([row] * 10, range(10), range(row * 10, row * 10 + 10))
    batch = build_step_tensors(
        step([(0, 9, 10), (3, 4, 5), (1, 0, 10), (2, 3, 7)], [0], 2), table, pool
    ).batch
    slots = batch.write_slots.tolist()
    assert len(set(slots)) == len(slots) == 16
    assert (batch.q_indptr.diff() > 0).all()


def test_the_token_pool_is_shaped_like_the_page_table_and_starts_as_zeros() -> None:
    """M-04, M-25: the dummy row feeds token 0."""
    table, pool = tables()
    assert pool.ids.shape == table.slots.shape
    assert not pool.ids.any()


def test_a_sampled_id_is_the_next_steps_input() -> None:
    """M-04: written at [row, end] on the device, read back without the host."""
    table, pool = tables()
    pool.start_rows([row_start(1, [5, 6, 7])])
    pool.write(torch.tensor([1]), torch.tensor([3]), torch.tensor([99]))
    built = build_step_tensors(step([(1, 3, 4)], [0], 1), table, pool)
    assert built.input_ids.tolist() == [99]


def test_a_token_past_the_last_column_lands_where_nobody_reads() -> None:
    """M-04: the last column of the dummy row, and no other sequence's tokens."""
    _, pool = tables()
    width = pool.ids.shape[1]
    before = pool.ids.clone()
    pool.write(torch.tensor([1, 2]), torch.tensor([width, width - 1]), torch.tensor([7, 8]))
    before[4, width - 1], before[2, width - 1] = 7, 8
    assert torch.equal(pool.ids, before)


def test_rows_are_started_with_one_write_for_all() -> None:
    _, pool = tables()
    pool.start_rows([row_start(0, [1, 2]), row_start(3, []), row_start(2, [3])])
    assert pool.ids[0, :2].tolist() == [1, 2]
    assert pool.ids[2, 0] == 3
    pool.start_rows([])


def test_every_index_tensor_begins_at_a_multiple_of_16_bytes() -> None:
    """A kernel is compiled for the alignment of its arguments: odd batches must not bring a new one."""
    table, pool = tables()
    built = build_step_tensors(step([(2, 0, 3), (1, 0, 5), (0, 0, 2)], [0, 2], 0), table, pool)
    batch = built.batch
    columns = (batch.rows, batch.kv_lens, batch.q_indptr, batch.positions, built.sampled_rows)
    first = min(column.untyped_storage().data_ptr() for column in columns)
    assert [(column.data_ptr() - first) % 16 for column in columns] == [0] * 5
