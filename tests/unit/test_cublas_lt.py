"""Calls of cuBLASLt, against a stand-in that reads what the real one would and multiplies."""

import ctypes
from ctypes import c_int32, c_uint16, c_uint32, c_uint64

import pytest
import torch
from torch import Tensor

from kernels import cublas_lt
from kernels.cublas_lt import Configuration, CublasLtError, LtProduct, LtShape

CPU = torch.device("cpu")
TRANSPOSE_A, CLUSTER = 3, 8
WANTED = Configuration(kind=66, tile=222, stages=35, cluster=3, custom=4, splits=2, reduction=1)


class Library:
    """Column-major matrices and D = op(A) B, as the library's documentation has it."""

    def __init__(self) -> None:
        self.descriptions: dict[int, list[int]] = {}  # by handle; rows, columns, column stride
        self.transposes: dict[int, int] = {}
        self.workspace_bytes = 0
        self.refused: set[int] = set()  # tiles
        self.launched: list[list[int]] = []  # attributes, the workspace's size and the stream

    def _new(self, place: object, description: list[int]) -> int:
        number = len(self.descriptions) + 1
        self.descriptions[number] = description
        place._obj.value = number  # type: ignore[attr-defined]
        return 0

    def cublasLtMatmulDescCreate(self, place, sums, scale):
        assert (sums, scale) == (68, 0)
        return self._new(place, [])

    def cublasLtMatmulDescSetAttribute(self, product, attribute, value, size):
        assert attribute == TRANSPOSE_A
        assert size.value == 4
        self.transposes[product.value] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, place, dtype, rows, columns, distance):
        assert dtype == 14
        return self._new(place, [rows.value, columns.value, distance.value])

    def cublasLtMatmulAlgoInit(self, handle, sums, scale, a, b, c, d, kind, algorithm):
        assert (sums, scale, a, b, c, d) == (68, 0, 14, 14, 14, 14)
        ctypes.cast(algorithm, ctypes.POINTER(c_uint32))[0] = kind
        return 0 if kind == 66 else 15

    def cublasLtMatmulAlgoConfigSetAttribute(self, algorithm, attribute, value, size):
        assert size.value == (2 if attribute == CLUSTER else 4)
        ctypes.cast(algorithm, ctypes.POINTER(c_uint32))[attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, attribute, value, size, written):
        assert size.value == (2 if attribute == CLUSTER else 4)
        value._obj.value = ctypes.cast(algorithm, ctypes.POINTER(c_uint32))[attribute]
        return 0

    def cublasLtMatmulAlgoCheck(self, handle, product, a, b, c, d, algorithm, result):
        result._obj.workspace_bytes = self.workspace_bytes
        tile = ctypes.cast(algorithm, ctypes.POINTER(c_uint32))[1]
        return 15 if tile in self.refused else 0

    def cublasLtMatmulPreferenceCreate(self, place):
        return self._new(place, [])

    def cublasLtMatmulPreferenceSetAttribute(self, search, attribute, value, size):
        assert (attribute, value._obj.value, size.value) == (1, cublas_lt.WORKSPACE_BYTES, 8)
        return 0

    def cublasLtMatmulPreferenceDestroy(self, search):
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, search, count, results, found):
        for number, tile in enumerate((20, 24, 27)):
            into = ctypes.cast(ctypes.byref(results[number].algorithm), ctypes.POINTER(c_uint32))
            into[0], into[1], into[2], into[CLUSTER] = 66, tile, 1, 5
            results[number].state = 1 if tile == 24 else 0  # one that is of no use
        found._obj.value = 3
        return 0

    def cublasLtMatmulAlgoCapGetAttribute(self, algorithm, attribute, room, capacity, size):
        assert attribute == 6
        room[:3] = [20, 24, 222]
        size._obj.value = 12
        return 0

    def cublasLtMatmul(self, handle, product, alpha, a, a_like, b, b_like, beta, c, c_like, d, d_like, *rest):
        algorithm, _, size, stream = rest
        assert (alpha._obj.value, beta._obj.value, self.transposes[product.value]) == (1.0, 0.0, 1)
        assert (c.value, c_like.value) == (d.value, d_like.value)
        left, right = self._read(a, a_like), self._read(b, b_like)
        self._read(d, d_like).copy_(left.T.float() @ right.float())
        attributes = ctypes.cast(algorithm, ctypes.POINTER(c_uint32))[:9]
        self.launched.append([*attributes, size.value, stream.value])
        return 0

    def _read(self, address: ctypes.c_void_p, like: ctypes.c_void_p) -> Tensor:
        rows, columns, distance = self.descriptions[like.value or 0]
        room = (ctypes.c_char * (2 * columns * distance)).from_address(address.value or 0)
        return torch.frombuffer(room, dtype=torch.bfloat16).view(columns, distance)[:, :rows].T


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made, stream = Library(), type("Stream", (), {"cuda_stream": 7})()
    monkeypatch.setattr(cublas_lt, "_library", lambda: made)
    monkeypatch.setattr(cublas_lt, "set_up", lambda device: None)
    monkeypatch.setattr(cublas_lt, "_handle", lambda device: ctypes.c_void_p(1))
    monkeypatch.setattr(cublas_lt, "_workspace", lambda device: torch.empty(8))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return made


def test_a_product_is_that_of_the_input_and_the_weight_with_the_attributes_asked_for(library: Library):
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(24, 16).bfloat16()
    product = LtProduct(LtShape(5, 24, 16, CPU), WANTED)
    torch.testing.assert_close(product(x, weight), torch.nn.functional.linear(x, weight))
    kind, tile, splits, reduction, _, custom, stages, _, cluster = range(9)
    attributes = dict(enumerate(library.launched[0]))
    asked = {kind: 66, tile: 222, splits: 2, reduction: 1, custom: 4, stages: 35, cluster: 3}
    assert attributes | asked == attributes
    assert library.launched[0][9:] == [cublas_lt.WORKSPACE_BYTES, 7]


def test_what_the_library_refuses_is_an_error(library: Library):
    shape = LtShape(5, 24, 16, CPU)
    library.refused = {222}
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoCheck: status 15"):
        LtProduct(shape, WANTED)
    library.refused, library.workspace_bytes = set(), cublas_lt.WORKSPACE_BYTES + 1
    with pytest.raises(CublasLtError, match=r"tile=222.*wants 33554433 bytes"):
        LtProduct(shape, WANTED)
    with pytest.raises(CublasLtError, match="cublasLtMatmulAlgoInit"):
        LtProduct(shape, Configuration(1, 222, 35, 3, 4))


def test_guesses_and_tiles_are_the_librarys(library: Library):
    guesses = LtShape(5, 24, 16, CPU).guesses(8)
    assert guesses == [Configuration(66, tile, 0, 5, 0, splits=1) for tile in (20, 27)]
    assert cublas_lt.tiles(66, CPU) == [20, 24, 222]


def test_structures_have_the_sizes_of_the_librarys():
    assert ctypes.sizeof(cublas_lt._Algorithm) == 64
    assert ctypes.sizeof(cublas_lt._Result) == 64 + 8 + 4 + 4 + 16
    sizes = [ctypes.sizeof(cublas_lt._number(name, 1)) for name in ("cluster", "tile")]
    assert sizes == [ctypes.sizeof(c_uint16), ctypes.sizeof(c_int32)]
    assert ctypes.sizeof(c_uint64 * 8) == ctypes.sizeof(cublas_lt._Algorithm)


def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    cublas_lt._library.cache_clear()
    with pytest.raises(CublasLtError, match=r"no cuBLASLt: libcublasLt\.so\.99"):
        cublas_lt.version()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CublasLtError, match="made without CUDA"):
        cublas_lt.version()
