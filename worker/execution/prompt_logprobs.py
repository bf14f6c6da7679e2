"""Log-probabilities of prompt tokens, for the spans of rows that asked.

Owns no state but references to the rows' parameters. Values are of the network's own logits: penalties and
bias shape what is sampled, not what was given.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from worker.execution.logprobs import LogprobTensors, token_logprobs
from worker.execution.sampling_state import NO_LOGPROBS, SamplingState
from worker.execution.step_tensors import StepTensors
from worker.execution.token_pool import TokenPool
from worker.scheduling.step import Step, TokenLogprob

_TOKENS_AT_ONCE = 64  # logits of 64 tokens of a vocabulary of 152 thousand are 39 MB; of 8,192 tokens, 5 GB


class PromptLogprobs:
    """Scores tokens start + 1 .. min(end, num_prompt - 1) of a span by the hidden states before them."""

    def __init__(
        self, state: SamplingState, token_pool: TokenPool, logits: Callable[[Tensor], Tensor]
    ) -> None:
        self._state = state
        self._token_pool = token_pool
        self._logits = logits

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
        rows = np.frombuffer(step.rows, dtype=np.int32)
        found = {}
        for span in (self._state.num_prompt_logprobs[rows] != NO_LOGPROBS).nonzero()[0].tolist():
            num_prompt = int(self._state.num_prompt[step.rows[span]])
            num_scored = min(step.ends[span], num_prompt - 1) - step.starts[span]
            if num_scored > 0:
                found[span] = num_scored
        return found

    def _score(self, hidden: Tensor, targets: Tensor, row: int) -> Callable[[], list[TokenLogprob]]:
        count = int(self._state.num_prompt_logprobs[row])
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
        return partial(whole.to_host, [count] * len(targets))

    def _vocabulary_logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)[:, : self._state.vocab_size].float()
