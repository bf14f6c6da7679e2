"""Products of fp8 weights beside those of bf16: time by rows, for the four products of a layer.

`python -m benchmarks.kernels.fp8_products` on a CUDA device of capability 8.9 or more. Both inside a CUDA
graph, weights of several layers in turn so that none stays in the cache; fp8 with the quantising of its
activations. --out writes JSON.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.testing import do_bench

from kernels import fp8
from kernels.fp8_matmul import MAX_ROWS, Fp8Launch, fp8_matmul
from kernels.fp8_rows import quantize_rows
from worker.model.quantized import Fp8Linear

SHAPES = {
    "llama-3.1-8b": {
        "qkv": (6144, 4096),
        "output": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "qwen3-0.6b": {
        "qkv": (4096, 1024),
        "output": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
    },
}
ROWS = (1, 8, 64, 256, 2048, 8192)
_CACHE_BYTES = 200 << 20  # more than the cache, by far


def graphed_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return float(do_bench(graph.replay, return_mode="median", warmup=5, rep=30)) / len(calls) * 1e3


def tuned(linears: list[Fp8Linear], x: tuple[Tensor, Tensor]) -> tuple[float, str]:
    """Microseconds of our product alone at the best of many launch shapes, and that shape."""
    inputs, found = linears[0].in_features, []
    for outputs, block, parts in itertools.product((64, 128), (128, 256), (1, 2, 4, 8)):
        if parts * block > inputs or parts * linears[0].out_features > 32768:
            continue
        launch = Fp8Launch(outputs, block, parts)
        calls = [
            partial(fp8_matmul, *x, one.weight, one.scale, out_dtype=torch.bfloat16, launch=launch)
            for one in linears
        ]
        try:
            found.append((round(graphed_us(calls), 1), str(launch)))
        except Exception as error:
            if "out of resource" not in str(error):
                raise
    return min(found)


def measure(shape: str, name: str, outputs: int, inputs: int, rows: int, tune: bool) -> dict[str, object]:
    """One product at one number of rows."""
    copies = max(2, min(24, _CACHE_BYTES // (outputs * inputs)))
    dense = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    linears = [Fp8Linear(*_quantized(weight), None) for weight in dense]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    bf16 = graphed_us([partial(torch.nn.functional.linear, x, weight) for weight in dense])
    ours = graphed_us([partial(linear, x) for linear in linears])
    rows_of_x = quantize_rows(x)
    library = graphed_us([partial(linear._of_many, *rows_of_x, x.dtype) for linear in linears])
    best, launch = tuned(linears, rows_of_x) if tune and rows <= MAX_ROWS else (None, "")
    quantising = graphed_us([lambda: quantize_rows(x)] * 8)
    flops = 2 * rows * outputs * inputs
    return {
        "shape": shape, "product": name, "rows": rows, "bf16_us": round(bf16, 1), "fp8_us": round(ours, 1),
        "fp8_library_us": round(library, 1), "fp8_best_us": best, "best_launch": launch,
        "quantising_us": round(quantising, 1), "fp8_tflops": round(flops / ours / 1e6, 1),
        "fp8_weight_tb_s": round(outputs * inputs / ours / 1e6, 2),
    }  # fmt: skip


def _quantized(dense: Tensor) -> tuple[Tensor, Tensor]:
    weight, scale = fp8.quantize_rows(dense)
    return weight, scale.flatten()


def main() -> None:
    """Prints a line for each product and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--products", nargs="*", default=["qkv", "output", "gate_up", "down"])
    parser.add_argument("--tune", action="store_true", help="try many launch shapes of few rows")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for shape in arguments.shapes:
        for name in arguments.products:
            outputs, inputs = SHAPES[shape][name]
            for rows in arguments.rows:
                records.append(measure(shape, name, outputs, inputs, rows, arguments.tune))
                print(json.dumps(records[-1]), flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
