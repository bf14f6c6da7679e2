"""Who may import whom: the contracts hold, and each is seen to break on a planted import."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# One planted import for each contract: the file that gets it, and the line.
PLANTS = {
    "leaves": ("kernels/batch.py", "import worker.ids"),
    "kernels-wire": ("kernels/backend.py", "import grpc"),
    "processes": ("worker/ids.py", "import service.errors"),
    "no-torch": ("service/mailbox.py", "import torch"),
    "worker-grpc": ("worker/stats.py", "import grpc"),
    "dashboard-service": ("dashboard/__init__.py", "import zmq"),
    "dashboard-grpc": ("dashboard/viewer.py", "import grpc"),
    "plain-control-plane": ("worker/pages/events.py", "import numpy"),
    "readers": ("worker/readers/__init__.py", "import worker.pages.pool"),
    "worker-layers": ("worker/pages/__init__.py", "import worker.scheduling.step"),
    "wire-at-the-edge": ("service/admission.py", "import zmq"),
    "model-files": ("protos/kvatlas/models/files.py", "import kvatlas.client.channel"),
    "client-cli": ("protos/kvatlas/client/channel.py", "import kvatlas.cli.exits"),
}


def lint(root: Path) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'protos'}{os.pathsep}{root}"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)


def contracts() -> dict[str, str]:
    """Names by id."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["id"]: contract["name"] for contract in settings["contracts"]}


def test_all_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_ten_contracts_and_a_plant_for_each() -> None:
    assert contracts().keys() == PLANTS.keys()
    assert len(PLANTS) >= 10


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the linter says of a copy of the tree with all plants in it."""
    root = tmp_path_factory.mktemp("planted")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("kernels", "worker", "service", "dashboard", "protos"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in PLANTS.values():
        with (root / file).open("a") as source:
            source.write(f"\n{line}\n")
    return lint(root).stdout


@pytest.mark.parametrize("contract", PLANTS)
def test_a_planted_import_breaks_its_contract(planted: str, contract: str) -> None:
    name = contracts()[contract]
    assert f"{name} BROKEN" in planted, planted
    file, line = PLANTS[contract]
    module = file.removeprefix("protos/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    imported = line.removeprefix("import ")
    if contract != "processes":  # named by the packages, not by the modules
        chain = re.escape(module) + r"\s+->\s+" + re.escape(imported.split(".")[0])
        assert re.search(chain, planted), (chain, planted)
