"""Runs compilers of C++ and CUDA side by side. Knows nothing of what they compile."""

import os
import signal
import subprocess
from collections.abc import Sequence

Done = subprocess.CompletedProcess[str]


def run_compilers(commands: Sequence[Sequence[str]], seconds: float) -> list[Done]:
    """Their exit codes and what they printed, in the order of the commands.

    No compiler outlives it, whatever ends it. Raises OSError, and TimeoutExpired where one takes longer.
    """
    running: list[subprocess.Popen[str]] = []
    done: list[Done] = []
    try:
        for command in commands:
            # A group of its own: a compiler is several processes, and ends with all of them or goes on.
            running.append(
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
                )
            )
        for process in running:
            out, errors = process.communicate(timeout=seconds)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, errors))
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return done
