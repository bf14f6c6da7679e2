"""The same network for a GPU: few kernels a layer, safe inside a CUDA graph.

Owns no parameters: it reads those of a loaded Model. Three ways through a layer: the library's products with
fused kernels between them, for any number of tokens; and for decode steps of few rows, whose products are
limited by the bytes of the weights, kernels of our own with all that stands around a product folded in: one
for a single row, one for a few. `OwnRows` says how far each goes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from kernels.batch import KvLayer
from kernels.few_rows import Scaled, add_product, product, runs_beside
from kernels.fp8_rows import norm_rows, silu_rows
from kernels.library_choice import faster_library, library_product, padded_rows, prepare
from kernels.matvec import matvec
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_store import Rotary, rotary_store
from kernels.silu_mul import silu_mul
from worker.model.layers import Linear, TorchLinear
from worker.model.llama import DecoderLayer, Model
from worker.model.quantized import FEW_ROWS as FEW_FP8_ROWS
from worker.model.quantized import Fp8Linear

AttendStored = Callable[[KvLayer, Tensor], Tensor]
"""(K and V of a layer, this step's already in it; q [T, num_heads, head_dim]) → [T, num_heads, head_dim]."""

AttendProduct = Callable[[KvLayer, Tensor, Rotary], Tensor]
"""(K and V of a layer, this step's not yet in it; the qkv product [T, (heads + 2 * KV heads) * head_dim];
what q and K go through) → [T, num_heads, head_dim]. Leaves K and V stored."""


ADDING_ROWS = 4096
"""Rows from which the library's products add to the residual, so that the norm reads one tensor less."""
BESIDE_ROWS = 256
"""Of a step in groups at most, as far as measured."""
MOST_GROUPS = 3
"""Of at most as many rows as run in a chain alone; larger steps are groups of up to twice as many."""
BESIDE_BYTES = 48 << 20
"""Of a layer's weights, at most, where groups of rows run side by side: each reads them, out of a cache."""

ONE_ROW_BYTES = 64 << 20
"""Of a layer's e4m3 weights, at most, where one row goes another way than many; measured at 16 and 218 MB."""


@dataclass(frozen=True, slots=True)
class LastRows:
    """Which tokens are read behind the last layer, and how they attend there."""

    tokens: Tensor  # int32 [n], n > 0: index of each in the step
    attend: AttendStored  # their queries [n, num_heads, head_dim]


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows up to which our own products beat the library's; figures in docs/kernels/products.md."""

    chain: int  # a whole decode step
    gated: int  # the product with the activation in it, and the head, beside the library's others
    dependent: int  # a step whose kernels of ours may begin before the last one has ended
    beside: int = 0  # a step in groups of rows, side by side

    @classmethod
    def of(cls, model: Model) -> "OwnRows":
        """As measured at layers of 31 and of 436 MB. The tensor cores' tiles are made for two bytes."""
        if not _are_own(model):
            return cls(0, 0, 0)
        if _dense(model.embedding).element_size() != 2:
            return cls(1, 0, 0)
        if _has_fp8(model):
            return cls(1 if _layer_bytes(model) <= ONE_ROW_BYTES else 0, 64, FEW_FP8_ROWS)
        return cls(64, 64, 256, BESIDE_ROWS if _run_beside(model) else 0)


class FusedModel:
    """A Model's parameters, run through fused kernels."""

    def __init__(self, model: Model, *, own_rows: OwnRows | None = None) -> None:
        self.config = model.config
        self.embedding = _dense(model.embedding)
        self._layers = model.layers
        self.depth = len(model.layers)  # layers that a step goes through
        self._norm = model.norm
        self._head = model.head
        self._own_rows = own_rows or OwnRows.of(model)
        prepare(self.embedding.device)
        table = model.rotary
        self._cos_sin = torch.cat([table.cos, table.sin], dim=1).contiguous()  # fp32 [positions, head_dim]

    def is_own(self, num_rows: int) -> bool:
        """Whether a decode step of so many rows runs without the library."""
        return num_rows <= self._own_rows.chain

    def is_chain(self, num_rows: int) -> bool:
        """Whether those of its kernels that are ours gain by beginning early: dependent launches."""
        return num_rows <= self._own_rows.dependent

    def num_groups(self, num_rows: int) -> int:
        """Groups of rows of a decode step that gain by running side by side, each `through_layers`."""
        own = self._own_rows
        if not own.chain < num_rows <= own.beside:
            return 1
        groups = -(-num_rows // own.chain)
        return groups if groups <= MOST_GROUPS else -(-num_rows // (2 * own.chain))

    def decode(self, residual: Tensor, kv: Sequence[KvLayer], attend: AttendProduct) -> Tensor:
        """A decode step: logits [T, vocab_size] of all rows. residual as in `forward`."""
        num_rows = residual.shape[0]
        if not self.is_own(num_rows):
            return self.logits(self._forward(residual, kv, attend))
        if num_rows == 1:
            return self._decode_one_row(residual, kv, attend)
        return self._decode_few_rows(residual, kv, attend)

    def forward(
        self, residual: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attend: AttendStored
    ) -> Tensor:
        """Stores this step's K and V, attends, and returns hidden states before the last norm: [T, hidden].

        residual [T, hidden]: embedding rows, overwritten; positions, slots int32 [T].
        """
        q, last = self.store(residual, positions, slots, kv, attend), self.depth - 1
        add(residual, self.leave(last, attend(kv[last], q).flatten(1), residual))
        return residual

    def store(
        self, residual: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attend: AttendStored
    ) -> Tensor:
        """`forward` as far as K and V of the last layer; its queries [T, num_heads, head_dim]."""
        q = self.new_q(residual.shape[0])
        pending: Tensor | None = None
        for number, layer_kv in enumerate(kv[: self.depth]):
            self.enter(number, pending, residual, positions, slots, layer_kv, q)
            if number + 1 < self.depth:
                pending = self.leave(number, attend(layer_kv, q).flatten(1), residual)
        return q

    def finish(self, q: Tensor, residual: Tensor, kv: KvLayer, last: LastRows) -> Tensor:
        """The last layer behind its K and V, for some tokens: their hidden states before the last norm.

        q, residual: of all tokens, as `enter` of the last layer leaves them, not changed; kv: of that layer.
        Returns [n, hidden]. By the products of a decode step of so many rows, which are loaded.
        """
        layer, rows = self._layers[self.depth - 1], residual.index_select(0, last.tokens)
        attended, count = last.attend(kv, q.index_select(0, last.tokens)).flatten(1), rows.shape[0]
        if count == 1 and self.is_own(count):
            self._leave_one_row(layer, attended, rows)
            return rows
        if self.is_own(count) or self.num_groups(count) > 1:
            parts = self.num_groups(count)
            for some, to in zip(attended.tensor_split(parts), rows.tensor_split(parts), strict=True):
                self._leave_few_rows(layer, some, to, self._norm)
            return rows
        attended, rows = padded_rows(attended), padded_rows(rows)
        add(rows, self._leave_norm(layer, _by_library(layer.output, attended), rows))
        return rows[:count]

    def stored_first(self, positions: Tensor, slots: Tensor, attend: AttendStored) -> AttendProduct:
        """Attention that finds K and V stored, behind a kernel that splits the product and stores them."""

        def attend_product(kv: KvLayer, qkv: Tensor, rotary: Rotary) -> Tensor:
            q = self.new_q(qkv.shape[0])
            rotary_store(qkv, kv, slots, positions, rotary, q)
            return attend(kv, q)

        return attend_product

    def _forward(self, residual: Tensor, kv: Sequence[KvLayer], attend: AttendProduct) -> Tensor:
        pending: Tensor | None = None
        for number, layer_kv in enumerate(kv[: self.depth]):
            qkv = self._product(number, pending, residual)
            attended = attend(layer_kv, qkv, self._rotary(self._layers[number]))
            pending = self.leave(number, attended.view(residual.shape[0], -1), residual)
        add(residual, pending)
        return residual

    def new_q(self, num_tokens: int) -> Tensor:
        """Room for queries: [num_tokens, num_heads, head_dim]."""
        config, like = self.config, self.embedding
        shape = (num_tokens, config.num_heads, config.head_dim)
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def enter(
        self,
        number: int,
        pending: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KvLayer,
        q: Tensor,
    ) -> None:
        """A layer as far as its attention: adds what is pending to the residual, stores K and V, fills q."""
        qkv = self._product(number, pending, residual)
        rotary_store(qkv, kv, slots, positions, self._rotary(self._layers[number]), q)

    def leave(self, number: int, attended: Tensor, residual: Tensor) -> Tensor | None:
        """A layer from its attention [T, num_heads * head_dim] on; the last product, None: added already."""
        layer = self._layers[number]
        return self._leave_norm(layer, _added(layer.output, attended, residual), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and head: [n, vocab_size], dtype of the weights. hidden is of `forward`."""
        normed, vocab = rms_norm(hidden, self._norm, self.config.rms_norm_eps), self.config.vocab_size
        if 0 < hidden.shape[0] <= self._own_rows.gated:
            head = _linear(self._head)
            return product(normed, head.weight[:vocab], bias=head.bias)
        return self._head(padded_rows(normed))[: hidden.shape[0], :vocab]

    @contextmanager
    def shallow(self) -> Iterator[None]:
        """Within, a step goes through two layers: enough to meet every kernel."""
        self.depth = min(2, len(self._layers))
        try:
            yield
        finally:
            self.depth = len(self._layers)

    def _depths(self, kv: Sequence[KvLayer]) -> Iterator[tuple[DecoderLayer, KvLayer]]:
        return zip(self._layers[: self.depth], kv[: self.depth], strict=True)

    def _decode_one_row(self, residual: Tensor, kv: Sequence[KvLayer], attend: AttendProduct) -> Tensor:
        eps = self.config.rms_norm_eps
        for layer, layer_kv in self._depths(kv):
            qkv, of_qkv = _own(layer.qkv)
            heads = matvec(residual, qkv, norm=layer.attention_norm, eps=eps, **of_qkv)
            attended = attend(layer_kv, heads, self._rotary(layer)).flatten(1)
            self._leave_one_row(layer, attended, residual)
        head = _linear(self._head)
        weight = head.weight[: self.config.vocab_size]
        return matvec(residual, weight, norm=self._norm, eps=eps, bias=head.bias)

    def _decode_few_rows(self, residual: Tensor, kv: Sequence[KvLayer], attend: AttendProduct) -> Tensor:
        normed, head = self.through_layers(residual, kv, attend), _linear(self._head)
        weight, eps = head.weight[: self.config.vocab_size], self.config.rms_norm_eps
        return product(normed, weight, eps=eps, bias=head.bias)

    def through_layers(self, residual: Tensor, kv: Sequence[KvLayer], attend: AttendProduct) -> Scaled:
        """All layers of a decode step of a few rows, added to the residual; what the last norm needs."""
        eps = self.config.rms_norm_eps
        gains = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        normed: Tensor | Scaled = rms_norm(residual, self._layers[0].attention_norm, eps)
        for (layer, layer_kv), next_gain in zip(self._depths(kv), gains, strict=False):
            qkv = _linear(layer.qkv)
            heads = product(normed, qkv.weight, eps=eps, bias=qkv.bias)
            attended = attend(layer_kv, heads, self._rotary(layer)).flatten(1)
            normed = self._leave_few_rows(layer, attended, residual, next_gain)
        assert isinstance(normed, Scaled), "a network without layers"
        return normed

    def _leave_one_row(self, layer: DecoderLayer, attended: Tensor, residual: Tensor) -> None:
        """A layer from its attention on, added to the residual."""
        (output, of_output), (gate_up, of_gate_up) = _own(layer.output), _own(layer.gate_up)
        down, of_down = _own(layer.down)
        matvec(attended, output, residual=residual, **of_output)
        eps = self.config.rms_norm_eps
        active = matvec(residual, gate_up, norm=layer.mlp_norm, eps=eps, gated=True, **of_gate_up)
        matvec(active, down, residual=residual, **of_down)

    def _leave_few_rows(
        self, layer: DecoderLayer, attended: Tensor, residual: Tensor, next_gain: Tensor
    ) -> Scaled:
        """The same for a few rows; what the next norm, of this gain, starts from."""
        output, gate_up, down = map(_linear, (layer.output, layer.gate_up, layer.down))
        scaled = add_product(attended, output.weight, residual, layer.mlp_norm, bias=output.bias)
        active = product(scaled, gate_up.weight, eps=self.config.rms_norm_eps, gated=True)
        return add_product(active, down.weight, residual, next_gain, bias=down.bias)

    def _leave_norm(self, layer: DecoderLayer, pending: Tensor | None, residual: Tensor) -> Tensor | None:
        """A layer from its second norm on; see `leave`."""
        if isinstance(layer.gate_up, Fp8Linear) and isinstance(layer.down, Fp8Linear):
            gate_up = self._normed_product(layer.gate_up, pending, residual, layer.mlp_norm)
            return layer.down.of_rows(*silu_rows(gate_up), residual.dtype)
        normed = self._added_norm(pending, residual, layer.mlp_norm)
        return _added(layer.down, self._activation(normed, layer), residual)

    def _activation(self, normed: Tensor, layer: DecoderLayer) -> Tensor:
        if 0 < normed.shape[0] <= self._own_rows.gated and type(layer.gate_up) is TorchLinear:
            return product(normed, layer.gate_up.weight, gated=True)
        return silu_mul(_by_library(layer.gate_up, normed))

    def _product(self, number: int, pending: Tensor | None, residual: Tensor) -> Tensor:
        """Adds what is pending to the residual; the qkv product of its norm."""
        layer = self._layers[number]
        return self._normed_product(layer.qkv, pending, residual, layer.attention_norm)

    def _normed_product(
        self, linear: Linear, pending: Tensor | None, residual: Tensor, gain: Tensor
    ) -> Tensor:
        if isinstance(linear, Fp8Linear):
            rows = norm_rows(pending, residual, gain, self.config.rms_norm_eps)
            return linear.of_rows(*rows, residual.dtype)
        return _by_library(linear, self._added_norm(pending, residual, gain))

    def _added_norm(self, pending: Tensor | None, residual: Tensor, gain: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        if pending is None:
            return rms_norm(residual, gain, eps)
        return add_rms_norm(pending, residual, gain, eps)

    def _rotary(self, layer: DecoderLayer) -> Rotary:
        return Rotary(self._cos_sin, layer.q_norm, layer.k_norm, self.config.rms_norm_eps)


def add(residual: Tensor, pending: Tensor | None) -> None:
    """What `FusedModel.leave` has left, to the residual."""
    if pending is not None:
        residual += pending


def _added(linear: Linear, x: Tensor, residual: Tensor) -> Tensor | None:
    """A product that is to be added to the residual; None: it has been, by the library itself."""
    if x.shape[0] < ADDING_ROWS or type(linear) is not TorchLinear or linear.bias is not None:
        return _by_library(linear, x)
    residual.addmm_(x, linear.weight.t())
    return None


def _by_library(linear: Linear, x: Tensor) -> Tensor:
    if type(linear) is not TorchLinear:
        return linear(x)
    if linear.bias is None:
        return library_product(x, linear.weight)
    with faster_library(x.shape[0], linear.weight):
        return linear(x)


class _Beside(TypedDict):
    """Of a weight, as our product of one row takes it."""

    scale: Tensor | None
    bias: Tensor | None


def _run_beside(model: Model) -> bool:
    """Whether a layer is small, and all its products are of kernels that may run at the same time."""
    layer = model.layers[0]
    qkv, output, gate_up, down = map(_linear, (layer.qkv, layer.output, layer.gate_up, layer.down))
    if _layer_bytes(model) > BESIDE_BYTES:
        return False
    into = runs_beside(output.weight, adds=True) and runs_beside(down.weight, adds=True)
    return into and runs_beside(qkv.weight) and runs_beside(gate_up.weight, gated=True)


def _own(linear: object) -> tuple[Tensor, _Beside]:
    """A weight that our product of one row can take, dense or e4m3, and what stands beside it."""
    if isinstance(linear, Fp8Linear):
        return linear.weight, {"scale": linear.scale, "bias": linear.bias}
    dense = _linear(linear)
    return dense.weight, {"scale": None, "bias": dense.bias}


def _are_own(model: Model) -> bool:
    """Whether our products can take all of a layer: weights that they know, no bias within the activation."""
    are_known = all(type(linear) in (TorchLinear, Fp8Linear) for linear in [*_linears(model), model.head])
    return are_known and not any(_own(layer.gate_up)[1]["bias"] is not None for layer in model.layers)


def _has_fp8(model: Model) -> bool:
    return any(type(linear) is Fp8Linear for linear in _linears(model))


def _layer_bytes(model: Model) -> int:
    """Of a layer's weights."""
    layer = model.layers[0]
    return sum(_own(part)[0].nbytes for part in (layer.qkv, layer.output, layer.gate_up, layer.down))


def _linears(model: Model) -> Iterator[Linear]:
    return (part for at in model.layers for part in (at.qkv, at.output, at.gate_up, at.down))


def _linear(linear: object) -> TorchLinear:
    assert isinstance(linear, TorchLinear), f"needs dense weights, not {type(linear).__name__}"
    return linear


def _dense(embedding: object) -> Tensor:
    weight = getattr(embedding, "weight", None)
    assert isinstance(weight, Tensor), f"fused kernels need a dense embedding, not {type(embedding).__name__}"
    return weight
