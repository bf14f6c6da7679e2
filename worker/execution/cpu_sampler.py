"""The sampler with its passes over the vocabulary in C++: same rules, same noise, same tokens.

Owns nothing of its own. Rows run side by side on the library's threads.
"""

import torch
from torch import Tensor

from kernels.cpu.library import CpuLibrary, DrawColumns, HistoryTables, PenaltyColumns
from worker.execution.constraint_masks import StepMasks
from worker.execution.sampler import HostRows, Sampler
from worker.execution.sampling_state import SamplingState


class CpuSampler(Sampler):
    """See Sampler."""

    def __init__(self, state: SamplingState, library: CpuLibrary) -> None:
        super().__init__(state)
        self._library = library

    def _mask(self, logits: Tensor, masks: StepMasks) -> None:
        rows = torch.tensor(masks.indexes, dtype=torch.int64)
        self._library.mask(logits, rows, torch.from_numpy(masks.words))

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self._library.best(logits)

    def _draw(self, logits: Tensor, best: Tensor, rows: HostRows, ends: HostRows) -> Tensor:
        state = self._state
        columns = DrawColumns(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            min_p=state.min_p[rows],
            seed_low=state.seed_low[rows],
            seed_high=state.seed_high[rows],
            choice=state.choice[rows],
            position=ends.copy(),
        )
        ids = torch.zeros(len(rows), dtype=torch.int64)
        self._library.draw(logits, best, columns, ids)
        return ids

    def _penalised(self, logits: Tensor, rows: HostRows) -> Tensor:
        state = self._state
        columns = PenaltyColumns(
            state.repetition_penalty[rows], state.frequency_penalty[rows], state.presence_penalty[rows]
        )
        self._library.penalise(logits, HistoryTables(*state.history.tables(rows.tolist())), columns)
        return logits
