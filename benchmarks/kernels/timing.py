"""How kernels are timed: calls in a CUDA graph, in turn over copies of their data that no L2 cache holds.

In the engine every layer has pages of its own, so what attention reads is never in the cache.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import torch

COLD_BYTES = 160 << 20
"""Bytes of all copies of one call's data, at least: several times an H200's L2 cache."""
REPLAYS = 9
READ_TB_S = 4.4
"""Terabytes a second that a kernel which only reads can hope for on an H200 (4.8 by its datasheet)."""
COPY_TB_S = 4.3
"""The same for one that reads and writes: a copy of 8.6 GB by torch."""

Data = TypeVar("Data")


def copies_for(num_bytes: int, most: int = 64) -> int:
    """Copies of data of `num_bytes` that together leave the cache cold."""
    return max(1, min(most, -(-COLD_BYTES // num_bytes)))


def graphed_us(run: Callable[[Data], object], data: Sequence[Data]) -> float:
    """Median microseconds of run(data[i]) inside a graph that goes through `data` (at least four calls)."""
    calls = [data[i % len(data)] for i in range(max(4, len(data)))]
    for one in calls[:2]:
        run(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in calls:
            run(one)
    graph.replay()
    return median(_event_us(graph.replay) for _ in range(REPLAYS)) / len(calls)


def eager_us(run: Callable[[], object]) -> float:
    """Median microseconds of a call that is long against its launch."""
    for _ in range(2):
        run()
    return median(_event_us(run) for _ in range(REPLAYS))


def _event_us(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
