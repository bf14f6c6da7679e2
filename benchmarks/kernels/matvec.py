"""Products of few rows: microseconds by launch shape, beside the library's product and the kernels around it.

Every call of a graph has a weight of its own, so that all bytes come from memory; launches are dependent ones
as in a decode step. `python -m benchmarks.kernels.matvec [--tune] [--shapes qwen3-0.6b llama-3.1-8b]` on a
CUDA device prints a line per product; --out writes all figures as JSON.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from triton.testing import do_bench

from kernels.matvec import MatvecLaunch, choose_launch, matvec
from kernels.rms_norm import add_rms_norm
from kernels.silu_mul import silu_mul

COLD_BYTES = 400 << 20  # of weights in one graph: many times what the caches hold
SHARED_BYTES = 200 << 10  # of one program's pipeline
BANDWIDTH = 4.3e12  # bytes/s, a copy on an H200


@dataclass(frozen=True)
class Product:
    """A linear layer as it stands in a decode step."""

    name: str
    outputs: int  # rows of the weight
    width: int
    has_norm: bool = False
    has_residual: bool = False
    is_gated: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the weight in bf16."""
        return 2 * self.outputs * self.width


PRODUCTS = {
    "qwen3-0.6b": [
        Product("qkv", 4096, 1024, has_norm=True),
        Product("output", 1024, 2048, has_residual=True),
        Product("gate_up", 6144, 1024, has_norm=True, is_gated=True),
        Product("down", 1024, 3072, has_residual=True),
        Product("head", 151936, 1024, has_norm=True),
    ],
    "llama-3.1-8b": [
        Product("qkv", 6144, 4096, has_norm=True),
        Product("output", 4096, 4096, has_residual=True),
        Product("gate_up", 28672, 4096, has_norm=True, is_gated=True),
        Product("down", 4096, 14336, has_residual=True),
        Product("head", 128256, 4096, has_norm=True),
    ],
}


class Case:
    """One product with so many rows, and weights enough that none is in a cache."""

    def __init__(self, product: Product, num_rows: int, *, is_cold: bool = True) -> None:
        self.product = product
        copies = max(2, COLD_BYTES // product.num_bytes) if is_cold else 1
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [
            torch.randn(product.outputs, product.width, **make).mul_(product.width**-0.5)
            for _ in range(copies)
        ]
        self.x = torch.randn(num_rows, product.width, **make)
        self.norm = torch.randn(product.width, **make) if product.has_norm else None
        residual = product.outputs if product.has_residual else product.width
        self.residual = torch.randn(num_rows, residual, **make)

    def ours(self, weight: Tensor, launch: MatvecLaunch | None = None) -> Tensor:
        """Our kernel, its prologue and epilogue."""
        residual = self.residual if self.product.has_residual else None
        return matvec(
            self.x, weight, norm=self.norm, residual=residual, gated=self.product.is_gated, launch=launch
        )

    def library(self, weight: Tensor) -> Tensor:
        """The library's product between the kernels that a decode step has around it."""
        x = self.x
        if self.norm is not None:
            x = add_rms_norm(x, self.residual, self.norm, 1e-6, weight)
        product = torch.nn.functional.linear(x, weight)
        return silu_mul(product) if self.product.is_gated else product

    def plain(self, weight: Tensor) -> Tensor:
        """In fp32, for comparison."""
        x = self.x.float()
        if self.norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm.float()
        product = x @ weight.float().T
        if self.product.is_gated:
            gate, up = product.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up
        return product + self.residual.float() if self.product.has_residual else product

    def microseconds(self, run: Callable[[Tensor], object]) -> float:
        """Of one call, in a graph of one call a weight."""
        run(self.weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in self.weights:
                run(weight)
        median = do_bench(graph.replay, return_mode="median", warmup=3, rep=15)
        return float(median) / len(self.weights) * 1e3

    def error(self, launch: MatvecLaunch) -> float:
        """Relative to the fp32 product, over all elements."""
        weight = self.weights[0]
        expected = self.plain(weight)
        kept = self.residual.clone()
        found = self.ours(weight, launch).float()
        self.residual.copy_(kept)
        return float((found - expected).norm() / expected.norm())


def launches(product: Product, num_rows: int, tune: bool) -> list[MatvecLaunch]:
    """What to try."""
    outputs = product.outputs // 2 if product.is_gated else product.outputs
    if not tune:
        return [choose_launch(num_rows, outputs, product.width, product.is_gated)]
    if num_rows == 1:
        return list(_one_row(product))
    return list(_few_rows(product) if num_rows <= 16 else _more_rows(product, num_rows))


def _one_row(product: Product) -> Iterator[MatvecLaunch]:
    for outputs, block, warps in itertools.product((2, 4, 8), (1024, 2048, 4096), (4, 8)):
        elements = outputs * block * (2 if product.is_gated else 1)
        if block < 2 * product.width and 16 <= elements // (32 * warps) <= 128:
            yield MatvecLaunch(outputs, block, 1, warps, 1)


def _few_rows(product: Product) -> Iterator[MatvecLaunch]:
    shapes = itertools.product((8, 16, 32), ((4, 64), (8, 32), (8, 64), (4, 128)), (4, 8), (4,))
    weights = 2 if product.is_gated else 1
    for outputs, (slices, block), warps, stages in shapes:
        turn = 2 * slices * block * (16 + weights * outputs)
        is_wide = slices * block >= 256 or product.width <= 1024
        programs = product.outputs // weights // outputs
        fits = turn * stages <= SHARED_BYTES and slices >= warps // 2
        if fits and is_wide and (programs >= 96 or outputs == 8) and programs <= 132 * 40:
            yield MatvecLaunch(outputs, block, slices, warps, stages)


def _more_rows(product: Product, num_rows: int) -> Iterator[MatvecLaunch]:
    weights = 2 if product.is_gated else 1
    shared = itertools.product((16, 32, 64), (64, 128), (1,), (4, 8), (3, 5))
    sliced = itertools.product((8, 16), (32,), (8,), (8,), (3,))
    for outputs, block, slices, warps, stages in (*shared, *sliced):
        turn = 2 * slices * block * (num_rows + weights * outputs)
        programs = product.outputs // weights // outputs
        if turn * stages <= SHARED_BYTES and programs >= 32 and (slices == 1 or programs <= 256):
            yield MatvecLaunch(outputs, block, slices, warps, stages)


def _compile(task: tuple[Product, int, MatvecLaunch]) -> None:
    product, num_rows, launch = task
    case = Case(product, num_rows, is_cold=False)
    try:
        case.ours(case.weights[0], launch)
    except Exception as error:
        print(f"{product.name} {launch}: {error!r}"[:200], flush=True)


def measure(product: Product, num_rows: int, tune: bool) -> dict[str, object]:
    """All launch shapes, best first, and the library."""
    case = Case(product, num_rows)
    timed = []
    for launch in launches(product, num_rows, tune):
        try:
            error = case.error(launch)
            assert error < 0.01, f"{product.name} {launch}: error {error}"
            timed.append((round(case.microseconds(lambda w, to=launch: case.ours(w, to)), 2), launch))
        except Exception as error:
            print(f"{product.name} {num_rows} {launch}: {error!r}"[:160], flush=True)
    timed.sort(key=lambda item: item[0])
    return {
        "product": product.name,
        "rows": num_rows,
        "limit_us": round(product.num_bytes / BANDWIDTH * 1e6, 2),
        "library_us": round(case.microseconds(case.library), 2),
        "ours": [(us, (at.outputs, at.block, at.slices, at.warps, at.stages)) for us, at in timed],
    }


def main() -> None:
    """Prints the best of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=list(PRODUCTS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--processes", type=int, default=14, help="that compile at once")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = [(p, n) for shape in arguments.shapes for p in PRODUCTS[shape] for n in arguments.rows]
    if arguments.tune:
        tasks = [(p, n, launch) for p, n in cases for launch in launches(p, n, tune=True)]
        print(f"{len(tasks)} kernels", flush=True)
        with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
            pool.map(_compile, tasks, chunksize=4)
    figures = []
    for product, num_rows in cases:
        found = measure(product, num_rows, arguments.tune)
        figures.append(found)
        best = found["ours"][:3] if isinstance(found["ours"], list) else []
        print(*(found[key] for key in ("product", "rows", "limit_us", "library_us")), *best, flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
