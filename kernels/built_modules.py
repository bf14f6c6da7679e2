"""Modules that Triton builds with the C compiler, loaded one at a time, each with what its own file defines.

Triton 3.6 builds a launcher for every signature and loads all of them under one name. When such a file is
loaded a second time, for another kernel of the same signature, CPython takes the module that has the name at
that moment, whichever file it came from, and writes this file's functions into it: who had that module then
holds another kernel's launcher, and two threads can each get the other's.
"""

from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace
from typing import Any

from triton.runtime import build

_lock = Lock()


def load_apart() -> None:
    """From now on Triton loads what it built through this module; once for the process."""
    with _lock:
        if not isinstance(build._load_module_from_path, _Loader):
            build._load_module_from_path = _Loader(build._load_module_from_path)


class _Loader:
    def __init__(self, load: Callable[[str, str], Any]) -> None:
        self._load = load

    def __call__(self, name: str, path: str) -> SimpleNamespace:
        """What the file at `path` defines, in an object that nobody writes to later."""
        with _lock:
            return SimpleNamespace(**vars(self._load(name, path)))
