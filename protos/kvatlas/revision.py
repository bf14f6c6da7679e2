"""Of which source revision a running process is, for its build_info and for results of benchmarks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ARCHIVED = "$Format:%H$"  # `git archive` puts the commit here (.gitattributes)


def source_revision() -> str:
    """Commit of the checkout or archive that this file lies in; empty for an installed package."""
    return archive_revision() or checkout_revision(ROOT)


def archive_revision() -> str:
    """Commit that an archive was made of; empty in a checkout."""
    return "" if _ARCHIVED.startswith("$") else _ARCHIVED


def checkout_revision(root: Path) -> str:
    """Commit that is checked out in a folder, read without git; empty where none is."""
    git = root / ".git"
    try:
        if git.is_file():  # a further work tree: "gitdir: PATH"
            git = root / git.read_text().partition(":")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        shared = git / "commondir"
        common = git / shared.read_text().strip() if shared.is_file() else git
        return _of_ref(common, head.removeprefix("ref: "))
    except OSError:
        return ""


def _of_ref(git: Path, ref: str) -> str:
    """A branch has a file of its own until `git gc` packs it."""
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    packed = (line.split() for line in (git / "packed-refs").read_text().splitlines())
    return next((words[0] for words in packed if words[1:] == [ref]), "")
