"""Products of few rows: microseconds by launch shape, beside the library's product and the kernels around it.

Every call of a graph has a weight of its own, so that all bytes come from memory; our launches are dependent
ones as in a decode step. `python -m benchmarks.kernels.products [--tune] [--shapes qwen3-0.6b llama-3.1-8b]`
on a CUDA device prints a line per product, and `--layers` one per way through the four products of a layer,
as they follow each other; --out writes all figures as JSON.
"""

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from triton.testing import do_bench

from kernels import few_rows, matvec, ring_launch, sliced_launch
from kernels.dependent_launch import dependent_launches
from kernels.few_rows import FewRowsLaunch, Scaled, add_product, product
from kernels.matvec import MatvecLaunch
from kernels.ring_launch import RingLaunch
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.silu_mul import silu_mul
from kernels.sliced_launch import SlicedLaunch

COLD_BYTES = 400 << 20  # of weights in one graph: many times what the caches hold
SHARED_BYTES = 220 << 10  # of one program's pipeline
BANDWIDTH = 4.3e12  # bytes/s, a copy on an H200
Launch = MatvecLaunch | FewRowsLaunch | RingLaunch | SlicedLaunch


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


def graph_microseconds(run: Callable[[], object], *, is_dependent: bool) -> float:
    """Of a graph of run()."""
    with dependent_launches(is_dependent):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return float(do_bench(graph.replay, return_mode="median", warmup=3, rep=12)) * 1e3


class Case:
    """One product with so many rows, and weights enough that none is in a cache."""

    def __init__(self, layer: Product, num_rows: int, *, is_cold: bool = True) -> None:
        self.layer = layer
        copies = max(2, COLD_BYTES // layer.num_bytes) if is_cold else 1
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [
            torch.randn(layer.outputs, layer.width, **make).mul_(layer.width**-0.5) for _ in range(copies)
        ]
        self.x = torch.randn(num_rows, layer.width, **make)
        self.norm = torch.randn(layer.width, **make)
        self.gain = torch.randn(layer.outputs, **make)
        self.residual = torch.randn(num_rows, layer.outputs if layer.has_residual else layer.width, **make)
        self.scaled = self._scaled()

    def _scaled(self) -> Scaled:
        """x times the gain, and its squares in 16 parts, as an added product leaves them."""
        squares = torch.zeros(16, few_rows.MAX_ROWS, device="cuda")
        squares[:, : len(self.x)] = self.x.float().square().view(len(self.x), 16, -1).sum(2).T
        return Scaled((self.x.float() * self.norm.float()).bfloat16(), squares)

    def ours(self, weight: Tensor, launch: Launch | None = None) -> Tensor:
        """Our kernel with what it folds in."""
        layer = self.layer
        if len(self.x) == 1:
            assert launch is None or isinstance(launch, MatvecLaunch)
            norm = self.norm if layer.has_norm else None
            residual = self.residual if layer.has_residual else None
            return matvec.matvec(
                self.x, weight, norm=norm, residual=residual, gated=layer.is_gated, launch=launch
            )
        assert launch is None or isinstance(launch, FewRowsLaunch | RingLaunch | SlicedLaunch)
        if layer.has_residual:
            add_product(self.x, weight, self.residual, self.gain, launch=launch)
            return self.residual
        return product(self.scaled, weight, gated=layer.is_gated, launch=launch)

    def library(self, weight: Tensor) -> Tensor:
        """The library's product between the kernels that a decode step has around it."""
        x = self.x
        if self.layer.has_norm:
            x = add_rms_norm(x, self.residual, self.norm, 1e-6)
        result = linear(x, weight)
        return silu_mul(result) if self.layer.is_gated else result

    def plain(self, weight: Tensor) -> Tensor:
        """In fp32, for comparison."""
        x = self.x.float()
        if self.layer.has_norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm.float()
        result = x @ weight.float().T
        if self.layer.is_gated:
            gate, up = result.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up
        return result + self.residual.float() if self.layer.has_residual else result

    def microseconds(self, run: Callable[[Tensor], object], *, is_dependent: bool) -> float:
        """Of one call, in a graph of one call a weight."""
        total = graph_microseconds(
            lambda: [run(weight) for weight in self.weights], is_dependent=is_dependent
        )
        return total / len(self.weights)

    def error(self, launch: Launch) -> float:
        """Relative to the fp32 product, over all elements."""
        weight, kept = self.weights[0], self.residual.clone()
        expected = self.plain(weight)
        with dependent_launches():
            found = self.ours(weight, launch).float()
        self.residual.copy_(kept)
        return float((found - expected).norm() / expected.norm())


class Layers:
    """The products of several layers in turn, with what a decode step has between them but its attention."""

    def __init__(self, shape: str, num_rows: int) -> None:
        parts = PRODUCTS[shape][:4]
        qkv, output = parts[:2]
        self.num_rows = num_rows
        depth = max(2, 2 * COLD_BYTES // sum(part.num_bytes for part in parts))
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [
            [torch.randn(part.outputs, part.width, **make).mul_(part.width**-0.5) for part in parts]
            for _ in range(depth)
        ]
        self.residual, self.gain = torch.randn(num_rows, qkv.width, **make), torch.randn(qkv.width, **make)
        self.attended = torch.randn(num_rows, output.width, **make)

    def one_row(self) -> None:
        """All ours."""
        residual, gain = self.residual, self.gain
        for qkv, output, gate_up, down in self.weights:
            matvec.matvec(residual, qkv, norm=gain)
            matvec.matvec(self.attended, output, residual=residual)
            active = matvec.matvec(residual, gate_up, norm=gain, gated=True)
            matvec.matvec(active, down, residual=residual)

    def few_rows(self) -> None:
        """All ours."""
        normed: Tensor | Scaled = rms_norm(self.residual, self.gain, 1e-6)
        for qkv, output, gate_up, down in self.weights:
            product(normed, qkv)
            scaled = add_product(self.attended, output, self.residual, self.gain)
            normed = add_product(product(scaled, gate_up, gated=True), down, self.residual, self.gain)

    def library(self, *, gated_is_ours: bool) -> None:
        """The library's, but perhaps for the one with the activation in it."""
        normed = rms_norm(self.residual, self.gain, 1e-6)
        for qkv, output, gate_up, down in self.weights:
            linear(normed, qkv)
            normed = add_rms_norm(linear(self.attended, output), self.residual, self.gain, 1e-6)
            if gated_is_ours:
                active = product(normed, gate_up, gated=True)
            else:
                active = silu_mul(linear(normed, gate_up))
            normed = add_rms_norm(linear(active, down), self.residual, self.gain, 1e-6)

    def microseconds(self) -> dict[str, float]:
        """Of one layer, by way."""
        figures = {"library": self._timed(lambda: self.library(gated_is_ours=False), is_dependent=False)}
        if self.num_rows <= few_rows.MAX_ROWS:
            ours = self.one_row if self.num_rows == 1 else self.few_rows
            figures["ours"] = self._timed(ours, is_dependent=False)
            figures["ours, dependent"] = self._timed(ours, is_dependent=True)
            figures["library, gated ours"] = self._timed(
                lambda: self.library(gated_is_ours=True), is_dependent=False
            )
        return figures

    def _timed(self, run: Callable[[], object], *, is_dependent: bool) -> float:
        self.residual.normal_()  # products were added to it
        return round(graph_microseconds(run, is_dependent=is_dependent) / len(self.weights), 1)


def launches(layer: Product, num_rows: int, tune: bool) -> list[Launch]:
    """What to try."""
    outputs = layer.outputs // 2 if layer.is_gated else layer.outputs
    if num_rows == 1:
        chosen: Launch = matvec.choose_launch(outputs, layer.width, layer.is_gated)
        return list(_one_row(layer)) if tune else [chosen]
    if tune:
        return list(_few_rows(layer, num_rows))
    found: list[Launch] = [few_rows.choose_launch(num_rows, outputs, layer.width, layer.is_gated)]
    kinds = {"gated": layer.is_gated, "adds": layer.has_residual}
    others: list[Launch | None] = []
    if ring_launch.LEAST_ROWS <= num_rows <= ring_launch.MOST_ROWS:
        others.append(ring_launch.choose_launch(layer.outputs, layer.width, **kinds))
    if num_rows <= sliced_launch.MOST_ROWS:
        others.append(sliced_launch.choose_launch(layer.outputs, layer.width, **kinds))
    found += [launch for launch in others if launch is not None]
    return found


def _one_row(layer: Product) -> Iterator[MatvecLaunch]:
    for outputs, block, warps in itertools.product((2, 4, 8), (512, 1024, 2048, 4096), (4, 8)):
        elements = outputs * block * (2 if layer.is_gated else 1) // (32 * warps)
        is_whole = block >= layer.width
        is_sane = elements >= 16 and elements <= (64 if is_whole else 32) and block < 2 * layer.width
        if is_sane:
            yield MatvecLaunch(outputs, block, warps)


def _few_rows(layer: Product, num_rows: int) -> Iterator[FewRowsLaunch]:
    """Pipelines as deep as one, two or three programs a multiprocessor leave room for."""
    halves, padded = 2 if layer.is_gated else 1, max(16, num_rows)
    shapes = itertools.product((32, 64, 128), (64, 128, 256), (1, 2, 3, 4, 6, 8), (4, 8), (1, 2, 3))
    for outputs, block, splits, warps, resident in shapes:
        tile, tiles = outputs * halves, layer.outputs // halves // outputs
        programs, sums = tiles * splits, tile * padded // (32 * warps)
        is_sane = tile in (64, 128, 256) and warps <= tile // 16 and sums <= 64
        is_sane = is_sane and programs >= 48 and (splits == 1 or programs <= resident * 132)
        for is_early in (True, False) if num_rows > 16 else (True,):
            turn = 2 * block * (tile if is_early else tile + padded)
            stages = min(8, (SHARED_BYTES // resident - 2 * block * padded) // turn)
            if is_sane and stages >= 3:
                yield FewRowsLaunch(outputs, block, splits, warps, stages, is_early, 0 if is_early else 4)


def _compile(task: tuple[Product, int, Launch]) -> None:
    layer, num_rows, launch = task
    case = Case(layer, num_rows, is_cold=False)
    try:
        with dependent_launches():
            case.ours(case.weights[0], launch)
    except Exception as error:
        print(f"{layer.name} {launch}: {error!r}"[:200], flush=True)


def measure(layer: Product, num_rows: int, tune: bool) -> dict[str, object]:
    """All launch shapes, best first, and the library."""
    case = Case(layer, num_rows)
    timed = []
    for launch in launches(layer, num_rows, tune):
        try:
            error = case.error(launch)
            assert error < 0.01, f"error {error}"
            us = case.microseconds(partial(case.ours, launch=launch), is_dependent=True)
            timed.append((round(us, 2), launch))
        except Exception as error:
            print(f"{layer.name} {num_rows} {launch}: {error!r}"[:160], flush=True)
    timed.sort(key=lambda item: item[0])
    return {
        "product": layer.name,
        "rows": num_rows,
        "limit_us": round(layer.num_bytes / BANDWIDTH * 1e6, 2),
        "library_us": round(case.microseconds(case.library, is_dependent=False), 2),
        "ours": [(us, astuple(launch)) for us, launch in timed],
    }


def compile_all(cases: Sequence[tuple[Product, int]], processes: int) -> None:
    """Every launch shape of the search, several at once; the kernels stay in Triton's cache."""
    tasks = [(layer, rows, launch) for layer, rows in cases for launch in launches(layer, rows, tune=True)]
    print(f"{len(tasks)} kernels", flush=True)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile, tasks, chunksize=4)


def measure_products(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Prints the best launches of each product."""
    cases = [
        (layer, rows) for shape in arguments.shapes for layer in PRODUCTS[shape] for rows in arguments.rows
    ]
    if arguments.tune:
        compile_all(cases, arguments.processes)
    for layer, num_rows in cases:
        found = measure(layer, num_rows, arguments.tune)
        best = found["ours"][:3] if isinstance(found["ours"], list) else []
        print(*(found[key] for key in ("product", "rows", "limit_us", "library_us")), *best, flush=True)
        yield found


def measure_layers(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Prints each way through a layer."""
    for shape, num_rows in itertools.product(arguments.shapes, arguments.rows):
        found = Layers(shape, num_rows).microseconds()
        print(shape, num_rows, found, flush=True)
        yield {"shape": shape, "rows": num_rows, "layer_us": found}


def main() -> None:
    """Prints what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=list(PRODUCTS))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--processes", type=int, default=14, help="that compile at once")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures = []
    for found in (measure_layers if arguments.layers else measure_products)(arguments):
        figures.append(found)
        if arguments.out:
            arguments.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
