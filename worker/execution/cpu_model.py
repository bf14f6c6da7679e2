"""The parts of a model that processors compute fast: packed products, quantised embedding, fused operations.

Owns the translation from a file's tensors to packed matrices. For fp32 activations on the CPU; weights are
exactly those of the file. What cannot be packed as it is stored is made dense first, at more memory.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import reference
from kernels.batch import KvLayer, LastQueries, PagedBatch
from kernels.cpu.decoder import CpuDecoder, DecoderLayerParts, DecoderShape
from kernels.cpu.library import CpuLibrary, Format
from kernels.cpu.packed import PackedLinear, PackedMatrix
from worker.model.layers import (
    Embedding,
    EmbeddingFactory,
    Linear,
    LinearFactory,
    LinearWeights,
    Operations,
    Placement,
    torch_embedding,
    torch_linear,
)
from worker.model.llama import DecoderLayer, Model
from worker.model.weights import WeightSource

log = logging.getLogger(__name__)

RawRows = npt.NDArray[np.uint8]
_BLOCK = 32
_STORED = {form.name: form for form in Format}


@dataclass(frozen=True, slots=True)
class CpuParts:
    """What load_model takes."""

    linear_factory: LinearFactory
    embedding_factory: EmbeddingFactory
    operations: Operations


class QuantizedEmbedding:
    """Rows of a Q8_0 table, made dense when asked for: a quarter of the memory of a dense table."""

    def __init__(self, library: CpuLibrary, source: WeightSource) -> None:
        self._library = library
        self._width = source.shape[1]
        self._rows = np.array(source.raw(), copy=True)  # the file may change or go

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int32 [num_tokens] → fp32 [num_tokens, width]."""
        return self._library.embed_q8(self._rows, self._width, ids.to(torch.int32))


def cpu_parts(library: CpuLibrary) -> CpuParts:
    """Factories and operations that use the library."""

    def linear(weights: LinearWeights, placement: Placement) -> Linear:
        if not _is_ours(placement):
            return torch_linear(weights, placement)
        matrices = _packed(library, weights.parts)
        return PackedLinear(library, matrices, weights.in_features, weights.bias(placement))

    def embedding(source: WeightSource, placement: Placement) -> Embedding:
        if not _is_ours(placement) or source.quantization != Format.Q8_0.name:
            return torch_embedding(source, placement)
        return QuantizedEmbedding(library, source)

    return CpuParts(linear, embedding, cpu_operations(library))


class CpuModel:
    """A Model whose layers run in one call, over pages. Same parameters, same bits as layer by layer."""

    def __init__(self, model: Model, library: CpuLibrary) -> None:
        shape = model.config
        self._embedding = model.embedding
        self._library = library
        self._decoder = CpuDecoder(
            library,
            DecoderShape(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                eps=shape.rms_norm_eps,
                scale=shape.attention_scale,
            ),
            [_layer_parts(layer) for layer in model.layers],
            model.norm,
            model.rotary.cos,
            model.rotary.sin,
        )

    def forward_paged(
        self,
        input_ids: Tensor,
        batch: PagedBatch,
        kv_layers: Sequence[KvLayer],
        last: LastQueries | None = None,
    ) -> Tensor:
        """See worker.execution.torch_runner.PagedModel."""
        self._library.use_torch_threads()
        return self._decoder.run(self._embedding(input_ids).contiguous(), batch, kv_layers, last)


def cpu_model(model: Model, library: CpuLibrary | None) -> CpuModel | None:
    """The model with its layers in one call; None where not all of them are packed."""
    is_packed = all(
        isinstance(linear, PackedLinear)
        for layer in model.layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    if library is None or not is_packed or model.config.head_dim % 8 != 0:
        return None
    return CpuModel(model, library)


def _layer_parts(layer: DecoderLayer) -> DecoderLayerParts:
    return DecoderLayerParts(
        attention_norm=layer.attention_norm,
        qkv=_as_packed(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        output=_as_packed(layer.output),
        mlp_norm=layer.mlp_norm,
        gate_up=_as_packed(layer.gate_up),
        down=_as_packed(layer.down),
    )


def _as_packed(linear: Linear) -> PackedLinear:
    assert isinstance(linear, PackedLinear), "cpu_model checks that"
    return linear


def cpu_operations(library: CpuLibrary) -> Operations:
    """The library's operations on fp32, the reference's on anything else."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or x.stride(-1) != 1 or x.dim() not in (2, 3):
            return reference.rms_norm(x, weight, eps)
        return library.rms_norm(x, weight, eps)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype != torch.float32 or not (x.is_contiguous() and residual.is_contiguous()):
            return reference.add_rms_norm(x, residual, weight, eps)
        return library.add_rms_norm(x, residual, weight, eps), residual

    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            return reference.rotary(x, cos, sin)
        return library.rotary(x, cos, sin)

    def silu_mul(gate_up: Tensor) -> Tensor:
        if gate_up.dtype != torch.float32 or gate_up.stride(-1) != 1:
            return reference.silu_mul(gate_up)
        return library.silu_mul(gate_up)

    return Operations(rms_norm=rms_norm, add_rms_norm=add_rms_norm, rotary=rotary, silu_mul=silu_mul)


def _is_ours(placement: Placement) -> bool:
    return placement.device.type == "cpu" and placement.dtype == torch.float32


def _packed(library: CpuLibrary, parts: Sequence[WeightSource]) -> list[PackedMatrix]:
    """Neighbours stored alike become one matrix: q, k and v are one product where the file allows it."""
    stored = [_stored_rows(part) for part in parts]
    matrices: list[PackedMatrix] = []
    first = 0
    for form, alike in groupby(stored, key=lambda pair: pair[0]):
        rows = [rows for _, rows in alike]
        together = rows[0] if len(rows) == 1 else np.concatenate(rows)
        packed = library.pack(form, together, parts[0].shape[1])
        matrices.append(PackedMatrix(form, packed, first, len(together)))
        first += len(together)
    return matrices


def _stored_rows(source: WeightSource) -> tuple[Format, RawRows]:
    """How a tensor is packed, and its rows in that form."""
    fits_blocks = source.shape[1] % _BLOCK == 0
    if source.quantization == "Q4_0" and fits_blocks:
        return Format.Q4_1, _with_least(source.raw())
    form = _STORED.get(source.quantization)
    if form is not None and (fits_blocks or form < Format.Q8_0):
        return form, source.raw()
    dense = source.dequantized(torch.float32, torch.device("cpu")).contiguous().numpy()
    return Format.F32, dense.view(np.uint8).reshape(dense.shape[0], -1)


def _with_least(rows: RawRows) -> RawRows:
    """Q4_0 blocks (scale, q) as Q4_1 blocks (scale, least, q) with least = -8 * scale: the very same weights.

    Eight times an fp16 is an fp16 unless it overflows, and a weight of half a million has other troubles.
    """
    blocks = rows.reshape(len(rows), -1, 18)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")
    least = (scale * np.float16(-8.0)).astype("<f2").view(np.uint8)
    return np.concatenate([blocks[:, :, :2], least, blocks[:, :, 2:]], axis=2).reshape(len(rows), -1)
