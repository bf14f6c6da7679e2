"""The page feed over a real WebSocket: what a browser gets, who is let in, and what is left behind."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from dashboard import frames
from dashboard.live_route import TOO_MANY, assets_digest

ROOT = Path(__file__).parents[2]
PAGES = 600
READY_SECONDS = 120.0
WAIT_SECONDS = 60.0  # only ends a test that hangs


class Dashboard:
    """`python -m dashboard --demo` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        ready = folder / "ready.json"
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "dashboard", "--demo", "--demo-pages", str(PAGES)]
        command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready), *arguments]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        limit = time.monotonic() + READY_SECONDS
        while not ready.exists():
            assert self.process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < limit, self.log_path.read_text()
            time.sleep(0.02)
        self.url = str(json.loads(ready.read_text())["url"])
        self.host = self.url.split("/")[2]

    def open(self, query: str = "", **options: Any) -> ClientConnection:
        return connect(f"ws{self.url[4:]}live/pages{query}", compression=None, **options)

    def get(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(self.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, b"", {}

    def num_viewers(self) -> int:
        return int(json.loads(self.get("live/health")[1])["viewers"])

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(WAIT_SECONDS)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    dashboard = Dashboard(tmp_path_factory.mktemp("dashboard"), "--max-viewers", "40")
    yield dashboard
    assert dashboard.end() == 0, dashboard.log_path.read_text()
    assert str(ROOT / "dashboard") not in dashboard.log_path.read_text()


class Viewer:
    """A browser's copy."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.texts: list[dict[str, Any]] = []
        self.states = np.zeros(PAGES, np.uint8)
        self.revision = 0
        self.clock = 0.0  # of the last frame, ms
        self.num_deltas = self.num_pages = self.num_bytes = 0
        self.snapshots: list[tuple[int, float]] = []  # flags, clock
        self.lists: dict[int, list[int]] = {}

    def take(self, seconds: float = WAIT_SECONDS) -> int | str:
        """One frame; its kind."""
        data = self.socket.recv(timeout=seconds)
        self.num_bytes += len(data)
        if isinstance(data, str):
            self.texts.append(json.loads(data))
            return str(self.texts[-1]["type"])
        kind, version, flags, count, revision, clock = frames.HEADER.unpack(data[:24])
        assert version == frames.VERSION
        assert revision >= self.revision or flags & frames.PAST
        self.revision, self.clock = revision, clock
        if kind == frames.SNAPSHOT:
            assert data[24:32] == struct.pack("<II", 0, 0)
            body = zlib.decompress(data[32:])
            assert len(body) == count * 9
            self.states = np.frombuffer(body, np.uint8, count, count * 6) & 7
            self.snapshots.append((flags, clock))
        elif kind == frames.DELTA:
            pages = np.frombuffer(data, "<u4", count, 24)
            self.states[pages] = np.frombuffer(data, np.uint8, count, 24 + count * 6) & 7
            self.num_deltas, self.num_pages = self.num_deltas + 1, self.num_pages + count
        else:
            self._take_lists(data, count, bool(flags & frames.ALL_LISTS))
        return int(kind)

    def _take_lists(self, data: bytes, count: int, is_all: bool) -> None:
        if is_all:
            self.lists.clear()
        starts = np.frombuffer(data, "<u4", count + 1, 24)
        pages = np.frombuffer(data, "<u4", starts[-1], 24 + starts.nbytes)
        owners = np.frombuffer(data, "<u2", count, 24 + starts.nbytes + pages.nbytes)
        for at, owner in enumerate(owners.tolist()):
            self.lists[owner] = pages[starts[at] : starts[at + 1]].tolist()

    def until(self, kind: int | str, seconds: float = WAIT_SECONDS) -> None:
        limit = time.monotonic() + seconds
        while self.take() != kind:
            assert time.monotonic() < limit, f"no {kind}"

    def say(self, **wish: object) -> None:
        self.socket.send(json.dumps(wish))


def counts(states: np.ndarray) -> dict[str, int]:
    names = ("free", "active", "cached", "pinned", "reserved")
    return {name: int((states == number).sum()) for number, name in enumerate(names, start=1)}


def test_a_viewer_gets_hello_a_snapshot_and_changes_that_keep_it_true(dashboard: Dashboard) -> None:
    with dashboard.open() as socket:
        viewer = Viewer(socket)
        viewer.until(frames.SNAPSHOT)
        assert [text["type"] for text in viewer.texts] == ["status", "hello"]
        assert viewer.texts[1]["page_count"] == PAGES
        viewer.until("tick")
        for _ in range(20):
            viewer.until(frames.DELTA)
        assert viewer.num_pages > 20
        assert len(viewer.snapshots) == 1
    with dashboard.open() as socket:
        other = Viewer(socket)
        other.until(frames.SNAPSHOT)
        assert sum(counts(viewer.states).values()) == PAGES
        assert (viewer.states != other.states).sum() < PAGES / 4, "the same pool a moment later"


def test_ticks_count_what_the_planes_hold(dashboard: Dashboard) -> None:
    with dashboard.open() as socket:
        viewer = Viewer(socket)
        viewer.until("tick")
        assert sum(viewer.texts[-1]["counts"].values()) == PAGES
        viewer.until("tick")
        viewer.until("tick")
        told = viewer.texts[-1]
        assert told["running"] > 0
        assert min(told["allocated"], told["evicted"], told["preempted"]) >= 0


def test_a_foreign_origin_is_refused_before_the_socket_opens(dashboard: Dashboard) -> None:
    for origin in ("http://evil.example", "null", f"http://{dashboard.host}.evil.example"):
        with pytest.raises(InvalidStatus) as refused:
            dashboard.open(origin=origin)
        assert refused.value.response.status_code == 403
    with dashboard.open(origin=f"http://{dashboard.host}") as socket:
        Viewer(socket).until("hello")
    assert dashboard.get("live/spectrogram", Origin="http://evil.example")[0] == 403
    assert dashboard.get("live/spectrogram")[0] == 200


def test_a_foreign_name_for_the_loopback_is_refused(dashboard: Dashboard) -> None:
    """DNS rebinding: the page of an attacker whose name suddenly resolves to 127.0.0.1."""
    for host in ("evil.example", f"evil.example:{dashboard.host.rpartition(':')[2]}", ""):
        with pytest.raises(InvalidStatus):
            dashboard.open(origin=f"http://{host}", additional_headers={"Host": host})
        assert dashboard.get("live/spectrogram", Host=host)[0] == 403
    port = dashboard.host.rpartition(":")[2]
    assert dashboard.get("live/spectrogram", Host=f"localhost:{port}")[0] == 200


def test_lists_come_to_who_asks(dashboard: Dashboard) -> None:
    with dashboard.open() as socket:
        viewer = Viewer(socket)
        for _ in range(5):
            viewer.until(frames.DELTA)
        assert viewer.lists == {}
        viewer.say(lists=1)
        viewer.until(frames.LISTS)
        assert viewer.lists
        pages = [page for pages in viewer.lists.values() for page in pages]
        assert pages
        assert max(pages) < PAGES


def test_a_viewer_can_go_back_and_return(dashboard: Dashboard) -> None:
    with dashboard.open() as socket:
        viewer = Viewer(socket)
        viewer.until(frames.SNAPSHOT)
        first = viewer.snapshots[-1][1]
        kept = viewer.states.copy()
        for _ in range(10):
            viewer.until(frames.DELTA)
        viewer.say(at=first)
        viewer.until(frames.SNAPSHOT)
        flags, clock = viewer.snapshots[-1]
        assert flags & frames.PAST
        assert clock <= first
        tenths = (
            1 + (first - clock) / 100
        )  # of a second between what is kept; more where the machine stood still
        assert (viewer.states != kept).sum() <= 30 * tenths, "what was shown then"
        deltas = viewer.num_deltas
        viewer.until("tick")
        viewer.until("tick")
        assert viewer.num_deltas == deltas, "the past stands still"
        viewer.say(at=0)
        viewer.until(frames.SNAPSHOT)
        assert viewer.snapshots[-1][0] & frames.PAST, "older than what is held: its start"
        viewer.say(live=1)
        viewer.until(frames.SNAPSHOT)
        assert not viewer.snapshots[-1][0] & frames.PAST
        viewer.until(frames.DELTA)


def test_nonsense_from_a_viewer_harms_nobody(dashboard: Dashboard) -> None:
    far = '{"at":1%s,"live":1}' % ("0" * 30)  # a moment that no u64 holds
    with dashboard.open("?hz=nan&lists=x&worker=") as socket:
        viewer = Viewer(socket)
        for text in ("", "[]", "{", '{"hz":"fast"}', '{"at":"now"}', '{"at":1e400}', '{"hz":1e9}', "7", far):
            socket.send(text)
        viewer.until(frames.SNAPSHOT)
        viewer.until(frames.DELTA)
        socket.send("x" * 5000)
        with pytest.raises(ConnectionClosed):
            viewer.until("never")
    with dashboard.open("?worker=nobody") as socket:
        viewer = Viewer(socket)
        assert viewer.take() == "status"
        assert viewer.texts[0]["status"] == "connecting"


def test_thirty_viewers_see_the_same_and_leave_nothing_behind(
    dashboard: Dashboard, wait_until: Callable[..., None]
) -> None:
    with ExitStack() as stack:
        viewers = [Viewer(stack.enter_context(dashboard.open("?hz=5"))) for _ in range(30)]
        for viewer in viewers:
            viewer.until(frames.SNAPSHOT)
            viewer.until(frames.DELTA)
        assert dashboard.num_viewers() == 30
    wait_until(lambda: dashboard.num_viewers() == 0)


def test_more_viewers_than_allowed_are_told_to_come_later(
    dashboard: Dashboard, wait_until: Callable[..., None]
) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(dashboard.open("?hz=1"))
        wait_until(lambda: dashboard.num_viewers() == 40)
        with dashboard.open() as socket, pytest.raises(ConnectionClosed) as closed:
            Viewer(socket).take()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == TOO_MANY, "by which the page says that there are too many"
    wait_until(lambda: dashboard.num_viewers() == 0)


def test_a_slow_viewer_gets_merged_frames_and_never_a_queue(dashboard: Dashboard) -> None:
    """Its socket is not read for seconds; then it is up to date within few frames."""
    with dashboard.open("?hz=30", max_queue=1, close_timeout=0.1) as socket:  # unread frames hold its end up
        slow = Viewer(socket)
        slow.until(frames.SNAPSHOT)
        with dashboard.open("?hz=0.5") as rare_socket:
            rare = Viewer(rare_socket)
            rare.until(frames.SNAPSHOT)
            clocks = []
            for _ in range(3):
                rare.until(frames.DELTA)
                clocks.append(rare.clock)
            assert min(clocks[1] - clocks[0], clocks[2] - clocks[1]) > 1500, "one every two seconds"
            assert rare.num_pages / rare.num_deltas > 15, "each holds what changed meanwhile"


def test_the_spectrogram_goes_on_where_a_reader_stands(dashboard: Dashboard) -> None:
    def read(since: int) -> tuple[int, int, int, bytes]:
        status, body, _ = dashboard.get(f"live/spectrogram?since={since}")
        assert status == 200
        raw = zlib.decompress(body)
        first, count, bands, pages = struct.unpack("<IIII", raw[:16])
        assert pages == PAGES
        assert len(raw) == 16 + count * (8 + 14 * 4 + 1 + 4 * bands)
        return first, count, bands, raw

    deadline = time.monotonic() + WAIT_SECONDS
    while (told := read(0))[1] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert told[2] == 256
    figures = np.frombuffer(told[3], "<u4", told[1] * 14, 16 + told[1] * 8).reshape(-1, 14)
    assert (figures[:, :5].sum(axis=1) == PAGES).all()
    first, count, _, _ = read(told[1] - 1)
    assert first == told[1] - 1
    assert count >= 1
    for nonsense in ("x", "%C2%B2", "9" * 30):
        assert dashboard.get(f"live/spectrogram?since={nonsense}")[0] == 404
    assert dashboard.get("live/spectrogram?worker=nobody")[0] == 404


def test_modules_are_cached_for_ever_under_their_digest(dashboard: Dashboard) -> None:
    status, body, headers = dashboard.get(f"live/{assets_digest()}/decode.js")
    assert status == 200
    assert headers["content-type"].startswith("text/javascript")
    assert "immutable" in headers["cache-control"]
    assert body == (ROOT / "dashboard" / "components" / "decode.js").read_bytes()
    for name in ("nothing.js", "..%2fapp.py", "%2e%2e/app.py"):
        status, body, _ = dashboard.get(f"live/{assets_digest()}/{name}")
        assert b"import streamlit" not in body
        assert status != 200 or body.lstrip().startswith(b"<!"), "Streamlit's own page at most"


def test_a_base_path_is_before_every_route(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path, "--base-path", "/kv/", "--allowed-origins", "https://ours.example")
    try:
        assert dashboard.url.endswith("/kv/")
        with dashboard.open(origin="https://ours.example") as socket:
            Viewer(socket).until("hello")
        assert dashboard.get("")[0] == 200
        assert dashboard.get("_stcore/health")[0] == 200
        with pytest.raises(InvalidStatus):
            connect(f"ws://{dashboard.host}/live/pages")
    finally:
        assert dashboard.end() == 0


def test_it_ends_while_a_viewer_reads(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path)
    with dashboard.open() as socket:
        viewer = Viewer(socket)
        viewer.until(frames.SNAPSHOT)
        assert dashboard.end() == 0, dashboard.log_path.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [(["--listen", "nowhere"], 2, "listen"), (["--no-such-flag"], 2, "no-such-flag")],
)
def test_a_bad_setting_ends_it_with_a_sentence(arguments: list[str], code: int, word: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "dashboard", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=READY_SECONDS,
    )
    assert done.returncode == code
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_an_error(dashboard: Dashboard) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "dashboard", "--demo", "--demo-pages", "64", "--listen", dashboard.host]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY_SECONDS)
    assert done.returncode == 1
    said = f"event=start_failed reason=EADDRINUSE why='listen {dashboard.host}: Address already in use'"
    assert done.stderr.rstrip().endswith(said)
    assert done.stderr.count("\n") == 1


def test_an_address_of_ipv6_is_one_that_a_browser_takes(tmp_path: Path) -> None:
    dashboard = Dashboard(tmp_path, "--listen", "[::1]:0")
    try:
        assert dashboard.url.startswith("http://[::1]:")
        assert dashboard.get("live/health")[0] == 200
    finally:
        assert dashboard.end() == 0


def test_the_command_becomes_the_process(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "kvatlas.cli", "dashboard", "--demo", "--listen", "127.0.0.1:0"]
    command += ["--ready-file", str(ready), "--set", "demo_pages=64", "--set", "base-path=see"]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path)
    try:
        limit = time.monotonic() + READY_SECONDS
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.02)
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        assert told["url"].endswith("/see/")
        with urllib.request.urlopen(told["url"] + "live/health", timeout=WAIT_SECONDS) as answer:
            assert json.loads(answer.read())["viewers"] == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
