"""Triton's interpreter without what it does over and over, for tests: the same results, sooner.

It knows Triton's insides by name. Where a version has other ones, that part stays as slow as it was.

- Each call of a function inside a kernel looks through triton.language for what to patch, although the
  launch has patched it already: a quarter of the time.
- Sums and products of integers are computed again in 64 bits, to assert that they fit; the assertion is left
  out where `debug` is off, as it is. Another quarter.
- The names to patch, and numpy's type for a type of Triton, are the same every time.
"""

import functools
import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """From now on, in this process. May be called twice."""
    if getattr(interpreter, "_is_quick", False):
        return
    interpreter._is_quick = True
    _leave_out_idle_assertions()
    _patch_once_a_launch()
    if hasattr(interpreter, "_patch_builtin"):
        _know_names()
    if hasattr(interpreter, "_get_np_dtype"):
        _know_types()


def _leave_out_idle_assertions() -> None:
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if options is not None and not options.debug:
        builder.options = replace(options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    """Triton undoes at the end of a launch what it patched at its beginning, and only that."""
    patch = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    executor = getattr(interpreter, "GridExecutor", None)
    if patch is None or scope is None or executor is None:
        return
    patched: set[ModuleType] = set()  # in the launch that runs
    execute = executor.__call__

    def patch_once(function: Any) -> Any:
        wanted = _languages_of(function)
        if wanted and wanted <= patched:
            return scope()
        patched.update(wanted)
        return patch(function)

    def execute_one(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        try:
            return execute(self, *arguments, **options)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_once
    executor.__call__ = execute_one


@functools.lru_cache(maxsize=1024)
def _languages_of(function: Any) -> frozenset[ModuleType]:
    """Those that its module has names for: what Triton patches for it."""
    return frozenset(value for value in function.__globals__.values() if value is tl or value is tl.core)


def _know_types() -> None:
    find = interpreter._get_np_dtype
    known = functools.lru_cache(maxsize=64)(find)

    def numpy_type(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return known(scalar) if type(scalar) is tl.dtype else find(scalar)  # pointers have no hash

    interpreter._get_np_dtype = numpy_type


def _know_names() -> None:
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    known = {place: _builtins_of(place) for place in places}

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name in known[place] if place in known else _builtins_of(place):
            member = getattr(place, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _builtins_of(place: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]
