"""Packed products: exactly the file's weights, as exact as fp32, and the same bits in any batch."""

from collections.abc import Iterator, Sequence

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kernels.cpu.library import CpuLibrary
from kernels.cpu.packed import PackedLinear
from tests import needs
from worker.execution.cpu_model import cpu_parts
from worker.model.layers import LinearWeights, Placement

CPU = Placement(torch.device("cpu"), torch.float32)
QUANTIZED = ["Q4_0", "Q4_1", "Q8_0"]
STORED = [*QUANTIZED, "F32", "F16", "BF16"]


@pytest.fixture
def library() -> CpuLibrary:
    return needs.compiled()


class Source:
    """A tensor of a GGUF file without the file."""

    name = "weight"

    def __init__(self, quantization: str, num_outputs: int, num_features: int, seed: int = 0) -> None:
        self.quantization = quantization
        self.shape = (num_outputs, num_features)
        dense = np.random.default_rng(seed).standard_normal(self.shape, dtype=np.float32) * 0.2
        self._kind = gguf.GGMLQuantizationType[quantization]
        self._raw: npt.NDArray[np.uint8] = gguf.quants.quantize(dense, self._kind).view(np.uint8)

    def raw(self) -> npt.NDArray[np.uint8]:
        return self._raw.reshape(self.shape[0], -1)

    def dequantized(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        dense = np.ascontiguousarray(gguf.quants.dequantize(self.raw(), self._kind), dtype=np.float32)
        return torch.from_numpy(dense.copy()).to(device, dtype).reshape(self.shape)


class Values:
    """A dense vector as a source."""

    name = "bias"
    quantization = "F32"

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.shape = tuple(values.shape)

    def raw(self) -> npt.NDArray[np.uint8]:
        return self._values.numpy().view(np.uint8).reshape(1, -1)

    def dequantized(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._values.to(device, dtype).clone()


def linear(library: CpuLibrary, parts: Sequence[Source], bias: Tensor | None = None) -> PackedLinear:
    biases = [] if bias is None else [Values(b) for b in bias.split([part.shape[0] for part in parts])]
    layer = cpu_parts(library).linear_factory(LinearWeights("test", parts, biases), CPU)
    assert isinstance(layer, PackedLinear)
    return layer


def expect_exact(ours: Tensor, parts: Sequence[Source], x: Tensor, bias: Tensor | None = None) -> None:
    """Within two fp32 roundings of the sum of magnitudes; an fp32 sum may lose half of one a feature."""
    assert roundings(ours, parts, x, x.abs(), bias) <= 2.0


def roundings(
    ours: Tensor, parts: Sequence[Source], x: Tensor, sizes: Tensor, bias: Tensor | None = None
) -> float:
    weight = torch.cat([part.dequantized(torch.float64, CPU.device) for part in parts])
    added = torch.zeros(len(weight)).double() if bias is None else bias.double()
    exact = torch.nn.functional.linear(x.double(), weight, added)
    magnitude = torch.nn.functional.linear(sizes.double(), weight.abs(), added.abs())
    rounding = torch.finfo(torch.float32).eps * magnitude
    return ((ours.double() - exact).abs() / rounding.clamp(min=1e-300)).max().item()


def activations(num_rows: int, num_features: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, num_features, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("quantization", STORED)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 9, 12, 13, 24, 25, 61])
def test_a_product_is_as_exact_as_fp32(library: CpuLibrary, quantization: str, num_rows: int) -> None:
    source = Source(quantization, 70, 160)
    x = activations(num_rows, 160)
    expect_exact(linear(library, [source])(x), [source], x)


@pytest.mark.parametrize("quantization", STORED)
@pytest.mark.parametrize(
    ("num_outputs", "num_features"), [(1, 32), (15, 64), (16, 128), (17, 576), (33, 1536)]
)
def test_every_width_of_a_matrix(
    library: CpuLibrary, quantization: str, num_outputs: int, num_features: int
) -> None:
    source = Source(quantization, num_outputs, num_features)
    for num_rows in (1, 6, 14):
        x = activations(num_rows, num_features)
        expect_exact(linear(library, [source])(x), [source], x)


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16"])
def test_dense_formats_take_any_number_of_features(library: CpuLibrary, quantization: str) -> None:
    source = Source(quantization, 20, 41)
    x = activations(7, 41)
    expect_exact(linear(library, [source])(x), [source], x)


@pytest.mark.parametrize("quantization", STORED)
def test_a_row_has_the_same_bits_in_any_batch(library: CpuLibrary, quantization: str) -> None:
    """B052's kind: what shares the step never shows."""
    layer = linear(library, [Source(quantization, 50, 256)])
    x = activations(61, 256)
    together = layer(x)
    for num_rows in (1, 2, 3, 4, 5, 11, 12, 40):
        assert torch.equal(layer(x[:num_rows]), together[:num_rows])
        assert torch.equal(layer(x[-num_rows:]), together[-num_rows:])


@pytest.mark.parametrize("num_rows", [1, 9])
def test_parts_stored_differently_are_put_side_by_side(library: CpuLibrary, num_rows: int) -> None:
    """q, k and v of one file may differ in quantisation; Q6_K is made dense first."""
    names = ["Q4_1", "Q4_0", "Q8_0", "Q5_1"]
    parts = [
        Source(name, size, 64, seed)
        for seed, (name, size) in enumerate(zip(names, [18, 5, 7, 3], strict=True))
    ]
    bias = activations(1, 33)[0]
    x = activations(num_rows, 64)
    expect_exact(linear(library, parts, bias)(x), parts, x, bias)


def test_rows_may_be_strided(library: CpuLibrary) -> None:
    source = Source("Q4_1", 40, 64)
    wide = activations(5, 200)
    x = wide[:, 40:104]
    assert torch.equal(linear(library, [source])(x), linear(library, [source])(x.contiguous()))


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_features_of_very_different_size_lose_what_the_largest_of_their_block_would(
    library: CpuLibrary, quantization: str
) -> None:
    """One feature a thousand times the others, blocks of zeros and of tiny values."""
    source = Source(quantization, 48, 256)
    x = activations(6, 256)
    x[:, 5] *= 1000.0
    x[:, 64:96] = 0.0
    x[:, 96:128] *= 1e-20
    x[1] = 0.0
    largest = x.abs().view(6, 8, 32).amax(dim=-1, keepdim=True).expand(6, 8, 32).reshape(6, 256)
    assert roundings(linear(library, [source])(x), [source], x, largest) <= 1.0


@pytest.mark.parametrize("quantization", STORED)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("num_rows", [2, 20])
def test_what_is_not_finite_stays_so_in_its_row_alone(
    library: CpuLibrary, quantization: str, value: float, num_rows: int
) -> None:
    """B057: a NaN must not turn into a number on its way."""
    layer = linear(library, [Source(quantization, 20, 96)])
    x = activations(num_rows, 96)
    clean = layer(x)
    x[1, 40] = value
    out = layer(x)
    assert not out[1].isfinite().any()
    others = [row for row in range(num_rows) if row != 1]
    assert torch.equal(out[others], clean[others])


@pytest.fixture
def fast(library: CpuLibrary) -> Iterator[CpuLibrary]:
    """Two digits instead of three, for the whole process."""
    library.use_precision("fast")
    yield library
    library.use_precision("exact")


@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 13, 30])
def test_the_fast_mode_rounds_at_two_to_the_minus_16(
    fast: CpuLibrary, quantization: str, num_rows: int
) -> None:
    """Half a unit of 1/32512 of the block's largest per feature; a row is still the same in any batch."""
    source = Source(quantization, 70, 160)
    x = activations(num_rows, 160)
    largest = (
        x.abs().view(num_rows, 5, 32).amax(dim=-1, keepdim=True).expand(-1, -1, 32).reshape(num_rows, -1)
    )
    layer = linear(fast, [source])
    ours = layer(x)
    assert roundings(ours, [source], x, largest) * torch.finfo(torch.float32).eps <= 0.5 / 32512
    if fast.multiplies_integers:
        assert roundings(ours, [source], x, largest) > 1.0, "this is the exact mode"
    for row in range(num_rows):
        assert torch.equal(layer(x[row : row + 1])[0], ours[row])


def test_embedding_rows_are_exactly_the_files(library: CpuLibrary) -> None:
    source = Source("Q8_0", 37, 96)
    embedding = cpu_parts(library).embedding_factory(source, CPU)
    ids = torch.tensor([0, 36, 5, 5, 17], dtype=torch.int32)
    assert torch.equal(embedding(ids), source.dequantized(torch.float32, CPU.device)[ids])


def test_an_id_outside_the_table_is_refused(library: CpuLibrary) -> None:
    embedding = cpu_parts(library).embedding_factory(Source("Q8_0", 37, 96), CPU)
    with pytest.raises(AssertionError, match="outside the vocabulary of 37"):
        embedding(torch.tensor([37], dtype=torch.int32))


def test_other_placements_get_plain_layers(library: CpuLibrary) -> None:
    source = Source("Q4_1", 8, 32)
    placement = Placement(torch.device("cpu"), torch.bfloat16)
    layer = cpu_parts(library).linear_factory(LinearWeights("x", [source], []), placement)
    assert layer(torch.zeros(1, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
