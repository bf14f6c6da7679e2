"""The model's shape and rope variant, resolved from its own files; what is unknown is refused by name.

Owns ModelConfig; hub_config and gguf_config make one from a file.
"""

import math
from dataclasses import dataclass

from kvatlas.models.errors import ModelError, ModelErrorReason
from worker.model.rope import RopeConfig

MOST_LAYERS = 1024
"""Of any network; a damaged file may say billions, and all of their tensors would be named."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. Families differ by these values only."""

    architecture: str  # as config.json names it, e.g. "Qwen3ForCausalLM"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # explicit: num_heads * head_dim need not be hidden_size
    intermediate_size: int
    vocab_size: int  # ids that can be sampled: the width of the logits
    embedding_rows: int  # >= vocab_size; rows past it are padding and never sampled
    max_context: int  # positions the model is made for
    rms_norm_eps: float
    rope: RopeConfig
    tied_head: bool  # the embedding is the output head
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False  # each head of q and k is normed before rotary
    sliding_window: int | None = None  # contexts up to this length are not affected by it
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def attention_scale(self) -> float:
        """Factor on the logits of attention."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def usable_context(self) -> int:
        """Positions at which results are right: a sliding window is not built, shorter contexts are exact."""
        return min(self.max_context, self.sliding_window or self.max_context)

    def check(self, where: str) -> None:
        """Raises where values do not fit together; `where` names the file."""
        problems = {
            f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads": (
                self.num_heads % self.num_kv_heads
            ),
            f"{self.num_layers} layers are more than {MOST_LAYERS}": self.num_layers > MOST_LAYERS,
            f"head_dim {self.head_dim} is odd": self.head_dim % 2,
            f"{self.num_heads} heads are more than hidden_size {self.hidden_size}": self.head_dim == 0,
            f"rms_norm_eps {self.rms_norm_eps} is not positive": self.rms_norm_eps <= 0,
            f"rope theta {self.rope.theta} is not above 1": self.rope.theta <= 1,
            f"rope factor {self.rope.factor} is not at least 1": self.rope.factor < 1,
            f"a beta of rope is not positive, {self.rope.beta_fast} or {self.rope.beta_slow}": (
                min(self.rope.beta_fast, self.rope.beta_slow) <= 0
            ),
        }
        for problem, present in problems.items():
            if present:
                raise ModelError(ModelErrorReason.INVALID_CONFIG, f"{where}: {problem}")
