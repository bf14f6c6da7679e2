"""What passes say: rates of first passes and of warm ones, and ours over the peers'."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OURS = "kvatlas"
FIRST, LATER = KINDS = ("first", "later")

Rates = dict[str, dict[str, float]]  # workload: kind of pass: output tokens a second


def rates_by_workload(rows: Sequence[Mapping[str, Any]]) -> Rates:
    """`first`: of the first pass; `later`: the median of the passes after it."""
    passes: dict[str, dict[int, float]] = {}
    for row in rows:
        passes.setdefault(row["workload"], {})[row["pass"]] = row["tokens_per_second"]
    rates: Rates = {}
    for workload, by_number in passes.items():
        later = [rate for number, rate in by_number.items() if number > 1]
        rates[workload] = {FIRST: by_number[1]} if 1 in by_number else {}
        rates[workload] |= {LATER: statistics.median(later)} if later else {}
    return rates


def ratios(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Rates]:
    """Ours over each peer, where both have passes, not rounded: `{"vllm": {"b1": {"first": 2.5}}}`."""
    ours = rates_by_workload(engines.get(OURS, {"rows": []})["rows"])
    return {
        peer: {
            workload: {
                kind: ours[workload][kind] / rate for kind, rate in rates.items() if kind in ours[workload]
            }
            for workload, rates in rates_by_workload(found["rows"]).items()
            if workload in ours
        }
        for peer, found in engines.items()
        if peer != OURS
    }
