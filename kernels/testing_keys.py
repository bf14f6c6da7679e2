"""Which kernels a piece of work would have compiled, without a device: launches are bound, not run.

For tests. A key is Triton's own: the kernel, dtypes, alignments and kinds of numbers of its arguments, its
constants and its options, as Triton binds them for an H200. Outputs of launches stay as they are, so keys
that depend on computed values are not those of a real run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.testing_driver import H200

MULTIPROCESSORS = 132


@dataclass(slots=True)
class LaunchKeys:
    """Keys seen, in order, each with the arguments of its first launch by name."""

    seen: dict[str, dict[str, object]] = field(default_factory=dict)
    _binders: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def record(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Adds the key of one launch."""
        if id(kernel) not in self._binders:
            compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
            bind = create_function_from_signature(compiled.signature, compiled.params, make_backend(H200))
            self._binders[id(kernel)] = (kernel, bind)
        bound, kinds, others = self._binders[id(kernel)][1](*arguments, debug=False, **options)
        parts = dict(zip(bound, map(str, kinds), strict=True))
        parts = {name: repr(bound[name]) if "constexpr" in kind else kind for name, kind in parts.items()}
        parts |= {name: str(value) for name, value in others.items()}
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        self.seen.setdefault(f"{name} {parts}", {"kernel": name, **parts})

    def missing_in(self, others: "LaunchKeys") -> list[str]:
        """Of each key that `others` has not: the kernel, and how it differs from the closest there."""
        return [_difference(parts, others) for key, parts in self.seen.items() if key not in others.seen]


@contextmanager
def launches_recorded(keys: LaunchKeys) -> Iterator[None]:
    """Within, no kernel runs; what each launch would need is added to `keys`."""

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        keys.record(self, arguments, options)

    before = [(kind, kind.run) for kind in (JITFunction, InterpretedFunction)]
    for kind, _ in before:
        kind.run = record
    try:
        yield
    finally:
        for kind, run in before:
            kind.run = run


def _difference(parts: dict[str, object], others: LaunchKeys) -> str:
    def unlike(other: dict[str, object]) -> list[str]:
        names = parts.keys() | other.keys()
        return sorted(name for name in names if parts.get(name) != other.get(name))

    of_kernel = [other for other in others.seen.values() if other["kernel"] == parts["kernel"]]
    if not of_kernel:
        return f"{parts['kernel']}: never"
    closest = min(of_kernel, key=lambda other: len(unlike(other)))
    changes = [f"{name} {closest.get(name)} -> {parts.get(name)}" for name in unlike(closest)]
    return f"{parts['kernel']}: {', '.join(changes)}"
