"""Of which source revision a running process is, for its build_info."""

from pathlib import Path


def source_revision() -> str:
    """Commit of the checkout that this file lies in; empty for an installed package."""
    git = Path(__file__).resolve().parents[2] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        return (git / head.removeprefix("ref: ")).read_text().strip()
    except OSError:
        return ""
