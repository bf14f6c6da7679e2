"""What tests need and a machine may lack: there they are skipped with the reason. CI has it all."""

import shutil

import pytest

from kernels.cpu.build import COMPILERS
from kernels.cpu.library import CpuLibrary, cpu_library

NODE = pytest.mark.skipif(shutil.which("node") is None, reason="needs node: apt-get install nodejs")
HAS_COMPILER = any(map(shutil.which, COMPILERS))
COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler: apt-get install g++")


def compiled() -> CpuLibrary:
    """The CPU's kernels. Where there is a compiler they must be there."""
    if not HAS_COMPILER:
        pytest.skip("needs a C++ compiler: apt-get install g++")
    library = cpu_library()
    assert library is not None, "the compiler made none, or what it made does not load"
    return library
