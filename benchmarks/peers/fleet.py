"""Which engines are on the device when: as many as fit start side by side, then each is measured alone.

An engine that waits for its next order holds memory and computes nothing. Nothing is measured while another
engine starts. When all that is there of a model is measured it ends, and those that did not fit start: others
of the same model, then those of the next.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
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
    tokens: Mapping[str, int]  # of each engine's pool
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

    def start(self, model: str) -> bool:
        """Starts what fits, and waits until everything that was started is ready or has ended.

        Whether an engine of the model is there to be measured; those that never fit are not asked for again.
        """
        while True:
            began = self._begin()
            for entry in began:
                assert entry.process is not None
                self._note(entry, entry.process.ready(min(self._settings.limits.start, self._left())))
            if any(entry.process is not None for entry in self.of(model)):
                return True
            if not began:
                self._give_up(model)
                return False

    def _begin(self) -> list[Entry]:
        began = []
        settings = self._settings
        while self._waiting and self._fits(self._waiting[0]):
            entry = self._waiting.pop(0)
            entry.process = EngineProcess(
                entry.engine,
                entry.model,
                settings.device,
                settings.tokens[entry.engine],
                settings.logs / f"{entry.name}.log",
                settings.sites.get(entry.engine, ""),
            )
            began.append(entry)
        return began

    def _give_up(self, model: str) -> None:
        for entry in self.of(model):
            if entry in self._waiting:
                self._waiting.remove(entry)
                entry.found["ended"] = "not started: no room beside the others"

    def passes(self, model: str, workloads: Sequence[tuple[str, int]]) -> Iterator[Entry]:
        """Measures a model's engines that are there in turns and yields each entry after each of its passes.

        `workloads`: name and number of passes.
        """
        for entry in self.of(model):
            if entry.process is not None:
                entry.found["beside"] = [other.name for other in self._running() if other is not entry]
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
        """Ends those of a model's engines that are there."""
        for entry in self.of(model):
            if entry.process is not None:
                entry.process.close()
                entry.process = None

    def close(self) -> None:
        """Ends everything."""
        for entry in self._running():
            assert entry.process is not None
            entry.process.close()
            entry.process = None

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
        held = sum(engine_bytes(each.model, tokens[each.engine]) for each in [*self._running(), entry])
        return held <= self._settings.limits.memory

    def _left(self) -> float:
        return self._deadline - time.monotonic()
