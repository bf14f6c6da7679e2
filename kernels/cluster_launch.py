"""Which decode batches kernels.cluster_decode takes, and in which shape. Imports no kernel."""

from dataclasses import dataclass

import torch

from kernels.batch import KvLayer
from kernels.gluon_there import gluon_is_there

LONGEST = 8192
"""Tokens up to which it was ahead: with more, what counts is how many bytes are under way."""

MULTIPROCESSORS = 132  # of the device that it was measured on
HEAD_DIMS = (64, 128)
GROUPS = (1, 2, 4, 8)  # queries of a KV head


@dataclass(frozen=True, slots=True)
class ClusterLaunch:
    """Launch shape; timings of the choices in docs/kernels/cluster-decode.md."""

    programs: int = 16  # of a cluster, which share a sequence and then V's dimensions
    warps: int = 4  # of a program, each with 16 tokens a turn


def cluster_launch(
    num_spans: int, num_heads: int, dtype: torch.dtype, kv: KvLayer, most_tokens: int
) -> ClusterLaunch | None:
    """The shape for queries of `dtype` where the kernel is there and the fastest; most_tokens: of a span, as
    far as the host knows.
    """
    if num_spans > 1 or most_tokens > LONGEST or not is_there(kv.k.device):
        return None
    is_read = dtype == kv.k.dtype == torch.bfloat16
    is_known = kv.k.shape[2] in HEAD_DIMS and num_heads / kv.k.shape[1] in GROUPS
    return ClusterLaunch() if is_read and is_known else None


def is_there(device: torch.device) -> bool:
    """Whether the kernel can run there; a part of a device may have no room for so large a cluster."""
    if not gluon_is_there("kernels.cluster_decode", device):
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count >= MULTIPROCESSORS
