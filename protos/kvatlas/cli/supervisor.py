"""Starts processes, passes on what they log, restarts the one that dies, ends all in order.

Owns the children and nothing else of the machine: it signals only processes that it started. Knows
neither worker nor service: each child is a command, a name and a way to end. Children are started by
exec in a session of their own (never forked Python), so that Ctrl-C reaches only the supervisor,
which then decides the order.
"""

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvatlas.cli.exits import FAILED, USAGE

KILL_SECONDS = 5.0  # after SIGKILL, until the kernel must have taken it
LINE_BYTES = 8192  # of one log line at a time
PARENT_WATCH_SECONDS = 0.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 0.25
"""A signal that comes just before a wait, or to another thread, does not end it: its handler runs later."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. Children end in the order of the list, each with its own patience."""

    name: str
    command: Sequence[str]
    end_seconds: float  # from SIGTERM to SIGKILL
    ends_all: bool = False  # its end with code 0, once all are ready, was asked for and is meant for all


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When to start a dead child again: soon, then ever later, at most `limit` times a window."""

    limit: int
    window_seconds: float = 60.0
    first_delay_seconds: float = 0.25
    last_delay_seconds: float = 8.0

    def delay(self, deaths: Sequence[float], now: float) -> float | None:
        """Seconds to wait after the last of `deaths` (times, oldest first); None: give up."""
        recent = sum(1 for death in deaths if now - death < self.window_seconds)
        if recent > self.limit:
            return None
        return min(self.first_delay_seconds * 2.0 ** max(0, recent - 1), self.last_delay_seconds)


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: "subprocess.Popen[bytes] | None" = None
    deaths: list[float] = field(default_factory=list)
    restart_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Died:
    name: str
    pid: int
    code: int


class Supervisor:
    """Runs until a signal, a drained service, or one that cannot be kept alive. `log` takes whole lines."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        policy: RestartPolicy,
        *,
        environment: Mapping[str, str],
        clock: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._children = {spec.name: _Child(spec) for spec in specs}
        self._policy = policy
        self._environment = environment
        self._clock = clock
        self._log = log
        self._events: queue.SimpleQueue[_Died | signal.Signals] = queue.SimpleQueue()
        self._is_ready = False
        self._has_signals = False

    def install_signals(self) -> None:
        """SIGINT, SIGTERM and SIGHUP end it in order, but what `nohup` has had ignored. Main thread only."""
        self._has_signals = True
        for number in SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda got, _frame: self._events.put(signal.Signals(got)))

    def watch_parent(self, pid: int) -> None:
        """Ends it in order, as SIGTERM does, once another process than this is the parent."""
        threading.Thread(target=self._await_orphaned, args=(pid,), daemon=True).start()

    def run(
        self,
        is_ready: Callable[[], bool],
        on_ready: Callable[[], None],
        ready_seconds: float,
        on_change: Callable[[], None],
    ) -> int:
        """Starts all, waits until they are ready, keeps them alive. An exit code; no child is left.

        `on_change` is called whenever `process_ids` has become another one since `on_ready`.
        """
        try:
            for child in self._children.values():
                self._start(child)
            code = self._wait_ready(is_ready, ready_seconds)
            if code is None:
                self._is_ready = True
                on_ready()
                code = self._keep_alive(on_change)
        finally:
            self._end_all()
            self._ignore_signals()
        return code

    def process_ids(self) -> dict[str, int]:
        """Of the children that run."""
        return {name: c.process.pid for name, c in self._children.items() if c.process is not None}

    def _ignore_signals(self) -> None:
        """All has ended: a further signal is late. At exit Python drops its handlers, and it would kill."""
        if self._has_signals:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)

    def _wait_ready(self, is_ready: Callable[[], bool], limit_seconds: float) -> int | None:
        """None: ready. Before that a death is final: what failed to start will fail again."""
        until = self._clock() + limit_seconds
        while self._clock() < until:
            event = self._next_event(0.1)
            if isinstance(event, signal.Signals):
                return 128 + event
            if event is not None:
                self._log(f"{event.name} ended before it was ready ({_ending(event.code)})")
                return USAGE if event.code == USAGE else FAILED
            if is_ready():
                return None
        self._log(f"not ready after {limit_seconds:g} s: giving up")
        return FAILED

    def _keep_alive(self, on_change: Callable[[], None]) -> int:
        told = self.process_ids()
        while True:
            event = self._next_event(self._until_restart())
            if isinstance(event, signal.Signals):
                self._log(f"{event.name}: draining; once more ends what runs, a third time kills")
                return 0
            if event is not None and event.code == 0 and self._children[event.name].spec.ends_all:
                self._log(f"{event.name} has drained and ended: ending the rest")
                return 0
            if event is not None and not self._plan_restart(event):
                return FAILED
            self._restart_due()
            if (running := self.process_ids()) != told:
                told = running
                on_change()

    def _next_event(self, timeout_seconds: float | None) -> "_Died | signal.Signals | None":
        """A death that counts, a signal, or None when the time is up."""
        until = math.inf if timeout_seconds is None else self._clock() + timeout_seconds
        while True:
            left = max(0.0, until - self._clock())
            try:
                event = self._events.get(timeout=min(left, LOOK_SECONDS))
                break
            except queue.Empty:
                if left <= LOOK_SECONDS:
                    return None
        if isinstance(event, _Died):
            child = self._children[event.name]
            assert child.process is not None, event
            assert child.process.pid == event.pid, event
            child.process = None
        return event

    def _plan_restart(self, event: _Died) -> bool:
        child = self._children[event.name]
        now = self._clock()
        child.deaths.append(now)
        delay = self._policy.delay(child.deaths, now)
        if delay is None:
            self._log(
                f"{event.name} ended ({_ending(event.code)}), {self._policy.limit + 1} times within"
                f" {self._policy.window_seconds:g} s: giving up"
            )
            return False
        self._log(f"{event.name} ended ({_ending(event.code)}); again in {delay:g} s")
        child.restart_at = now + delay
        return True

    def _until_restart(self) -> float | None:
        times = [child.restart_at for child in self._children.values() if child.restart_at is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def _restart_due(self) -> None:
        for child in self._children.values():
            if child.restart_at is not None and child.restart_at <= self._clock():
                child.restart_at = None
                self._start(child)

    def _start(self, child: _Child) -> None:
        process = subprocess.Popen(
            child.spec.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(self._environment),
            start_new_session=True,
        )
        child.process = process
        # Two threads: a grandchild may hold the pipe open after the child is dead.
        for task in (self._pass_on_log, self._await_death):
            threading.Thread(target=task, args=(child.spec.name, process), daemon=True).start()

    def _pass_on_log(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout as output:
            while line := output.readline(LINE_BYTES):
                self._log(f"{name:7} | {line.decode(errors='replace').rstrip()}")

    def _await_orphaned(self, pid: int) -> None:
        while os.getppid() == pid:
            time.sleep(PARENT_WATCH_SECONDS)
        self._log(f"the process that started this, {pid}, is gone")
        self._events.put(signal.SIGTERM)

    def _await_death(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        self._events.put(_Died(name, process.pid, process.wait()))

    def _end_all(self) -> None:
        """One child after the other: SIGTERM, patience, SIGKILL. A further signal speeds it up.

        Before they are ready they serve nobody, and all are told at once.
        """
        running = [child for child in self._children.values() if child.process is not None]
        if not self._is_ready:
            for child in running:
                _terminate(child)
        for child in running:
            if self._is_ready:
                _terminate(child)
            self._await_end(child)

    def _await_end(self, child: _Child) -> None:
        process = child.process
        if process is None:
            return
        until, num_signals = self._clock() + child.spec.end_seconds, 0
        while child.process is not None and (left := until - self._clock()) > 0:
            event = self._next_event(left)
            if isinstance(event, signal.Signals):
                num_signals += 1
                self._log(f"{event.name}: ending what runs" if num_signals == 1 else f"{event.name}: killing")
                for other in self._children.values():
                    if other.process is not None:
                        _hurry(other.process) if num_signals == 1 else _kill(other.process)
        if child.process is not None:
            self._log(f"{child.spec.name} did not end within {child.spec.end_seconds:g} s: killed")
            _kill(process)
            while child.process is not None and self._clock() < until + KILL_SECONDS:
                self._next_event(0.1)


def _terminate(child: _Child) -> None:
    if child.process is not None:
        child.process.terminate()


def _hurry(process: "subprocess.Popen[bytes]") -> None:
    """A second signal. Not SIGTERM again: two of a kind that come at once are delivered as one."""
    process.send_signal(signal.SIGINT)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """With all that it started: each child leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(code: int) -> str:
    """`signal KILL` or `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name.removeprefix('SIG')}"
    except ValueError:
        return f"signal {-code}"


def print_log(line: str) -> None:
    """A line to stderr, whole: one write, so that threads do not mix.

    Lost where its reader has left or its disk is full: what serves must go on, and end in order.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
