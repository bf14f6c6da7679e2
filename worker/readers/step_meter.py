"""Histograms and counters of steps, audit rounds and bills. Filled by the observer alone."""

from collections.abc import Iterable

from worker.readers.buckets import Buckets, FrozenBuckets
from worker.readers.metric_table import (
    CHECK_SECONDS,
    PAGE_SECONDS,
    PHASES,
    STEP_SECONDS,
    STEP_SEQUENCES,
    STEP_TOKENS,
)
from worker.stats import StepStats


class StepMeter:
    """What the engine did, counted."""

    def __init__(self) -> None:
        self._seconds = {phase: Buckets(STEP_SECONDS) for phase in PHASES}
        self._tokens = Buckets(STEP_TOKENS)
        self._sequences = Buckets(STEP_SEQUENCES)
        self._checks = Buckets(CHECK_SECONDS)
        self._bills = Buckets(PAGE_SECONDS)
        self._replayed = 0
        self._eager = 0

    def step(self, step: StepStats) -> None:
        """One step that ended."""
        self._seconds[step.phase].observe(step.seconds)
        self._tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self._sequences.observe(step.num_sequences)
        if step.is_replayed:
            self._replayed += 1
        else:
            self._eager += 1

    def check(self, seconds: float) -> None:
        """One round of the audit."""
        self._checks.observe(seconds)

    def bills(self, page_seconds: Iterable[float]) -> None:
        """Requests that ended."""
        for charge in page_seconds:
            self._bills.observe(charge)

    @property
    def graphs(self) -> tuple[int, int]:
        """Steps that were replayed from a CUDA graph, and steps that ran eagerly."""
        return self._replayed, self._eager

    def frozen(self) -> dict[tuple[str, tuple[str, ...]], FrozenBuckets]:
        """All histograms by name and label values."""
        histograms: dict[tuple[str, tuple[str, ...]], FrozenBuckets]
        histograms = {("step_seconds", (phase,)): self._seconds[phase].frozen() for phase in PHASES}
        histograms["step_tokens", ()] = self._tokens.frozen()
        histograms["step_sequences", ()] = self._sequences.frozen()
        histograms["integrity_check_seconds", ()] = self._checks.frozen()
        histograms["request_page_seconds", ()] = self._bills.frozen()
        return histograms
