"""Decode attention: time and KV bytes per second by batch, context and page size.

FlashInfer stands beside it where it is installed. `python -m benchmarks.kernels.paged_decode [--tune]` on a
CUDA device prints a table and, with --out, writes JSON.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.testing import do_bench

from kernels.batch import KvLayer
from kernels.paged_decode import DecodeLaunch, make_plan, paged_decode, plan_decode

SHAPES = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 32768), (64, 8192)]
HEADS = [(32, 8, 128), (16, 8, 128)]


@dataclass(frozen=True)
class Cell:
    """One batch of equal contexts whose pages lie in random order."""

    batch: int
    context: int
    page: int
    heads: int
    kv_heads: int
    dim: int
    q: Tensor
    pool: Tensor  # [2, num_slots, kv_heads, dim]
    page_ids: Tensor

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        return self.batch * self.context * 2 * self.kv_heads * self.dim * self.pool.element_size()


def make_cell(batch: int, context: int, page: int, heads: int, kv_heads: int, dim: int) -> Cell:
    """A seeded cell on the device, in bf16."""
    torch.manual_seed(0)
    pages = batch * -(-context // page)
    pool = torch.randn(2, pages * page, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16)
    return Cell(
        batch, context, page, heads, kv_heads, dim, q, pool, torch.randperm(pages, device="cuda").int()
    )


def graphed(run: Callable[[], object], repeats: int = 8) -> float:
    """Median microseconds of one call inside a CUDA graph of `repeats` calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return float(do_bench(graph.replay, return_mode="median", warmup=10, rep=60)) / repeats * 1e3


def ours(cell: Cell, launch: DecodeLaunch, chunk_scale: int) -> float | None:
    """Microseconds of our kernel; None where the launch shape does not fit the device."""
    offsets = torch.arange(cell.page, device="cuda", dtype=torch.int32)
    table = (cell.page_ids[:, None] * cell.page + offsets).view(cell.batch, -1).contiguous()
    rows = torch.arange(cell.batch, device="cuda", dtype=torch.int32)
    lens = torch.full((cell.batch,), cell.context, device="cuda", dtype=torch.int32)
    kv = KvLayer(cell.pool[0], cell.pool[1])
    shape = (cell.batch, cell.heads, cell.kv_heads, cell.dim)
    plan = make_plan(*shape, 32768, cell.q.device, chunk_scale=chunk_scale, launch=launch)
    plan_decode(plan, lens)
    try:
        return graphed(lambda: paged_decode(cell.q, kv, table, rows, lens, plan, scale=cell.dim**-0.5))
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return None


def flashinfer_us(cell: Cell) -> float | None:
    """FlashInfer's decode wrapper on the same pages; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    pages = -(-cell.context // cell.page)
    cache = tuple(part.view(-1, cell.page, cell.kv_heads, cell.dim) for part in cell.pool)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32, device="cuda") * pages
    last = torch.full((cell.batch,), (cell.context - 1) % cell.page + 1, dtype=torch.int32, device="cuda")
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    shape = (cell.heads, cell.kv_heads, cell.dim, cell.page)
    wrapper.plan(indptr, cell.page_ids, last, *shape, **kinds)
    return graphed(lambda: wrapper.run(cell.q, cache))


def launches(tune: bool) -> list[tuple[DecodeLaunch, int]]:
    """Launch shapes and chunk scales to try."""
    if not tune:
        return [(DecodeLaunch(), 1), (DecodeLaunch(), 4)]
    shapes = itertools.product((32, 64, 128), (4,), (2, 3), (1, 2, 3, 4), (1, 2, 4))
    return [(DecodeLaunch(*shape), scale) for *shape, scale in shapes]


def measure(cell: Cell, tune: bool) -> dict[str, object]:
    """The best of the launch shapes, beside FlashInfer."""
    timed = [(us, launch, scale) for launch, scale in launches(tune) if (us := ours(cell, launch, scale))]
    us, launch, scale = min(timed, key=lambda item: item[0])
    peer = flashinfer_us(cell)
    return {
        "batch": cell.batch,
        "context": cell.context,
        "page": cell.page,
        "heads": cell.heads,
        "kv_heads": cell.kv_heads,
        "us": round(us, 2),
        "tb_s": round(cell.kv_bytes / us / 1e6, 2),
        "flashinfer_us": peer and round(peer, 2),
        "launch": f"{launch} x{scale}",
    }


def main() -> None:
    """Runs all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try many launch shapes")
    parser.add_argument("--pages", type=int, nargs="*", default=[16], help="page sizes")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for heads, shape, page in itertools.product(HEADS, SHAPES, arguments.pages):
        records.append(measure(make_cell(*shape, page, *heads), arguments.tune))
        print(records[-1], flush=True)
        torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
