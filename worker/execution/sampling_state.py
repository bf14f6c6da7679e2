"""How each running row is sampled by the plain sampler, and the token history that its penalties need.

Owns one column per parameter, indexed by row, and the count tables. Draws nothing itself.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.noise import NoiseKeys
from worker.scheduling.step import RowStart

NO_LOGPROBS = -1
LOWEST_TEMPERATURE = 1e-5  # below it logits / temperature leaves what float32 can tell apart: greedy


class TokenHistory:
    """Which tokens the prompt has and how often each was put out, for rows with penalties only.

    A table line costs 5 bytes per vocabulary entry, so lines are made when asked for and used again.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._lines: dict[int, int] = {}  # row -> line
        self._free: list[int] = []
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def start(self, start: RowStart) -> None:
        """Sets a row's history to exactly the tokens of `start`."""
        line = self._lines.get(start.row)
        if line is None:
            line = self._lines[start.row] = self._free.pop() if self._free else self._add_line()
        self._counts[line] = self._count(start.token_ids[start.num_prompt_tokens :])
        self._in_prompt[line] = self._count(start.token_ids[: start.num_prompt_tokens]) > 0

    def forget(self, row: int) -> None:
        """Gives a row's line back; a row without one is no error."""
        if (line := self._lines.pop(row, None)) is not None:
            self._free.append(line)

    def tables(self, rows: Iterable[int]) -> tuple[Tensor, Tensor, Tensor]:
        """All counts, all prompt marks, and the line of each row in both."""
        return self._counts, self._in_prompt, self._line_index(rows)

    def output_counts(self, rows: Iterable[int]) -> Tensor:
        """Times each token was put out, int32 [num_rows, vocab_size]."""
        return self._counts[self._line_index(rows)]

    def in_prompt(self, rows: Iterable[int]) -> Tensor:
        """Whether each token is in the prompt, bool [num_rows, vocab_size]."""
        return self._in_prompt[self._line_index(rows)]

    def add(self, rows: Iterable[int], ids: Tensor) -> None:
        """Counts one sampled token per row, on the device, so that the next step may already be queued."""
        lines = self._line_index(rows)
        one = torch.ones((), dtype=torch.int32, device=ids.device)
        self._counts.index_put_((lines, ids), one, accumulate=True)

    def _line_index(self, rows: Iterable[int]) -> Tensor:
        lines = [self._lines[row] for row in rows]
        return torch.tensor(lines, dtype=torch.int64, device=self._counts.device)

    def _add_line(self) -> int:
        num_lines = len(self._counts)
        more = max(4, num_lines)
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._vocab_size)])
        self._in_prompt = torch.cat([self._in_prompt, self._in_prompt.new_zeros(more, self._vocab_size)])
        self._free.extend(range(num_lines + more - 1, num_lines, -1))
        return num_lines

    def _count(self, token_ids: Sequence[int]) -> Tensor:
        counts = np.bincount(np.asarray(token_ids, dtype=np.int64), minlength=self._vocab_size)
        return torch.from_numpy(counts[: self._vocab_size]).to(self._counts.device)


def mark(rows: set[int], row: int, is_one: bool) -> None:
    """Puts a row into a set, or takes it out."""
    if is_one:
        rows.add(row)
    else:
        rows.discard(row)


def any_of(rows: NDArray[np.int32], marked: set[int]) -> bool:
    """Whether some of the rows are among those marked."""
    return bool(marked) and not marked.isdisjoint(rows.tolist())


class SamplingState:
    """One entry per row of the page table in every column; set when a sequence enters the row."""

    def __init__(self, *, max_running: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.history = TokenHistory(vocab_size, device)
        self.temperature = np.zeros(max_running, np.float32)
        self.top_k = np.zeros(max_running, np.int64)  # 0: off
        self.top_p = np.ones(max_running, np.float32)
        self.min_p = np.zeros(max_running, np.float32)
        self.repetition_penalty = np.ones(max_running, np.float32)
        self.frequency_penalty = np.zeros(max_running, np.float32)
        self.presence_penalty = np.zeros(max_running, np.float32)
        self.has_penalties = np.zeros(max_running, np.bool_)
        self.is_random = np.zeros(max_running, np.bool_)  # draws; else the most likely token
        self.seed_low = np.zeros(max_running, np.int64)
        self.seed_high = np.zeros(max_running, np.int64)
        self.choice = np.zeros(max_running, np.int64)
        # Stop tokens may be sampled from this position on, which may lie far behind the longest context.
        self.first_free_end = np.zeros(max_running, np.int64)
        self.num_logprobs = np.full(max_running, NO_LOGPROBS, np.int32)
        self.has_edits = np.zeros(max_running, np.bool_)  # penalties, bias or masked stop tokens
        self.bias: dict[int, tuple[Tensor, Tensor]] = {}  # row -> token ids, what is added to their logits
        self.stop_ids: dict[int, Tensor] = {}  # row -> tokens masked below min_tokens

    def start_rows(self, starts: Sequence[RowStart]) -> None:
        """Takes over the parameters and the history of sequences that enter a row."""
        for start in starts:
            self._fill(start)
            self._start_edits(start)

    def keys(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NoiseKeys:
        """Noise keys of the tokens at these positions."""
        columns = (self.seed_low[rows], self.seed_high[rows], self.choice[rows], positions.astype(np.int64))
        return NoiseKeys(*(torch.from_numpy(column).to(self.device) for column in columns))

    def _fill(self, start: RowStart) -> None:
        row, params = start.row, start.params
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.has_penalties[row] = params.has_penalties
        # One kept token needs no draw: top_k 1 is greedy, ties and all.
        self.is_random[row] = params.temperature >= LOWEST_TEMPERATURE and params.top_k != 1
        self.seed_low[row] = params.seed & 0xFFFFFFFF
        self.seed_high[row] = (params.seed >> 32) & 0xFFFFFFFF
        self.choice[row] = start.choice_index
        self.first_free_end[row] = start.num_prompt_tokens + params.min_tokens
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs

    def _start_edits(self, start: RowStart) -> None:
        row, params = start.row, start.params
        self.bias.pop(row, None)
        self.stop_ids.pop(row, None)
        if params.logit_bias:
            in_vocab = [(token, value) for token, value in params.logit_bias if token < self.vocab_size]
            if in_vocab:
                tokens, values = zip(*in_vocab, strict=True)
                self.bias[row] = (self._ids(tokens), torch.tensor(values, device=self.device))
        if params.min_tokens > 0:
            stops = sorted(t for t in params.stop_token_ids | start.eos_token_ids if t < self.vocab_size)
            if stops:
                self.stop_ids[row] = self._ids(stops)
        if params.has_penalties:
            self.history.start(start)
        else:
            self.history.forget(row)
        self.has_edits[row] = params.has_penalties or row in self.bias or row in self.stop_ids

    def _ids(self, token_ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(token_ids), dtype=torch.int64, device=self.device)
