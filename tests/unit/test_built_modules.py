"""Launchers that Triton builds have one name and must not become each other."""

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from tests import needs

pytest.importorskip("triton", reason="Triton has wheels for Linux only")
HEADER = Path(sysconfig.get_paths()["include"], "Python.h")
pytestmark = [
    pytest.mark.skipif(not HEADER.exists(), reason=f"Triton builds with {HEADER}: python3-dev"),
    needs.COMPILER,
]

# Built and loaded by Triton's own functions. Each file's `launch` answers with a number of its own.
PROGRAM = """
import sys, threading
from triton.runtime import build

def source(number):
    return f'''
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{ {{"launch", launch, METH_VARARGS, ""}}, {{NULL, NULL, 0, NULL}} }};
static struct PyModuleDef definition = {{ PyModuleDef_HEAD_INIT, "__launcher", NULL, -1, methods }};
PyMODINIT_FUNC PyInit___launcher(void) {{ return PyModule_Create(&definition); }}
'''

def load(number):
    return build.compile_module_from_src(source(number), "__launcher")
"""


def run(code: str, folder: Path) -> str:
    program = f"import sys; sys.path[:] = {sys.path!r}\n" + PROGRAM + textwrap.dedent(code)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_file_loaded_again_changes_no_other(tmp_path: Path) -> None:
    """The first line is what Triton alone does, in one thread: the second launcher has become the first."""
    code = """
    first, second = load(1), load(2)
    again = load(1)
    print(first.launch(), second.launch(), again.launch())
    """
    apart = "\nfrom kernels.built_modules import load_apart\nload_apart()\n"
    assert run(code, tmp_path).split() == ["1", "1", "1"]
    assert run(apart + textwrap.dedent(code), tmp_path).split() == ["1", "2", "1"]


def test_threads_get_the_launchers_that_they_asked_for(tmp_path: Path) -> None:
    printed = run(
        """
        from kernels.built_modules import load_apart
        load_apart()
        load_apart()
        sys.setswitchinterval(1e-6)
        found = []

        def keep_loading(number):
            found.extend((load(number % 4).launch(), number % 4) for _ in range(200))

        threads = [threading.Thread(target=keep_loading, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(found), sum(mine == wanted for mine, wanted in found))
        """,
        tmp_path,
    )
    assert printed.split() == ["1600", "1600"]


def test_a_triton_without_that_function_is_left_alone(tmp_path: Path) -> None:
    """It is not Triton's promise: a start must not end for want of it."""
    printed = run(
        """
        del build._load_module_from_path
        from kernels.built_modules import load_apart
        load_apart()
        print(hasattr(build, "_load_module_from_path"))
        """,
        tmp_path,
    )
    assert printed.strip() == "False"


def test_a_loader_with_more_arguments_gets_them(tmp_path: Path) -> None:
    printed = run(
        """
        from types import SimpleNamespace
        build._load_module_from_path = lambda *got, **named: SimpleNamespace(got=(*got, *named.values()))
        from kernels.built_modules import load_apart
        load_apart()
        print(*build._load_module_from_path("name", "path", language="c++").got)
        """,
        tmp_path,
    )
    assert printed.split() == ["name", "path", "c++"]
