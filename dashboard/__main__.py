"""`python -m dashboard`: config, app, serve. No logic."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dashboard import allocator
from dashboard.config import ConfigError, DashboardConfig, from_args, wants_print
from kvatlas.log_lines import LineFormatter
from kvatlas.start_failures import start_reason

USAGE_STATUS, START_STATUS = 2, 1
PARENT_WATCH_SECONDS = 0.5
SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 3  # for open sockets, when it ends

if TYPE_CHECKING:
    from uvicorn import Server

logger = logging.getLogger("dashboard")


def main(arguments: Sequence[str]) -> int:
    """Serves until a signal; returns the exit status."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    try:
        config = from_args(arguments)
    except ConfigError as error:
        sys.stderr.write(f"python -m dashboard: {error}\n")
        return USAGE_STATUS
    if wants_print(arguments):
        sys.stdout.write(config.printable() + "\n")
        return 0
    _set_up_log(config.log_level)
    if config.ready_file:
        with contextlib.suppress(OSError):  # then it cannot be written either, which is told
            Path(config.ready_file).unlink()  # of a run before: who waits would take it for ours
    try:
        listener = _listen(config)  # before Streamlit is imported, which takes seconds
    except OSError as error:
        # What Python adds to it names the address again.
        why, _, _ = (error.strerror or str(error)).partition(" (while")
        logger.error(
            "event=start_failed reason=%s why=%r", start_reason(error), f"listen {config.listen}: {why}"
        )
        return START_STATUS
    from dashboard import process

    allocator.settle()
    process.install(config)
    return asyncio.run(_serve(config, listener))


def _set_up_log(level: str) -> None:
    """One format for all processes: kvatlas/log_lines.py."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _listen(config: DashboardConfig) -> socket.socket:
    """The socket that browsers come to. Raises OSError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family)


async def _serve(config: DashboardConfig, listener: socket.socket) -> int:
    import uvicorn

    from dashboard.web import make_app  # imports Streamlit: a wrong flag should not take seconds

    server = uvicorn.Server(
        uvicorn.Config(
            make_app(config),
            ws="websockets-sansio",
            ws_per_message_deflate=False,  # our frames are compressed once, not once for each viewer
            log_level="warning",
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    allocator.set_apart()
    # uvicorn takes these over while it serves, and raises them once more when it has ended in order.
    for number in SIGNALS:
        signal.signal(number, _pass)
    port = listener.getsockname()[1]
    tell = asyncio.ensure_future(_tell_when_ready(server, config, port))
    watch = asyncio.ensure_future(_watch_parent(config.parent_watch, server))
    tidy = asyncio.ensure_future(allocator.keep_tidy())
    try:
        await server.serve(sockets=[listener])
    finally:
        tell.cancel()
        watch.cancel()
        tidy.cancel()
    return 0 if server.started else START_STATUS


async def _tell_when_ready(server: "Server", config: DashboardConfig, port: int) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}{config.prefix}/"
    logger.info("event=serving url=%s server=%s", url, config.server if not config.demo else "demo")
    if config.ready_file:
        path = Path(config.ready_file)
        aside = path.with_suffix(".new")
        try:
            aside.write_text(json.dumps({"url": url, "port": port, "pid": os.getpid()}))
            aside.replace(path)
        except OSError as error:
            logger.error("event=ready_file_failed why=%r", str(error))


async def _watch_parent(pid: int, server: "Server") -> None:
    while pid and os.getppid() == pid:
        await asyncio.sleep(PARENT_WATCH_SECONDS)
    if pid:
        logger.warning("event=parent_gone pid=%d", pid)
        server.should_exit = True


def _leave(number: int, frame: FrameType | None) -> None:
    """Before anything serves a signal simply ends the process."""
    raise SystemExit(0)


def _pass(number: int, frame: FrameType | None) -> None:
    """It has ended already."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
