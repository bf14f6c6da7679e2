"""One engine in a process of its own, so that it finds an empty GPU: a line of JSON per pass.

    python -m benchmarks.peers.child vllm random:qwen3-0.6b cuda /tmp/scratch b1 b8 b64 offline256

Every workload runs twice, the second time with other ids: first what a fresh engine does, then a warm one,
and no prefix cache helps either. Before the first, two short prompts.
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.peers.engines import ENGINES, timed, version_of
from benchmarks.workloads import fixed, named

MARK = "PEER "  # begins a line that is ours; engines print much, and bars without an end of line


def main() -> None:
    """Loads, warms up, runs."""
    began = time.perf_counter()
    engine, model, device, scratch, *names = sys.argv[1:]
    generate = ENGINES[engine](model, Path(scratch), device)
    generate(fixed(2, 64, 16))
    ready = {"ready_seconds": round(time.perf_counter() - began, 1), "version": version_of(engine)}
    print("\n" + MARK + json.dumps(ready), flush=True)
    for name in names:
        workload = named(name)
        for number in (1, 2):
            row = {"pass": number, **timed(generate, workload.renamed(number))}
            print("\n" + MARK + json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # engines leave threads and children that would be waited for


if __name__ == "__main__":
    main()
