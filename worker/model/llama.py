"""The network of the Llama family, as the paper reads. Families differ by config only.

Owns parameters. Knows nothing of pages, batches or sequences: attention is a function it is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.config import ModelConfig
from worker.model.layers import Embedding, Linear, Operations, RotaryTable

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim]) → [T, num_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Parameters of one layer."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # hidden → (num_heads + 2 * num_kv_heads) * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # num_heads * head_dim → hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden → 2 * intermediate
    down: Linear  # intermediate → hidden


class Model:
    """A loaded network. T tokens of any number of sequences go through it side by side."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: Tensor,  # [hidden]
        head: Linear,  # hidden → embedding_rows
        rotary: RotaryTable,
        operations: Operations,
        num_parameters: int,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.operations = operations
        self.num_parameters = num_parameters

    @property
    def max_context(self) -> int:
        """Positions it can compute: those of its rotary table."""
        return len(self.rotary.cos)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm: [T, hidden].

        input_ids, positions int [T]; `attend` is called once per layer, in order.
        """
        eps, operations = self.config.rms_norm_eps, self.operations
        cos, sin = self.rotary.at(positions)
        residual = self.embedding(input_ids)  # [T, hidden]
        normed = operations.rms_norm(residual, self.layers[0].attention_norm, eps)
        for number, layer in enumerate(self.layers):
            attended = self._attention(number, layer, normed, cos, sin, attend)
            normed, residual = operations.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            outcome = layer.down(operations.silu_mul(layer.gate_up(normed)))
            last = number + 1 == len(self.layers)
            next_norm = self.norm if last else self.layers[number + 1].attention_norm
            normed, residual = operations.add_rms_norm(outcome, residual, next_norm, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, fp32 [n, vocab_size]. hidden [n, hidden], rows of `forward`'s result.

        Padding rows of the embedding are left out: no id past the tokenizer's can be sampled.
        """
        return self.head(hidden)[:, : self.config.vocab_size].float()

    def _attention(
        self, number: int, layer: DecoderLayer, normed: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        config, operations = self.config, self.operations
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, config.head_dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = operations.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = operations.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = operations.rotary(q, cos, sin), operations.rotary(k, cos, sin)
        return layer.output(attend(number, q, k, v).reshape(-1, heads * config.head_dim))
