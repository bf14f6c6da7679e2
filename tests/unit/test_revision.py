"""The commit of a running process, from however a checkout keeps it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.revision import archive_revision, checkout_revision, source_revision

ROOT = Path(__file__).resolve().parents[2]
MODULE = "protos/kvatlas/revision.py"
PACKAGE = "protos/kvatlas/__init__.py"  # without it an installed package of this name goes first


Git = Callable[..., str]


@pytest.fixture
def checkout(tmp_path: Path, git: Git) -> Path:
    """A repository with one commit that holds the module under test."""
    folder = tmp_path / "checkout"
    git(tmp_path, "init", "-q", str(folder))
    for name in (MODULE, PACKAGE, ".gitattributes"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_a_branch_is_found_loose_and_packed(checkout: Path, git: Git) -> None:
    """After `git gc` the commit was gone from build_info."""
    commit = git(checkout, "rev-parse", "HEAD")
    assert checkout_revision(checkout) == commit
    git(checkout, "pack-refs", "--all")
    assert checkout_revision(checkout) == commit
    git(checkout, "commit", "-q", "--allow-empty", "-m", "later")
    assert checkout_revision(checkout) == git(checkout, "rev-parse", "HEAD") != commit


def test_a_commit_without_a_branch_and_a_further_work_tree_are_found(checkout: Path, git: Git) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    git(checkout, "worktree", "add", "-q", "-b", "other", "../beside")
    beside = checkout.parent / "beside"
    git(beside, "commit", "-q", "--allow-empty", "-m", "later")
    assert checkout_revision(beside) == git(beside, "rev-parse", "HEAD") != commit
    git(checkout, "checkout", "-q", "--detach")
    assert checkout_revision(checkout) == commit


def test_an_archive_says_what_it_was_made_of(checkout: Path, tmp_path: Path, git: Git) -> None:
    git(checkout, "archive", "--output", str(tmp_path / "source.tar"), "HEAD")
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", "source.tar", "-C", "unpacked"], cwd=tmp_path, check=True)
    said = subprocess.run(
        [sys.executable, "-c", "from kvatlas.revision import source_revision as r; print(r())"],
        cwd=tmp_path / "unpacked" / "protos",
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout.strip() == git(checkout, "rev-parse", "HEAD")


def test_elsewhere_there_is_none(tmp_path: Path) -> None:
    assert checkout_revision(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    assert checkout_revision(tmp_path) == ""
    assert source_revision() == (archive_revision() or checkout_revision(ROOT))
