"""Builds the C++ of this folder for this very processor, once, and keeps it in a cache folder.

Owns the compiler's command line and the names of cached libraries. Knows nothing of what the code does.
"""

import atexit
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kernels.compilers import run_compilers
from kernels.config import cache_folder

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# psabi and uninitialized: GCC warns of its own headers. The code asks for fused multiply-adds only where the
# processor has them, and a fused one is never less exact.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=fast", "-Wno-psabi", "-w")
_BUILD_SECONDS = 300


def default_cache_folder() -> Path:
    """Where libraries are kept: in the user's cache folder, or, where there is none, a private one."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    private = tempfile.mkdtemp(prefix="kvatlas-kernels-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)  # nobody else would find it again
    return Path(private)


def build(into: Path | None = None, *, architecture: str = "native") -> Path | None:
    """The shared library, built unless the cache has it; None, with a line in the log, where it cannot be.

    `architecture` is what follows -march=; another one than native is for tests.
    """
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        log.warning("event=cpu_kernels_not_built reason=no_compiler tried=%s", ",".join(COMPILERS))
        return None
    folder = into or default_cache_folder()
    library = folder / f"cpu-{_key(compiler, architecture)}.so"
    if library.exists():
        return library
    try:
        with _lock(library.with_suffix(".lock")):
            # Who waited for the lock finds what another process built meanwhile.
            return library if library.exists() else _build(compiler, architecture, library)
    except OSError as error:
        log.warning("event=cpu_kernels_not_built reason=folder_unusable path=%s why=%r", folder, str(error))
        return None


def _build(compiler: str, architecture: str, library: Path) -> Path | None:
    began = time.monotonic()
    error: str | None = None
    # Some compilers do not know the processor they run on: then without its name.
    for flags in ((*FLAGS, f"-march={architecture}"), FLAGS):
        error = _compile(compiler, flags, library)
        if error is None:
            seconds = time.monotonic() - began
            log.info("event=cpu_kernels_built seconds=%.1f compiler=%s path=%s", seconds, compiler, library)
            return library
    log.warning("event=cpu_kernels_not_built reason=compiler_failed compiler=%s why=%r", compiler, error)
    return None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process builds, others wait: of two that build at once on two cores both take twice as long."""
    with path.open("w") as file:
        with suppress(OSError):  # on a file system without locks both build, and the last one wins
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file gives the lock back, as does the end of the process


def _key(compiler: str, architecture: str) -> str:
    """Changes with the sources, the flags, the compiler and the processor."""
    digest = hashlib.sha256()
    for part in (*FLAGS, architecture, _version(compiler), _processor()):
        digest.update(part.encode() + b"\0")
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _processor() -> str:
    """What `-march=native` looks at: the model and its instruction sets."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = [line for line in info.read_text().splitlines() if line.startswith(wanted)]
    return "\n".join(sorted(set(lines)))


def _compile(compiler: str, flags: Sequence[str], library: Path) -> str | None:
    """Objects side by side, then one library, renamed into place when whole; None, or what went wrong."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(scratch, source.stem + ".o")) for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", to]
            for source, to in zip(sources, objects, strict=True)
        ]
        built = str(Path(scratch, "library.so"))
        error = _run_all(commands) or _run_all([[compiler, "-shared", *objects, "-o", built, "-lpthread"]])
        if error is None:
            os.replace(built, library)  # nobody ever sees half a library
        return error


def _run_all(commands: Sequence[Sequence[str]]) -> str | None:
    """What went wrong, of the last that did."""
    try:
        done = run_compilers(commands, _BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done after {_BUILD_SECONDS} s"
    failed = [each for each in done if each.returncode != 0]
    if not failed:
        return None
    return " ".join(failed[-1].stderr.split())[:400] or f"exit status {failed[-1].returncode}"
