"""The engine without a service, in a process of its own: what benchmarks/serving.py is compared with.

    python -m benchmarks.engine_alone '{"model": "random:tiny", "settings": {...}, "scale": 0.1,
        "with_offline": true, "marks": ""}'

Prints one line of JSON, the fields of serving_cases.Alone. `marks`: a folder for the times of its steps'
stations (benchmarks/serving_marks.py).
"""

import json
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from benchmarks.offline import Engine, measure
from benchmarks.record import percentile
from benchmarks.serving_cases import (
    FIRST_TOKEN_RUNS,
    LEAD_SECONDS,
    WARM_UP_RUNS,
    offline_workload,
    prompt_length,
)
from benchmarks.serving_marks import Marks, mark_engine
from benchmarks.workloads import Workload, fixed, id_limit
from worker.config import WorkerConfig

PAUSES = {"paused": LEAD_SECONDS, "in_turn": 0.0}
"""Seconds before each prompt, those of served requests."""


def main() -> None:
    """Every workload twice, the second pass counts."""
    order = json.loads(sys.argv[1])
    scale, limit = order["scale"], id_limit(order["model"])
    marks = Marks()
    if order["marks"]:
        mark_engine(marks, order["settings"]["device"])
    engine = Engine(WorkerConfig(model=order["model"], **order["settings"]))
    workload = offline_workload(scale).within(limit)
    passes = 2 if order["with_offline"] else 0
    rates = [measure(engine, workload)["tokens_per_second"] for _ in range(passes)]
    medians = {}
    for name, prompts in new_prompts(prompt_length(scale), limit).items():
        medians[name] = round(percentile(first_tokens(engine, prompts, PAUSES[name], marks), 0.5), 2)
        if order["marks"]:
            marks.write(Path(order["marks"]), f"alone_{name}")
    figures = {
        "offline_rate": rates[-1] if rates else None,
        "first_token_ms": medians["paused"],
        "first_token_in_turn_ms": medians["in_turn"],
    }
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


def new_prompts(length: int, limit: int) -> dict[str, list[Workload]]:
    """Prompts for each way, none of which begins as another: the engine's prefix cache keeps them all."""
    draws = count()
    return {
        name: [fixed(1, length, 4, seed=next(draws)).within(limit) for _ in range(FIRST_TOKEN_RUNS)]
        for name in PAUSES
    }


def first_tokens(engine: Engine, prompts: Sequence[Workload], pause: float, marks: Marks) -> list[float]:
    """Milliseconds to the first token of each prompt but the first ones; their marks are all that is left."""
    found = []
    for number, prompt in enumerate(prompts):
        if number == WARM_UP_RUNS:
            marks.passed.clear()
        time.sleep(pause)
        found.append(engine.run(prompt).first_token * 1000)
    return found[WARM_UP_RUNS:]


if __name__ == "__main__":
    main()
