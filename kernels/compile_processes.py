"""Processes that compile kernels, begun at the start of a process whose kernel cache is empty.

Compilers on threads of one process get in each other's way; processes do not, and they import what they need
while this process imports its own. What they compile lies in Triton's cache, where the caller finds it.
Imports neither torch nor Triton.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from kernels.config import triton_cache_folder

MAX_PROCESSES = 16
END_SECONDS = 5.0

_begun: "list[CompileProcesses]" = []


class CompileProcesses:
    """`compile` from as many threads as there are processes; `close` ends them."""

    def __init__(self, modules: Sequence[str], count: int) -> None:
        """Begins `count` processes that have these modules; returns at once."""
        pairs = [Pipe() for _ in range(count)]
        self.count = count
        self._connections: list[Connection[Any, Any]] = [ours for ours, _ in pairs]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; sys.pycache_prefix = {sys.pycache_prefix!r}\n"
            f"from kernels.compile_process import serve; serve({list(modules)!r}, {descriptors!r})"
        )
        self._process = subprocess.Popen([sys.executable, "-c", program], pass_fds=descriptors)
        for _, theirs in pairs:
            theirs.close()
        self._free: SimpleQueue[Connection[Any, Any]] = SimpleQueue()
        for connection in self._connections:
            self._free.put(connection)

    def compile(self, source: Any, options: dict[str, Any]) -> str:
        """Has a triton.compiler.ASTSource compiled; returns why that failed, or an empty text."""
        function = source.fn
        where = (function.__module__, function.__name__)
        connection = self._free.get()
        try:
            connection.send((*where, source.signature, source.constants, source.attrs, options))
            return str(connection.recv())
        except Exception as error:  # it is gone, or the request cannot be sent: the caller compiles
            return f"no answer: {error!r}"
        finally:
            self._free.put(connection)

    def close(self) -> None:
        """Ends them, at the latest after END_SECONDS. Idempotent."""
        for connection in self._connections:
            connection.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "CompileProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def begin_if_cold(modules: Sequence[str]) -> None:
    """Begins processes for the kernels of this process's start, where Triton's cache holds nothing yet."""
    cores = len(os.sched_getaffinity(0))
    if cores > 2 and not _begun and _is_empty():
        _begun.append(CompileProcesses(modules, min(MAX_PROCESSES, cores - 1)))


def take_begun() -> CompileProcesses | None:
    """What was begun, once: the caller closes it."""
    return _begun.pop() if _begun else None


def _is_empty() -> bool:
    with contextlib.suppress(OSError):
        return not any(triton_cache_folder().iterdir())
    return True
