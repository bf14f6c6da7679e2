"""How long a step takes: a linear model, fitted to the steps of a recording.

Owns the coefficients. A step costs something by itself, for each prompt token it computes, for each sequence
that takes one token, and for each token of context that attention reads. None of them can be negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.scheduling.step import Step

MIN_STEPS = 8  # fewer tell nothing about four coefficients
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step as a sum; see the module's text."""

    base: float
    per_prompt_token: float = 0.0
    per_sequence: float = 0.0
    per_context_token: float = 0.0
    median_error: float = 0.0  # of the fit, relative
    num_steps: int = 0  # it was fitted to; 0: assumed

    def seconds(self, step: Step, resolution: int = 1) -> float:
        """What a step takes; with units of several tokens, what the steps that it stands for take."""
        context = sum(step.ends) * resolution
        prompt_tokens = context - sum(step.starts) * resolution - step.num_decode * resolution
        num_sampled = len(step.sampled)
        turns = resolution if num_sampled else 1
        return self.per_prompt_token * prompt_tokens + turns * (
            self.base + self.per_sequence * step.num_decode + self.per_context_token * context
        )


def fit(
    seconds: Sequence[float], prompt_tokens: Sequence[int], sequences: Sequence[int], context: Sequence[int]
) -> StepTime | None:
    """Non-negative least squares of the relative error; None: too few steps.

    Relative, because a few long prompts would otherwise decide alone. The slowest hundredth is left out:
    it is the machine's, not the step's.
    """
    taken = np.asarray(seconds, dtype=np.float64)
    if len(taken) < MIN_STEPS:
        return None
    columns = [
        np.ones(len(taken)),
        *(np.asarray(c, dtype=np.float64) for c in (prompt_tokens, sequences, context)),
    ]
    table = np.stack(columns, axis=1)
    usual = (taken > 0) & (taken <= np.quantile(taken, 0.99))
    if np.count_nonzero(usual) < MIN_STEPS:
        return None
    table, taken = table[usual], taken[usual]
    weights = 1.0 / np.maximum(taken, np.quantile(taken, 0.1))
    found = _non_negative(table * weights[:, None], taken * weights)
    error = float(np.median(np.abs(table @ found - taken) / taken))
    base, prompt, sequence, token = found.tolist()
    return StepTime(base, prompt, sequence, token, median_error=error, num_steps=len(taken))


def _non_negative(table: Floats, wanted: Floats) -> Floats:
    """Least squares without negative coefficients: the most negative one is left out until none is."""
    used = list(range(table.shape[1]))
    found = np.zeros(table.shape[1])
    while used:
        part = np.linalg.lstsq(table[:, used], wanted, rcond=None)[0]
        worst = int(np.argmin(part))
        if part[worst] >= 0:
            found[used] = part
            break
        del used[worst]
    return found
