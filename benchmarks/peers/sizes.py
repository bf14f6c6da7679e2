"""How many tokens every engine's pool holds, and what an engine takes of the device."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.workloads import Workload
from kvatlas.models.shapes import SHAPES

PAGE_SIZE = 16
RESERVING = ("mini_sglang",)  # engines that begin a request only when its whole answer fits beside all others
SPARE = 1.1  # of the peak: pages that are not full, prompts that begin a few steps late
ROUND_TO = 4096  # tokens
BF16 = 2  # bytes
OVERHEAD_BYTES = 7 * 10**9  # of an engine: context, kernels, activations of a step, graphs
KEPT_FREE_BYTES = 4 * 10**9  # of the device


def pool_tokens(workloads: Sequence[Workload], engine: str) -> int:
    """Room for every workload so that the engine neither preempts nor keeps a request waiting."""
    if engine in RESERVING:
        most = max(workload.prompt_tokens + sum(workload.output_tokens) for workload in workloads)
    else:
        most = int(max(workload.peak_tokens for workload in workloads) * SPARE)
    return -(-most // ROUND_TO) * ROUND_TO


def token_bytes(model: str) -> int:
    """Keys and values of one token in bf16, all layers. KeyError for an unknown shape."""
    shape = _shape(model)
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * _head_dim(shape) * BF16


def weight_bytes(model: str) -> int:
    """Of all matrices in bf16; norms and biases are too small to count. KeyError for an unknown shape."""
    shape = _shape(model)
    width, heads = shape["hidden_size"], shape["num_attention_heads"] + shape["num_key_value_heads"]
    layer = 2 * width * heads * _head_dim(shape) + 3 * width * shape["intermediate_size"]
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return BF16 * (shape["num_hidden_layers"] * layer + tables * shape["vocab_size"] * width)


def engine_bytes(model: str, tokens: int) -> int:
    """What an engine with a pool of so many tokens may take of the device."""
    return weight_bytes(model) + tokens * token_bytes(model) + OVERHEAD_BYTES


def device_share(model: str, tokens: int) -> float:
    """The same as a share of the first GPU. CalledProcessError where there is none."""
    return round(engine_bytes(model, tokens) / (device_bytes() + KEPT_FREE_BYTES), 3)


def device_bytes() -> int:
    """What engines may take together of the first GPU. CalledProcessError where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(answer.splitlines()[0]) * 2**20 - KEPT_FREE_BYTES


def _shape(model: str) -> Mapping[str, Any]:
    return SHAPES[model.removeprefix("random:")]


def _head_dim(shape: Mapping[str, Any]) -> int:
    return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])
