"""Each worker of pytest rewrites its share of the test files, and pytest finds what it has made."""

import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests.rewritten_once import rewrite_a_share


class OfWorker:
    """The settings of this run, as another worker has them."""

    def __init__(self, config: pytest.Config, number: int) -> None:
        self._config = config
        self.workerinput = {"workerid": f"gw{number}", "workercount": 2}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    paths = [tmp_path / f"test_{number}.py" for number in range(5)]
    for path in paths:
        path.write_text("def test():\n    assert 1 == 1\n")
    return paths


def rewritten(files: list[Path]) -> set[str]:
    made = {path: rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL) for path in files}
    return {path.stem for path in files if rewrite._read_pyc(path, made[path]) is not None}


def test_two_workers_rewrite_each_file_once(files: list[Path], pytestconfig: pytest.Config) -> None:
    rewrite_a_share(OfWorker(pytestconfig, 0), files)
    assert rewritten(files) == {"test_0", "test_2", "test_4"}
    rewrite_a_share(OfWorker(pytestconfig, 1), files[::-1])  # in the same order for all
    assert rewritten(files) == {path.stem for path in files}


def test_what_cannot_be_rewritten_is_left_to_the_collection(
    files: list[Path], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    files[2].write_text("def test(:\n")
    rewrite_a_share(OfWorker(pytestconfig, 0), files)
    assert rewritten(files) == {"test_0"}
    monkeypatch.delattr(rewrite, "_rewrite_test")
    rewrite_a_share(OfWorker(pytestconfig, 1), files)
