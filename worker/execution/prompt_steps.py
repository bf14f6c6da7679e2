"""Steps of a few short prompts: one message to the device, graphs, one message back.

A lone prompt on an idle machine waits for its first token, and the host's launches were longer than what a
small model's device computes. So whatever such a step needs is put into pinned memory, one kernel reads it,
two graphs follow (the network as far as the last layer's K and V, then that layer, head and draw of what is
sampled), and one kernel leaves the results where the host reads them. Owns the buffers and the graphs of what
is sampled; the network's are those of PromptGraphs. Which steps these are: prompts alone, as many tokens and
spans as a whole graph holds, no special row (special_rows.py) and none that is scored.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.plan_buffers import new_event
from kernels.prompt_step import (
    BLOCK,
    COLUMN_ROWS,
    COLUMNS,
    MESSAGE_LINES,
    NO_ENTRY,
    PAGE_IDS,
    PAGE_INDEXES,
    PAGE_ROWS,
    REST,
    REST_WORDS,
    RESULT_LINES,
    SAMPLED_ENDS,
    SAMPLED_ROWS,
    SAMPLED_TOKENS,
    TOKEN_IDS,
    TOKEN_POSITIONS,
    TOKEN_ROWS,
    WORDS,
    message_room,
    read_prompts,
    write_prompt_results,
)
from kernels.sample import SampleScratch, sample
from kernels.sample_columns import NUM_COLUMNS, SampleColumns, SampleRow, matrix_of
from kernels.static_prefill import MAX_SPANS
from worker.execution.page_table import PageTable
from worker.execution.prompt_graphs import PromptGraphs
from worker.execution.step_buffers import BufferShapes, StepBuffer, StepBuffers, StepOutcome
from worker.execution.token_pool import TokenPool
from worker.execution.whole_sizes import WholeSize
from worker.model.fused import FusedModel
from worker.scheduling.step import RowStart, Step

TOKEN_ROOM = 4096
"""Known tokens of rows that start: prompts with what is cached of them. More are sent before the message."""

Message = NDArray[np.int32]


class Spans(NamedTuple):
    """See kernels.batch.HostSpans."""

    rows_host: Sequence[int]
    kv_lens_host: Sequence[int]
    q_lens_host: Sequence[int]
    num_decode: int


class PromptSteps:
    """`run` launches a step, where it is one of these."""

    def __init__(
        self,
        graphs: PromptGraphs,
        model: FusedModel,
        page_table: PageTable,
        token_pool: TokenPool,
        columns: SampleColumns,
        scratch: SampleScratch,
        *,
        capture: bool,
    ) -> None:
        device = page_table.slots.device
        self._graphs = graphs
        self._model = model
        self._page_table = page_table
        self._token_pool = token_pool
        self._columns = columns
        self._scratch = scratch
        self._is_finite = scratch.is_finite.view(torch.int8)
        num_words = graphs.static.words.shape[0] if graphs.static is not None else 0
        self._room = message_room(TOKEN_ROOM, num_words)
        shapes = BufferShapes((MESSAGE_LINES, self._room), (RESULT_LINES, MAX_SPANS))
        is_cuda = device.type == "cuda"
        self._buffers = StepBuffers(shapes, lambda: new_event(device), is_pinned=is_cuda)
        self._sampled = torch.zeros(3, MAX_SPANS, dtype=torch.int32, device=device)
        self._max_sampled = min(MAX_SPANS, scratch.ids.shape[0])
        # By number of sampled tokens, and whether any is filtered.
        self._heads: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._captures = capture and is_cuda

    def run(self, step: Step, starts: Sequence[SampleRow], *, with_filters: bool) -> StepOutcome | None:
        """Queues a step; None, and nothing is queued, where it needs another way.

        starts: how each of step.row_starts is sampled; `with_filters`: whether a sampled row has any. Page
        copies must be queued already; no row may be special or scored.
        """
        q_lens = [end - start for start, end in zip(step.starts, step.ends, strict=True)]
        spans = Spans(step.rows, step.ends, q_lens, step.num_decode)
        whole = self._whole_of(step, spans)
        if whole is None:
            return None
        with self._buffers.next() as buffer:
            count = self._fill(buffer.batch_columns, step, spans, starts, whole.num_tokens)
            self._launch(buffer, count, whole, [step.ends[span] for span in step.sampled], with_filters)
        return StepOutcome(buffer, MAX_SPANS)

    def run_bodies(self) -> None:
        """A step of nobody through every kernel: for compiling them beforehand."""
        if self._graphs.static is None:
            return
        with self._buffers.next() as buffer:
            into, rest = buffer.batch_columns, buffer.batch_columns[REST]
            into[:], into[WORDS], rest[SAMPLED_TOKENS:SAMPLED_ROWS] = NO_ENTRY, 0, 0
            rest[SAMPLED_ROWS:SAMPLED_ENDS], rest[SAMPLED_ENDS:COLUMN_ROWS] = self._page_table.dummy_row, 1
            size = min(self._graphs.whole_sizes)
            counts = sorted({1, min(2, self._max_sampled), self._max_sampled})  # 1 has kernels of its own
            for num_sampled, with_filters in product(counts, (False, True)):
                self._launch(buffer, BLOCK, WholeSize(size, False), [1] * num_sampled, with_filters)
            self._launch(buffer, BLOCK, WholeSize(size, True), [], False)

    def capture_all(self) -> None:
        """Captures the heads, the largest first; nothing where graphs are off."""
        if not self._captures or self._graphs.static is None:
            return
        self.run_bodies()  # what the graphs record has run once
        for count, with_filters in product(range(self._max_sampled, 0, -1), (False, True)):
            self._graphs.prepare_finish([1] * count)
            head = self._graphs.captured(partial(self._head_body, count, with_filters))
            self._heads[count, with_filters] = head

    def close(self) -> None:
        """Lets go of the graphs; waits for the steps in flight."""
        self._buffers.close()
        self._heads.clear()

    def _whole_of(self, step: Step, spans: Spans) -> WholeSize | None:
        if step.num_decode or len(step.rows) > self._max_sampled:
            return None
        return self._graphs.whole_size(spans, step.num_tokens)

    def _fill(self, into: Message, step: Step, spans: Spans, starts: Sequence[SampleRow], size: int) -> int:
        """Writes the message; how many entries the device is to read."""
        static = self._graphs.static
        assert static is not None, "there is a size"
        static.fill(spans, size, into[WORDS])
        num_tokens = self._fill_tokens(into, step.row_starts)
        num_pages = self._fill_pages(into, step)
        num_words = static.num_words(size)
        count = -(-max(num_tokens, num_pages, num_words, REST_WORDS) // BLOCK) * BLOCK
        into[TOKEN_ROWS, num_tokens:count], into[PAGE_ROWS, num_pages:count] = NO_ENTRY, NO_ENTRY
        self._fill_sampled(into[REST], step, spans.q_lens_host)
        _fill_columns(into[REST], step.row_starts, starts)
        return count

    def _fill_tokens(self, into: Message, starts: Sequence[RowStart]) -> int:
        if sum(len(start.token_ids) for start in starts) > self._room:
            self._token_pool.start_rows(starts)
            return 0
        at = 0
        for start in starts:
            end = at + len(start.token_ids)
            into[TOKEN_ROWS, at:end] = start.row
            into[TOKEN_POSITIONS, at:end] = np.arange(end - at, dtype=np.int32)
            into[TOKEN_IDS, at:end] = start.token_ids
            at = end
        return at

    def _fill_pages(self, into: Message, step: Step) -> int:
        count = len(step.new_page_ids)
        pages = (step.new_page_rows, step.new_page_indexes, step.new_page_ids)
        if count > self._room:
            self._page_table.write_pages(*pages)
            return 0
        if count:
            into[PAGE_ROWS, :count], into[PAGE_INDEXES, :count], into[PAGE_IDS, :count] = pages
        return count

    @staticmethod
    def _fill_sampled(rest: Message, step: Step, q_lens: Sequence[int]) -> None:
        ends = list(accumulate(q_lens))
        for at, span in enumerate(step.sampled):
            rest[SAMPLED_TOKENS + at] = ends[span] - 1
            rest[SAMPLED_ROWS + at] = step.rows[span]
            rest[SAMPLED_ENDS + at] = step.ends[span]

    def _launch(
        self, buffer: StepBuffer, count: int, whole: WholeSize, ends: Sequence[int], with_filters: bool
    ) -> None:
        static, table, ids = self._graphs.static, self._page_table, self._token_pool.ids
        assert static is not None, "there is a size"
        into = (table.slots, ids, self._columns.matrix, static.words, self._sampled)
        read_prompts(buffer.batch, *into, count, page_size=table.page_size)
        self._graphs.run_read(ids, whole)
        if ends:
            self._run_head(ends, with_filters)
        flags = (self._is_finite, self._graphs.is_broken)
        write_prompt_results(self._scratch.ids, *flags, static.words, buffer.results)

    def _run_head(self, ends: Sequence[int], with_filters: bool) -> None:
        self._graphs.prepare_finish(ends)
        head = self._heads.get((len(ends), with_filters))
        if head is not None:
            head.replay()
        else:
            self._head_body(len(ends), with_filters)

    def _head_body(self, count: int, with_filters: bool) -> None:
        tokens, rows, ends = self._sampled[:, :count]
        logits = self._model.logits(self._graphs.finish_read(tokens, rows, ends))
        where = (rows, ends, self._columns, self._scratch, self._model.config.vocab_size)
        sample(logits, *where, with_filters=with_filters, token_pool=self._token_pool.ids)


def _fill_columns(rest: Message, starts: Sequence[RowStart], values: Sequence[SampleRow]) -> None:
    rows, count = rest[COLUMN_ROWS:COLUMNS], len(starts)
    rows[:count], rows[count:] = [start.row for start in starts], NO_ENTRY
    if count:
        rest[COLUMNS:REST_WORDS].reshape(NUM_COLUMNS, MAX_SPANS)[:, :count] = matrix_of(values)
