"""cuBLASLt as torch brings it, called by its own interface: a product by a configuration that is named.

torch takes the first guess of the library's heuristics. This asks for a tile, a cluster and a split of the
sum instead (cublasLtMatmulAlgoInit and its attributes), which the library checks. Which configuration is the
fastest is told by kernels.library_choice. CUDA library documentation, cuBLAS, 3.4.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

WORKSPACE_BYTES = 32 << 20
_BF16, _FP32, _SUMS_FP32, _TRANSPOSED = 14, 0, 68, 1  # library_types.h, cublas_api.h
_TRANSPOSE_A, _MOST_WORKSPACE, _TILES = 3, 1, 6  # of a product, of a search, of what algorithms can do
_ATTRIBUTES = {"kind": 0, "tile": 1, "splits": 2, "reduction": 3, "custom": 5, "stages": 6, "cluster": 8}
_TWO_BYTES = ("cluster",)
_MAX_TILES = 4096


class CublasLtError(RuntimeError):
    """The library is not there, or refuses a product."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Of an algorithm; numbers as in cublasLt.h: cublasLtMatmulTile_t, cublasLtClusterShape_t and so on."""

    kind: int
    tile: int
    stages: int
    cluster: int
    custom: int
    splits: int = 1
    reduction: int = 0


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class LtShape:
    """x [num_rows, width] @ weight [num_outputs, width].T in bf16, sums in fp32, as the library has it."""

    def __init__(self, num_rows: int, num_outputs: int, width: int, device: torch.device) -> None:
        set_up(device)
        self.result = num_rows, num_outputs
        self.handle, self.workspace = _handle(device), _workspace(device)
        self.product, transposed = c_void_p(), c_int32(_TRANSPOSED)
        _call("cublasLtMatmulDescCreate", byref(self.product), _SUMS_FP32, _FP32)
        _call("cublasLtMatmulDescSetAttribute", self.product, _TRANSPOSE_A, *_sized(transposed))
        # There columns lie side by side: the weight is [width, outputs], the result [outputs, rows].
        self.weight = _described(width, num_outputs)
        self.x, self.out = _described(width, num_rows), _described(num_outputs, num_rows)

    @property
    def described(self) -> tuple[c_void_p, ...]:
        """The product and its matrices, as most calls take them."""
        return self.product, self.weight, self.x, self.out, self.out

    def guesses(self, count: int) -> list[Configuration]:
        """What the library's heuristics would take, the best first."""
        search, results, found = c_void_p(), (_Result * count)(), c_int()
        _call("cublasLtMatmulPreferenceCreate", byref(search))
        most = _sized(c_size_t(WORKSPACE_BYTES))
        _call("cublasLtMatmulPreferenceSetAttribute", search, _MOST_WORKSPACE, *most)
        where = (search, count, results, byref(found))
        _call("cublasLtMatmulAlgoGetHeuristic", self.handle, *self.described, *where)
        _call("cublasLtMatmulPreferenceDestroy", search)
        return [_configuration(result.algorithm) for result in results[: found.value] if result.state == 0]


class LtProduct:
    """The product of one shape by one configuration. One stream at a time: splits share a workspace."""

    def __init__(self, shape: LtShape, configuration: Configuration) -> None:
        """Raises CublasLtError where the library does not take the configuration for this shape."""
        self._shape, self._algorithm, result = shape, _algorithm(shape.handle, configuration), _Result()
        asked = byref(self._algorithm), byref(result)
        _call("cublasLtMatmulAlgoCheck", shape.handle, *shape.described, *asked)
        if result.state != 0 or result.workspace_bytes > WORKSPACE_BYTES:
            raise CublasLtError(f"cuBLASLt: {configuration} wants {result.workspace_bytes} bytes")

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """On the current stream. Both contiguous, at multiples of 16 bytes."""
        shape = self._shape
        out = torch.empty(shape.result, dtype=x.dtype, device=x.device)
        one, zero = c_float(1.0), c_float(0.0)
        a, b, d = (c_void_p(tensor.data_ptr()) for tensor in (weight, x, out))
        _call(
            "cublasLtMatmul",
            *(shape.handle, shape.product, byref(one), a, shape.weight, b, shape.x),
            *(byref(zero), d, shape.out, d, shape.out, byref(self._algorithm)),
            *(c_void_p(shape.workspace.data_ptr()), c_size_t(WORKSPACE_BYTES)),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        return out


def set_up(device: torch.device) -> None:
    """Allocates what all products of a device share; not within a graph's capture. Raises CublasLtError."""
    with torch.cuda.device(device):
        _handle(device)
        _workspace(device)


def version() -> int:
    """As the library counts, 130100 for 13.1.0. Raises CublasLtError."""
    return int(_library().cublasLtGetVersion())


def tiles(kind: int, device: torch.device) -> list[int]:
    """Numbers of all tiles that algorithms of this kind may have."""
    algorithm, room, size = _started(_handle(device), kind), (c_uint32 * _MAX_TILES)(), c_size_t()
    capacity = c_size_t(ctypes.sizeof(room))
    _call("cublasLtMatmulAlgoCapGetAttribute", byref(algorithm), _TILES, room, capacity, byref(size))
    return list(room[: size.value // ctypes.sizeof(c_uint32)])


@cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        raise CublasLtError("torch was made without CUDA")
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        raise CublasLtError(f"no cuBLASLt: {error}") from error
    library.cublasLtGetVersion.restype = c_size_t
    return library


@cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    _call("cublasLtCreate", byref(handle))
    return handle


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _described(rows: int, columns: int) -> c_void_p:
    layout, sizes = c_void_p(), (c_uint64(rows), c_uint64(columns), c_int64(rows))
    _call("cublasLtMatrixLayoutCreate", byref(layout), _BF16, *sizes)
    return layout


def _started(handle: c_void_p, kind: int) -> _Algorithm:
    algorithm, types = _Algorithm(), (_SUMS_FP32, _FP32, _BF16, _BF16, _BF16, _BF16)
    _call("cublasLtMatmulAlgoInit", handle, *types, kind, byref(algorithm))
    return algorithm


def _algorithm(handle: c_void_p, configuration: Configuration) -> _Algorithm:
    algorithm = _started(handle, configuration.kind)
    for name, attribute in list(_ATTRIBUTES.items())[1:]:
        value = _number(name, getattr(configuration, name))
        _call("cublasLtMatmulAlgoConfigSetAttribute", byref(algorithm), attribute, *_sized(value))
    return algorithm


def _configuration(algorithm: _Algorithm) -> Configuration:
    found, size = {}, c_size_t()
    for name, attribute in _ATTRIBUTES.items():
        value = _number(name, 0)
        where = (*_sized(value), byref(size))
        _call("cublasLtMatmulAlgoConfigGetAttribute", byref(algorithm), attribute, *where)
        found[name] = value.value
    return Configuration(**found)


def _number(name: str, value: int) -> c_uint16 | c_uint32:
    return c_uint16(value) if name in _TWO_BYTES else c_uint32(value)


def _sized(value: c_uint16 | c_uint32 | c_int32 | c_size_t) -> tuple[object, c_size_t]:
    """A value as attributes take it."""
    return byref(value), c_size_t(ctypes.sizeof(value))


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise CublasLtError(f"{name}: status {status}")
