"""Bytecode of packages that keep none: in a folder of ours, and only where that is needed and safe."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from worker import bytecode
from worker.bytecode import keep_bytecode

PROGRAM = """
import sys
sys.path[:] = {path!r}
from pathlib import Path
from worker import bytecode
bytecode.os.access = lambda path, mode: False  # root may write everywhere
print(bytecode.keep_bytecode("bare", Path({folder!r})))
import bare
print(bare.__cached__)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without bytecode, in a folder that cannot be written."""
    source = tmp_path / "packages" / "bare" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(source.parent.parent)
    monkeypatch.setattr(bytecode.os, "access", lambda path, mode: False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return source


def test_a_package_without_bytecode_gets_it_in_the_folder_and_the_next_process_finds_it(
    package: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "bytecode"
    path = [str(package.parent.parent), *sys.path]
    program = textwrap.dedent(PROGRAM).format(path=path, folder=str(folder))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    seen = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        is_kept, cached = done.stdout.split()
        assert (is_kept, Path(cached).is_relative_to(folder)) == ("True", True)
        seen.append(Path(cached).stat().st_mtime_ns)
    assert seen[0] == seen[1]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not (package.parent / "__pycache__").exists()


def test_nothing_changes_where_the_package_has_bytecode_or_can_keep_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = Path(bytecode.cache_from_source(str(package)))
    cached.parent.mkdir()
    cached.touch()
    assert not keep_bytecode("bare", tmp_path / "folder")
    cached.unlink()
    monkeypatch.setattr(bytecode.os, "access", lambda path, mode: True)
    assert not keep_bytecode("bare", tmp_path / "folder")
    assert not keep_bytecode("no_such_package", tmp_path / "folder")
    assert sys.pycache_prefix is None
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(("name", "value"), [("dont_write_bytecode", True), ("pycache_prefix", "/elsewhere")])
def test_what_python_was_told_stays(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(sys, name, value)
    assert not keep_bytecode("bare", tmp_path / "folder")
    assert getattr(sys, name) == value


def test_a_folder_that_others_can_write_is_not_trusted(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    assert not keep_bytecode("bare", folder)
    assert sys.pycache_prefix is None


def test_a_folder_that_cannot_be_made_is_done_without(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not keep_bytecode("bare", tmp_path / "file" / "folder")
    assert sys.pycache_prefix is None
