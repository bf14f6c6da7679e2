"""The historical kernel's time and KV bytes per second, beside the kernel that the product uses.

`python -m benchmarks.kernels.paged_cuda` on a CUDA device; cells and figures are those of
benchmarks.kernels.paged_decode.
"""

import argparse
import json

import torch

from benchmarks.kernels import paged_decode as peer
from benchmarks.kernels.timing import copies_for, graphed_us
from kernels.paged_cuda.build import Specialization
from kernels.paged_cuda.library import Context, load, num_partitions


def historical_us(cell: peer.Cell) -> dict[str, float | None]:
    """Microseconds of v1 and v2 on random K and V; None where the logits do not fit in shared memory."""
    major, minor = torch.cuda.get_device_capability()
    library = load(Specialization(peer.DIM, cell.page, "bfloat16"), f"sm_{major}{minor}")
    copies = range(copies_for(cell.kv_bytes))
    caches = [library.new_cache(len(cell.page_ids), peer.KV_HEADS, cell.q.device) for _ in copies]
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
    (batch, heads, _), longest = cell.q.shape, max(cell.lengths)
    lens = torch.tensor(cell.lengths, dtype=torch.int32, device=cell.q.device)
    context = Context(cell.page_ids.view(batch, -1), lens, longest, peer.DIM**-0.5)
    scratch = library.new_partitions(batch * heads * num_partitions(longest), cell.q.device)
    return {
        "v1_us": graphed_us(lambda cache: library.v1(cell.q, cache, context), caches)
        if longest <= 32768
        else None,
        "v2_us": graphed_us(lambda cache: library.v2(cell.q, cache, context, scratch), caches),
    }


def main() -> None:
    """Runs all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="*", default=[16], help="page sizes: 8, 16 or 32")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for lengths, page, query_heads, name in peer.cells(arguments.pages):
        if min(lengths) != max(lengths):
            continue  # its block tables are rectangles
        cell = peer.make_cell(lengths, page, query_heads, name)
        times = {**historical_us(cell), "triton_us": peer.ours(cell)}
        fastest = min(us for name, us in times.items() if us and name != "triton_us")
        records.append(
            {
                "batch": len(lengths),
                "context": cell.context,
                "page": page,
                "heads": query_heads,
                **{name: us and round(us, 2) for name, us in times.items()},
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
