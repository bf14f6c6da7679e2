"""The slowest turns of a pass, and what the host did in them: why one pass was slower than the next.

Owns a few records per kind of step, a hook of the garbage collector and one of Triton's compiler while a pass
runs. A turn is one round of the engine's loop: a step is decided and launched, the one before is waited for.
"""

import contextlib
import gc
import heapq
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from worker.scheduling.step import Step

KEPT = 2  # of each kind; a file of a comparison has a dozen passes
MAX_KERNELS = 8  # named in one turn


class Times(NamedTuple):
    """What a pass has spent so far, in seconds."""

    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0  # for the device
    commit: float = 0.0


class SlowSteps:
    """Which turns took longest, those with prompts apart: they are long anyway and would hide the others."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kept: dict[bool, list[tuple[float, int, dict[str, Any]]]] = {False: [], True: []}
        self._began = self._ended = clock()
        self._turns = 0
        self._gc_began: float | None = None
        self._gc_seconds = 0.0
        self._kernels: deque[str] = deque(maxlen=MAX_KERNELS)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A pass: counts its garbage collections and the kernels that are compiled or read from the disk."""
        gc.callbacks.append(self._collected)
        self._began = self._ended = self._clock()
        try:
            with _told_of_kernels(self._compiled):
                yield
        finally:
            gc.callbacks.remove(self._collected)

    def turn(self, launched: Step | None, finished: Step | None, before: Times, after: Times) -> None:
        """A turn has ended; `before`, `after`: the pass's times at its two ends."""
        now = self._clock()
        seconds = now - self._ended
        kept = self._kept[_has_prompts(launched) or _has_prompts(finished)]
        if len(kept) < KEPT or seconds > kept[0][0]:
            record = {
                "at_ms": _ms(self._ended - self._began),
                "ms": _ms(seconds),
                **{
                    f"{part}_ms": _ms(end - start)
                    for part, start, end in zip(Times._fields, before, after, strict=True)
                },
                "gc_ms": _ms(self._gc_seconds),
                "kernels": list(self._kernels),
                "launched": _size(launched),
                "finished": _size(finished),
            }
            (heapq.heappush if len(kept) < KEPT else heapq.heappushpop)(kept, (seconds, self._turns, record))
        self._turns += 1
        self._gc_seconds = 0.0
        self._kernels.clear()
        self._ended = now

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Milliseconds, rows and tokens of the slowest turns, the slowest first."""
        return {
            "prompts" if has_prompts else "decode": [record for *_, record in sorted(kept, reverse=True)]
            for has_prompts, kept in self._kept.items()
        }

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        now = self._clock()
        if phase == "stop" and self._gc_began is not None:
            self._gc_seconds += now - self._gc_began
        self._gc_began = now if phase == "start" else None

    def _compiled(self, **event: Any) -> None:
        name = getattr(event.get("src"), "name", "unknown")
        self._kernels.append(f"{name} ({'cached' if event.get('cache_hit') else 'compiled'})")


@contextlib.contextmanager
def _told_of_kernels(listener: Callable[..., None]) -> Iterator[None]:
    """Whoever listened before still hears. Nothing where Triton is not loaded."""
    if (triton := sys.modules.get("triton")) is None:
        yield
        return
    before = triton.knobs.compilation.listener

    def hear(**event: Any) -> None:
        if before is not None:
            before(**event)
        listener(**event)

    triton.knobs.compilation.listener = hear
    try:
        yield
    finally:
        triton.knobs.compilation.listener = before


def _has_prompts(step: Step | None) -> bool:
    return step is not None and step.num_decode < len(step.rows)


def _size(step: Step | None) -> dict[str, int] | None:
    return None if step is None else {"rows": len(step.rows), "tokens": step.num_tokens}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
