"""The store of new K and V: time, bytes a second and percent of a plain copy's rate.

`python -m benchmarks.kernels.store_kv` on a CUDA device prints a table and, with --out, writes JSON.
"""

import argparse
import json

import torch

from benchmarks.kernels.timing import copies_for, graphed_us
from kernels.batch import KvLayer
from kernels.store_kv import store_kv

TOKENS = (1, 64, 2048, 16384)
KV_HEADS, DIM = 8, 128
POOL_SLOTS = 1 << 18


def copy_us(num_bytes: int) -> float:
    """Microseconds in which torch copies `num_bytes` from one place to another, cold."""
    source = torch.zeros(copies_for(num_bytes), num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return graphed_us(lambda i: target[i].copy_(source[i]), list(range(source.shape[0])))


def measure(num_tokens: int, pool_dtype: torch.dtype) -> dict[str, object]:
    """One number of tokens whose slots lie in random order."""
    torch.manual_seed(0)
    row = KV_HEADS * DIM
    read, written = num_tokens * 2 * row * 2, num_tokens * 2 * row * pool_dtype.itemsize
    copies = copies_for(read, most=16)
    heads = (16 + 2 * KV_HEADS) * DIM
    fused = torch.randn(copies, num_tokens, heads, device="cuda", dtype=torch.bfloat16)
    pool = torch.zeros(2, POOL_SLOTS, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).to(pool_dtype)
    kv = KvLayer(pool[0], pool[1])
    parts = [one.view(num_tokens, -1, DIM).split([16, KV_HEADS, KV_HEADS], dim=1)[1:] for one in fused]
    slots = [torch.randperm(POOL_SLOTS, device="cuda")[:num_tokens].int() for _ in parts]
    calls = list(zip(slots, parts, strict=True))
    us = graphed_us(lambda call: store_kv(kv, call[0], *call[1]), calls)
    copy = copy_us((read + written) // 2)
    return {
        "tokens": num_tokens,
        "pool": str(pool_dtype),
        "bytes": read + written,
        "us": round(us, 2),
        "tb_s": round((read + written) / us / 1e6, 2),
        "copy_us": round(copy, 2),
        "percent_of_copy": round(100 * copy / us),
    }


def main() -> None:
    """Runs all sizes, in bf16 and e4m3 pools."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for tokens in TOKENS:
            records.append(measure(tokens, dtype))
            print(records[-1], flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
