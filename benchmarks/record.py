"""One JSON file per measurement in benchmarks/results/: what was run, on which machine, with which versions.

Owns the format of the head of such a file; the figures are the caller's. Time, commit and load are those of
the moment this module was imported, at the start of a run: its code is read then, and a checkout may move on.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvatlas.revision import archive_revision

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SHORT = 7  # digits of a commit


def write_result(
    name: str, figures: Mapping[str, Any], packages: Sequence[str], folder: Path = RESULTS, device: str = ""
) -> Path:
    """Writes <date>-<machine>-<name>.json and returns its path; `device`: the name of the GPU, if any."""
    folder.mkdir(exist_ok=True)
    day = _BEGUN["time"].partition("T")[0]
    place = device.split()[-1] if device else f"{os.cpu_count()}cpu"
    path = folder / f"{day}-{platform.machine()}-{place}-{name}.json"
    document = {"name": name, **_circumstances(packages), "figures": figures}
    if device:
        document["device"] = device
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that so large a share of them does not exceed (nearest rank), in any order."""
    ordered = sorted(values)
    rank = math.ceil(round(share * len(ordered), 9))  # 0.07 of 100 is 7, whatever floats say
    return ordered[max(rank, 1) - 1]


def device_name() -> str:
    """Of the first GPU, without a CUDA context in this process; CalledProcessError where there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def _circumstances(packages: Sequence[str]) -> dict[str, Any]:
    return {
        "time": _BEGUN["time"],
        "command": shlex.join(["python", "-m", _module_name(), *map(_without_folders, sys.argv[1:])]),
        "commit": _BEGUN["commit"],
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load_before": _BEGUN["load_before"],
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def _version(name: str) -> str:
    """Of an installed package; empty where there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _without_folders(argument: str) -> str:
    """A file is told by its name: where it lies is that machine's business. NAME=/a/b:/c/d is NAME=b:d."""
    return re.sub(r"(?<![^=:])/(?!/)[^=:]*", lambda path: Path(path[0]).name, argument)


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec is not None else sys.argv[0]


def _beginning() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": archive_revision()[:SHORT] or _commit_of_checkout(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def _commit_of_checkout() -> str:
    """The commit, with a + when files differ from it; empty outside of a checkout."""
    git = ["git", "--no-optional-locks"]  # or a look at the state would be in the way of who commits
    try:
        commit, changed = (
            subprocess.run([*git, *what], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
            for what in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("+" if changed else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


_BEGUN = _beginning()
