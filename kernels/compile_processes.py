"""Processes that compile the kernels of a first start, begun before this process imports anything heavy.

Compilers on threads of one process get in each other's way; processes do not, and they import what they need
while this process imports its own. What they compile lies in Triton's cache, where the caller finds it. A
mark in that cache says what was compiled before: where there is one, no process begins. Imports neither torch
nor Triton.
"""

import contextlib
import ctypes
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from kernels.config import triton_cache_folder

MAX_PROCESSES = 16
LEAST_CORES = 4
"""Of a machine on which processes gain something: one imports here, one there."""
ANSWER_SECONDS = 300.0
"""Of a process that is then done without. The slowest kernel takes a few on a quiet machine."""

END_SECONDS = 5.0
PR_SET_PDEATHSIG = 1  # of prctl(2)

_begun: "list[CompileProcesses]" = []


class CompileProcesses:
    """`compile` from as many threads as there are processes; `close` ends them."""

    def __init__(self, modules: Sequence[str], count: int, mark: Path | None = None) -> None:
        """Begins `count` processes that have these modules; returns at once."""
        pairs = [Pipe() for _ in range(count)]
        self.count = count
        self._mark = mark
        self._connections: list[Connection[Any, Any]] = [ours for ours, _ in pairs]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from kernels.compile_processes import follow_parent; follow_parent()\n"
            f"from kernels.compile_process import serve; serve({list(modules)!r}, {descriptors!r})"
        )
        try:
            self._process = subprocess.Popen([sys.executable, "-c", program], pass_fds=descriptors)
        except OSError:
            for ours in self._connections:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._free: SimpleQueue[Connection[Any, Any] | None] = SimpleQueue()
        for connection in self._connections:
            self._free.put(connection)

    def compile(self, source: Any, options: dict[str, Any]) -> str:
        """Has a triton.compiler.ASTSource compiled; returns why that failed, or an empty text."""
        function = source.fn
        where = (function.__module__, function.__name__)
        connection = self._free.get()
        try:
            if connection is None:
                return "its process is gone"
            connection.send((*where, source.signature, source.constants, source.attrs, options))
            if connection.poll(ANSWER_SECONDS):
                return str(connection.recv())
            connection = None
            return f"no answer within {ANSWER_SECONDS:g} s"
        except (OSError, EOFError) as error:
            connection = None  # whose turn that is compiles alone
            return f"no answer: {error!r}"
        except Exception as error:
            return f"not sent: {error!r}"
        finally:
            self._free.put(connection)

    def mark_compiled(self) -> None:
        """The next start with the same kernels begins no process."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.touch()

    def close(self) -> None:
        """Ends them, whatever they are doing; idle ones end by themselves. Idempotent."""
        for connection in self._connections:
            connection.close()
        try:
            self._process.wait(END_SECONDS)  # it waits for its children: else they were left to process 1
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel ends its children with it
            self._process.wait()

    def __enter__(self) -> "CompileProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def begin_if_cold(modules: Sequence[str], shape: str) -> None:
    """Begins processes for the kernels of this process's start, unless they were compiled before.

    `shape` says all of a start that its kernels depend on. On a machine of few cores nothing begins.
    """
    cores = len(os.sched_getaffinity(0))
    if cores < LEAST_CORES or _begun:
        return
    with contextlib.suppress(OSError):  # then threads compile
        mark = triton_cache_folder() / f"kvatlas-{_key(shape)}"
        if not mark.exists():
            _begun.append(CompileProcesses(modules, min(MAX_PROCESSES, cores - 1), mark))


def take_begun() -> CompileProcesses | None:
    """What was begun, once: the caller closes it."""
    return _begun.pop() if _begun else None


def close_begun(*, is_needless: bool) -> None:
    """Ends what was begun and not taken; `is_needless`: the next such start begins none."""
    if (processes := take_begun()) is None:
        return
    if is_needless:
        processes.mark_compiled()
    processes.close()


def follow_parent() -> None:
    """This process is killed when the one that began it ends, and not by a Ctrl-C for all of a group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _key(shape: str) -> str:
    """Of these kernels, this Triton and what `shape` says."""
    parts = [shape, sys.version]
    for name in ("triton", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            parts.append(version(name))
    for file in sorted(Path(__file__).parent.glob("*.py")):
        facts = file.stat()
        parts.append(f"{file.name} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
