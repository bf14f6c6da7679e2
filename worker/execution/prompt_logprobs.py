"""Log-probabilities of prompt tokens, for the spans of rows that asked.

Owns who asked. Values are of the network's own logits: penalties and
bias shape what is sampled, not what was given.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.execution.logprobs import LogprobTensors, token_logprobs
from worker.execution.step_tensors import StepTensors
from worker.execution.token_pool import TokenPool
from worker.scheduling.step import RowStart, Step, TokenLogprob

_TOKENS_AT_ONCE = 64  # logits of 64 tokens of a vocabulary of 152 thousand are 39 MB; of 8,192 tokens, 5 GB


class PromptLogprobs:
    """Scores tokens start + 1 .. min(end, num_prompt - 1) of a span by the hidden states before them."""

    def __init__(self, vocab_size: int, token_pool: TokenPool, logits: Callable[[Tensor], Tensor]) -> None:
        self._vocab_size = vocab_size
        self._token_pool = token_pool
        self._logits = logits
        self._rows: dict[int, tuple[int, int]] = {}  # who asked -> prompt tokens, alternatives

    def start_rows(self, starts: Sequence[RowStart]) -> None:
        """Takes over what sequences that enter a row want."""
        for start in starts:
            self._rows.pop(start.row, None)
            if (count := start.params.prompt_logprobs) is not None:
                self._rows[start.row] = (start.num_prompt_tokens, count)

    def of_step(
        self, step: Step, tensors: StepTensors, hidden: Tensor
    ) -> dict[int, Callable[[], list[TokenLogprob]]]:
        """By span index, what reads the records once the step is over. hidden [T, hidden]: of all tokens."""
        readers = {}
        for span, num_scored in self.asked(step).items():
            row, start, first = step.rows[span], step.starts[span], int(tensors.q_indptr_host[span])
            targets = self._token_pool.ids[row, start + 1 : start + 1 + num_scored].long()
            readers[span] = self._score(hidden[first : first + num_scored], targets, row)
        return readers

    def asked(self, step: Step) -> dict[int, int]:
        """By span index, how many of its tokens score the next one; only who has any."""
        if not self._rows:
            return {}
        found = {}
        for span, row in enumerate(step.rows):
            if row in self._rows:
                num_scored = min(step.ends[span], self._rows[row][0] - 1) - step.starts[span]
                if num_scored > 0:
                    found[span] = num_scored
        return found

    def _score(self, hidden: Tensor, targets: Tensor, row: int) -> Callable[[], list[TokenLogprob]]:
        _, count = self._rows[row]
        parts = [
            token_logprobs(self._vocabulary_logits(some), ids, count)
            for some, ids in zip(
                torch.split(hidden, _TOKENS_AT_ONCE), torch.split(targets, _TOKENS_AT_ONCE), strict=True
            )
        ]
        whole = LogprobTensors(
            chosen=torch.cat([p.chosen for p in parts]),
            ranks=torch.cat([p.ranks for p in parts]),
            top_values=torch.cat([p.top_values for p in parts]),
            top_ids=torch.cat([p.top_ids for p in parts]),
        )
        return whole.on_the_way([count] * len(targets))

    def _vocabulary_logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)[:, : self._vocab_size].float()
