"""All layers of a decoder in one call.

Owns the structures that decoder.h names, and keeps alive what they point to. fp32 throughout.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.batch import KvLayer, LastQueries, PagedBatch
from kernels.cpu.library import CpuLibrary
from kernels.cpu.packed import PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderLayerParts:
    """Parameters of one layer."""

    attention_norm: Tensor  # [hidden]
    qkv: PackedLinear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and constants; q_norm and k_norm come with the layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float  # on attention's logits


class _Matrix(Structure):
    _fields_ = (("format", c_int64), ("weights", c_void_p), ("first", c_int64), ("num_outputs", c_int64))


class _Linear(Structure):
    _fields_ = (
        ("matrices", POINTER(_Matrix)),
        ("num_matrices", c_int64),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
    )


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Decoder(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("norm", c_void_p),
        *(
            (name, c_int64)
            for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")
        ),
        ("eps", c_float),
        ("scale", c_float),
    )


_STEP_POINTERS = ("positions", "write_slots", "rows", "kv_lens", "q_indptr", "table", "cos", "sin")
_STEP_SIZES = ("num_tokens", "num_spans", "table_stride", "num_positions", "num_slots")


class _Step(Structure):
    _fields_ = (
        *((name, c_void_p) for name in _STEP_POINTERS),
        ("keys", POINTER(c_void_p)),
        ("values", POINTER(c_void_p)),
        ("last", c_void_p),
        ("last_tokens", c_void_p),
        *((name, c_int64) for name in _STEP_SIZES),
    )


class CpuDecoder:
    """A decoder's layers and last norm."""

    def __init__(
        self,
        library: CpuLibrary,
        shape: DecoderShape,
        layers: Sequence[DecoderLayerParts],
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """norm [hidden]; cos, sin [num_positions, head_dim / 2]. All fp32 and contiguous."""
        self._library = library
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
        self._alive: list[object] = [layers, norm]  # what the structures point to
        first = layers[0]
        self._decoder = _Decoder(
            layers=(_Layer * len(layers))(*(self._layer(layer) for layer in layers)),
            norm=norm.data_ptr(),
            num_layers=len(layers),
            hidden=first.qkv.in_features,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate=first.down.in_features,
            eps=shape.eps,
            scale=shape.scale,
        )
        self._kv: tuple[Sequence[KvLayer], object, object] | None = None

    def run(
        self,
        residual: Tensor,
        batch: PagedBatch,
        kv_layers: Sequence[KvLayer],
        last: LastQueries | None = None,
    ) -> Tensor:
        """Stores K and V of the step, attends, and returns hidden states after the last norm.

        residual [num_tokens, hidden], contiguous: rows of the embedding, overwritten. With `last`, rows of
        other tokens are what the last layer has read of them, after its norm.
        """
        normed = torch.empty(residual.shape)
        step = self._step(batch, kv_layers)
        if last is not None:
            assert last.tokens.shape == last.batch.rows.shape, "each of the last queries is a span"
            those = self._step(last.batch, kv_layers)
            step.last, step.last_tokens = ctypes.addressof(those), last.tokens.data_ptr()
        code = self._library.decode(self._decoder, step, residual, normed)
        assert code == 0, (
            f"a slot of {batch.write_slots.tolist()} lies outside {kv_layers[0].k.shape[0]} slots, "
            f"a position of {batch.positions.tolist()} outside {self._cos.shape[0]}, "
            f"or {last and last.tokens.tolist()} are not ascending tokens of the step"
        )
        return normed

    def _step(self, batch: PagedBatch, kv_layers: Sequence[KvLayer]) -> _Step:
        keys, values = self._kv_pointers(kv_layers)
        return _Step(
            positions=batch.positions.data_ptr(),
            write_slots=batch.write_slots.data_ptr(),
            rows=batch.rows.data_ptr(),
            kv_lens=batch.kv_lens.data_ptr(),
            q_indptr=batch.q_indptr.data_ptr(),
            table=batch.page_table.data_ptr(),
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            keys=keys,
            values=values,
            num_tokens=batch.positions.shape[0],
            num_spans=batch.rows.shape[0],
            table_stride=batch.page_table.stride(0),
            num_positions=self._cos.shape[0],
            num_slots=kv_layers[0].k.shape[0],
        )

    def _kv_pointers(self, kv_layers: Sequence[KvLayer]) -> tuple[object, object]:
        """Made once per pool: its layers never move."""
        known = self._kv
        if known is None or known[0] is not kv_layers:
            array = c_void_p * len(kv_layers)
            keys = array(*(kv.k.data_ptr() for kv in kv_layers))
            values = array(*(kv.v.data_ptr() for kv in kv_layers))
            self._kv = known = (kv_layers, keys, values)
        return known[1], known[2]

    def _layer(self, parts: DecoderLayerParts) -> _Layer:
        return _Layer(
            attention_norm=parts.attention_norm.data_ptr(),
            q_norm=None if parts.q_norm is None else parts.q_norm.data_ptr(),
            k_norm=None if parts.k_norm is None else parts.k_norm.data_ptr(),
            mlp_norm=parts.mlp_norm.data_ptr(),
            qkv=self._linear(parts.qkv),
            output=self._linear(parts.output),
            gate_up=self._linear(parts.gate_up),
            down=self._linear(parts.down),
        )

    def _linear(self, linear: PackedLinear) -> _Linear:
        matrices = (_Matrix * len(linear.matrices))(
            *(_Matrix(m.form, m.packed.ctypes.data, m.first, m.num_outputs) for m in linear.matrices)
        )
        self._alive.append(matrices)
        return _Linear(
            matrices=ctypes.cast(matrices, POINTER(_Matrix)),
            num_matrices=len(linear.matrices),
            bias=None if linear.bias is None else linear.bias.data_ptr(),
            in_features=linear.in_features,
            out_features=linear.out_features,
        )
