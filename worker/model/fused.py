"""The same network for a GPU: few kernels a layer, safe inside a CUDA graph.

Owns no parameters: it reads those of a loaded Model. A product of few rows goes through the matrix-vector
kernels where these are faster, with norm, residual and activation folded in; all others go through the
library with fused kernels between them, which ask for the next weight while they run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.matvec import beats_library, matvec
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_store import rotary_store
from kernels.silu_mul import silu_mul
from worker.model.layers import Linear, TorchLinear
from worker.model.llama import DecoderLayer, Model

MAX_AHEAD_TOKENS = 512
"""Tokens up to which products wait for their weights, so that it pays to ask for them early."""

AttendStored = Callable[[KvLayer, Tensor], Tensor]
"""(K and V of a layer, this step's already in it; q [T, num_heads, head_dim]) → [T, num_heads, head_dim]."""


class FusedModel:
    """A Model's parameters, run through fused kernels."""

    def __init__(self, model: Model) -> None:
        self.config = model.config
        self.embedding = _dense(model.embedding)
        self._layers = model.layers
        self._depth = len(model.layers)
        self._norm = model.norm
        self._head = model.head
        table = model.rotary
        self._cos_sin = torch.cat([table.cos, table.sin], dim=1).contiguous()  # fp32 [positions, head_dim]

    def forward(
        self, residual: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attend: AttendStored
    ) -> Tensor:
        """Stores this step's K and V, attends, and returns hidden states before the last norm: [T, hidden].

        residual [T, hidden]: embedding rows, overwritten; positions, slots int32 [T].
        """
        pending: Tensor | None = None  # the last product, not yet added to the residual
        for layer, layer_kv in zip(self._layers[: self._depth], kv[: self._depth], strict=True):
            qkv = self._normed_product(pending, residual, layer.attention_norm, layer.qkv)
            attended = self._attend(layer, qkv, positions, slots, layer_kv, attend)
            pending = self._added(attended, layer.output, residual)
            active = self._activation(pending, residual, layer)
            pending = self._added(active, layer.down, residual)
        if pending is not None:
            residual += pending
        return residual

    @contextmanager
    def shallow(self) -> Iterator[None]:
        """Within, `forward` goes through two layers: enough to meet every kernel."""
        self._depth = min(2, len(self._layers))
        try:
            yield
        finally:
            self._depth = len(self._layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and head: [n, vocab_size], dtype of the weights. hidden is of `forward`."""
        vocab = self.config.vocab_size
        dense = _few_rows(hidden, self._head)
        if dense is not None:
            eps = self.config.rms_norm_eps
            return matvec(hidden, dense.weight[:vocab], norm=self._norm, eps=eps, bias=dense.bias)
        return self._normed_product(None, hidden, self._norm, self._head)[:, :vocab]

    def _normed_product(
        self, pending: Tensor | None, residual: Tensor, norm: Tensor, linear: Linear
    ) -> Tensor:
        """The product of the normed residual, to which what is pending was added first."""
        dense = _few_rows(residual, linear)
        if dense is None:
            return linear(self._normed(pending, residual, norm, linear))
        if pending is not None:
            residual += pending
        return matvec(residual, dense.weight, norm=norm, eps=self.config.rms_norm_eps, bias=dense.bias)

    def _activation(self, pending: Tensor | None, residual: Tensor, layer: DecoderLayer) -> Tensor:
        """silu(gate) * up of the normed residual, to which what is pending was added first."""
        dense = _few_rows(residual, layer.gate_up, gated=True)
        if dense is None or dense.bias is not None:
            normed = self._normed(pending, residual, layer.mlp_norm, layer.gate_up)
            return silu_mul(layer.gate_up(normed), _ahead(residual, layer.down))
        if pending is not None:
            residual += pending
        eps = self.config.rms_norm_eps
        return matvec(residual, dense.weight, norm=layer.mlp_norm, eps=eps, gated=True)

    def _added(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor | None:
        """Adds the product to the residual, or returns it to be added by the next norm."""
        dense = _few_rows(x, linear)
        if dense is None:
            return linear(x)
        matvec(x, dense.weight, residual=residual, bias=dense.bias)
        return None

    def _normed(self, pending: Tensor | None, residual: Tensor, norm: Tensor, coming: Linear) -> Tensor:
        eps, ahead = self.config.rms_norm_eps, _ahead(residual, coming)
        if pending is None:
            return rms_norm(residual, norm, eps, ahead)
        return add_rms_norm(pending, residual, norm, eps, ahead)

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
        norms, ahead = (layer.q_norm, layer.k_norm), _ahead(qkv, layer.output)
        eps = config.rms_norm_eps
        rotary_store(qkv, kv, slots, positions, self._cos_sin, q, *norms, eps=eps, ahead=ahead)
        return attend(kv, q).view(qkv.shape[0], -1)


def _few_rows(x: Tensor, linear: Linear, *, gated: bool = False) -> TorchLinear | None:
    """The dense weights, where the kernels for few rows take this product."""
    if isinstance(linear, TorchLinear) and beats_library(x.shape[0], *linear.weight.shape, gated=gated):
        return linear
    return None


def _ahead(x: Tensor, linear: Linear) -> Tensor | None:
    """The weight of a product of so many rows, if it is worth asking for early."""
    weight = getattr(linear, "weight", None)
    if x.shape[0] > MAX_AHEAD_TOKENS or not isinstance(weight, Tensor) or not weight.is_contiguous():
        return None
    return weight


def _dense(embedding: object) -> Tensor:
    weight = getattr(embedding, "weight", None)
    assert isinstance(weight, Tensor), f"fused kernels need a dense embedding, not {type(embedding).__name__}"
    return weight
