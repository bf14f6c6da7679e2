"""Functions on tensors. A leaf: imports nothing of ours."""
