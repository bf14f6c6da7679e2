"""Which release this is, and of which source revision."""

from pathlib import Path

VERSION = "0.1.0"


def source_revision() -> str:
    """Commit of the checkout that this file lies in; empty for an installed package."""
    git = Path(__file__).resolve().parents[1] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        return (git / head.removeprefix("ref: ")).read_text().strip()
    except OSError:
        return ""
