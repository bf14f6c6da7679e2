"""Launches of Triton kernels at a fraction of the host's time: for steps that no CUDA graph holds.

Triton's own launch binds, specialises and looks up by text at every call, some tens of microseconds; an eager
step has hundreds of them and the device would wait. Here the kernel that Triton compiled for the same
constants, dtypes and alignments is called directly. Its first launch, and all in Triton's interpreter, go
through Triton.
"""

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

_compiled: dict[tuple[object, ...], CompiledKernel] = {}
MAX_COMPILED = 4096
"""Entries of the table: far more than the kernels of a process; beyond it Triton launches."""

_state = {"is_compiling": False}
_asked: set[tuple[object, ...]] = set()


def set_compiling(is_compiling: bool) -> None:
    """Within kernels.compile_ahead.compiling launches only ask for their kernel, so Triton must see one of
    each kind.
    """
    _state["is_compiling"] = is_compiling
    _asked.clear()


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Tensor | int | float, ...],
    constants: tuple[int | bool, ...],
    *,
    num_warps: int,
    num_stages: int = 3,
    num_ctas: int = 1,
    max_registers: int | None = None,
    is_dependent: bool = False,
) -> None:
    """kernel[grid](*arguments, *constants) on the current stream of the device of arguments[0], a tensor.

    The kernel's parameters are its arguments, then its constants (tl.constexpr), in this order. num_ctas:
    programs of a cluster, of which the grid counts only the clusters.
    """
    first = arguments[0]
    assert isinstance(first, Tensor), "the first argument says which device"
    values: list[int | float] = []
    marks: list[object] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            values.append(address)
            marks.append((argument.dtype, address % 16 == 0))
        else:
            values.append(argument)
            marks.append(_mark(argument))
    shape = (num_warps, num_stages, num_ctas, max_registers, is_dependent)
    key = (id(kernel), first.device.index, constants, *shape, *marks)
    compiled = _compiled.get(key)
    if compiled is None or _state["is_compiling"]:
        if key in _asked:
            return
        options = {"num_warps": num_warps, "num_stages": num_stages}
        if max_registers is not None and first.is_cuda:
            options["maxnreg"] = max_registers
        if is_dependent:
            options["launch_pdl"] = True
        if num_ctas > 1:
            options["num_ctas"] = num_ctas
        result = kernel[grid](*arguments, *constants, **options)
        is_kept = isinstance(result, CompiledKernel) and not _state["is_compiling"]
        if is_kept and len(_compiled) < MAX_COMPILED:
            _compiled[key] = result
        if _state["is_compiling"] and result is not None:  # None: Triton's interpreter has run it
            _asked.add(key)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(first.device.index)
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants
    )


def _mark(number: int | float) -> object:
    """What Triton compiles a kernel for: whether an integer is 1, a multiple of 16, or needs 64 bits."""
    if isinstance(number, float):
        return None
    return number == 1, number % 16 == 0, -(2**31) <= number < 2**31
