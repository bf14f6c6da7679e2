"""Builds kernel.cu into a shared library with a plain C interface, on first use, and keeps it.

One library per head size, block size, type and device architecture: all of them at once would take minutes.
Owns the compiler's command line and the names of the libraries; library.py calls what is in them.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kernels.compilers import run_compilers
from kernels.config import cache_folder
from kernels.paged_cuda.shape import BLOCK_SIZES

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernel.cu")
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
SCALARS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
DEFAULT_ARCHITECTURE = "sm_90"
FLAGS = ("-O3", "-std=c++17", "--shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v")
_USUAL_PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")
_BUILD_SECONDS = 300


class BuildError(RuntimeError):
    """The kernel could not be built; says what is missing or what the compiler said."""


@dataclass(frozen=True, slots=True)
class Specialization:
    """What one library is compiled for. Raises ValueError, with the choices, for what was never compiled."""

    head_size: int
    block_size: int
    scalar: str  # a key of SCALARS, torch's name of the type

    def __post_init__(self) -> None:
        choices = {"head_size": HEAD_SIZES, "block_size": BLOCK_SIZES, "scalar": tuple(SCALARS)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)}: paged_cuda exists for {allowed}")

    @property
    def definitions(self) -> tuple[str, ...]:
        """Of the source's macros."""
        return (
            f"-DHEAD_SIZE_={self.head_size}",
            f"-DBLOCK_SIZE_={self.block_size}",
            f"-DSCALAR_={SCALARS[self.scalar]}",
        )


def build(
    shape: Specialization, *, architecture: str = DEFAULT_ARCHITECTURE, folder: Path | None = None
) -> Path:
    """The library, from the cache or built now. Raises BuildError.

    Beside it lies the assembler's report of registers and spills, with the ending .log.
    """
    compiler = find_compiler()
    folder = folder or cache_folder()
    library = folder / f"paged_cuda-{_key(compiler, shape, architecture)}.so"
    if library.exists():
        return library
    began = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _compile(compiler, shape, architecture, library)
    except OSError as error:
        raise BuildError(f"paged_cuda cannot be built in {folder}: {error}") from error
    seconds = time.monotonic() - began
    log.info("event=paged_cuda_built seconds=%.1f shape=%r path=%s", seconds, str(shape), library)
    return library


def find_compiler() -> str:
    """Path of nvcc. Raises BuildError."""
    found = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(_USUAL_PLACES))
    if found is None:
        raise BuildError(
            f"paged_cuda is compiled on first use: no nvcc on PATH nor in {', '.join(_USUAL_PLACES)}; "
            "install a CUDA toolkit or choose another attention backend"
        )
    return found


def _compile(compiler: str, shape: Specialization, architecture: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        built = Path(scratch, "library.so")
        command = [
            compiler,
            *FLAGS,
            f"-arch={architecture}",
            *shape.definitions,
            str(SOURCE),
            "-o",
            str(built),
        ]
        try:
            (done,) = run_compilers([command], _BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise BuildError(f"nvcc did not end within {_BUILD_SECONDS} s: {' '.join(command)}") from None
        report = done.stderr + done.stdout
        if done.returncode != 0:
            raise BuildError(f"nvcc failed for {shape} on {architecture}: {' '.join(report.split())[:800]}")
        Path(scratch, "report").write_text(report)
        os.replace(Path(scratch, "report"), library.with_suffix(".log"))
        # Two processes may build at once: the last one wins, and both libraries are whole.
        os.replace(built, library)


def _key(compiler: str, shape: Specialization, architecture: str) -> str:
    """Changes with the source, the flags, the shape, the architecture and the compiler."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(SOURCE.read_bytes())
    for part in (*FLAGS, architecture, *shape.definitions, version):
        digest.update(part.encode() + b"\0")
    return f"{architecture}-{shape.scalar}-{shape.head_size}x{shape.block_size}-{digest.hexdigest()[:16]}"
