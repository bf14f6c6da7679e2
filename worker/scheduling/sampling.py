"""How one sequence's tokens are picked and when it stops: all values resolved, frozen.

Owns no state. Defaults were filled in by the service; ranges were checked there.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """Where one output stands in its constraint. Used by one thread at a time."""

    num_tokens: int  # of the output, that were taken

    def take(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the output."""
        ...

    def take_back(self, count: int) -> None:
        """Forgets the last tokens."""
        ...

    def write_mask(self, address: int, num_bytes: int) -> str | None:
        """Writes the allowed next tokens, a bit each, in words of 4 bytes; None, or why there are none."""
        ...


class Constraint(Protocol):
    """What an output must satisfy, compiled: all its samples share it."""

    def begin(self, output_ids: Iterable[int] = ()) -> Progress:
        """From the start, or behind tokens that were put out before."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stop values of one request; the same for all its samples.

    Noise of choice i at absolute position p depends on (seed, i, p) and nothing else.
    """

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output
    frequency_penalty: float = 0.0  # 0: off; over output
    presence_penalty: float = 0.0  # 0: off; over output
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0  # EOS and stop ids are masked until so many tokens are out
    stop_token_ids: frozenset[int] = frozenset()
    stop_at_eos: bool = True
    max_duration_seconds: float | None = None  # from admission
    logprobs: int | None = None  # alternatives per output token; None: no log-probabilities
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None  # tokens that would leave it are masked; EOS until it is satisfied

    @property
    def has_penalties(self) -> bool:
        """Whether the history of the sequence changes its logits."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
