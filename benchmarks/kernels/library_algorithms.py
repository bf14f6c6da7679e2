"""The fastest configurations of cuBLASLt by number of rows: makes kernels/library_table.json.

For every product of a layer: all tiles, clusters and options that the library accepts at some numbers of
rows, by halving (a call each, the best 64 four calls, the best 6 in turns in graphs); at those between, what
was among the best there and what the library's heuristics would take. Every call has a weight that is in no
cache. `python -m benchmarks.kernels.library_algorithms --shapes llama-3.1-8b` on a CUDA device prints a line
a product and number of rows, with what torch's two ways take, and writes the table to --out.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.kernels.products import COLD_BYTES, PRODUCTS, Product
from kernels import cublas_lt
from kernels.cublas_lt import Configuration, CublasLtError, LtProduct, LtShape
from kernels.library_choice import LEAST_ROWS, MOST_ROWS, TABLE, faster_library

DEVICE = torch.device("cuda", 0)
CLUSTERS = (2, 3, 4, 5, 6, 8)  # 1x1, 2x1, 4x1, 1x2, 2x2, 1x4
OPTIONS = range(8)
WIDE_EVERY = 32  # rows between searches of everything
HALVED, FINALISTS, KEPT = 64, 6, 3
WORST_ERROR = 0.004  # relative to fp32; bf16 results have 0.0017
AHEAD_CYCLES = 60_000  # that the device sleeps while the host queues the next calls
EVENTS = 512  # pairs, between two waits for the device
TURNS = 11
GAIN = 0.98  # of what torch takes, at most: entries that gain less are left out

Found = dict[Configuration, float]  # microseconds


@dataclass(frozen=True, slots=True)
class Line:
    """Of one product at one number of rows; microseconds."""

    rows: int
    torch_us: float
    torch_best_us: float  # the way of torch's two that kernels.library_choice takes
    best_us: float
    tried: int
    configuration: tuple[int, ...]

    @property
    def gains(self) -> bool:
        """Whether it is worth an entry."""
        return self.best_us <= GAIN * self.torch_best_us


class Case:
    """One product of a layer: weights that no cache holds, and inputs for all numbers of rows."""

    def __init__(self, part: Product) -> None:
        make: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        copies = max(2, -(-COLD_BYTES // part.num_bytes))
        self.part = part
        self.weights = [
            torch.randn(part.outputs, part.width, **make).mul_(part.width**-0.5) for _ in range(copies)
        ]
        self.x = torch.randn(MOST_ROWS, part.width, **make)
        self._next = itertools.cycle(self.weights)
        self._stream = torch.cuda.Stream()
        self._events = [_pair() for _ in range(EVENTS)]

    def shape(self, num_rows: int) -> LtShape:
        """For the library."""
        return LtShape(num_rows, self.part.outputs, self.part.width, DEVICE)

    def timed(self, products: Mapping[Configuration, LtProduct], num_rows: int, calls: int) -> Found:
        """Microseconds of each, queued one behind the other."""
        x, found = self.x[:num_rows], Found()
        for at in range(0, len(products), EVENTS):
            some = list(products.items())[at : at + EVENTS]
            for (_, product), (begin, end) in zip(some, self._events, strict=False):
                torch.cuda._sleep(AHEAD_CYCLES)
                begin.record()
                for _ in range(calls):
                    product(x, next(self._next))
                end.record()
            torch.cuda.synchronize()
            for (configuration, _), (begin, end) in zip(some, self._events, strict=False):
                found[configuration] = begin.elapsed_time(end) / calls * 1e3
        return found

    def in_turns(self, ways: Sequence[Callable[[Tensor, Tensor], Tensor]], num_rows: int) -> list[float]:
        """Median microseconds of a call of each, in graphs of one call a weight."""
        x, graphs = self.x[:num_rows], []
        for way in ways:
            with torch.cuda.stream(self._stream):
                way(x, self.weights[0])
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                for weight in self.weights:
                    way(x, weight)
                graph.capture_end()
            graphs.append(graph)
        times: list[list[float]] = [[] for _ in graphs]
        begin, end = _pair()
        for _, (number, graph) in itertools.product(range(TURNS), enumerate(graphs)):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[number].append(begin.elapsed_time(end) * 1e3 / len(self.weights))
        return [round(median(one), 2) for one in times]

    def error(self, product: LtProduct, num_rows: int) -> float:
        """Relative to the product in fp32, over all elements."""
        x, weight = self.x[:num_rows], self.weights[0]
        exact = x.float() @ weight.float().T
        return float((product(x, weight).float() - exact).norm() / exact.norm())


def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def accepted(shape: LtShape, wanted: Iterator[Configuration]) -> dict[Configuration, LtProduct]:
    """Those that the library takes for a shape."""
    products = {}
    for configuration in dict.fromkeys(wanted):
        try:
            products[configuration] = LtProduct(shape, configuration)
        except CublasLtError:
            continue
    return products


def everything(guesses: Sequence[Configuration]) -> Iterator[Configuration]:
    """All tiles of the kinds that the heuristics name, with their stages and splits."""
    for kind in sorted({guess.kind for guess in guesses}):
        mine = [guess for guess in guesses if guess.kind == kind]
        stages = sorted({guess.stages for guess in mine})
        splits = sorted({(1, 0), *((guess.splits, guess.reduction) for guess in mine)})
        choices = (cublas_lt.tiles(kind, DEVICE), stages, CLUSTERS, OPTIONS, splits)
        for tile, stage, cluster, option, split in itertools.product(*choices):
            yield Configuration(kind, tile, stage, cluster, option, *split)


def fastest(case: Case, num_rows: int, pool: list[Configuration], *, is_wide: bool) -> Line:
    """The best for so many rows, beside torch's two ways; the pool gets what was among the best."""
    shape = case.shape(num_rows)
    guesses = shape.guesses(32)
    wanted = itertools.chain(everything(guesses) if is_wide else (), guesses, pool)
    products = accepted(shape, wanted)
    once = case.timed(products, num_rows, calls=1)
    halved = sorted(once, key=once.__getitem__)[:HALVED]
    again = case.timed({key: products[key] for key in halved}, num_rows, calls=4)
    last = [
        key
        for key in sorted(again, key=again.__getitem__)
        if case.error(products[key], num_rows) < WORST_ERROR
    ]
    last = last[:FINALISTS]

    def today(x: Tensor, weight: Tensor) -> Tensor:
        with faster_library(num_rows, weight):
            return linear(x, weight)

    us = case.in_turns([linear, today, *(products[key] for key in last)], num_rows)
    order = sorted(range(len(last)), key=lambda number: us[2 + number])
    pool.extend(last[number] for number in order[:KEPT])
    best = last[order[0]]
    return Line(num_rows, us[0], us[1], us[2 + order[0]], len(products), astuple(best))


def search(part: Product, sizes: Sequence[int]) -> list[Line]:
    """All numbers of rows of a product; those of a wide search first."""
    case = Case(part)
    found: dict[int, Line] = {}
    pool: list[Configuration] = []
    for rows in sorted(sizes, key=lambda rows: (rows % WIDE_EVERY != 0, -rows)):
        began = time.monotonic()
        found[rows] = fastest(case, rows, pool, is_wide=rows % WIDE_EVERY == 0)
        print(part.name, found[rows], f"{time.monotonic() - began:.1f} s", flush=True)
    return [found[rows] for rows in sorted(found)]


def table(found: Mapping[Product, list[Line]]) -> dict[str, object]:
    """As kernels.library_choice reads it; what gains next to nothing is torch's."""
    products = [
        {
            "outputs": part.outputs,
            "width": part.width,
            "rows": {str(line.rows): line.configuration for line in lines if line.gains},
        }
        for part, lines in found.items()
    ]
    where = {"device": torch.cuda.get_device_name(DEVICE), "version": cublas_lt.version()}
    return {**where, "products": products}


def written(found: Mapping[str, object]) -> str:
    """A table as JSON, a line for each number of rows."""
    products, comma = found["products"], ",\n"
    assert isinstance(products, list)
    parts = []
    for part in products:
        lines = (f"    {json.dumps(rows)}: {json.dumps(line)}" for rows, line in part["rows"].items())
        which = f'"outputs": {part["outputs"]}, "width": {part["width"]}'
        parts.append(f'  {{{which}, "rows": {{\n{comma.join(lines)}\n  }}}}')
    where = f'"device": {json.dumps(found["device"])}, "version": {found["version"]}'
    return f'{{{where}, "products": [\n{comma.join(parts)}\n]}}\n'


def main() -> None:
    """Prints and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["llama-3.1-8b"], choices=list(PRODUCTS))
    parser.add_argument("--parts", nargs="*", default=["qkv", "output", "gate_up", "down"])
    parser.add_argument("--rows", nargs="*", type=int, default=list(range(LEAST_ROWS + 7, MOST_ROWS + 1, 8)))
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    found = {
        part: search(part, arguments.rows)
        for shape in arguments.shapes
        for part in PRODUCTS[shape]
        if part.name in arguments.parts
    }
    arguments.out.write_text(written(table(found)))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
