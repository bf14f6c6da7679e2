"""Steps with prompts as CUDA graphs: short ones whole, others in pieces between attentions.

An eager step costs the host hundreds of launches, more time than a small model's device needs for thousands
of tokens. Attention alone depends on how a step's tokens belong to sequences; the rest depends on their
number, which is padded to a grid. Where the backend can read spans and tiles from memory that stays where it
is, and the device would wait for the host, one graph holds the attention, too; of some decodes beside the
prompts as well, and of few queries over many keys, in graphs of their own. Padding writes the dummy page and
is read by nobody.

Of most prompt tokens only K and V are ever read. So graphs end where the last layer has stored them, and what
follows runs for the tokens that are sampled: eagerly, since their number is any. A piece of its own holds the
last layer's rest for all tokens, where a prompt is scored.

Of a number of tokens whose steps are mostly whole the pieces are captured when a step first needs them: 29
graphs a size for a model of 28 layers, and few starts see one.

Owns the static buffers and the graphs. Where graphs are off the same steps run eagerly, padded alike: the
library picks its products by size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kernels.backend import GraphBackend, StaticDecode
from kernels.batch import HostSpans, KvLayer, LastQueries, PagedBatch
from kernels.prompt_step import mark_broken, prompt_inputs
from kernels.static_prefill import MAX_SPANS
from worker.execution.decodes_beside import DecodesBeside
from worker.execution.whole_sizes import WholeSize, grids_of, least, least_grid, whole_sizes_at
from worker.model.fused import FusedModel, LastRows, add

SMALLEST, LARGE = 64, 1024  # tokens

Captured = TypeVar("Captured")


def token_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens worth graphs: four to each doubling, eight where the device is what takes long, and
    the largest step's; ascending.
    """
    sizes = list(_parts_of_doublings(max_tokens))
    return sorted({*sizes, max_tokens}) if max_tokens >= SMALLEST else []


def _parts_of_doublings(max_tokens: int) -> Iterator[int]:
    octave = SMALLEST
    while octave <= max_tokens:
        parts = 8 if octave >= LARGE else 4
        yield from (size for size in range(octave, 2 * octave, octave // parts) if size <= max_tokens)
        octave *= 2


class PromptGraphs:
    """`run` is FusedModel.forward for steps of up to `max_tokens` tokens."""

    def __init__(
        self,
        model: FusedModel,
        backend: GraphBackend,
        kv: Sequence[KvLayer],
        page_table: Tensor,
        *,
        max_tokens: int,
        dummy_slot: int,
        scale: float,
        capture: bool,
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv = kv
        self._dummy_slot = dummy_slot
        self._scale = scale
        self.sizes = token_sizes(max_tokens)
        room = max(self.sizes, default=0)
        like, device = model.embedding, page_table.device
        self.hidden = torch.zeros(room, like.shape[1], dtype=like.dtype, device=device)
        """[largest size, hidden]: what a step leaves, before the last norm, or before the last layer."""
        self._positions = torch.zeros(room, dtype=torch.int32, device=device)
        self._slots = torch.full((room,), dummy_slot, dtype=torch.int32, device=device)
        self._q = model.new_q(room)
        self._attended = torch.zeros_like(self._q)
        self._grids = grids_of(model.config, self.sizes, max_running=page_table.shape[0] - 1)
        self.whole_sizes = self._grids[0].sizes if self._grids else []
        """Numbers of tokens with a graph that holds a whole step of prompts alone."""
        largest = max((grid.sizes[-1] for grid in self._grids), default=0)
        self.static = backend.static_prefill(page_table, largest) if largest else None
        # Attention in a whole step: of its decodes; of what is sampled, in the last layer.
        self._beside: list[DecodesBeside] = []
        self._of_sampled: StaticDecode | None = None
        if self.static is not None:
            self._beside = [
                DecodesBeside(backend, page_table, grid.room) for grid in self._grids if grid.room
            ]
            self._of_sampled = backend.static_decode(page_table, MAX_SPANS)
        # Of a whole step: tokens whose hidden states are not finite.
        self.is_broken = torch.zeros(largest, dtype=torch.int32, device=device)
        self._page_table = page_table
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}  # by size, in pieces
        self._whole: dict[WholeSize, torch.cuda.CUDAGraph] = {}
        self._captures = capture and device.type == "cuda"
        self._captures_late = False  # before `capture_all` steps may run that only ask for their kernels
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        # One for all captures: the library keeps a workspace for every stream that it has seen.
        self._stream = torch.cuda.Stream(device) if self._captures else None  # type: ignore[no-untyped-call]

    def run(self, hidden: Tensor, batch: PagedBatch, last: LastQueries | None = None) -> Tensor:
        """Hidden states before the last norm, overwritten by the next run; as FusedModel.forward.

        hidden [T, hidden]: embedding rows. `batch` says which tokens they are. With `last`, rows of other
        tokens are not yet through the last layer.
        """
        num_tokens = hidden.shape[0]
        whole = self._whole_of(batch, num_tokens, is_scored=last is None)
        size = whole.num_tokens if whole is not None else least(self.sizes, num_tokens)
        if size is None:
            return self._run_eagerly(hidden, batch, last)
        if whole is None and self._captures_late and size not in self._graphs:
            self._captured_on_stream(partial(self._capture_pieces, size))  # before the buffers are filled
        self._take(hidden, batch, size)
        if whole is not None:
            self._prepare_whole(batch, whole)
            self._run_whole(whole)
        else:
            self._run_pieces(batch, size, num_tokens)
        if last is not None:
            self._finish(self._q, self.hidden, last)
        else:
            self._finish_all(size, num_tokens, whole)
        return self.hidden[:num_tokens]

    def whole_size(self, spans: HostSpans, num_tokens: int) -> WholeSize | None:
        """The graph that holds a whole step of so many tokens, None where none does."""
        grid = least_grid(self._grids, spans.num_decode, num_tokens)
        if self.static is None or grid is None or not (num_parts := self.static.num_parts(spans)):
            return None
        return grid.size_of(num_tokens, is_split=num_parts > 1)

    def run_read(self, token_ids: Tensor, whole: WholeSize) -> None:
        """As `run`, of a step whose spans are in `static.words` and whose tokens are in the tables.

        Ends where the last layer's K and V are stored: `finish_read` goes on. token_ids int32, of the shape
        of the page table. Also fills `is_broken` up to the size.
        """
        assert self.static is not None, "the backend has no static prefill"
        size = whole.num_tokens
        residual = self.hidden[:size]
        prompt_inputs(
            self.static.words,
            self._page_table,
            token_ids,
            self._model.embedding,
            self._positions[:size],
            self._slots[:size],
            residual,
            dummy_slot=self._dummy_slot,
        )
        self._run_whole(whole)

    def prepare_finish(self, kv_lens: Sequence[int]) -> None:
        """The host's part of `finish_read`, before each replay of it, and before its capture."""
        assert self._of_sampled is not None, "the backend has no static prefill"
        self._of_sampled.prepare(len(kv_lens), kv_lens)

    def finish_read(self, tokens: Tensor, rows: Tensor, kv_lens: Tensor) -> Tensor:
        """Hidden states of some tokens behind `run_read`, before the last norm: [n, hidden].

        int32 [n], 0 < n <= MAX_SPANS, always the same memory: index of each token in the step, its row, and
        its position + 1.
        """
        decode = self._of_sampled
        assert decode is not None, "the backend has no static prefill"
        decode.begin(rows, kv_lens)
        last = LastRows(tokens, partial(decode.attend, scale=self._scale))
        return self._model.finish(self._q, self.hidden, self._layers[-1], last)

    def run_bodies(self) -> None:
        """A whole step for each room beside prompts: for compiling beforehand. No warm step may have so many
        decodes in a step that is whole.
        """
        for beside in self._beside:
            size = next(grid.sizes[0] for grid in self._grids if grid.room == beside.room)
            self._whole_body(WholeSize(size, False, beside.room))

    def capture_all(self) -> None:
        """Captures every size, the largest first, pieces only where no step is whole; nothing where graphs
        are off.
        """
        for size in reversed(self.sizes) if self._captures else []:
            self._captured_on_stream(partial(self._capture, size))
        self._captures_late = self._captures

    def _whole_of(self, batch: PagedBatch, num_tokens: int, *, is_scored: bool) -> WholeSize | None:
        """See `whole_size`; a scored step beside decodes is for pieces, too."""
        return None if is_scored and batch.num_decode else self.whole_size(batch, num_tokens)

    def _prepare_whole(self, batch: PagedBatch, whole: WholeSize) -> None:
        """The host's part of a whole step."""
        assert self.static is not None, "there is a size"
        self.static.prepare(batch, whole.num_tokens)
        if whole.room:
            self._with_room(whole.room).prepare(batch)

    def _with_room(self, room: int) -> DecodesBeside:
        return next(beside for beside in self._beside if beside.room == room)

    def _run_whole(self, whole: WholeSize) -> None:
        graph = self._whole.get(whole)
        if graph is not None:
            graph.replay()
        else:
            self._whole_body(whole)

    def _whole_body(self, whole: WholeSize) -> None:
        static, size = self.static, whole.num_tokens
        assert static is not None, "the backend has no static prefill"
        beside = self._with_room(whole.room) if whole.room else None
        if beside is not None:
            beside.begin()
        pieces = self.pieces(size)
        for layer_kv in self._layers[:-1]:
            next(pieces)
            q, attended = self._q[:size], self._attended[:size]
            if beside is not None:  # before the prompts: its padding leaves something in their first rows
                beside.attend(layer_kv, q, attended, scale=self._scale)
            static.attend(layer_kv, q, attended, scale=self._scale, is_split=whole.is_split)
        next(pieces)
        mark_broken(self.hidden[:size], self.is_broken)

    def _run_pieces(self, batch: PagedBatch, size: int, num_tokens: int) -> None:
        """As far as K and V of the last layer."""
        self._backend.plan(batch)
        pieces = self._replayed(size) if size in self._graphs else self.pieces(size)
        for layer_kv in self._layers[:-1]:
            next(pieces)
            self._attend_into(layer_kv, num_tokens)
        next(pieces)

    def _run_eagerly(self, residual: Tensor, batch: PagedBatch, last: LastQueries | None) -> Tensor:
        self._backend.plan(batch)
        tokens = (batch.positions, batch.write_slots)
        if last is None:
            return self._model.forward(residual, *tokens, self._kv, self._attend_eagerly)
        q = self._model.store(residual, *tokens, self._kv, self._attend_eagerly)
        self._finish(q, residual, last)
        return residual

    def _finish(self, q: Tensor, residual: Tensor, last: LastQueries) -> None:
        """The last layer of some tokens, into their rows of the residual. Plans the backend for them."""
        if not last.batch.num_decode:
            return
        self._backend.plan(last.batch)
        rows = self._model.finish(q, residual, self._layers[-1], LastRows(last.tokens, self._attend_eagerly))
        residual.index_copy_(0, last.tokens.long(), rows)

    def _finish_all(self, size: int, num_tokens: int, whole: WholeSize | None) -> None:
        """The last layer of all tokens, the backend or the static attention still planned for them."""
        if whole is not None:
            assert self.static is not None, "it ran"
            q, out = self._q[:size], self._attended[:size]
            self.static.attend(self._layers[-1], q, out, scale=self._scale, is_split=whole.is_split)
        else:
            self._attend_into(self._layers[-1], num_tokens)
        if size in self._graphs:
            self._graphs[size][-1].replay()
        else:
            self._last_piece(size)

    def _attend_into(self, kv: KvLayer, num_tokens: int) -> None:
        q, out = self._q[:num_tokens], self._attended[:num_tokens]
        self._backend.attend(kv, q, scale=self._scale, out=out)

    def _attend_eagerly(self, kv: KvLayer, q: Tensor) -> Tensor:
        return self._backend.attend(kv, q, scale=self._scale)

    def _replayed(self, size: int) -> Iterator[None]:
        for graph in self._graphs[size][:-1]:
            graph.replay()
            yield

    def pieces(self, size: int) -> Iterator[None]:
        """Runs a step of `size` tokens as far as K and V of the last layer, but for attention, by layers."""
        residual, positions, slots = self.hidden[:size], self._positions[:size], self._slots[:size]
        q, attended = self._q[:size], self._attended[:size].flatten(1)
        pending: Tensor | None = None
        for number, layer_kv in enumerate(self._layers):
            if number > 0:
                pending = self._model.leave(number - 1, attended, residual)
            self._model.enter(number, pending, residual, positions, slots, layer_kv, q)
            yield

    def _last_piece(self, size: int) -> None:
        """What follows the last layer's attention, for all tokens."""
        residual, attended = self.hidden[:size], self._attended[:size].flatten(1)
        add(residual, self._model.leave(len(self._layers) - 1, attended, residual))

    @property
    def _layers(self) -> Sequence[KvLayer]:
        return self._kv[: self._model.depth]

    def close(self) -> None:
        """Lets go of the graphs and their memory."""
        self._graphs.clear()
        self._whole.clear()

    def _take(self, hidden: Tensor, batch: PagedBatch, size: int) -> None:
        num_tokens = hidden.shape[0]
        self.hidden[:num_tokens].copy_(hidden)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slots[:num_tokens].copy_(batch.write_slots)
        if num_tokens < size:
            self._positions[num_tokens:size].zero_()
            self._slots[num_tokens:size].fill_(self._dummy_slot)

    def captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What `work` queues, as a graph in the memory of the others; it must have run before."""
        return self._captured_on_stream(lambda: self._recorded(work))

    def _captured_on_stream(self, capture: Callable[[], Captured]) -> Captured:
        stream = self._stream
        assert stream is not None, "graphs are off"
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            captured = capture()
        torch.cuda.current_stream().wait_stream(stream)
        return captured

    def _capture(self, size: int) -> None:
        self._run_shallow(size)
        wholes = list(whole_sizes_at(size, self._grids)) if self.static is not None else []
        for whole in wholes:
            self._whole[whole] = self._recorded(partial(self._whole_body, whole))
        if not any(whole.room == 0 for whole in wholes):
            self._record_pieces(size)

    def _capture_pieces(self, size: int) -> None:
        self._run_shallow(size)
        self._record_pieces(size)

    def _run_shallow(self, size: int) -> None:
        """So that the libraries have loaded and allocated what they need."""
        self._positions.zero_()
        self._slots.fill_(self._dummy_slot)
        with self._model.shallow():
            for _ in self.pieces(size):
                pass
            self._last_piece(size)

    def _record_pieces(self, size: int) -> None:
        pieces = self.pieces(size)
        graphs = [self._recorded(lambda: next(pieces)) for _ in self._layers]
        self._graphs[size] = [*graphs, self._recorded(partial(self._last_piece, size))]

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
        return graph
