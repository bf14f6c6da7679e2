"""Where Python keeps the bytecode of installed packages that cannot keep their own.

Some installers leave none (uv), and in an image or another user's environment their folder cannot be written:
Python then compiles every module at every start, two seconds for torch's.
"""

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path


def keep_bytecode(package: str, folder: Path) -> bool:
    """From now on Python keeps bytecode below `folder`, if it has none of `package` and could keep none.

    `folder` is made, for this user alone. Nothing changes where Python was told something about bytecode, or
    where others could write into the folder, since what is in it is run.
    """
    if sys.dont_write_bytecode or sys.pycache_prefix is not None:
        return False
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return False
    source = Path(spec.origin)
    if Path(cache_from_source(spec.origin)).exists() or os.access(source.parent, os.W_OK):
        return False
    if not _is_ours(folder):
        return False
    sys.pycache_prefix = str(folder)
    return True


def _is_ours(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError:
        return False
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022
