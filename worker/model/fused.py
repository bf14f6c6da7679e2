"""The same network for a GPU: few kernels a layer, safe inside a CUDA graph.

Owns no parameters: it reads those of a loaded Model. Up to `MATVEC_ROWS` tokens go through matrix-vector
kernels with norm, residual and activation folded in; more go through the library's products with fused
kernels between them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.matvec import matvec
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_store import rotary_store
from kernels.silu_mul import silu_mul
from worker.model.layers import TorchLinear
from worker.model.llama import DecoderLayer, Model

MATVEC_ROWS = 1
"""Tokens up to which the matrix-vector kernels beat the library (docs/kernels.md)."""

AttendStored = Callable[[KvLayer, Tensor], Tensor]
"""(K and V of a layer, this step's already in it; q [T, num_heads, head_dim]) → [T, num_heads, head_dim]."""


class FusedModel:
    """A Model's parameters, run through fused kernels."""

    def __init__(self, model: Model) -> None:
        self.config = model.config
        self.embedding = _dense(model.embedding)
        self._layers = model.layers
        self._norm = model.norm
        self._head = _linear(model.head)
        table = model.rotary
        self._cos_sin = torch.cat([table.cos, table.sin], dim=1).contiguous()  # fp32 [positions, head_dim]

    def forward(
        self, residual: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attend: AttendStored
    ) -> Tensor:
        """Stores this step's K and V, attends, and returns hidden states before the last norm: [T, hidden].

        residual [T, hidden]: embedding rows, overwritten; positions, slots int32 [T].
        """
        is_few = residual.shape[0] <= MATVEC_ROWS and not self.config.has_mlp_bias
        run = self._matvec_layer if is_few else self._library_layer
        pending: Tensor | None = None  # the last product, not yet added to the residual
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            pending = run(layer, residual, pending, positions, slots, layer_kv, attend)
        if pending is not None:
            residual += pending
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and head: [n, vocab_size], dtype of the weights. hidden is of `forward`."""
        eps, vocab = self.config.rms_norm_eps, self.config.vocab_size
        if hidden.shape[0] <= MATVEC_ROWS:
            return matvec(hidden, self._head.weight[:vocab], norm=self._norm, eps=eps, bias=self._head.bias)
        return self._head(rms_norm(hidden, self._norm, eps))[:, :vocab]

    def _matvec_layer(
        self,
        layer: DecoderLayer,
        residual: Tensor,
        pending: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        kv: KvLayer,
        attend: AttendStored,
    ) -> Tensor | None:
        eps = self.config.rms_norm_eps
        qkv, output, gate_up, down = (
            _linear(x) for x in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        product = matvec(residual, qkv.weight, norm=layer.attention_norm, eps=eps, bias=qkv.bias)
        attended = self._attend(layer, product, positions, slots, kv, attend)
        matvec(attended, output.weight, residual=residual, bias=output.bias)
        active = matvec(residual, gate_up.weight, norm=layer.mlp_norm, eps=eps, gated=True)
        matvec(active, down.weight, residual=residual, bias=down.bias)
        return pending

    def _library_layer(
        self,
        layer: DecoderLayer,
        residual: Tensor,
        pending: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        kv: KvLayer,
        attend: AttendStored,
    ) -> Tensor | None:
        eps = self.config.rms_norm_eps
        if pending is None:
            normed = rms_norm(residual, layer.attention_norm, eps)
        else:
            normed = add_rms_norm(pending, residual, layer.attention_norm, eps)
        attended = self._attend(layer, layer.qkv(normed), positions, slots, kv, attend)
        normed = add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps)
        return layer.down(silu_mul(layer.gate_up(normed)))

    def _attend(
        self,
        layer: DecoderLayer,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KvLayer,
        attend: AttendStored,
    ) -> Tensor:
        config = self.config
        q = torch.empty(qkv.shape[0], config.num_heads, config.head_dim, dtype=qkv.dtype, device=qkv.device)
        norms = (layer.q_norm, layer.k_norm)
        rotary_store(qkv, kv, slots, positions, self._cos_sin, q, *norms, eps=config.rms_norm_eps)
        return attend(kv, q).view(qkv.shape[0], -1)


def _linear(linear: object) -> TorchLinear:
    assert isinstance(linear, TorchLinear), f"fused kernels need dense weights, not {type(linear).__name__}"
    return linear


def _dense(embedding: object) -> Tensor:
    weight = getattr(embedding, "weight", None)
    assert isinstance(weight, Tensor), f"fused kernels need a dense embedding, not {type(embedding).__name__}"
    return weight
