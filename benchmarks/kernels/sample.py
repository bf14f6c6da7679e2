"""Sampling: time and bytes per second by rows, vocabulary, kind of filter and shape of the distribution.

`python -m benchmarks.kernels.sample [--tune]` on a CUDA device prints a line per cell, torch's argmax and
softmax with multinomial beside it, and with --out writes JSON. Every time is of one call inside a CUDA graph.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.testing import do_bench

from kernels.sample import SampleLaunch, make_scratch, sample
from kernels.sample_columns import SampleRow, make_columns, write_rows
from kernels.sample_edits import EditRow, make_edits, write_line

ROWS = (1, 8, 64, 256)
VOCABULARIES = (151_936, 262_144)
TARGETS_US = {1: 12.0, 64: 20.0, 256: 45.0}  # temperature alone, vocabulary 151,936
KINDS = {
    "greedy": SampleRow(),
    "temperature": SampleRow(temperature=0.6),
    "top_k 20, top_p 0.95": SampleRow(temperature=0.6, top_k=20, top_p=0.95),
    "top_p 0.9": SampleRow(temperature=0.6, top_p=0.9),
    "min_p 0.05": SampleRow(temperature=0.6, min_p=0.05),
}


@dataclass(frozen=True)
class Cell:
    """One batch of logits. Flat ones are normal, as of random weights; peaked ones have a few high tokens."""

    num_rows: int
    vocab_size: int
    is_peaked: bool
    dtype: torch.dtype
    logits: Tensor

    @property
    def num_bytes(self) -> int:
        """What one pass must read."""
        return self.num_rows * self.vocab_size * self.logits.element_size()


def make_cell(num_rows: int, vocab_size: int, is_peaked: bool, dtype: torch.dtype) -> Cell:
    """A seeded cell on the device."""
    torch.manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, device="cuda")
    if is_peaked:
        logits = logits * 2.5
        high = torch.randint(vocab_size, (num_rows, 30), device="cuda")
        logits.scatter_(1, high, 8 + 14 * torch.rand(num_rows, 30, device="cuda"))
    return Cell(num_rows, vocab_size, is_peaked, dtype, logits.to(dtype))


def graphed(run: Callable[[], object], repeats: int = 8) -> float:
    """Median microseconds of one call inside a CUDA graph of `repeats` calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return float(do_bench(graph.replay, return_mode="median", warmup=10, rep=60)) / repeats * 1e3


def ours(
    cell: Cell, kind: SampleRow, *, launch: SampleLaunch | None = None, with_edits: bool = False
) -> float:
    """Microseconds of all launches that this kind of row needs."""
    device = cell.logits.device
    columns = make_columns(cell.num_rows + 1, device)
    write_rows(columns, range(cell.num_rows), [kind] * cell.num_rows)
    scratch = make_scratch(cell.num_rows, cell.vocab_size, device, launch=launch or SampleLaunch())
    rows = torch.arange(cell.num_rows, dtype=torch.int32, device=device)
    edits = None
    if with_edits:
        edits = make_edits(
            cell.num_rows + 1, cell.num_rows, cell.vocab_size, device, max_bias=64, max_stops=8
        )
        edits.line[: cell.num_rows] = rows
        for line in range(cell.num_rows):
            write_line(edits, line, EditRow(1.1, 0.1, 0.1, 0, range(1000), range(500), ((5, 1.0),)))
    has_filters = kind.top_k > 0 or kind.top_p < 1.0 or kind.min_p > 0.0
    return graphed(
        lambda: sample(
            cell.logits, rows, rows, columns, scratch, cell.vocab_size, edits=edits, with_filters=has_filters
        )
    )


def peers(cell: Cell) -> dict[str, float]:
    """Microseconds of what torch has for it."""
    return {
        "argmax_us": round(graphed(lambda: cell.logits.argmax(dim=-1)), 2),
        "softmax_multinomial_us": round(
            graphed(lambda: torch.multinomial((cell.logits / 0.6).softmax(dim=-1, dtype=torch.float32), 1)), 2
        ),
    }


def record(cell: Cell, kind: str, us: float) -> dict[str, object]:
    """One line."""
    target = TARGETS_US.get(cell.num_rows) if kind == "temperature" and cell.vocab_size == 151_936 else None
    return {
        "rows": cell.num_rows,
        "vocabulary": cell.vocab_size,
        "dtype": str(cell.dtype).removeprefix("torch."),
        "logits": "peaked" if cell.is_peaked else "flat",
        "kind": kind,
        "us": round(us, 2),
        "tb_s": round(cell.num_bytes / us / 1e6, 2),
        "target_us": target,
    }


def tune(cell: Cell) -> list[dict[str, object]]:
    """The unfiltered draw with other launch shapes."""
    shapes = itertools.product((64, 128, 256, 512), (1, 2, 4), (8, 16, 32, 64))
    lines = []
    for shape in shapes:
        us = ours(cell, KINDS["temperature"], launch=SampleLaunch(*shape))
        lines.append({**record(cell, "temperature", us), "launch": str(shape)})
    return sorted(lines, key=lambda line: float(str(line["us"])))


def main() -> None:
    """Runs all cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="try launch shapes of the unfiltered draw")
    parser.add_argument("--fp32", action="store_true", help="logits in fp32 instead of bf16")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    dtype = torch.float32 if arguments.fp32 else torch.bfloat16
    records: list[dict[str, object]] = []

    def add(line: dict[str, object]) -> None:
        records.append(line)
        print(line, flush=True)

    for vocab_size, num_rows, is_peaked in itertools.product(VOCABULARIES, ROWS, (False, True)):
        cell = make_cell(num_rows, vocab_size, is_peaked, dtype)
        if arguments.tune:
            for line in tune(cell)[:5]:
                add(line)
            continue
        for name, kind in KINDS.items():
            add(record(cell, name, ours(cell, kind)))
        if not is_peaked:
            add(record(cell, "temperature, edits", ours(cell, KINDS["temperature"], with_edits=True)))
            add({**record(cell, "torch", 1.0), "us": None, "tb_s": None, **peers(cell)})
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
