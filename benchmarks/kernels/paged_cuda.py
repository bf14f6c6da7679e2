"""The historical kernel's time and KV bytes per second, beside the kernel that the product uses.

`python -m benchmarks.kernels.paged_cuda` on a CUDA device; cells and figures are those of
benchmarks.kernels.paged_decode.
"""

import argparse
import itertools
import json

import torch

from benchmarks.kernels import paged_decode as peer
from kernels.paged_cuda.build import Specialization
from kernels.paged_cuda.library import Context, load, num_partitions
from kernels.paged_decode import DecodeLaunch


def historical_us(cell: peer.Cell) -> dict[str, float | None]:
    """Microseconds of v1 and v2 on random K and V; None where the logits do not fit in shared memory."""
    major, minor = torch.cuda.get_device_capability()
    library = load(Specialization(cell.dim, cell.page, "bfloat16"), f"sm_{major}{minor}")
    cache = library.new_cache(len(cell.page_ids), cell.kv_heads, cell.q.device)
    cache.k.normal_()
    cache.v.normal_()
    lens = torch.full((cell.batch,), cell.context, dtype=torch.int32, device=cell.q.device)
    context = Context(cell.page_ids.view(cell.batch, -1), lens, cell.context, cell.dim**-0.5)
    scratch = library.new_partitions(cell.batch * cell.heads * num_partitions(cell.context), cell.q.device)
    return {
        "v1_us": peer.graphed(lambda: library.v1(cell.q, cache, context)) if cell.context <= 32768 else None,
        "v2_us": peer.graphed(lambda: library.v2(cell.q, cache, context, scratch)),
    }


def main() -> None:
    """Runs all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="*", default=[16], help="page sizes: 8, 16 or 32")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for heads, shape, page in itertools.product(peer.HEADS, peer.SHAPES, arguments.pages):
        cell = peer.make_cell(*shape, page, *heads)
        times = {**historical_us(cell), "triton_us": peer.ours(cell, DecodeLaunch(), 1)}
        fastest = min(us for name, us in times.items() if us and name != "triton_us")
        records.append(
            {
                "batch": cell.batch,
                "context": cell.context,
                "page": cell.page,
                "heads": cell.heads,
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
