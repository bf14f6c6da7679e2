"""The environment of model fetching, read here and nowhere else."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder() -> Path:
    """Where fetched models are kept: $KVATLAS_CACHE, else kvatlas in the user's cache folder."""
    chosen = os.environ.get("KVATLAS_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared) if shared and Path(shared).is_absolute() else Path("~/.cache").expanduser()
    return base / "kvatlas"


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with changes, for a child process."""
    return {**os.environ, **changes}
