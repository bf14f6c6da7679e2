"""Logits to one token per sampled row, in plain torch: what the kernels of kernels/sample.py must equal.

Owns no state but its reference to the rows' parameters. The order is: penalties, bias, masked stop tokens,
masks of constraints (log-probabilities are read here), temperature, top-k, top-p, min-p, noise.
- Greedy is the highest logit, the lowest id among equals, and consumes no noise.
- top-k keeps every token whose logit is at least the k-th highest; top-p is the smallest set of most likely
  tokens of what top-k kept whose mass reaches top_p, equals of the last one included; min-p keeps tokens of
  at least min_p times the highest probability. The most likely token is always kept.
- A row whose logits hold NaN or +inf, or nothing but -inf, is reported and never gets a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.noise import NoiseKeys, noise_of_tokens, noise_of_vocabulary
from worker.execution.constraint_masks import StepMasks
from worker.execution.logprobs import LogprobTensors, token_logprobs
from worker.execution.on_the_way import to_device
from worker.execution.sampling_state import NO_LOGPROBS, SamplingState
from worker.scheduling.step import RowStart

HostRows = NDArray[np.int32]
ROWS_AT_ONCE = 32
"""Drawn together at most: a step of more needs no more memory than these."""
BYTES_OF_TOKEN = 128
"""Beside its logit, of a token of each of these rows at most: penalties, noise, a filter that keeps all."""
_FIRST_CANDIDATES = 256  # of a row with top-p or min-p alone; more only if they do not settle it


@dataclass(frozen=True, slots=True)
class Sampled:
    """Outcome of one step on the device; index i is the i-th sampled span."""

    ids: Tensor  # int64, or int32 of a kernel, [num_sampled]; 0 where is_finite is false
    is_finite: Tensor  # bool [num_sampled]
    logprob_indexes: list[int]  # which i asked for log-probabilities
    logprob_counts: list[int]  # and for how many alternatives
    logprobs: LogprobTensors | None


@dataclass(frozen=True, slots=True)
class Filters:
    """Filter values of the rows that have any, on the device."""

    top_k: Tensor  # int64 [num_rows]; vocab_size where off
    top_p: Tensor  # float64 [num_rows]
    log_min_p: Tensor  # float32 [num_rows]; -inf where off


class Sampler:
    """Draws for the rows of a step, as many at once as ROWS_AT_ONCE says."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def start_rows(self, starts: Sequence[RowStart]) -> None:
        """See SamplingState."""
        self._state.start_rows(starts)

    def sample(
        self, logits: Tensor, rows: HostRows, ends: HostRows, masks: StepMasks | None = None
    ) -> Sampled:
        """One token per row, for position ends[i]; logits [num_sampled, >= vocab_size] may be overwritten."""
        if len(rows) <= ROWS_AT_ONCE:
            return self._sample(logits, rows, ends, masks)
        parts = []
        for first in range(0, len(rows), ROWS_AT_ONCE):
            here = slice(first, first + ROWS_AT_ONCE)
            of_part = masks.part(here.start, here.stop) if masks is not None else None
            parts.append(self._sample(logits[here], rows[here], ends[here], of_part))
        return merged(parts)

    def _sample(self, logits: Tensor, rows: HostRows, ends: HostRows, masks: StepMasks | None) -> Sampled:
        logits = logits[:, : self._state.vocab_size].float()
        if self._state.has_edits[rows].any():
            logits = self._edit(logits, rows, ends)
        if masks is not None:
            self._mask(logits, masks)
        best, ids = self._best(logits)
        is_finite = best.isfinite()  # NaN anywhere in a row is its maximum
        drawing = self._state.is_random[rows].nonzero()[0]
        if len(drawing):
            index = self._index(drawing)
            ids[index] = self._draw(logits[index], best[index], rows[drawing], ends[drawing])
        ids = torch.where(is_finite, ids, 0)
        self._remember(rows, ids)
        asking = (self._state.num_logprobs[rows] != NO_LOGPROBS).nonzero()[0]
        counts = self._state.num_logprobs[rows[asking]].tolist()
        logprobs = None
        if counts:
            index = self._index(asking)
            logprobs = token_logprobs(logits[index], ids[index], max(counts))
        return Sampled(ids, is_finite, asking.tolist(), counts, logprobs)

    # What follows up to _draw may be done faster by a subclass: same results.

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Highest logit of each row, NaN where it holds NaN, and its lowest index."""
        best, ids = logits.max(dim=-1)
        return best, ids

    def _mask(self, logits: Tensor, masks: StepMasks) -> None:
        """Takes every token away that a constraint does not allow; in place."""
        words = to_device(torch.from_numpy(masks.words), self._state.device)
        forbidden = ~unpacked(words, logits.shape[1])
        for line, index in enumerate(masks.indexes):
            logits[index].masked_fill_(forbidden[line], -math.inf)

    # -- before temperature ------------------------------------------------------------------------------

    def _edit(self, logits: Tensor, rows: HostRows, ends: HostRows) -> Tensor:
        penalised = self._state.has_penalties[rows].nonzero()[0]
        if len(penalised):
            index = self._index(penalised)
            logits[index] = self._penalised(logits[index], rows[penalised])
        for i in self._state.has_edits[rows].nonzero()[0].tolist():
            row = int(rows[i])
            if (bias := self._state.bias.get(row)) is not None:
                logits[i].index_add_(0, *bias)
            stops = self._state.stop_ids.get(row)
            if stops is not None and ends[i] < self._state.first_free_end[row]:
                logits[i].index_fill_(0, stops, -math.inf)
        return logits

    def _penalised(self, logits: Tensor, rows: HostRows) -> Tensor:
        """A new tensor, or logits itself changed."""
        state = self._state
        counts = state.history.output_counts(rows.tolist())
        was_put_out = counts > 0
        repetition = self._column(state.repetition_penalty[rows])
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(was_put_out | state.history.in_prompt(rows.tolist()), scaled, logits)
        logits = logits - self._column(state.frequency_penalty[rows]) * counts
        return logits - self._column(state.presence_penalty[rows]) * was_put_out

    def _remember(self, rows: HostRows, ids: Tensor) -> None:
        penalised = self._state.has_penalties[rows].nonzero()[0]
        if len(penalised):
            self._state.history.add(rows[penalised].tolist(), ids[self._index(penalised)])

    # -- the draw ----------------------------------------------------------------------------------------

    def _draw(self, logits: Tensor, best: Tensor, rows: HostRows, ends: HostRows) -> Tensor:
        """Ids int64 [num_rows]; best is the highest logit of each row."""
        state = self._state
        scores = logits / self._column(state.temperature[rows])
        has_filter = (state.top_k[rows] > 0) | (state.top_p[rows] < 1.0) | (state.min_p[rows] > 0.0)
        ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        for is_filtered in (False, True):
            part = (has_filter == is_filtered).nonzero()[0]
            if len(part) == 0:
                continue
            index = self._index(part)
            keys = state.keys(rows[part], ends[part])
            draw = self._draw_filtered if is_filtered else self._draw_unfiltered
            ids[index] = draw(scores[index], keys, rows[part])
        return ids

    def _draw_unfiltered(self, scores: Tensor, keys: NoiseKeys, rows: HostRows) -> Tensor:
        return (scores - noise_of_vocabulary(keys, scores.shape[-1]).log()).argmax(dim=-1)

    def _draw_filtered(self, scores: Tensor, keys: NoiseKeys, rows: HostRows) -> Tensor:
        values, token_ids, is_kept = kept_candidates(scores, self._filters(rows))
        drawn = (values - noise_of_tokens(keys, token_ids).log()).masked_fill(~is_kept, -math.inf)
        # Candidates of equal logits lie in any order: of equals the lowest id, as without filters.
        is_best = drawn == drawn.amax(dim=-1, keepdim=True)
        return token_ids.masked_fill(~is_best, self._state.vocab_size).amin(dim=-1)

    def _filters(self, rows: HostRows) -> Filters:
        state = self._state
        top_k = np.where(state.top_k[rows] > 0, state.top_k[rows], state.vocab_size)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(state.min_p[rows])
        return Filters(
            top_k=self._index(np.minimum(top_k, state.vocab_size)),
            top_p=torch.from_numpy(state.top_p[rows].astype(np.float64)).to(state.device),
            log_min_p=torch.from_numpy(log_min_p).to(state.device),
        )

    def _index(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._state.device)

    def _column(self, values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._state.device)[:, None]


def merged(parts: Sequence[Sampled]) -> Sampled:
    """Outcomes of some rows each as that of all of them."""
    firsts = accumulate((len(part.ids) for part in parts), initial=0)
    asked = [(first, part) for first, part in zip(firsts, parts, strict=False) if part.logprobs is not None]
    return Sampled(
        ids=torch.cat([part.ids for part in parts]),
        is_finite=torch.cat([part.is_finite for part in parts]),
        logprob_indexes=[first + i for first, part in asked for i in part.logprob_indexes],
        logprob_counts=[count for _, part in asked for count in part.logprob_counts],
        logprobs=_joined([part.logprobs for _, part in asked if part.logprobs is not None]),
    )


def _joined(parts: Sequence[LogprobTensors]) -> LogprobTensors | None:
    if not parts:
        return None
    width = max(part.top_ids.shape[1] for part in parts)

    def wide(columns: Tensor) -> Tensor:
        return torch.nn.functional.pad(columns, (0, width - columns.shape[1]))

    return LogprobTensors(
        chosen=torch.cat([part.chosen for part in parts]),
        ranks=torch.cat([part.ranks for part in parts]),
        top_values=torch.cat([wide(part.top_values) for part in parts]),
        top_ids=torch.cat([wide(part.top_ids) for part in parts]),
    )


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Bits of int32 [num_rows, num_words], the lowest first, as bool [num_rows, vocab_size]."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> bits & 1).bool().flatten(1)[:, :vocab_size]


def kept_candidates(scores: Tensor, filters: Filters) -> tuple[Tensor, Tensor, Tensor]:
    """The best tokens of each row, at least all that the filters keep: values, ids, is kept; [num_rows, n].

    Looks at few candidates first: sorting whole rows of a large vocabulary costs more than the rest.
    """
    vocab_size = scores.shape[-1]
    log_mass = scores.logsumexp(dim=-1)
    limit = int(torch.where(filters.top_k < vocab_size, filters.top_k, _FIRST_CANDIDATES).max()) + 1
    while True:
        width = min(limit, vocab_size)
        values, token_ids = scores.topk(width, dim=-1)
        lowest_kept, lowest_seen = _thresholds(values, log_mass, filters)
        # Settled once a candidate falls below the threshold: then no equal of the last one is missing.
        if width == vocab_size or bool((values[:, -1] < lowest_seen).all()):
            return values, token_ids, values >= lowest_kept[:, None]
        limit = 16 * width


def _thresholds(values: Tensor, log_mass: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """The lowest value that passes all filters, and the lowest that mattered to them; [num_rows] each.

    values are the best of each row, highest first; log_mass is that of the whole row.
    """
    last = (filters.top_k - 1).clamp(max=values.shape[-1] - 1)
    kth = values.gather(1, last[:, None])
    in_top_k = values >= kth
    has_top_k = filters.top_k <= values.shape[-1]
    mass = torch.where(has_top_k, values.masked_fill(~in_top_k, -math.inf).logsumexp(dim=-1), log_mass)
    # float64: 150 thousand small probabilities in float32 may add up to less than a top_p near 1.
    probs = (values - mass[:, None]).double().exp()
    mass_before = probs.cumsum(dim=-1) - probs
    top_p = filters.top_p[:, None]
    in_top_p = (mass_before < top_p) | (top_p >= 1.0)
    in_min_p = values >= values[:, :1] + filters.log_min_p[:, None]
    is_kept = in_top_k & in_top_p & in_min_p
    is_kept[:, 0] = True
    lowest_kept = values.masked_fill(~is_kept, math.inf).amin(dim=-1)
    return lowest_kept, torch.where(has_top_k, kth[:, 0], lowest_kept)
