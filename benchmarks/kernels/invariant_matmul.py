"""What a product costs whose rows do not know the batch: ours beside the library's, by rows and launch shape.

`python -m benchmarks.kernels.invariant_matmul [--tune]` on a CUDA device. Weights in turn so that none stays
in the cache; inside a CUDA graph. --out writes JSON.
"""

import argparse
import itertools
import json
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.fp8_products import SHAPES, graphed_us
from kernels.invariant_matmul import InvariantLaunch, invariant_matmul, launch_for

ROWS = (1, 64, 256, 2048)
_CACHE_BYTES = 200 << 20


def launches(tune: bool, outputs: int) -> list[InvariantLaunch]:
    """The default, or a search."""
    if not tune:
        return [launch_for(outputs, 2)]
    few = itertools.product((64,), (32, 64, 128), (64, 128), (4,), (3, 4))
    many = itertools.product((128,), (128,), (64,), (8,), (3, 4))
    return [InvariantLaunch(*shape) for shape in (*few, *many)]


def measure(shape: str, product: str, outputs: int, inputs: int, tune: bool) -> list[dict[str, Any]]:
    """All launch shapes of one product; each at all numbers of rows."""
    copies = max(2, min(24, _CACHE_BYTES // (outputs * inputs * 2)))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    xs = {rows: torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16) for rows in ROWS}
    library = {
        rows: graphed_us([partial(torch.nn.functional.linear, x, w) for w in weights])
        for rows, x in xs.items()
    }
    records = []
    for launch in launches(tune, outputs):
        record: dict[str, Any] = {"shape": shape, "product": product, "launch": str(launch)}
        try:
            for rows, x in xs.items():
                calls = [partial(invariant_matmul, x, w, launch=launch) for w in weights]
                record[f"us_{rows}"] = round(graphed_us(calls), 1)
                record[f"library_us_{rows}"] = round(library[rows], 1)
        except Exception as error:
            if "out of resource" not in str(error):
                raise
            continue
        records.append(record)
    return records


def main() -> None:
    """Prints a line for each product and launch shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--tune", action="store_true", help="try many launch shapes")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for shape in arguments.shapes:
        for product, (outputs, inputs) in SHAPES[shape].items():
            for record in measure(shape, product, outputs, inputs, arguments.tune):
                records.append(record)
                print(json.dumps(record), flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
