"""The other side of kernels.compile_processes: imports kernels once, forks, and each child compiles.

Touches no GPU: what it compiles for is in the message, and its work lies in Triton's cache. The kernel ends
every child with this process, and this process with the one that began it.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from triton import knobs
from triton.backends.nvidia import driver
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.cache import triton_key

from kernels.compile_processes import follow_parent


def serve(modules: Sequence[str], descriptors: Sequence[int]) -> None:
    """Compiles what comes over these connections, a child for each, until all are closed; does not return."""
    for module in modules:
        import_module(module)
    triton_key()  # once for all children
    knobs.compilation.store_binary_only = True
    torch = sys.modules.get("torch")  # two seconds, where no module of kernels has imported it
    assert torch is None or not torch.cuda.is_initialized(), "a device does not survive a fork"
    assert "grpc" not in sys.modules, "gRPC does not survive a fork"
    for descriptor in descriptors:
        if os.fork() == 0:  # noqa: TID251  # see above
            try:
                follow_parent()
                _close_all_but(descriptor, descriptors)
                _answer(Connection(descriptor))
            finally:
                os._exit(0)
    _close_all_but(-1, descriptors)
    for _ in descriptors:
        os.wait()
    os._exit(0)  # nothing here needs the interpreter's orderly end, and the caller waits for this one


def _close_all_but(kept: int, descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor != kept:
            os.close(descriptor)


def _answer(connection: Any) -> None:
    """To each request an empty text, or why it could not be compiled."""
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            compile_one(*request)
            connection.send("")
        except Exception:  # whatever the compiler met is told; the worker then compiles it itself
            connection.send(traceback.format_exc())


def compile_one(
    module: str,
    name: str,
    signature: dict[str, Any],
    constants: dict[Any, Any],
    attributes: dict[Any, Any],
    options: dict[str, Any],
) -> None:
    """Puts a kernel into Triton's cache, and its launcher, which Triton 3.6 builds for each signature."""
    function = getattr(import_module(module), name)
    source = _source_type(function)(function, signature, constants, attributes)
    kernel = compile_kernel(source, **options)
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(kernel.src, kernel.metadata)


def _source_type(function: Any) -> Any:
    """Gluon, Triton's lower level, has its own, which takes the same arguments."""
    if not function.is_gluon():
        return ASTSource
    return import_module("triton.experimental.gluon._runtime").GluonASTSource
