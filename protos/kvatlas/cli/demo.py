"""`kvatlas demo`: one model, two questions with the same beginning, the page map before, during and after.

Everything goes the way of any client: a server in processes of its own, gRPC between. It checks what
it shows: without hits in the prefix cache, or with a page left in use, it fails. For a person (`--keep`, or
on a terminal) it then goes on to serve, with the dashboard, until it is interrupted.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from kvatlas.cli import config, demo_dashboard
from kvatlas.cli.asking import describe
from kvatlas.cli.exits import DONE, CommandFailed
from kvatlas.cli.pages import print_map, write_svg
from kvatlas.cli.pull import pull
from kvatlas.client.errors import Unavailable
from kvatlas.client.events import Delta, Event, Started, Summary
from kvatlas.client.page_map import PageMap
from kvatlas.client.request import Message
from kvatlas.client.sync import Client

READY_SECONDS = 180.0
END_SECONDS = 60.0
SETTLE_SECONDS = 10.0
POLL_SECONDS = 0.05
LOOK_AFTER_TOKENS = 24  # into an answer, for the map during it

SYSTEM = (
    "You answer questions about this text in one or two short sentences.\n\n"
    "The lighthouse of Skarholm stands on a rock in the North Sea. It was built in 1874 by Anna Lindqvist, "
    "who was also its first keeper. Its lamp burns whale oil and can be seen from thirty miles away. Every "
    "evening the keeper climbs 212 steps to light it. In the winter of 1901 a storm cut the island off for "
    "forty days, and the keeper lived on dried fish and potatoes."
)
QUESTIONS = ("Who built the lighthouse, and when?", "What did the keeper eat during the storm?")


def run(settings: Namespace) -> int:
    """The whole show; leaves no process behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything in order, as Ctrl-C does
    pull(settings.model)
    with tempfile.TemporaryDirectory(prefix="kvatlas-demo-") as name:
        folder = Path(name)
        started = time.monotonic()
        server = _start(settings, folder)
        try:
            facts = _wait_ready(server, folder, started)
            with Client(facts["address"]) as client:
                _show(client, settings, started)
            if settings.keep or (sys.stdin.isatty() and sys.stdout.isatty()):
                _keep(server, facts["address"], folder)
        except KeyboardInterrupt:
            _stop(server)
            raise
        except BaseException:
            _stop(server)
            print(_tail(folder), file=sys.stderr)
            raise
        code = _stop(server)
        if code != 0:
            print(_tail(folder), file=sys.stderr)
            raise CommandFailed(f"the server ended with exit code {code}")
    name = _own_name()
    _say(f"The server has drained and ended. Next: `{name} serve`, then `{name} chat`, `{name} dashboard`.")
    return DONE


def _own_name() -> str:
    """What a user types here: in an environment that is not activated, the path of its script."""
    script = Path(sys.executable).with_name("kvatlas")
    if shutil.which("kvatlas") or not script.exists():
        return "kvatlas"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


def _start(settings: Namespace, folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "kvatlas.cli", "serve", "--model", settings.model]
    command += ["--listen", "127.0.0.1:0", "--metrics-port", "0", "--worker-metrics-port", "0"]
    command += ["--num-pages", str(settings.num_pages), "--page-size", str(settings.page_size)]
    command += ["--ready-file", str(folder / "ready.json"), "--parent-watch", str(os.getpid())]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=config.child_environment()
        )


def _wait_ready(server: "subprocess.Popen[bytes]", folder: Path, started: float) -> dict[str, Any]:
    """The facts of the ready file."""
    ready = folder / "ready.json"
    is_terminal = sys.stderr.isatty()
    while not ready.exists():
        waited = time.monotonic() - started
        if server.poll() is not None or waited > READY_SECONDS:
            raise CommandFailed("the server did not start")
        if is_terminal:
            print(f"\rstarting worker and service … {waited:.1f} s", end="", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)
    end = "\r" if is_terminal else ""
    print(f"{end}worker and service are ready after {time.monotonic() - started:.1f} s", file=sys.stderr)
    facts: dict[str, Any] = json.loads(ready.read_text())
    return facts


def _show(client: Client, settings: Namespace, started: float) -> None:
    _say("")
    print_map(_first_map(client), "state", title="before")
    first_token = _Clock(started)
    _ask(client, settings, QUESTIONS[0], first_token)
    _say(f"(first token {first_token.seconds:.1f} s after the server's processes were started)")
    second = _ask(client, settings, QUESTIONS[1], _Clock(started), svg=settings.svg)
    prefix = second.usage.prefix
    if prefix is None or prefix.hit_tokens == 0:
        raise CommandFailed("the second question found nothing in the prefix cache")
    pages = prefix.hit_tokens // settings.page_size
    _say(
        f"The second question begins like the first: {prefix.hit_tokens} of its {second.usage.prompt_tokens}"
        f" prompt tokens were served from {pages} CACHED pages and not computed again."
    )


def _keep(server: "subprocess.Popen[bytes]", address: str, folder: Path) -> None:
    """Until Ctrl-C. A dashboard that cannot be shown is no reason to end."""
    try:
        _say("\nstarting the dashboard …")
        try:
            with demo_dashboard.running(address, folder) as (url, dashboard):
                _say(f"Every page, live: {url}")
                _say(f"In another terminal: kvatlas chat --address {address}\nCtrl-C ends.")
                while server.poll() is None and dashboard.poll() is None:
                    time.sleep(POLL_SECONDS)
                if server.poll() is None:
                    raise CommandFailed(f"the dashboard ended with exit code {dashboard.poll()}")
        except CommandFailed as failure:
            _say(f"{failure}\nThe server goes on: kvatlas chat --address {address}\nCtrl-C ends.")
            while server.poll() is None:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        _say("")


class _Clock:
    """Stops once."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.seconds = 0.0

    def stop(self) -> None:
        self.seconds = self.seconds or time.monotonic() - self._started


def _ask(client: Client, settings: Namespace, question: str, first_token: _Clock, svg: str = "") -> Summary:
    """Streams one answer, then shows the map that was seen during it, and the one after."""
    _say(f"\n> {question}")
    during: PageMap | None = None
    num_tokens, prefix_line, summary = 0, "", None
    messages = [Message("system", SYSTEM), Message("user", question)]
    with client.stream(messages, max_tokens=settings.max_tokens, temperature=0.0) as stream:
        for event in stream:
            _print_piece(event)
            if isinstance(event, Started) and event.prefix is not None:
                prefix_line = f"started with {event.prefix.hit_tokens} prompt tokens from the cache"
            elif isinstance(event, Delta):
                first_token.stop()
                num_tokens += event.token_count
                if during is None and num_tokens >= min(LOOK_AFTER_TOKENS, settings.max_tokens // 2):
                    during = client.page_map()
            elif isinstance(event, Summary):
                summary = event
    assert summary is not None, "a stream that ended well has a summary"
    _say("\n  " + "\n  ".join([prefix_line, *describe(summary)]) + "\n")
    if during is not None:
        print_map(during, "state", title="during")
        if svg:
            write_svg(during, svg)
    print_map(_settled(client), "state", title="after")
    return summary


def _print_piece(event: Event) -> None:
    if isinstance(event, Delta):
        sys.stdout.write(event.text)
        sys.stdout.flush()


def _first_map(client: Client) -> PageMap:
    """The service answers prompts as soon as the worker is warm; its copy of the pages may come later."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return client.page_map()
        except Unavailable:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_SECONDS)


def _settled(client: Client) -> PageMap:
    """The map once no page is in use: the last one goes back one step after the answer's end."""
    until = time.monotonic() + SETTLE_SECONDS
    while (page_map := client.page_map()).counts()["active"]:
        if time.monotonic() > until:
            raise CommandFailed(f"{page_map.counts()['active']} pages are still in use after the answer")
        time.sleep(POLL_SECONDS)
    return page_map


def _stop(server: "subprocess.Popen[bytes]") -> int:
    server.terminate()
    try:
        return server.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def _tail(folder: Path) -> str:
    lines = (folder / "log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-20:])


def _say(text: str) -> None:
    print(text, flush=True)
