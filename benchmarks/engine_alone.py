"""The engine without a service, in a process of its own: what benchmarks/serving.py is compared with.

    python -m benchmarks.engine_alone '{"model": "random:tiny", "settings": {...}, "scale": 0.1}'

Prints one line of JSON, the fields of serving_cases.Alone.
"""

import json
import sys
import time

from benchmarks.offline import Engine, measure
from benchmarks.record import percentile
from benchmarks.serving_cases import (
    FIRST_TOKEN_RUNS,
    LEAD_SECONDS,
    WARM_UP_RUNS,
    offline_workload,
    prompt_length,
)
from benchmarks.workloads import fixed, id_limit
from worker.config import WorkerConfig


def main() -> None:
    """Every workload twice, the second pass counts."""
    order = json.loads(sys.argv[1])
    scale, limit = order["scale"], id_limit(order["model"])
    engine = Engine(WorkerConfig(model=order["model"], **order["settings"]))
    workload = offline_workload(scale).within(limit)
    rates = [measure(engine, workload)["tokens_per_second"] for _ in range(2)]
    first_tokens = []
    for number in range(FIRST_TOKEN_RUNS):
        time.sleep(LEAD_SECONDS)  # as long as between two served requests: clocks of an idle device drop
        workload = fixed(1, prompt_length(scale), 4, seed=number).within(limit)
        first_tokens.append(engine.run(workload).first_token * 1000)
    figures = {
        "offline_rate": rates[1],
        "first_token_ms": round(percentile(first_tokens[WARM_UP_RUNS:], 0.5), 2),
    }
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
