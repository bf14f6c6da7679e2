"""Decode attention: time, KV bytes a second and percent of the limit by batch, context and page size.

FlashInfer stands beside it where it is installed, timed in the same way on the same pages. `product`: the
launch that also norms q and K, rotates them and stores K and V; `two launches`: the same of two kernels.
`python -m benchmarks.kernels.paged_decode [--tune] [--pages 1 16 64]` on a CUDA device prints a table and,
with --out, writes JSON.
"""

import argparse
import itertools
import json
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.timing import READ_TB_S, copies_for, graphed_us
from benchmarks.workloads import published
from kernels.batch import KvLayer
from kernels.decode_plan import DecodeLaunch, make_plan, plan_decode
from kernels.paged_decode import paged_decode, paged_decode_product
from kernels.rotary_store import Rotary, rotary_store

SHAPES = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 32768), (64, 8192)]
"""Batch and context of the cells of 32 query heads; FlashInfer's figures of 2026-11 are of these."""
SMALL_SHAPES = [(8, 640), (64, 640), (256, 640)]
"""The same for 16 query heads: contexts of the offline workload."""
OFFLINE_STEPS = (50, 200, 500, 800)
"""Decode steps of the offline workload whose contexts are timed."""
HEADS = {32: SHAPES, 16: SMALL_SHAPES}
KV_HEADS, DIM = 8, 128


@dataclass(frozen=True)
class Cell:
    """A batch whose pages lie in random order, with copies of the pool for a cold cache."""

    context: str
    page: int
    lengths: list[int]
    q: Tensor  # [batch, heads, dim]
    pools: list[KvLayer]
    page_ids: Tensor  # int32, the pages of all sequences one after another
    table: Tensor  # int32 [batch, width]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        slot = 2 * self.pools[0].k[0].numel() * self.pools[0].k.element_size()
        return sum(self.lengths) * slot


def make_cell(lengths: list[int], page: int, heads: int, context: str = "") -> Cell:
    """A seeded cell on the device, in bf16."""
    torch.manual_seed(0)
    pages = [-(-length // page) for length in lengths]
    slots = sum(pages) * page
    copies = copies_for(slots * 2 * KV_HEADS * DIM * 2)
    pool = torch.randn(copies, 2, slots, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    page_ids = torch.randperm(sum(pages), device="cuda").int()
    offsets = torch.arange(page, device="cuda", dtype=torch.int32)
    table = torch.zeros(len(lengths), max(pages) * page, device="cuda", dtype=torch.int32)
    for row, ids in zip(table, page_ids.split(pages), strict=True):
        row[: len(ids) * page] = (ids[:, None] * page + offsets).flatten()
    return Cell(
        context=context or str(lengths[0]),
        page=page,
        lengths=lengths,
        q=torch.randn(len(lengths), heads, DIM, device="cuda", dtype=torch.bfloat16),
        pools=[KvLayer(one[0], one[1]) for one in pool],
        page_ids=page_ids,
        table=table,
    )


def ours(cell: Cell, launch: DecodeLaunch | None = None, chunk_scale: int | None = None) -> float | None:
    """Microseconds of our kernel; None where the launch shape does not fit the device."""
    batch, heads, dim = cell.q.shape
    lens = torch.tensor(cell.lengths, device="cuda", dtype=torch.int32)
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    shape = (batch, heads, KV_HEADS, dim)
    plan = make_plan(*shape, max(8192, *cell.lengths), cell.q.device, chunk_scale=chunk_scale, launch=launch)
    plan_decode(plan, rows, lens)
    try:
        return graphed_us(lambda kv: paged_decode(cell.q, kv, cell.table, plan, scale=dim**-0.5), cell.pools)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return None


def of_product(cell: Cell) -> tuple[float, float]:
    """Microseconds from the qkv product: of one launch, and of two."""
    batch, heads, dim = cell.q.shape
    lens = torch.tensor(cell.lengths, device="cuda", dtype=torch.int32)
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    plan = make_plan(batch, heads, KV_HEADS, dim, max(8192, *cell.lengths), cell.q.device)
    plan_decode(plan, rows, lens)
    qkv = torch.randn(batch, (heads + 2 * KV_HEADS) * dim, device="cuda", dtype=torch.bfloat16)
    gain = torch.ones(dim, device="cuda", dtype=torch.bfloat16)
    rotary = Rotary(torch.randn(max(cell.lengths), dim, device="cuda"), gain, gain)
    slots, positions = cell.table[rows.long(), lens.long() - 1], lens - 1
    scale, q = dim**-0.5, torch.empty_like(cell.q)

    def one(kv: KvLayer) -> None:
        paged_decode_product(qkv, kv, cell.table, plan, rotary, scale=scale)

    def two(kv: KvLayer) -> None:
        rotary_store(qkv, kv, slots, positions, rotary, q)
        paged_decode(q, kv, cell.table, plan, scale=scale)

    return graphed_us(one, cell.pools), graphed_us(two, cell.pools)


def flashinfer_us(cell: Cell) -> float | None:
    """FlashInfer's decode wrapper on the same pages; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    pages = [-(-length // cell.page) for length in cell.lengths]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32, device="cuda")
    last = [(length - 1) % cell.page + 1 for length in cell.lengths]
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    shape = (cell.q.shape[1], KV_HEADS, DIM, cell.page)
    wrapper.plan(indptr, cell.page_ids, torch.tensor(last, dtype=torch.int32, device="cuda"), *shape, **kinds)
    caches = [tuple(p.view(-1, cell.page, KV_HEADS, DIM) for p in (kv.k, kv.v)) for kv in cell.pools]
    return graphed_us(lambda cache: wrapper.run(cell.q, cache), caches)


def launches(tune: bool) -> list[tuple[DecodeLaunch | None, int | None]]:
    """Launch shapes and chunk scales to try; None: chunks by the batch."""
    if not tune:
        return [(None, None)]
    programs = ((3, 2), (3, 3), (4, 4), (6, 6))
    shapes = itertools.product(((32, 1), (32, 2), (64, 4)), (3, 4), programs, (None, 2, 4, 16, 32))
    return [
        (DecodeLaunch(block, warps, stages, *per_sm), scale)
        for (block, warps), stages, per_sm, scale in shapes
    ]


def measure(cell: Cell, tune: bool) -> dict[str, object]:
    """The best of the launch shapes, beside FlashInfer."""
    timed = [(us, launch, scale) for launch, scale in launches(tune) if (us := ours(cell, launch, scale))]
    us, launch, scale = min(timed, key=lambda item: item[0])
    peer = flashinfer_us(cell)
    one, two = of_product(cell)
    limit = cell.kv_bytes / READ_TB_S / 1e6
    return {
        "batch": len(cell.lengths),
        "context": cell.context,
        "page": cell.page,
        "heads": cell.q.shape[1],
        "kv_heads": KV_HEADS,
        "bytes": cell.kv_bytes,
        "us": round(us, 2),
        "tb_s": round(cell.kv_bytes / us / 1e6, 2),
        "percent_of_limit": round(100 * limit / us),
        "flashinfer_us": peer and round(peer, 2),
        "product_us": round(one, 2),
        "two_launches_us": round(two, 2),
        "launch": f"{launch} {scale}" if tune else "default",
    }


def cells(pages: list[int]) -> list[tuple[list[int], int, int, str]]:
    """Arguments of make_cell; the last of a page size are of mixed lengths, drawn and of offline256."""
    draw = random.Random(1)
    mixed = [draw.randint(100, 1600) for _ in range(256)]
    listed = []
    for page in pages:
        for heads, shapes in HEADS.items():
            listed += [([context] * batch, page, heads, str(context)) for batch, context in shapes]
        listed.append((mixed, page, 16, "100..1600"))
        for heads, step in itertools.product(HEADS, OFFLINE_STEPS):
            listed.append((offline_lengths(step), page, heads, f"offline256 at {step}"))
    return listed


def offline_lengths(step: int) -> list[int]:
    """Contexts of the offline workload after so many decode steps."""
    workload = published(256)
    pairs = zip(workload.prompts, workload.output_tokens, strict=True)
    return [len(prompt) + step for prompt, count in pairs if count > step]


def main() -> None:
    """Runs all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try many launch shapes")
    parser.add_argument("--pages", type=int, nargs="*", default=[16], help="page sizes")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for lengths, page, heads, context in cells(arguments.pages):
        records.append(measure(make_cell(lengths, page, heads, context), arguments.tune))
        print(records[-1], flush=True)
        torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
