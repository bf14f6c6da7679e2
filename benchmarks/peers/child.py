"""One engine in a process of its own: loads, says that it is ready, then runs what it is told to.

    python -m benchmarks.peers.child vllm random:qwen3-0.6b cuda 192512 /tmp/scratch

An order is a line of JSON on stdin, {"workload": "b8", "pass": 2}; its answer, and what there is to say when
the engine is ready, is a line on stdout that begins with MARK. Each pass has other ids, so that no prefix
cache helps. Before it is ready the engine answers two short prompts. Ends with stdin and parent.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES, Request, timed, version_of
from benchmarks.workloads import fixed, named

PARENT_WATCH_SECONDS = 0.5
MARK = "PEER "  # begins a line that is ours; engines print much, and bars without an end of line


def main() -> None:
    """Loads, warms up, obeys."""
    began = time.perf_counter()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    engine, model, device, tokens, scratch = sys.argv[1:]
    loaded = ENGINES[engine](Request(model, device, int(tokens), Path(scratch)))
    loaded.generate(fixed(2, 64, 16))
    say(
        {
            "ready_seconds": round(time.perf_counter() - began, 1),
            "version": version_of(engine),
            "options": loaded.options,
        }
    )
    for line in sys.stdin:
        order = json.loads(line)
        workload = named(order["workload"]).renamed(order["pass"])
        say({"pass": order["pass"], **timed(loaded.generate, workload), **loaded.explain()})
    sys.stdout.flush()
    os._exit(0)  # engines leave threads and children that would be waited for


def end_with(parent: int) -> None:
    """Kills this group, of which this process is the first, when its parent is gone.

    What kills the parent's own group does not reach it; until it reads stdin again it would hold the device.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_WATCH_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


def say(message: dict[str, Any]) -> None:
    """One write, so that no other process writes between its parts."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"\n{MARK}{json.dumps(message)}\n".encode())


if __name__ == "__main__":
    main()
