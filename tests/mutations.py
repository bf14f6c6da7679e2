"""Plants one fault after another in a copy of the product and shows which tests notice.

    python -m tests.mutations                  all faults, a table
    python -m tests.mutations --only salt      those whose name contains a word
    python -m tests.mutations --first          stop at the first kind of test that notices

A fault that no longer fits the code is reported instead of silently planting nothing, and so are tests that
fail without any: they would notice everything. The exit status is 1 if any fault survives.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.planted_elsewhere import ELSEWHERE
from tests.planted_faults import CONTROL_PLANE, Fault

ROOT = Path(__file__).resolve().parents[1]
KINDS: Mapping[str, Sequence[str]] = {  # of the control plane
    "simulation": ["tests/simulation"],
    "machines": [
        f"tests/property/test_{name}.py"
        for name in (
            "page_pool_machine",
            "prefix_trie_machine",
            "what_if_cache",
            "order_of_service",
            "eviction_order",
        )
    ],
    "units": [
        f"tests/unit/test_{name}.py"
        for name in (
            "scheduler_steps",
            "scheduler_pieces",
            "scheduler_last_tokens",
            "scheduler_sharing",
            "scheduler_samples",
            "scheduler_ends",
            "scheduler_preemption",
            "scheduler_admission",
            "scheduler_arrivals",
            "scheduler_waits",
            "scheduler_outputs",
            "scheduler_observers",
            "scheduler_snapshots",
            "scheduler_audit",
            "page_pool",
            "page_events",
            "eviction",
            "prefix_trie",
            "prefix_index_changes",
            "marked_prefixes",
            "pins_and_flush",
            "pin_limits",
            "fake_runner",
        )
    ],
}


# What tests share; all of it, so that no test of a fault misses what it imports.
FIXTURES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*.py"))


def plant(fault: Fault, folder: Path) -> None:
    """Replaces the text in the copy."""
    path = folder / fault.file
    text = path.read_text()
    found = text.count(fault.old)
    if found != 1:
        raise LookupError(f"its text occurs {found} times in {fault.file}, not once")
    path.write_text(text.replace(fault.old, fault.new))


def copy_tree(folder: Path, kinds: Mapping[str, Sequence[str]]) -> None:
    """What these tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("worker", "protos", "kernels", "service"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for paths in (FIXTURES, *kinds.values()):
        for path in paths:
            source, target = ROOT / path, folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignored)
            else:
                shutil.copy(source, target)


def killer(folder: Path, paths: Sequence[str]) -> str:
    """Name of the first test that fails; empty: all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *paths]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) \S*?::(\S+)", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return found.group(1).removesuffix("::runTest")


@cache
def check_without_fault(paths: tuple[str, ...]) -> None:
    """LookupError where tests fail in a copy that has no fault."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy_tree(Path(name), {"units": paths})
        if failed := killer(Path(name), paths):
            raise LookupError(f"{failed} fails without any fault")


def try_fault(fault: Fault, stop_at_first: bool) -> dict[str, str]:
    """Who noticed, by kind of test; LookupError where that would say nothing."""
    kinds = {"units": fault.tests} if fault.tests else KINDS
    for paths in kinds.values():
        check_without_fault(tuple(paths))
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_tree(folder, kinds)
        plant(fault, folder)
        found = {}
        for kind, paths in kinds.items():
            found[kind] = killer(folder, paths)
            if found[kind] and stop_at_first:
                break
        return found


def main() -> int:
    """Tries the faults and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--first", action="store_true", help="stop at the first kind of test that notices")
    arguments = parser.parse_args()
    faults = [fault for fault in (*CONTROL_PLANE, *ELSEWHERE) if arguments.only in fault.name]
    survivors = []
    print(f"{'planted fault':64} {'s':>5}  " + "  ".join(f"{kind:44}" for kind in KINDS))
    for fault in faults:
        begin = time.monotonic()
        try:
            found = try_fault(fault, arguments.first)
        except LookupError as error:
            survivors.append(f"{fault.name}: {error}")
            continue
        if not any(found.values()):
            survivors.append(fault.name)
        cells = [f"{found.get(kind) or '-':44.44}" for kind in KINDS]
        print(f"{fault.name:64} {time.monotonic() - begin:5.1f}  " + "  ".join(cells), flush=True)
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults were noticed")
    for name in survivors:
        print(f"SURVIVED: {name}")
    return 1 if survivors or not faults else 0


if __name__ == "__main__":
    sys.exit(main())
