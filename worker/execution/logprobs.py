"""Log-probabilities of chosen tokens, their ranks and the best alternatives.

Owns no state. Values are of the logits as given: after penalties, bias and
masks, before temperature and filters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from worker.execution.on_the_way import OnTheWay
from worker.scheduling.step import TokenLogprob


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Of num_rows tokens, on the device; read on the host once the step is over."""

    chosen: Tensor  # float32 [num_rows]
    ranks: Tensor  # integers [num_rows], from 1
    top_values: Tensor  # float32 [num_rows, max alternatives], best first
    top_ids: Tensor  # integers [num_rows, max alternatives]

    def on_the_way(self, num_alternatives: Sequence[int]) -> Callable[[], list[TokenLogprob]]:
        """Begins to copy them, in one piece; what is returned waits for that alone, not for later steps, and
        gives one record per row, each with the alternatives it asked for, as far as they are possible.
        """
        numbers = torch.cat([self.ranks[:, None], self.top_ids], dim=1).int()
        values = torch.cat([self.chosen[:, None], self.top_values], dim=1).view(torch.int32)
        return partial(_records, OnTheWay(torch.cat([numbers, values], dim=1)), num_alternatives)


def _records(matrix: OnTheWay, num_alternatives: Sequence[int]) -> list[TokenLogprob]:
    numbers, values = np.split(matrix.arrived(), 2, axis=1)
    ids, logprobs = numbers.tolist(), values.view(np.float32).tolist()
    return [
        TokenLogprob(logprobs[i][0], ids[i][0], _possible(ids[i][1 : count + 1], logprobs[i][1 : count + 1]))
        for i, count in enumerate(num_alternatives)
    ]


def _possible(ids: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Without tokens of probability 0, which a constraint or min_tokens does not allow."""
    return tuple((token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf)


def token_logprobs(logits: Tensor, token_ids: Tensor, max_alternatives: int) -> LogprobTensors:
    """Of token_ids int64 [num_rows] under logits float32 [num_rows, vocab_size].

    Equal logits share the better rank; among alternatives the lower id comes first. Logits that are not equal
    may have log-probabilities that are, rounded: order is that of the logits.
    """
    logprobs, chosen = logits.log_softmax(dim=-1), token_ids[:, None]
    ids = _best(logits, min(max_alternatives, logits.shape[-1]))
    return LogprobTensors(
        chosen=logprobs.gather(1, chosen)[:, 0],
        ranks=(logits > logits.gather(1, chosen)).sum(dim=-1) + 1,
        top_values=logprobs.gather(1, ids),
        top_ids=ids,
    )


def _best(logits: Tensor, count: int) -> Tensor:
    """Ids int64 [num_rows, count]."""
    values, ids = logits.topk(count, dim=-1)
    # topk leaves equals in any order: by id first, then by value with a stable sort.
    ids, by_id = ids.sort(dim=-1)
    by_value = values.gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, by_value)
