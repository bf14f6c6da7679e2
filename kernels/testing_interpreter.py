"""Triton's interpreter without what it does over and over, for tests: the same results, sooner.

It knows Triton's insides by name. Where a version has other ones, that part stays as slow as it was.

- Each call of a function inside a kernel looks through triton.language for what to patch, although the
  launch has patched it already: a quarter of the time.
- Sums and products of integers are computed again in 64 bits, to assert that they fit; the assertion is left
  out where `debug` is off, as it is. Another quarter.
- The names to patch, and numpy's type for a type of Triton, are the same every time.
- Each value has a type with its shape in objects of Triton's, made and checked again for each operation: half
  of what was left. Values of one shape share them, and two of the same shape are not compared dimension by
  dimension. The type that two operands have in common is looked up.
"""

import functools
import inspect
import math
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
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "interpreter_semantic"):
        _know_names()
    if hasattr(interpreter, "_get_np_dtype"):
        _know_types()
    _know_shapes()
    _know_operands()


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
                scope.set_attr(place, name, _told_what_is_meant(member))

    interpreter._patch_builtin = patch_builtin


_CHECKS_FOR_SEMANTIC = tl.core.builtin(lambda: None).__code__


@functools.lru_cache(maxsize=4096)
def _told_what_is_meant(member: Any) -> Any:
    """`member` with the interpreter's semantic, without the question whether it was given."""
    function = member.__wrapped__ if member.__code__ is _CHECKS_FOR_SEMANTIC else member
    semantic = interpreter.interpreter_semantic

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*arguments, **options)

    return call


def _builtins_of(place: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)]


class _Shape:
    """What a type of blocks and its values have of their shape alone; nobody changes it."""

    def __init__(self, made: Any) -> None:
        self.of_type, self.numel, self.text = made.shape, made.numel, str(made.shape)
        self.of_value = _shape_of_value(list(made.shape))


def _shape_of_value(sizes: list[int]) -> tuple[Any, Any]:
    return tl.core.constexpr(math.prod(sizes)), tl.core.tuple([tl.core.constexpr(size) for size in sizes])


def _know_shapes() -> None:
    block: Any = tl.core.block_type
    value: Any = tl.core.tensor
    make, constant = block.__init__, tl.core.constexpr
    a_type = block(tl.int32, [2, 4])
    if set(vars(a_type)) != {"element_ty", "shape", "numel", "name"}:
        return
    if set(vars(value(None, a_type))) != {"handle", "type", "dtype", "numel", "shape"}:
        return
    known: dict[tuple[int, ...], _Shape] = {}
    by_identity: dict[int, _Shape] = {}  # of the shapes of types, which `known` keeps
    scalar = _shape_of_value([])

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        found = by_identity.get(id(shape))
        if found is None:
            sizes = tuple(size.value if type(size) is constant else size for size in shape)
            found = known.get(sizes) if all(type(size) is int for size in sizes) else None
        if found is None:
            make(self, element_ty, shape)
            found = known[sizes] = by_identity[id(self.shape)] = _Shape(self)
        self.element_ty, self.shape, self.numel = element_ty, found.of_type, found.numel
        self.name = f"<{found.text}, {element_ty}>"

    def make_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = by_identity[id(type.shape)].of_value if type.is_block() else scalar

    block.__init__, value.__init__ = make_type, make_value


def _know_operands() -> None:
    semantic: Any = type(getattr(interpreter, "interpreter_semantic", None))
    broadcast = getattr(semantic, "broadcast_impl_value", None)
    common = getattr(semantic, "computation_type_impl", None)
    if broadcast is None or common is None:
        return

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (False, False) or (blocks == (True, True) and left.type.shape is right.type.shape):
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_unlike
    semantic.computation_type_impl = functools.lru_cache(maxsize=4096)(common)
