"""What a turn of the engine tells its observers, with nothing in it but what a test says."""

from array import array
from typing import Any

from worker.readers.observation import Observation
from worker.stats import EngineCounts, Growth


def quiet_turn(**told: Any) -> Observation:
    """A turn in which no page and no sequence changed; `told` are fields of Observation."""
    quiet: dict[str, Any] = {
        "changes": (),
        "growth": Growth(),
        "ended": (),
        "started": (),
        "ended_owners": array("H"),
        "progress_owners": array("H"),
        "progress_tokens": array("I"),
        "counts": EngineCounts(),
        "rows_used": 0,
        "idle_seconds": 0.0,
    }
    return Observation(**{**quiet, **told})
