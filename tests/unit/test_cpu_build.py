"""The C++ is built once, whole or not at all, and its absence is no failure."""

import errno
import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from kernels.cpu import build as building
from kernels.cpu.library import CpuLibrary
from kernels.cpu_backend import CpuBackend
from tests import needs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(building, "SOURCES", folder)
    return folder


@needs.COMPILER
def test_a_second_start_compiles_nothing(small_sources: Path, tmp_path: Path) -> None:
    first = building.build(tmp_path)
    assert first is not None
    stamp = first.stat().st_mtime_ns
    assert building.build(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp


def test_libraries_are_kept_by_the_xdg_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert building.default_cache_folder() == tmp_path / "xdg" / "kvatlas" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # not allowed to mean anything
    assert building.default_cache_folder() == tmp_path / "home" / ".cache" / "kvatlas" / "kernels"


def test_a_cache_folder_that_cannot_be_made_is_replaced_by_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    folder = building.default_cache_folder()
    assert folder.is_dir()
    assert in_the_way not in folder.parents
    folder.rmdir()


def test_a_private_folder_goes_with_its_process(tmp_path: Path) -> None:
    """A worker without a cache folder left one of a megabyte at each start."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    code = "from kernels.cpu import build; folder = build.default_cache_folder(); (folder / 'x').touch()"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "file"),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list((tmp_path / "tmp").iterdir()) == []


@needs.COMPILER
def test_of_two_builders_one_builds(
    small_sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(2) as builders:
        first, second = builders.map(lambda _: building.build(tmp_path), range(2))
    assert first == second
    assert caplog.text.count("event=cpu_kernels_built ") == 1


@needs.COMPILER
def test_without_file_locks_it_is_built_all_the_same(
    small_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert building.build(tmp_path) is not None


@needs.COMPILER
def test_a_folder_that_takes_no_file_is_no_failure(
    small_sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert building.build(tmp_path / "none") is None
    assert "event=cpu_kernels_not_built reason=folder_unusable" in caplog.text
    assert "No such file" in caplog.text


@needs.COMPILER
def test_changed_sources_are_another_library(small_sources: Path, tmp_path: Path) -> None:
    first = building.build(tmp_path)
    (small_sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert building.build(tmp_path) != first


@needs.COMPILER
def test_a_broken_build_leaves_nothing_and_says_why(
    small_sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_sources / "two.cpp").write_text("this is no C++\n")
    with caplog.at_level(logging.WARNING):
        assert building.build(tmp_path) is None
    assert "reason=compiler_failed" in caplog.text
    assert list(tmp_path.glob("*.so")) == []
    assert list(tmp_path.glob("build-*")) == []


SLOW_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo slow
sleep 1000 &
echo $! >>"$(dirname "$0")/running"
wait
"""
BUILDER = """
import signal, sys
from pathlib import Path
from kernels.cpu import build as building
def leave(number, frame): raise SystemExit(0)
signal.signal(signal.SIGTERM, leave)
building.SOURCES, building.COMPILERS = Path(sys.argv[1]), (sys.argv[2],)
building.build(Path(sys.argv[3]))
"""


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def is_over(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_build_that_is_broken_off_leaves_no_compiler_and_no_file(
    small_sources: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """A worker that was stopped during its first start ended, and its six compilers went on."""
    (small_sources / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    compiler, running, cache = tmp_path / "slow", tmp_path / "running", tmp_path / "cache"
    cache.mkdir()
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o700)
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(small_sources), str(compiler), str(cache)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: running.exists() and len(running.read_text().split()) == 2)
        builder.send_signal(number)
        builder.wait(60)
    finally:
        builder.kill()
        builder.wait()
    for pid in running.read_text().split():
        wait_until(lambda pid=int(pid): is_over(pid))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_without_a_compiler_torch_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "COMPILERS", ("no-such-compiler",))
    with caplog.at_level(logging.WARNING):
        assert building.build(tmp_path) is None
    assert "reason=no_compiler" in caplog.text
    assert not CpuBackend(compiled=False).is_compiled


@needs.COMPILER
def test_an_unknown_architecture_falls_back_to_the_compilers_own(small_sources: Path, tmp_path: Path) -> None:
    assert building.build(tmp_path, architecture="no-such-processor") is not None


@needs.COMPILER
def test_a_library_that_lacks_a_function_is_refused(small_sources: Path, tmp_path: Path) -> None:
    path = building.build(tmp_path)
    assert path is not None
    with pytest.raises(AttributeError, match="kv_"):
        CpuLibrary(path)


def test_the_default_cache_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = building.default_cache_folder()
    assert folder.is_relative_to(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0


def test_threads_follow_torch() -> None:
    """Asked at every step, and the pool is made anew only when the number has changed."""
    library = needs.compiled()
    before = torch.get_num_threads()
    try:
        for count in (3, 1, 2):
            torch.set_num_threads(count)
            library.use_torch_threads()
            assert library.num_threads == count
    finally:
        torch.set_num_threads(before)
        library.use_torch_threads()
