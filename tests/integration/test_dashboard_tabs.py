"""Tabs come and go; what a closed one leaves behind is counted, over the protocol that a browser speaks."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import connect

from dashboard.testing import FeedServer

ROOT = Path(__file__).parents[2]
VIEWS = ("", "requests", "prefix_tree", "what_if", "timeline", "integrity", "playground", "explain")
AT_ONCE = 3
WAIT_SECONDS = 120.0  # only ends a test that hangs
OBJECTS_A_TAB = 20  # of those that the collector knows; a session that somebody held has some thousand
KIB_A_TAB, KIB_A_TAB_OF_HUNDREDS = 24.0, 2.0  # 5 and 0.5 were seen

SERVED = """
import ctypes, gc, json, os, sys, threading

from dashboard import __main__ as command
from dashboard import allocator

allocator.settle()
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.memory_session_storage import MemorySessionStorage

STORED = 4  # closed tabs that Streamlit keeps for those that come back: 128 for two minutes by default
MemorySessionStorage.__init__.__defaults__ = (STORED, 3600)


def answer():
    for _ in sys.stdin:
        allocator.tidy()
        with open("/proc/self/status") as file:
            status = dict(line.split(":", 1) for line in file)
        objects = gc.get_objects()
        sessions = sum(type(each) is AppSession for each in objects)
        told = {"sessions": sessions - STORED, "objects": len(objects)}
        del objects
        told["kib"] = int(status["RssAnon"].split()[0])
        told |= {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
        print(json.dumps(told), flush=True)


threading.Thread(target=answer, daemon=True).start()
sys.exit(command.main(sys.argv[1:]))
"""
"""The dashboard, which tells for each line of its input what it holds."""
ROUNDS = 3


class Tabs:
    """A dashboard on a small pool, and tabs without a browser."""

    def __init__(self, folder: Path, server: str) -> None:
        ready, self.log_path = folder / "ready.json", folder / "log"
        command = [sys.executable, "-c", SERVED, "--server", server, "--history-seconds", "10"]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=environment,
            )
        limit = time.monotonic() + WAIT_SECONDS
        while not ready.exists():
            assert self.process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < limit, self.log_path.read_text()
            time.sleep(0.02)
        self.url = str(json.loads(ready.read_text())["url"])
        self._views = cycle(VIEWS)

    def held(self) -> dict[str, int]:
        """Counts, when closed tabs have been collected."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("tell\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log_path.read_text()
        return dict(json.loads(line))

    def open_and_close(self, count: int) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._visit, islice(self._views, count)))

    def _visit(self, view: str) -> None:
        with urllib.request.urlopen(self.url + view, timeout=WAIT_SECONDS) as page:
            assert b"<html" in page.read()
        stream = f"ws{self.url[4:]}_stcore/stream"
        with connect(stream, subprotocols=["streamlit"], max_size=None, compression=None) as socket:  # type: ignore[list-item]
            again = _run(socket, view)
            if again:
                _run(socket, view, again)
            if view in ("", "requests"):
                with connect(f"ws{self.url[4:]}live/pages?lists=1", max_size=None, compression=None) as feed:
                    while isinstance(feed.recv(timeout=WAIT_SECONDS), str):
                        pass


def _run(socket: Any, view: str, fragment: str = "") -> str:
    """One run of the script, or of a fragment; the fragment that it says to run again, or ""."""
    message, again = BackMsg(), ""
    message.rerun_script.page_name, message.rerun_script.fragment_id = view, fragment
    socket.send(message.SerializeToString())
    while True:
        told = ForwardMsg.FromString(socket.recv(timeout=WAIT_SECONDS))
        kind = told.WhichOneof("type")
        if kind == "auto_rerun":
            again = told.auto_rerun.fragment_id
        elif kind == "script_finished":
            return again


@pytest.fixture
def tabs(tmp_path: Path) -> Iterator[Tabs]:
    feed = FeedServer(600, hz=1.0).start()
    tabs = Tabs(tmp_path, feed.address)
    try:
        yield tabs
    finally:
        tabs.process.terminate()
        tabs.process.communicate(timeout=WAIT_SECONDS)
        feed.stop()


def check(tabs: Tabs, count: int, kib_a_tab: float) -> None:
    """What is loaded once, and late, comes in one round; what tabs leave comes in each."""
    tabs.open_and_close(3 * len(VIEWS))
    told, before = [], tabs.held()
    for _ in range(ROUNDS):
        tabs.open_and_close(count)
        after = tabs.held()
        more = {name: after[name] - before[name] for name in before}
        assert after["sessions"] <= AT_ONCE, after  # of those that have just closed
        told.append(more)
        if (
            more["objects"] < OBJECTS_A_TAB * count
            and more["kib"] < kib_a_tab * count
            and max(more["files"], more["threads"]) < 24
        ):
            return
        before = after
    raise AssertionError(told)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_closed_tab_leaves_nothing(tabs: Tabs) -> None:
    check(tabs, 6 * len(VIEWS), KIB_A_TAB)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hundreds_of_closed_tabs_leave_nothing(tabs: Tabs) -> None:
    check(tabs, 100 * len(VIEWS), KIB_A_TAB_OF_HUNDREDS)
