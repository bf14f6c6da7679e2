"""Asserts of test files are rewritten once, not by each of several workers: they collect all files in step.

It knows pytest's insides by name. Where a version has other ones, each worker rewrites all that it imports.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite


def rewrite_a_share(config: pytest.Config, paths: Sequence[Path]) -> None:
    """Of one worker, before it collects: what it leaves out is another's."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    for path in sorted(paths)[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        try:
            _rewrite(config, path)
        except (AttributeError, TypeError, OSError, SyntaxError):  # collecting says what is wrong
            return


def _rewrite(config: pytest.Config, path: Path) -> None:
    """Into the file that pytest looks for when it imports `path`."""
    folder = rewrite.get_cache_dir(path)
    made = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, made) is None:
        source, code = rewrite._rewrite_test(path, config)
        os.makedirs(folder, exist_ok=True)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, made)
