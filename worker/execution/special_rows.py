"""Rows that want more than a draw: penalties, a bias, masked stop tokens, a constraint, log-probabilities.

Owns the tables that the sampling kernels read for them, and which row has which line of these: the history of
its tokens, its lists, its mask. A line costs 9.1 bytes per token of the vocabulary, so lines are made when
asked for and used again. Draws nothing itself; nothing here waits for the device.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kernels.sample_edits import EditRow, SampleEdits, grow_edits, make_edits, write_line
from kernels.sample_logprobs import best_of, find_best, make_logprob_scratch, token_logprobs
from worker.execution.constraint_masks import StepMasks
from worker.execution.logprobs import LogprobTensors
from worker.execution.on_the_way import to_device
from worker.execution.sampler import HostRows, Sampled
from worker.execution.sampling_state import NO_LOGPROBS, any_of, mark
from worker.scheduling.step import RowStart

LEAST_LINES = 4
MAX_BIAS, MAX_STOPS, MAX_BEST = 1024, 128, 32
"""Of tables, at first; what the service lets through fits. A row that has more makes them wider, and with
that kernels are compiled anew."""
_LAST_END = 2**31 - 1


class SpecialRows:
    """Made once for a runner; `start_rows` says who is special, and how."""

    def __init__(self, max_running: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_running = max_running
        self._rows: set[int] = set()
        self._lines: dict[int, int] = {}  # row -> line
        self._free: list[int] = []
        self._num_logprobs: dict[int, int] = {}  # of rows that ask
        self._asked = torch.full((max_running + 1,), NO_LOGPROBS, dtype=torch.int32, device=device)
        lists = {"max_bias": MAX_BIAS, "max_stops": MAX_STOPS}
        self.edits: SampleEdits = make_edits(max_running + 1, 0, vocab_size, device, **lists)
        self._scratch = make_logprob_scratch(max_running, vocab_size, device, max_best=MAX_BEST)

    def has_any(self, rows: HostRows) -> bool:
        """Whether one of these rows is special."""
        return any_of(rows, self._rows)

    def start_rows(self, starts: Sequence[RowStart]) -> None:
        """Takes over what sequences that enter a row want, and their history."""
        for start in starts:
            is_edited, is_asking = self._start_edits(start), self._start_logprobs(start)
            mark(self._rows, start.row, is_edited or is_asking)

    def allow(self, rows: HostRows, masks: StepMasks) -> None:
        """Masks of this step's constrained rows; `rows`: all that are sampled. Every step has new ones."""
        lines = torch.tensor([self._lines[int(rows[index])] for index in masks.indexes])
        words = to_device(torch.from_numpy(masks.words), self._device)
        self.edits.allowed[to_device(lines, self._device)] = words

    def sampled(
        self, logits: Tensor, rows: HostRows, there: Tensor, ids: Tensor, is_finite: Tensor
    ) -> Sampled:
        """What was drawn for `rows`, on the device `there`, with the log-probabilities that they want.

        logits, ids and is_finite as `kernels.sample.sample` had and returned them, with `edits`.
        """
        asking: list[int] = []
        if self._num_logprobs:  # most steps with prompts come here without any
            asking = [index for index, row in enumerate(rows.tolist()) if row in self._num_logprobs]
        counts = [self._num_logprobs[int(rows[index])] for index in asking]
        logprobs = None
        if asking:
            self.launch_logprobs(logits, there, ids)
            index = to_device(torch.tensor(asking), self._device)
            scratch = self._scratch
            values, best_ids = best_of(scratch, index, min(max(counts), self._vocab_size))
            logprobs = LogprobTensors(scratch.chosen[index], scratch.ranks[index], values, best_ids)
        # Copies: the scratch is the next step's as soon as that is launched.
        return Sampled(ids.clone(), is_finite.clone(), asking, counts, logprobs)

    def launch_logprobs(self, logits: Tensor, there: Tensor, ids: Tensor) -> None:
        """The kernels that log-probabilities take."""
        where = (self._asked, self._scratch, self._vocab_size)
        token_logprobs(logits, there, ids, *where, edits=self.edits)
        find_best(logits, there, *where, edits=self.edits)

    def _start_edits(self, start: RowStart) -> bool:
        """Whether it has any."""
        row, params = start.row, start.params
        stops = params.stop_token_ids | start.eos_token_ids if params.min_tokens > 0 else frozenset()
        if not (params.has_penalties or params.logit_bias or stops or params.constraint is not None):
            if (line := self._lines.pop(row, None)) is not None:
                self._free.append(line)
                self.edits.line[row] = -1
            return False
        needs_line = row not in self._lines
        self._make_room(len(params.logit_bias), len(stops), with_line=needs_line)
        if needs_line:
            self._lines[row] = self._free.pop()
            self.edits.line[row] = self._lines[row]
        num_prompt = start.num_prompt_tokens
        history = start.token_ids if params.has_penalties else ()
        write_line(
            self.edits,
            self._lines[row],
            EditRow(
                repetition_penalty=params.repetition_penalty,
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                # It may lie far behind the longest context.
                first_free_end=min(num_prompt + params.min_tokens, _LAST_END),
                prompt_ids=history[:num_prompt],
                output_ids=history[num_prompt:],
                bias=params.logit_bias,
                stop_ids=stops,
            ),
        )
        return True

    def _start_logprobs(self, start: RowStart) -> bool:
        """Whether it asks for any."""
        row, asked = start.row, start.params.logprobs
        if asked != self._num_logprobs.get(row):
            self._asked[row] = NO_LOGPROBS if asked is None else asked
        if asked is None:
            self._num_logprobs.pop(row, None)
            return False
        self._num_logprobs[row] = asked
        if asked > self._scratch.best_keys.shape[2]:
            wider = {"max_best": triton.next_power_of_2(asked)}
            self._scratch = make_logprob_scratch(self._max_running, self._vocab_size, self._device, **wider)
        return True

    def _make_room(self, num_biased: int, num_stops: int, *, with_line: bool) -> None:
        """For lists of these lengths, and for one more line."""
        edits, num_lines = self.edits, len(self.edits.edited)
        widths = (edits.bias_ids.shape[1], edits.stop_ids.shape[1])
        needed = [
            width if count <= width else triton.next_power_of_2(count)
            for width, count in zip(widths, (num_biased, num_stops), strict=True)
        ]
        more = 0
        if with_line and not self._free:
            more = min(max(LEAST_LINES, num_lines), self._max_running - num_lines)
        if more or tuple(needed) != widths:
            grow_edits(edits, num_lines + more, *needed)
        self._free.extend(range(num_lines + more - 1, num_lines - 1, -1))
