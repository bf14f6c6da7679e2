"""Whether memory grows: the line through its samples."""

from typing import Any

import numpy as np

FLAT_MIB_PER_HOUR = 1.0
BLOCK_SECONDS = 300.0
"""Neighbouring samples are alike: the line and its error are those of means over about so many seconds."""


def growth(samples: list[tuple[float, float]], settled: float) -> dict[str, Any]:
    """MiB an hour by least squares after `settled` seconds, and a sample each minute or so.

    `samples`: (seconds, MiB) in order of time, at least three after `settled`.
    """
    late = np.array([each for each in samples if each[0] >= settled])
    count = max(6, round((late[-1, 0] - settled) / BLOCK_SECONDS))
    edges = np.linspace(settled, late[-1, 0], count + 1)[1:-1]
    block = np.searchsorted(edges, late[:, 0], side="right")
    times, mib = np.array([late[block == number].mean(axis=0) for number in np.unique(block)]).T
    hours = (times - times.mean()) / 3600
    slope = float(hours @ mib / (hours @ hours))
    rest = mib - mib.mean() - slope * hours
    error = float(np.sqrt(rest @ rest / max(1, len(mib) - 2) / (hours @ hours)))
    every = max(1, round(len(samples) / 60))
    return {
        "mib_per_hour": round(slope, 2),
        "standard_error": round(error, 2),
        "is_flat": slope <= FLAT_MIB_PER_HOUR,
        "mib_median": round(float(np.median(late[:, 1])), 1),
        "mib_max": round(float(late[:, 1].max()), 1),
        "mib": [round(value, 1) for _, value in samples[::every]],
    }
