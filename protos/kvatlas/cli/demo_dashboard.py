"""The dashboard of `kvatlas demo`: beside the demo's server until somebody has seen enough."""

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvatlas.cli import config
from kvatlas.cli.dashboard import NEEDS
from kvatlas.cli.exits import CommandFailed

USUAL_PORT = 8501
READY_SECONDS, END_SECONDS = 60.0, 10.0
POLL_SECONDS = 0.05

Process = subprocess.Popen[bytes]


@contextmanager
def running(server_address: str, folder: Path) -> Iterator[tuple[str, Process]]:
    """Its URL and its process, which ends with the block. CommandFailed where it cannot start."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandFailed(f"no dashboard: {missing[0]} is not installed: pip install 'kvatlas[dashboard]'")
    ready, log_path = folder / "dashboard.json", folder / "dashboard.log"
    command = [sys.executable, "-m", "dashboard", "--server", server_address, "--parent-watch"]
    command += ["--listen", f"127.0.0.1:{_free_port()}", "--ready-file", str(ready)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=config.child_environment()
        )
    try:
        _wait(process, ready, log_path)
        yield str(json.loads(ready.read_text())["url"]), process
    finally:
        _end(process)


def _free_port() -> int:
    """The one that people know, or any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", USUAL_PORT))
        except OSError:
            return 0
    return USUAL_PORT


def _wait(process: Process, ready: Path, log_path: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > until:
            last = log_path.read_text(errors="replace").splitlines()[-5:]
            raise CommandFailed("the dashboard did not start: " + " / ".join(last))
        time.sleep(POLL_SECONDS)


def _end(process: Process) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
