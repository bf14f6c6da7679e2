"""Decode steps as CUDA graphs, one per batch size: tables in, sampled tokens out, in one replay.

Owns the static buffers that the graphs read and the graphs themselves. Padding rows point at the dummy row,
which feeds token 0 and writes the dummy page. The host leaves rows, lengths and new pages in pinned memory,
where one kernel before the graph reads them, and one behind it leaves the results: no copy stands between two
graphs. Ids, positions and slots are read from the tables on the device, and sampled ids go back into the
token pool there, so the next step can be launched before this one's result is known.

All sizes are captured before the first request, so that none waits for a capture; those with filters when a
batch first needs them. A batch always runs in the graph of its own size: the library picks its products by
size, and no answer depends on what was captured before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.backend import GraphBackend, StaticDecode
from kernels.batch import KvLayer
from kernels.decode_inputs import decode_inputs
from kernels.dependent_launch import dependent_launches
from kernels.plan_buffers import new_event
from kernels.product_decode import ProductDecode
from kernels.sample import SampleScratch, make_scratch, sample
from kernels.sample_columns import SampleColumns
from kernels.zero_copy import (
    KV_LENS,
    NO_PAGE,
    PAGE_IDS,
    PAGE_INDEXES,
    PAGE_ROWS,
    ROWS,
    padded_room,
    read_batch,
    write_results,
)
from worker.execution.graph_sizes import capture_sizes, kernel_sizes, padded_size
from worker.execution.row_groups import Branches, group_slices
from worker.execution.step_buffers import StepBuffer, StepBuffers, StepOutcome, decode_shapes
from worker.model.fused import AttendProduct, FusedModel

PRODUCT_ROWS = 64
"""Of a batch whose attention takes the qkv product: as many as have products of our own. With 128 a tile's
own norm and rotation cost more than the launch that they save (docs/kernels/decode-attention.md)."""
WARM_UPS = 1  # before a capture: compiles and loads kernels, and lets the libraries allocate


@dataclass(frozen=True, slots=True)
class NewPages:
    """Page ids[j] becomes page number indexes[j] of row rows[j] before the step: Step.new_page_*."""

    rows: Sequence[int] = ()
    indexes: Sequence[int] = ()
    ids: Sequence[int] = ()


NO_PAGES = NewPages()


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """What a decode step reads and writes besides its batch; all live as long as the runner."""

    page_table: Tensor  # int32 [max_running + 1, width]
    token_ids: Tensor  # int32 [max_running + 1, width]
    kv: Sequence[KvLayer]
    columns: SampleColumns
    dummy_row: int
    page_size: int


class DecodeGraphs:
    """Graphs of the captured sizes; `run` replays the smallest that holds a batch."""

    def __init__(
        self,
        model: FusedModel,
        backend: GraphBackend,
        tables: DecodeTables,
        *,
        max_batch: int,
        scale: float,
        capture: bool = True,
    ) -> None:
        device = tables.page_table.device
        config = model.config
        self._model = model
        self._tables = tables
        self._scale = scale
        self.sizes = capture_sizes(max_batch)
        self.page_room = room = padded_room(max_batch)
        self._rows = torch.full((room,), tables.dummy_row, dtype=torch.int32, device=device)
        self._kv_lens = torch.ones(room, dtype=torch.int32, device=device)
        is_pinned = device.type == "cuda"
        self._buffers = StepBuffers(decode_shapes(max_batch), lambda: new_event(device), is_pinned=is_pinned)
        self._positions = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._slots = torch.zeros(max_batch, dtype=torch.int32, device=device)
        width, dtype = model.embedding.shape[1], model.embedding.dtype
        self._hidden = torch.zeros(max_batch, width, dtype=dtype, device=device)
        self._decode = backend.static_decode(tables.page_table, max_batch)
        # With e4m3 weights one row may go by products of its own: two would take longer than attention gains.
        self._least_size = (
            self._decode.least_size if isinstance(self._decode, ProductDecode) and model.is_own(2) else None
        )
        most = max(map(model.num_groups, self.sizes)) if isinstance(self._decode, ProductDecode) else 1
        groups = range(most if most > 1 else 0)
        self._of_groups = [
            backend.static_decode(tables.page_table, 2 * PRODUCT_ROWS, is_beside=True) for _ in groups
        ]
        self._parts = {size: self._parts_of(size) for size in self.sizes}
        self._branches = Branches(most, device)
        self._scratch: SampleScratch = make_scratch(max_batch, config.vocab_size, device)
        self._is_finite = self._scratch.is_finite.view(torch.int8)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._forward_graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by size, up to the logits
        self._logits: Tensor | None = None  # [max_batch, at least vocab_size], of the last of these
        self._captures = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        # One for all captures: the library keeps a workspace for every stream that it has seen.
        self._stream = torch.cuda.Stream(device) if self._captures else None  # type: ignore[no-untyped-call]
        self.replays = 0

    def fits(self, batch_size: int) -> bool:
        """Whether some captured size holds the batch."""
        return padded_size(batch_size, self.sizes) is not None

    @property
    def captures(self) -> bool:
        """Whether there are graphs at all; else the same bodies run eagerly."""
        return self._captures

    def capture_all(self) -> None:
        """Captures every size without filters, the largest first; nothing where graphs are off."""
        for size in self.sizes if self._captures else []:
            self._capture(size, with_filters=False)

    def run_bodies(self) -> None:
        """Steps that meet every kernel of all sizes, and draws with filters of large and of small ones, whose
        launches are dependent: for compiling them beforehand.
        """
        sizes = kernel_sizes(self.sizes)
        filtered = [(size, True) for size in dict.fromkeys((sizes[0], sizes[-1]))]
        for size, with_filters in filtered + [(size, False) for size in sizes]:
            with self._buffers.next() as buffer:
                self._send(buffer, [], [], size)
                self.body(size, with_filters)
                self._hand_out(buffer, size)

    def columns(self, size: int) -> tuple[Tensor, Tensor]:
        """Rows and kv_lens, int32 [size] each, of the graph of `size` rows; all sizes share the memory."""
        return self._rows[:size], self._kv_lens[:size]

    def prepare(self, rows: Sequence[int], kv_lens: Sequence[int], size: int) -> None:
        """Sends a batch, padded to `size`, with nothing behind it."""
        with self._buffers.next() as buffer:
            self._send(buffer, rows, kv_lens, size)

    def run(
        self,
        rows: Sequence[int],
        kv_lens: Sequence[int],
        *,
        with_filters: bool,
        new_pages: NewPages = NO_PAGES,
    ) -> StepOutcome:
        """Queues one decode step. new_pages: at most `page_room`."""
        size = self._size(kv_lens)
        graph = self._graph(size, with_filters) if self._captures else None  # may capture, so first
        with self._buffers.next() as buffer:
            self._send(buffer, rows, kv_lens, size, new_pages)
            if graph is not None:
                graph.replay()
                self.replays += 1
            else:
                self.body(size, with_filters)
            self._hand_out(buffer, len(rows))
        return StepOutcome(buffer, len(rows))

    def run_forward(
        self, rows: Sequence[int], kv_lens: Sequence[int], *, new_pages: NewPages = NO_PAGES
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queues one decode step without its draw: logits; rows and kv_lens on the device, as many as rows.

        All three are overwritten by the next run. For steps with special rows (special_rows.py), whose draw
        is behind the graph; the first step of a size captures its graph.
        """
        count, size = len(rows), self._size(kv_lens)
        graph = self._forward_graph(size) if self._captures else None
        with self._buffers.next() as buffer:
            self._send(buffer, rows, kv_lens, size, new_pages)
        if graph is not None:
            graph.replay()
            self.replays += 1
        else:
            self.forward_body(size)
        assert self._logits is not None
        rows_there, lens_there = self.columns(size)
        return self._logits[:count], (rows_there[:count], lens_there[:count])

    def close(self) -> None:
        """Lets go of the graphs and their memory."""
        self._buffers.close()
        self._graphs.clear()
        self._forward_graphs.clear()
        self._logits = None

    def forward_body(self, size: int) -> None:
        """One step up to its logits, eagerly: what a forward graph records."""
        with dependent_launches(self._model.is_chain(size)):
            logits = self._forward(size)
        if self._logits is None:
            room = self._hidden.shape[0]
            self._logits = torch.empty(room, logits.shape[1], dtype=logits.dtype, device=logits.device)
        self._logits[:size].copy_(logits)

    def body(self, size: int, with_filters: bool) -> None:
        """One step over the static buffers, eagerly: what a graph records."""
        with dependent_launches(self._model.is_chain(size)):
            self._body(size, with_filters)

    def _body(self, size: int, with_filters: bool) -> None:
        logits, tables = self._forward(size), self._tables
        vocab, pool = self._model.config.vocab_size, tables.token_ids
        where = (*self.columns(size), tables.columns, self._scratch, vocab)
        sample(logits, *where, with_filters=with_filters, token_pool=pool)

    def _forward(self, size: int) -> Tensor:
        rows, kv_lens = self.columns(size)
        positions, slots, hidden = self._positions[:size], self._slots[:size], self._hidden[:size]
        tables = self._tables
        inputs = (tables.page_table, tables.token_ids, self._model.embedding)
        decode_inputs(rows, kv_lens, *inputs, positions, slots, hidden)
        if len(parts := self._parts[size]) > 1:
            self._branches.run([partial(self._run_group, *part, rows, kv_lens) for part in parts])
            return self._model.logits(hidden)
        self._decode.begin(rows, kv_lens)
        return self._model.decode(hidden, tables.kv, self._attention(positions, slots))

    def _parts_of(self, size: int) -> list[tuple[StaticDecode, slice]]:
        """Groups of rows that run side by side, each with its attention; or all rows."""
        count = min(self._model.num_groups(size), len(self._of_groups))
        if count <= 1:
            return [(self._decode, slice(0, size))]
        return list(zip(self._of_groups, group_slices(size, count), strict=False))

    def _run_group(self, decode: StaticDecode, at: slice, rows: Tensor, kv_lens: Tensor) -> None:
        """The layers of some rows; their logits are those of the whole step."""
        assert isinstance(decode, ProductDecode), "groups are made of these"
        with dependent_launches(False):  # what comes before it is on another stream
            decode.begin(rows[at], kv_lens[at])
        attend = partial(decode.attend_product, scale=self._scale)
        self._model.through_layers(self._hidden[at], self._tables.kv, attend)

    def _attention(self, positions: Tensor, slots: Tensor) -> AttendProduct:
        """Of one launch a layer for few rows, where the backend has that."""
        decode, scale = self._decode, self._scale
        if isinstance(decode, ProductDecode) and positions.shape[0] <= PRODUCT_ROWS:
            return partial(decode.attend_product, scale=scale)
        return self._model.stored_first(positions, slots, partial(decode.attend, scale=scale))

    def _size(self, kv_lens: Sequence[int]) -> int:
        least = 1
        if self._least_size is not None:
            least = min(self._least_size(kv_lens, self._tables.kv[0]), self.sizes[0])
        size = padded_size(max(len(kv_lens), least), self.sizes)
        assert size is not None, f"no graph holds {len(kv_lens)} rows"
        return size

    def _send(
        self,
        buffer: StepBuffer,
        rows: Sequence[int],
        kv_lens: Sequence[int],
        size: int,
        new_pages: NewPages = NO_PAGES,
    ) -> None:
        """Every entry up to `size` is overwritten, and all of new pages: nothing of older batches is left."""
        into, count, num_pages = buffer.batch_columns, len(rows), len(new_pages.ids)
        into[ROWS, :count], into[ROWS, count:size] = rows, self._tables.dummy_row
        into[KV_LENS, :count], into[KV_LENS, count:size] = kv_lens, 1
        into[PAGE_ROWS, num_pages:] = NO_PAGE
        if num_pages:
            into[PAGE_ROWS, :num_pages] = new_pages.rows
            into[PAGE_INDEXES, :num_pages] = new_pages.indexes
            into[PAGE_IDS, :num_pages] = new_pages.ids
        there = (self._tables.page_table, self._rows, self._kv_lens)
        read_batch(buffer.batch, *there, max(size, num_pages), page_size=self._tables.page_size)
        for decode, at in self._parts[size]:
            decode.prepare(at.stop - at.start, kv_lens[at])

    def _hand_out(self, buffer: StepBuffer, count: int) -> None:
        write_results(self._scratch.ids, self._is_finite, buffer.results, count)

    def _graph(self, size: int, with_filters: bool) -> torch.cuda.CUDAGraph:
        if (size, with_filters) not in self._graphs:
            self._capture(size, with_filters)
        return self._graphs[size, with_filters]

    def _forward_graph(self, size: int) -> torch.cuda.CUDAGraph:
        if size not in self._forward_graphs:
            self._forward_graphs[size] = self._captured(size, lambda: self.forward_body(size), WARM_UPS)
        return self._forward_graphs[size]

    def _capture(self, size: int, with_filters: bool) -> None:
        # Filters add a kernel that a start has loaded: where the size is known there is nothing to warm up.
        warm_ups = 0 if (size, False) in self._graphs else WARM_UPS
        graph = self._captured(size, lambda: self.body(size, with_filters), warm_ups)
        self._graphs[size, with_filters] = graph

    def _captured(self, size: int, body: Callable[[], None], warm_ups: int) -> torch.cuda.CUDAGraph:
        self.prepare([], [], size)
        stream = self._stream
        assert stream is not None, "graphs are off"
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            with self._model.shallow():
                for _ in range(warm_ups):
                    body()
            # Not torch.cuda.graph(): it waits for the device and collects garbage.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph
