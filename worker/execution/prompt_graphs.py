"""Steps with prompts, all but their attention, as CUDA graphs: a piece from each attention to the next.

An eager step costs the host hundreds of launches, more time than a small model's device needs for thousands
of tokens. Attention alone depends on how a step's tokens belong to sequences, so it stays eager; the rest
depends on their number, which is padded to a grid. Padding writes the dummy page and is read by nobody.

Owns the static buffers and the graphs. Where graphs are off the same pieces run eagerly, padded alike: the
library picks its products by size.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.batch import KvLayer
from worker.model.fused import AttendStored, FusedModel

SMALLEST = 64  # tokens


def token_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens worth graphs: four to each doubling, and the largest step's; ascending."""
    sizes = list(_quarters(max_tokens))
    return sorted({*sizes, max_tokens}) if max_tokens >= SMALLEST else []


def _quarters(max_tokens: int) -> Iterator[int]:
    octave = SMALLEST
    while octave <= max_tokens:
        yield from (size for size in range(octave, 2 * octave, octave // 4) if size <= max_tokens)
        octave *= 2


class PromptGraphs:
    """`run` is FusedModel.forward for steps of up to `max_tokens` tokens."""

    def __init__(
        self,
        model: FusedModel,
        kv: Sequence[KvLayer],
        *,
        max_tokens: int,
        dummy_slot: int,
        device: torch.device,
        capture: bool,
    ) -> None:
        self._model = model
        self._kv = kv
        self._dummy_slot = dummy_slot
        self.sizes = token_sizes(max_tokens)
        room = max(self.sizes, default=0)
        like = model.embedding
        self._residual = torch.zeros(room, like.shape[1], dtype=like.dtype, device=device)
        self._positions = torch.zeros(room, dtype=torch.int32, device=device)
        self._slots = torch.full((room,), dummy_slot, dtype=torch.int32, device=device)
        self._q = model.new_q(room)
        self._attended = torch.zeros_like(self._q).flatten(1)
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._captures = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        # One for all captures: the library keeps a workspace for every stream that it has seen.
        self._stream = torch.cuda.Stream(device) if self._captures else None  # type: ignore[no-untyped-call]

    def run(self, hidden: Tensor, positions: Tensor, slots: Tensor, attend: AttendStored) -> Tensor:
        """Hidden states before the last norm, overwritten by the next run; as FusedModel.forward.

        hidden [T, hidden]: embedding rows; positions, slots int32 [T].
        """
        num_tokens = hidden.shape[0]
        size = next((size for size in self.sizes if size >= num_tokens), None)
        if size is None:
            return self._model.forward(hidden, positions, slots, self._kv, attend)
        self._take(hidden, positions, slots, size)
        pieces = self._replayed(size) if size in self._graphs else self.pieces(size)
        for layer_kv, _ in zip(self._layers, pieces, strict=False):
            attended = attend(layer_kv, self._q[:num_tokens])
            self._attended[:num_tokens].copy_(attended.view(num_tokens, -1))
        next(pieces)
        return self._residual[:num_tokens]

    def capture_all(self) -> None:
        """Captures every size, the largest first; nothing where graphs are off."""
        for size in reversed(self.sizes) if self._captures else []:
            self._capture(size)

    def _replayed(self, size: int) -> Iterator[None]:
        for graph in self._graphs[size]:
            graph.replay()
            yield

    def pieces(self, size: int) -> Iterator[None]:
        """Runs all of a step of `size` tokens but its attention, piece by piece."""
        residual, positions, slots = self._residual[:size], self._positions[:size], self._slots[:size]
        q, attended = self._q[:size], self._attended[:size]
        pending: Tensor | None = None
        for number, layer_kv in enumerate(self._layers):
            if number > 0:
                pending = self._model.leave(number - 1, attended, residual)
            self._model.enter(number, pending, residual, positions, slots, layer_kv, q)
            yield
        residual += self._model.leave(len(self._layers) - 1, attended, residual)
        yield

    @property
    def _layers(self) -> Sequence[KvLayer]:
        return self._kv[: self._model.depth]

    def close(self) -> None:
        """Lets go of the graphs and their memory."""
        self._graphs.clear()

    def _take(self, hidden: Tensor, positions: Tensor, slots: Tensor, size: int) -> None:
        num_tokens = hidden.shape[0]
        self._residual[:num_tokens].copy_(hidden)
        self._positions[:num_tokens].copy_(positions)
        self._slots[:num_tokens].copy_(slots)
        if num_tokens < size:
            self._positions[num_tokens:size].zero_()
            self._slots[num_tokens:size].fill_(self._dummy_slot)

    def _capture(self, size: int) -> None:
        stream = self._stream
        assert stream is not None, "graphs are off"
        stream.wait_stream(torch.cuda.current_stream())
        graphs = []
        with torch.cuda.stream(stream):
            self._positions.zero_()
            self._slots.fill_(self._dummy_slot)
            with self._model.shallow():
                for _ in self.pieces(size):  # so that the libraries have loaded and allocated what they need
                    pass
            pieces = self.pieces(size)
            for _ in range(len(self._layers) + 1):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    next(pieces)
                finally:
                    graph.capture_end()
                graphs.append(graph)
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[size] = graphs
