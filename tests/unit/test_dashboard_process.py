"""The dashboard's process: its settings and files, its allocator, and browsers' tabs that go away."""

import asyncio
import ctypes
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dashboard import allocator
from dashboard.config import ConfigError, from_args
from dashboard.web import GoneTabs


def test_flags_win_over_the_environment() -> None:
    environment = {"KVATLAS_DASHBOARD_SERVER": "a:1", "KVATLAS_DASHBOARD_BASE_PATH": "/kv/"}
    config = from_args(["--server", "b:2"], environment)
    assert (config.server, config.prefix, config.host, config.port) == ("b:2", "/kv", "127.0.0.1", 8501)
    assert from_args(["--listen", "[::1]:0"], {}).host == "::1"
    assert 'server = "b:2"' in config.printable()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--listen", "8501"], "listen"),
        (["--ready-file", "/nowhere/ready.json"], "ready_file"),
        (["--listen", "127.0.0.1:²"], "listen"),
        (["--allowed-origins", "https://ours.example,http://[x"], "allowed_origins: 'http://\\[x' is not"),
        (["--allowed-origins", "ours.example"], "allowed_origins"),
        (["--server", "http://a:1"], "server: 'http://a:1': gRPC's addresses have no http://"),
        (["--server", ""], "server: the address is empty"),
        (["--token-file", "/nowhere/token"], "token_file"),
        (["--max-viewers", "0"], "max_viewers"),
    ],
)
def test_a_bad_setting_is_named(arguments: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        from_args(arguments, {})


def test_a_ready_file_of_a_run_before_does_not_outlive_a_start_that_fails(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "dashboard",
            "--demo",
            "--listen",
            listen,
            "--ready-file",
            str(ready),
        ]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, ready.exists()) == (1, False), done.stderr


def test_the_token_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    config = from_args(["--token-file", str(path)], {})
    assert config.read_token() == "first"
    path.write_text("second\n")
    assert config.read_token() == "second"
    assert "first" not in config.printable()


def test_a_tab_that_is_gone_is_no_crash_and_other_faults_are() -> None:
    class WebSocketDisconnected(RuntimeError):
        """As Starlette's."""

    async def call(kind: str, fault: Exception) -> None:
        async def fail(*_: Any) -> None:
            raise fault

        await GoneTabs(fail)({"type": kind, "path": "/_stcore/stream"}, None, None)

    asyncio.run(call("websocket", WebSocketDisconnected("closed")))
    for kind, fault in (("http", WebSocketDisconnected("closed")), ("websocket", RuntimeError("a bug"))):
        with pytest.raises(RuntimeError):
            asyncio.run(call(kind, fault))


def test_the_allocator_is_set_where_there_is_one_to_set() -> None:
    allocator.settle()  # twice is as good as once
    allocator.settle()
    assert ctypes.CDLL(None).mallopt(allocator.M_ARENA_MAX, allocator.ARENAS) == 1, "glibc took it"
