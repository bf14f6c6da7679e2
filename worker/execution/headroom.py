"""Memory that the largest step needs beside weights and pages: an upper bound, before anything is loaded.

The first steps of a start run at that size, so a bound that is too low fails there and not under load; but
for what rows with penalties and the like need, which a start does not have.
"""

from worker.execution.sampler import BYTES_OF_TOKEN, ROWS_AT_ONCE
from worker.model.config import ModelConfig

HISTORY_BYTES = 19
"""Of a row and a token, for what penalties need. For the kernels twice the 9.1 of a line
(kernels/sample_edits.py): there are as many lines as rows, and tables are copied to grow. For the plain
sampler 15: its tables take 5, and have up to twice the rows."""

LIBRARIES = 1 << 30
"""Bytes for the libraries' workspaces, kernels and CUDA graphs, measured with room to spare on an H200."""


def step_bytes(model: ModelConfig, *, max_step_tokens: int, max_running: int, itemsize: int) -> int:
    """Bytes of activations and logits of one step, each counted as long as it lives beside the others."""
    q = model.num_heads * model.head_dim
    qkv = q + 2 * model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    # Residual and its norm live through a layer; beside them either attention's tensors or those of the MLP.
    per_token = 3 * hidden + max(qkv + 2 * q, 3 * inner)
    # Logits in the model's dtype; beside them what requests need that want more than a plain draw.
    logits = max_running * model.vocab_size * (itemsize + HISTORY_BYTES)
    drawn = min(max_running, ROWS_AT_ONCE) * model.vocab_size * BYTES_OF_TOKEN
    # Twice: once in the graphs' memory, once in what an eager step of another size leaves cached.
    return 2 * max_step_tokens * per_token * itemsize + logits + drawn + LIBRARIES
