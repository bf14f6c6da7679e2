"""Protos and what is compiled from them: clean by buf, fresh by bytes, and no grpc where the worker looks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def buf(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(str(Path(sys.executable).with_name("buf")), *arguments)


def test_generated_code_is_fresh() -> None:
    done = run(sys.executable, "protos/generate.py", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [("lint", "protos"), ("format", "--diff", "--exit-code", "protos")])
def test_buf_has_nothing_to_say(arguments: tuple[str, ...]) -> None:
    done = buf(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stubs_are_made_only_for_files_that_declare_a_service() -> None:
    for proto in PROTOS.rglob("*.proto"):
        has_service = any(line.startswith("service ") for line in proto.read_text().splitlines())
        assert proto.with_name(f"{proto.stem}_pb2_grpc.py").exists() == has_service, proto


def test_the_messages_of_the_seam_load_without_grpc() -> None:
    code = "import sys, kvatlas.worker.v1.worker_pb2; sys.exit('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(PROTOS)}, timeout=60)
    assert done.returncode == 0
