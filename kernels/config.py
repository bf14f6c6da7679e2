"""The environment of kernel builds, read here and nowhere else."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where built kernels are kept: kvatlas/kernels in the user's cache folder, by the XDG rules."""
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared) if shared and Path(shared).is_absolute() else Path("~/.cache").expanduser()
    return base / "kvatlas" / "kernels"


def triton_cache_folder() -> Path:
    """Where Triton keeps what it compiles, by its own rules."""
    if chosen := os.environ.get("TRITON_CACHE_DIR"):
        return Path(chosen)
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(home) / ".triton" / "cache"
