"""Prefill attention: time, TFLOP/s, and torch's own attention on the same numbers without pages.

`python -m benchmarks.kernels.paged_prefill` on a CUDA device prints a table and, with --out, writes JSON.
"""

import argparse
import json
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.timing import eager_us
from kernels.paged_prefill import paged_prefill
from kernels.prefill_plan import list_tiles
from kernels.testing import random_paged_problem

KV_HEADS, DIM = 8, 128
PEAK_TFLOPS = 790
"""A bf16 product of 8,192 x 8,192 x 8,192 by torch on an H200."""


@dataclass(frozen=True)
class Cell:
    """Equal spans: `new` query tokens each of `context` tokens in all."""

    spans: int
    new: int
    context: int
    heads: int

    @property
    def flops(self) -> float:
        """Multiplications and additions of the causal half that must be done."""
        cached = self.context - self.new
        keys = self.new * cached + self.new * (self.new + 1) / 2
        return self.spans * 4 * DIM * self.heads * keys


CELLS = (
    Cell(1, 512, 512, 16),
    Cell(16, 512, 512, 16),
    Cell(8, 2048, 2048, 16),
    Cell(8, 2048, 2048, 32),
    Cell(1, 2048, 32768, 32),
)


def ours_us(cell: Cell, page: int) -> float:
    """Our kernel on pages in random order."""
    problem = random_paged_problem(
        q_lens=[cell.new] * cell.spans,
        kv_lens=[cell.context] * cell.spans,
        num_heads=cell.heads,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        page_size=page,
        dtype=torch.bfloat16,
        device="cuda",
        unused=0.5,
    )
    tiles = torch.tensor(list_tiles([cell.new] * cell.spans, cell.heads // KV_HEADS), dtype=torch.int32)
    tiles = tiles.to("cuda")
    return eager_us(lambda: paged_prefill(problem.q, problem.kv, problem.batch, tiles, scale=problem.scale))


def torch_us(cell: Cell) -> float | None:
    """torch's attention of whole prompts; it has no pages and no cached context."""
    if cell.new != cell.context:
        return None
    shape = (cell.spans, cell.heads, cell.new, DIM)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn_like(q[:, :KV_HEADS]) for _ in range(2))
    return eager_us(lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def measure(cell: Cell, page: int) -> dict[str, object]:
    """One cell beside torch."""
    us, peer = ours_us(cell, page), torch_us(cell)
    return {
        "spans": cell.spans,
        "new": cell.new,
        "context": cell.context,
        "heads": cell.heads,
        "page": page,
        "flops": cell.flops,
        "us": round(us, 1),
        "tflops": round(cell.flops / us / 1e6),
        "percent_of_limit": round(100 * cell.flops / us / 1e6 / PEAK_TFLOPS),
        "torch_us": peer and round(peer, 1),
    }


def main() -> None:
    """Runs all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="*", default=[16], help="page sizes")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for page in arguments.pages:
        for cell in CELLS:
            records.append(measure(cell, page))
            print(records[-1], flush=True)
            torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
