"""GGUF → weight sources: names, row order and block formats of one file.

Owns the translation of ggml's tensor names and the undoing of its row order for the `llama` architecture.
The container itself is read by kvatlas.models.gguf.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.gguf import GgufFile, GgufTensor
from worker.model.config import ModelConfig
from worker.model.weights import Checkpoint, Shape, WeightSource

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGML_NAMES = {theirs: ours for ours, theirs in (_LAYER_NAMES | _TOP_NAMES).items()}
ROPE_DIVISORS = "rope_freqs.weight"


class GgufSource:
    """One tensor of a GGUF file; rows are reordered on the way out where the file permutes them."""

    def __init__(self, file: GgufFile, tensor: GgufTensor, row_order: npt.NDArray[np.int64] | None) -> None:
        self._file = file
        self._tensor = tensor
        self._row_order = row_order  # row i of the meaning is row row_order[i] of the file

    @property
    def name(self) -> str:
        """As the file spells it."""
        return self._tensor.name

    @property
    def shape(self) -> Shape:
        """Outermost first."""
        return self._tensor.shape

    @property
    def quantization(self) -> str:
        """The ggml type."""
        return self._tensor.type_name

    def raw(self) -> npt.NDArray[np.uint8]:
        """Stored bytes by row; a view of the mapped file unless rows are reordered."""
        data = np.frombuffer(self._file.data(self._tensor), dtype=np.uint8)
        rows = data.reshape(self.shape[0], -1) if len(self.shape) > 1 else data.reshape(1, -1)
        if self._row_order is None:
            return rows
        # A vector (a bias) has one element per row.
        by_row = rows if len(self.shape) > 1 else rows.reshape(self.shape[0], -1)
        return np.ascontiguousarray(by_row[self._row_order]).reshape(rows.shape)

    def dequantized(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The dense tensor, through fp32."""
        import gguf  # slow, and most models are in other files

        kind = gguf.GGMLQuantizationType[self.quantization]
        try:
            dense = gguf.quants.dequantize(self.raw(), kind)
        except NotImplementedError as error:
            raise ModelError(
                ModelErrorReason.UNSUPPORTED_QUANTISATION,
                f"tensor {self.name!r} is stored as {self.quantization}, which cannot be read",
            ) from error
        # Stored fp32 comes back as a view; a model must not depend on the file staying in place.
        owned = dense if dense.flags.writeable else dense.copy()
        return torch.from_numpy(owned.reshape(self.shape)).to(device=device, dtype=dtype)


def read_checkpoint(file: GgufFile, config: ModelConfig) -> Checkpoint:
    """All tensors of the file under canonical names."""
    permuted = file.text("general.architecture") == "llama"
    sources: dict[str, WeightSource] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_DIVISORS:  # part of the config
            continue
        name = canonical_name(tensor.name)
        row_order = _row_order(name, tensor.shape[0], config) if permuted else None
        sources[name] = GgufSource(file, tensor, row_order)
    return Checkpoint(sources, ggml_name)


def rope_divisors(file: GgufFile) -> tuple[float, ...]:
    """The rotary scaling of the file by pair of elements; empty where it has none."""
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return ()
    if tensor.type_name != "F32":
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_QUANTISATION,
            f"tensor {tensor.name!r} is {tensor.type_name}, not F32",
        )
    return tuple(np.frombuffer(file.data(tensor), dtype="<f4").tolist())


def open_gguf(path: Path) -> GgufFile:
    """Opens one file; refuses a part of a split one."""
    file = GgufFile(path)
    if (file.integer("split.count") or 1) > 1:
        raise ModelError(
            ModelErrorReason.UNSUPPORTED_FORMAT, f"{path} is one part of a split GGUF file; merge it first"
        )
    return file


def canonical_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    parts = stem.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    return name


def ggml_name(name: str) -> str:
    """The inverse of canonical_name."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGML_NAMES:
        return f"{_GGML_NAMES[stem]}.{kind}"
    parts = stem.split(".", 3)
    return f"blk.{parts[2]}.{_GGML_NAMES[parts[3]]}.{kind}"


def _row_order(name: str, num_rows: int, config: ModelConfig) -> npt.NDArray[np.int64] | None:
    """Undoes the order of q and k rows in files of the `llama` architecture.

    There a head's rows alternate between its halves (0, d/2, 1, d/2 + 1, ...), so that the two elements
    that are turned together lie side by side; ours turns element i with element i + d/2. Nothing for a
    tensor of other rows than the config's, which is refused by its shape.
    """
    if ".self_attn.q_proj." in name:
        num_heads = config.num_heads
    elif ".self_attn.k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return None
    if num_rows != num_heads * config.head_dim:
        return None
    in_file = np.arange(num_heads * config.head_dim).reshape(num_heads, config.head_dim // 2, 2)
    return in_file.swapaxes(1, 2).reshape(-1)
