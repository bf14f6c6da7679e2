"""Modules that Triton builds with the C compiler, loaded one at a time, each with what its own file defines.

Triton 3.6 builds a launcher for every signature and loads all of them under one name. When such a file is
loaded a second time, for another kernel of the same signature, CPython takes the module that has the name at
that moment, whichever file it came from, and writes this file's functions into it: who had that module then
holds another kernel's launcher, and two threads can each get the other's.
"""

import logging
from collections.abc import Callable
from threading import Lock
from types import SimpleNamespace
from typing import Any

from triton.runtime import build

LOADER = "_load_module_from_path"  # of Triton 3.6 to 3.9, not for others to use: it may go

_lock = Lock()

log = logging.getLogger(__name__)


def load_apart() -> None:
    """From now on Triton loads what it built through this module; once for the process.

    Where Triton has no such function it loads by itself, which is said in the log.
    """
    with _lock:
        load = getattr(build, LOADER, None)
        if load is None:
            log.warning("event=modules_not_apart why='triton.runtime.build has no %s'", LOADER)
        elif not isinstance(load, _Loader):
            setattr(build, LOADER, _Loader(load))


class _Loader:
    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load

    def __call__(self, *arguments: Any, **named: Any) -> SimpleNamespace:
        """What the file defines, in an object that nobody writes to later. Arguments are Triton's own."""
        with _lock:
            return SimpleNamespace(**vars(self._load(*arguments, **named)))
