"""Which engines are on the device when: as many as fit start side by side, then each is measured alone.

An engine that waits for its next order holds memory and computes nothing. Nothing is measured while another
engine starts. When all of a model is measured its engines end, and those that did not fit start.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.process import EngineProcess
from benchmarks.peers.sizes import engine_bytes

FEW = {"transformers": ("b1",)}  # workloads of an engine that takes them one by one
SLOW_STARTERS = ("vllm", "mini_sglang")  # of the models that come later, the first to begin


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: until an engine is ready, of one pass, of the whole run; bytes: of all engines together."""

    start: float
    one_pass: float
    whole: float
    memory: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What all engines share."""

    device: str
    tokens: int  # of each pool
    limits: Limits
    logs: Path
    sites: dict[str, str]  # engine: folders of its packages


@dataclass(slots=True)
class Entry:
    """An engine on a model, and what is known of it."""

    model: str
    engine: str
    process: EngineProcess | None = None
    found: dict[str, Any] = field(default_factory=lambda: {"rows": []})

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.model.removeprefix('random:')}"


class Fleet:
    """The engines of all comparisons, in the order in which they may start."""

    def __init__(self, comparisons: Sequence[tuple[str, Sequence[str]]], settings: Settings) -> None:
        self._settings = settings
        self._deadline = time.monotonic() + settings.limits.whole
        self.entries = [Entry(model, engine) for model, engines in comparisons for engine in engines]
        first = comparisons[0][0]
        self._waiting = sorted(
            self.entries, key=lambda e: (e.model != first, e.model != first and e.engine not in SLOW_STARTERS)
        )

    def of(self, model: str) -> list[Entry]:
        """The entries of a model, in the order of its comparison."""
        return [entry for entry in self.entries if entry.model == model]

    def start(self) -> None:
        """Starts what fits, and waits until everything that was started is ready or has ended."""
        while self._waiting and self._fits(self._waiting[0]):
            entry = self._waiting.pop(0)
            settings = self._settings
            entry.process = EngineProcess(
                entry.engine,
                entry.model,
                settings.device,
                settings.tokens,
                settings.logs / f"{entry.name}.log",
                settings.sites.get(entry.engine, ""),
            )
        for entry in self._running():
            if "ready_seconds" not in entry.found:
                assert entry.process is not None
                message = entry.process.ready(min(self._settings.limits.start, self._left()))
                self._note(entry, message)

    def passes(self, model: str, workloads: Sequence[tuple[str, int]]) -> Iterator[Entry]:
        """Measures a model's engines in turns and yields each entry after each of its passes.

        `workloads`: name and number of passes.
        """
        for workload, count in workloads:
            for number in range(1, count + 1):
                for entry in self.of(model):
                    if entry.process is None or workload not in FEW.get(entry.engine, (workload,)):
                        continue
                    if self._left() <= 0:
                        entry.found.setdefault("ended", "the time of the whole run was over")
                        continue
                    seconds = min(self._settings.limits.one_pass, self._left())
                    self._note(entry, entry.process.run(workload, number, seconds))
                    yield entry

    def end(self, model: str) -> None:
        """Ends a model's engines; what has not started by now never does."""
        for entry in self.of(model):
            if entry.process is not None:
                entry.process.close()
                entry.process = None
            if entry in self._waiting:
                self._waiting.remove(entry)
                entry.found["ended"] = "not started: no room beside the others"

    def close(self) -> None:
        """Ends everything."""
        for entry in self._running():
            assert entry.process is not None
            entry.process.close()
            entry.process = None

    def resident(self) -> list[str]:
        """Names of the engines that hold memory now."""
        return [entry.name for entry in self._running()]

    def _note(self, entry: Entry, message: dict[str, Any] | None) -> None:
        assert entry.process is not None
        if message is None:
            entry.found["ended"] = entry.process.ended
            print(entry.name, "ended:", entry.process.ended, *entry.process.last_lines, sep="\n", flush=True)
            entry.process = None
        elif "workload" in message:
            entry.found["rows"].append(message)
        else:
            entry.found |= message

    def _running(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.process is not None]

    def _fits(self, entry: Entry) -> bool:
        tokens = self._settings.tokens
        held = sum(engine_bytes(other.model, tokens) for other in [*self._running(), entry])
        return held <= self._settings.limits.memory

    def _left(self) -> float:
        return self._deadline - time.monotonic()
