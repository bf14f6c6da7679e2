"""The limits that the scheduler keeps to. Frozen plain values; owns no state."""

from dataclasses import dataclass

from worker.pages.page_cache import CacheConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything the control plane is told. Counts are in tokens or pages as the names say."""

    cache: CacheConfig
    max_running: int  # sequences; rows of the page table less the dummy row
    max_step_tokens: int  # more than max_running, so that prompts progress beside a full batch
    max_context_tokens: int  # prompt and output of one sequence
    max_queued_requests: int = 1024
    max_chunk_tokens: int = 0  # of one prompt in one step; 0: no limit but max_step_tokens
    # Context at which a prompt's token costs twice what it costs at position 0: beside running sequences,
    # pieces shrink with their context, so that a step takes no longer late in a prompt. 0: not counted.
    doubling_context: int = 0
    watermark_pages: int | None = None  # kept free by admission; None: a hundredth of the pool
    aging_seconds: float = 30.0  # waiting so long is worth one level of priority
    max_skips: int = 16  # times that later requests may pass a request that does not fit yet
    max_scanned: int = 8  # requests that do not fit looked past in one step
    eos_token_ids: frozenset[int] = frozenset()
    max_pinned_pages: int | None = None  # None: a quarter of the pool
    start_time: float = 0.0  # of the epoch, on the clock of every ``now``

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= 32_767:
            raise ValueError(f"max_running is {self.max_running}, possible are 1 .. 32767")
        if self.max_step_tokens <= self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be more than max_running "
                f"({self.max_running}), or prompts stand still beside a full batch"
            )
        if self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens is {self.max_context_tokens}, at least 2 are needed")
        if self.aging_seconds <= 0:
            raise ValueError(f"aging_seconds is {self.aging_seconds}, it must be positive")

    @property
    def is_simulated(self) -> bool:
        """For what-if: no device runs the steps, nobody watches, nobody is billed."""
        return not self.cache.is_watched

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.cache.page_size

    @property
    def num_watermark_pages(self) -> int:
        """Pages that admission leaves free for running sequences."""
        if self.watermark_pages is not None:
            return self.watermark_pages
        return self.cache.num_pages // 100

    @property
    def num_pinnable_pages(self) -> int:
        """Most pages that pins may keep."""
        if self.max_pinned_pages is not None:
            return self.max_pinned_pages
        return self.cache.num_pages // 4
