"""The head of a result: the run's own circumstances, whatever changes while it runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["benchmarks/__init__.py", "protos/kvatlas/__init__.py"]  # else those of this checkout come first
FILES = [*PACKAGES, "benchmarks/record.py", "protos/kvatlas/revision.py", ".gitattributes"]

# What a benchmark does: it is started, works while somebody commits, and writes at its end.
RUN = """
import subprocess, sys
from pathlib import Path
from benchmarks.record import write_result
if sys.argv[1:]:
    subprocess.run(sys.argv[1:], check=True, capture_output=True)
print(write_result("try", {}, [], Path("out")))
"""


Git = Callable[..., str]


@pytest.fixture
def checkout(tmp_path: Path, git: Git) -> Path:
    """A repository with one commit that holds the module under test."""
    folder = tmp_path / "checkout"
    git(tmp_path, "init", "-q", str(folder))
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "run.py").write_text(RUN)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def result_of(folder: Path, *meanwhile: str) -> dict[str, object]:
    command = [sys.executable, "-B", "-m", "run", *meanwhile]
    environment = {**os.environ, "PYTHONPATH": str(folder / "protos")}
    ran = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads((folder / ran.stdout.strip()).read_text())
    return found


def test_a_commit_made_during_a_run_is_not_the_runs(checkout: Path, git: Git) -> None:
    before = git(checkout, "rev-parse", "--short", "HEAD")
    commit = "git -c user.name=n -c user.email=e -c commit.gpgsign=false commit -q --allow-empty -m later"
    assert result_of(checkout, *commit.split())["commit"] == before
    assert git(checkout, "rev-parse", "--short", "HEAD") != before


def test_a_file_that_differed_at_the_start_shows(checkout: Path, git: Git) -> None:
    (checkout / "benchmarks" / "__init__.py").write_text("# another\n")
    before = git(checkout, "rev-parse", "--short", "HEAD")
    assert result_of(checkout)["commit"] == f"{before}+"
    git(checkout, "commit", "-qam", "second")
    later = git(checkout, "rev-parse", "--short", "HEAD")
    assert result_of(checkout, "rm", "run.py")["commit"] == later


def test_an_archive_knows_its_commit_even_inside_another_repository(checkout: Path, git: Git) -> None:
    commit = git(checkout, "rev-parse", "--short", "HEAD")
    inside = checkout / "unpacked"
    inside.mkdir()
    git(checkout, "archive", "--output", "source.tar", "HEAD")
    subprocess.run(["tar", "-xf", "source.tar", "-C", str(inside)], cwd=checkout, check=True)
    git(checkout, "commit", "-q", "--allow-empty", "-m", "later")
    assert result_of(inside)["commit"] == commit


def test_without_a_repository_there_is_no_commit(checkout: Path) -> None:
    subprocess.run(["rm", "-r", str(checkout / ".git")], check=True)
    assert result_of(checkout)["commit"] == ""


def test_a_command_can_be_given_again_and_tells_no_folder(checkout: Path) -> None:
    words = ["true", "/opt/models/a.gguf", "vllm=/opt/vllm:/opt/more", "ipc://x/y", "two words", "out/b"]
    told = "true a.gguf vllm=vllm:more ipc://x/y 'two words' out/b"
    assert result_of(checkout, *words)["command"] == f"python -m run {told}"
