"""Decode steps as CUDA graphs, one per batch size: tables in, sampled tokens out, in one replay.

Owns the static buffers that the graphs read and the graphs themselves. Padding rows point at the dummy row,
which feeds token 0 and writes the dummy page. The host sends rows and lengths; ids, positions and slots are
read from the tables on the device, and sampled ids go back into the token pool there, so the next step can be
launched before this one's result is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.backend import GraphBackend
from kernels.batch import KvLayer
from kernels.decode_inputs import decode_inputs
from kernels.sample import SampleScratch, make_scratch, sample
from kernels.sample_columns import SampleColumns
from worker.execution.decode_buffers import capture_sizes, padded_size
from worker.model.fused import FusedModel

WARM_UPS = 2  # before a capture: compiles kernels and lets the libraries allocate


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """What a decode step reads and writes besides its batch; all live as long as the runner."""

    page_table: Tensor  # int32 [max_running + 1, width]
    token_ids: Tensor  # int32 [max_running + 1, width]
    kv: Sequence[KvLayer]
    columns: SampleColumns
    dummy_row: int


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
        self._columns = torch.empty(2, max_batch, dtype=torch.int32, device=device)  # rows, kv_lens
        self._columns[0] = tables.dummy_row
        self._columns[1] = 1
        self._positions = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._slots = torch.zeros(max_batch, dtype=torch.int32, device=device)
        width, dtype = model.embedding.shape[1], model.embedding.dtype
        self._hidden = torch.zeros(max_batch, width, dtype=dtype, device=device)
        self._decode = backend.static_decode(tables.page_table, max_batch)
        self._scratch: SampleScratch = make_scratch(max_batch, config.vocab_size, device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._captures = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self.replays = 0

    def fits(self, batch_size: int) -> bool:
        """Whether some captured size holds the batch."""
        return padded_size(batch_size, self.sizes) is not None

    def capture_all(self) -> None:
        """Captures every size without filters, the largest first; nothing where graphs are off."""
        for size in self.sizes if self._captures else []:
            self._graph(size, with_filters=False)

    def prepare(self, rows: Sequence[int], kv_lens: Sequence[int], size: int) -> None:
        """Sends a batch, padded to `size`. Every entry is overwritten: nothing of older batches is left."""
        is_pinned = self._columns.device.type == "cuda"
        # A fresh pinned buffer each step: torch hands it out again only after the copy that reads it.
        host = torch.empty(2, size, dtype=torch.int32, pin_memory=is_pinned)
        into = host.numpy()
        into[0, len(rows) :] = self._tables.dummy_row
        into[1, len(rows) :] = 1
        into[0, : len(rows)] = np.asarray(rows, dtype=np.int32)
        into[1, : len(rows)] = np.asarray(kv_lens, dtype=np.int32)
        self._columns[:, :size].copy_(host, non_blocking=True)
        self._decode.prepare(size, kv_lens)

    def run(
        self, rows: Sequence[int], kv_lens: Sequence[int], *, with_filters: bool
    ) -> tuple[Tensor, Tensor]:
        """Queues one decode step; ids int32 [n] and is_finite bool [n], overwritten by the next run."""
        size = padded_size(len(rows), self.sizes)
        assert size is not None, f"no graph holds {len(rows)} rows"
        if self._captures:
            graph = self._graph(size, with_filters)  # before prepare: a capture runs over padding alone
            self.prepare(rows, kv_lens, size)
            graph.replay()
            self.replays += 1
        else:
            self.prepare(rows, kv_lens, size)
            self.body(size, with_filters)
        return self._scratch.ids[: len(rows)], self._scratch.is_finite[: len(rows)]

    def body(self, size: int, with_filters: bool) -> None:
        """One step over the static buffers, eagerly: what a graph records."""
        rows, kv_lens = self._columns[0, :size], self._columns[1, :size]
        positions, slots, hidden = self._positions[:size], self._slots[:size], self._hidden[:size]
        tables = self._tables
        inputs = (tables.page_table, tables.token_ids, self._model.embedding)
        decode_inputs(rows, kv_lens, *inputs, positions, slots, hidden)
        self._decode.begin(rows, kv_lens)

        def attend(kv: KvLayer, q: Tensor) -> Tensor:
            return self._decode.attend(kv, q, scale=self._scale)

        last = self._model.forward(hidden, positions, slots, tables.kv, attend)
        logits = self._model.logits(last)
        vocab, pool = self._model.config.vocab_size, tables.token_ids
        where = (rows, kv_lens, tables.columns, self._scratch, vocab)
        sample(logits, *where, with_filters=with_filters, token_pool=pool)

    def _graph(self, size: int, with_filters: bool) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get((size, with_filters))
        if graph is None:
            graph = self._graphs[size, with_filters] = self._capture(size, with_filters)
        return graph

    def _capture(self, size: int, with_filters: bool) -> torch.cuda.CUDAGraph:
        self.prepare([], [], size)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.body(size, with_filters)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self.body(size, with_filters)
        return graph
