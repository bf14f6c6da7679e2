"""The historical kernel's time and KV bytes per second, beside the kernel that the product uses.

`python -m benchmarks.kernels.paged_cuda` on a CUDA device; cells and figures are those of
benchmarks.kernels.paged_decode.
"""

import argparse
import json

import torch

from benchmarks.kernels import paged_decode as peer
from benchmarks.kernels.timing import graphed_us
from kernels.paged_cuda.build import Specialization
from kernels.paged_cuda.library import BlockCache, Context, PagedCudaLibrary, load, num_partitions

LONGEST_OF_V1 = 32768  # its logits have to fit in shared memory


def random_caches(library: PagedCudaLibrary, cell: peer.Cell) -> list[BlockCache]:
    """As many copies as the cell has pools, so that none stays in the cache."""
    caches = [library.new_cache(len(cell.page_ids), peer.KV_HEADS, cell.q.device) for _ in cell.pools]
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    return caches


def historical_us(cell: peer.Cell) -> dict[str, float | None]:
    """Microseconds of v1 and v2 on random K and V; None where the logits do not fit in shared memory."""
    major, minor = torch.cuda.get_device_capability()
    library = load(Specialization(peer.DIM, cell.page, "bfloat16"), f"sm_{major}{minor}")
    caches, longest = random_caches(library, cell), max(cell.lengths)
    lens = torch.tensor(cell.lengths, dtype=torch.int32, device=cell.q.device)
    blocks = (cell.table[:, :: cell.page] // cell.page).contiguous()
    context = Context(blocks, lens, longest, peer.DIM**-0.5)
    batch, heads, _ = cell.q.shape
    scratch = library.new_partitions(batch * heads * num_partitions(longest), cell.q.device)
    v1 = None
    if longest <= LONGEST_OF_V1:
        v1 = graphed_us(lambda cache: library.v1(cell.q, cache, context), caches)
    return {
        "v1_us": v1,
        "v2_us": graphed_us(lambda cache: library.v2(cell.q, cache, context, scratch), caches),
    }


def main() -> None:
    """Runs all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="*", default=[16], help="page sizes: 8, 16 or 32")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for lengths, page, heads, name in peer.cells(arguments.pages):
        cell = peer.make_cell(lengths, page, heads, name)
        times = {**historical_us(cell), "triton_us": peer.ours(cell)}
        fastest = min(us for key, us in times.items() if us and key != "triton_us")
        records.append(
            {
                "batch": len(lengths),
                "context": cell.context,
                "page": page,
                "heads": heads,
                **{key: us and round(us, 2) for key, us in times.items()},
                "tb_s": round(cell.kv_bytes / fastest / 1e6, 2),
            }
        )
        print(records[-1], flush=True)
        torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
