"""One decode step on the device: microseconds by batch, where they go, and what dependent launches change.

Random weights of a named shape; every sequence has the same context, in pages of random order. The step is
the whole graph: inputs, layers, head, draw. `python -m benchmarks.decode_step --model random:qwen3-0.6b`.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import write_result
from kernels.dependent_launch import allow_dependent_launches
from kernels.sample_columns import SampleRow, make_columns, write_rows
from kernels.triton_backend import TritonBackend
from kvatlas.models.resolve import resolve_model
from worker.execution.cuda_graphs import DecodeGraphs, DecodeTables
from worker.execution.kv_pool import KvPool
from worker.execution.step_buffers import StepOutcome
from worker.model.fused import FusedModel
from worker.model.llama import Model
from worker.model.source import load_model

PAGE = 16
MAX_CONTEXT = 4096


@dataclass(frozen=True)
class Bench:
    """A model, and tables for one batch."""

    model: Model
    batch: int
    context: int
    pool: KvPool
    tables: DecodeTables

    def graphs(self) -> DecodeGraphs:
        """Fresh graphs of this batch."""
        shape = self.model.config
        backend = TritonBackend(shape.num_heads, shape.num_kv_heads, shape.head_dim, MAX_CONTEXT)
        scale = shape.attention_scale
        return DecodeGraphs(FusedModel(self.model), backend, self.tables, max_batch=self.batch, scale=scale)

    def run(self, graphs: DecodeGraphs) -> StepOutcome:
        """Queues a step."""
        rows = range(self.batch)
        return graphs.run(list(rows), [self.context] * self.batch, with_filters=False)


def make_bench(model: Model, batch: int, context: int) -> Bench:
    """Pages in random order; rows draw at temperature 0.6."""
    shape, device = model.config, torch.device("cuda", 0)
    pages = -(-context // PAGE)
    pool = KvPool(
        num_layers=shape.num_layers,
        num_pages=batch * pages,
        page_size=PAGE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=model.norm.dtype,
        device=device,
    )
    pool.buffer.normal_(generator=torch.Generator(device).manual_seed(1))
    table = torch.full((batch + 1, MAX_CONTEXT), pool.num_slots, dtype=torch.int32, device=device)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(2)).to(device)
    slots = order[:, None] * PAGE + torch.arange(PAGE, device=device)
    table[:batch, : pages * PAGE] = slots.view(batch, -1)
    ids = torch.randint(0, shape.vocab_size, table.shape, generator=torch.Generator().manual_seed(3))
    columns = make_columns(batch + 1, device)
    write_rows(columns, list(range(batch)), [SampleRow(temperature=0.6, seed=i) for i in range(batch)])
    tables = DecodeTables(table, ids.int().to(device), pool.layers, columns, dummy_row=batch, page_size=PAGE)
    return Bench(model, batch, context, pool, tables)


def microseconds(bench: Bench, graphs: DecodeGraphs, repeats: int = 20) -> float:
    """Of one step among many, as the engine queues them."""
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            bench.run(graphs)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats * 1e3)
    return median(times)


def by_kernel(bench: Bench, graphs: DecodeGraphs, steps: int = 3) -> dict[str, tuple[float, int]]:
    """Microseconds and launches a step, by kernel; dependent ones count from when they are resident."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(steps):
            bench.run(graphs)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in record.events():
        found[event.name[:48]].append(event.device_time)
    kernels = {name: (sum(us) / steps, len(us) // steps) for name, us in found.items()}
    return dict(sorted(kernels.items(), key=lambda item: -item[1][0]))


def results(bench: Bench, graphs: DecodeGraphs) -> list[torch.Tensor]:
    """What one step leaves behind: ids and flags, and this token's K and V of all layers."""
    ids, is_finite = bench.run(graphs).arrived()
    slots = bench.tables.page_table[: bench.batch, bench.context - 1].long()
    left = [torch.from_numpy(ids.copy()), torch.from_numpy(is_finite.copy())]
    return [*left, *(part[slots] for kv in bench.tables.kv for part in (kv.k, kv.v))]


def is_same_without(bench: Bench, graphs: DecodeGraphs) -> tuple[bool, float]:
    """Whether ordinary launches leave the same bits, and their microseconds."""
    expected = results(bench, graphs)
    allow_dependent_launches(False)
    try:
        ordinary = bench.graphs()
        found = results(bench, ordinary)
        us = microseconds(bench, ordinary)
    finally:
        allow_dependent_launches(True)
    again = results(bench, graphs)
    pairs = zip(expected * 2, found + again, strict=True)
    return all(torch.equal(left, right) for left, right in pairs), us


def measure(model: Model, batch: int, context: int, *, with_profile: bool) -> dict[str, object]:
    """One batch."""
    bench = make_bench(model, batch, context)
    graphs = bench.graphs()
    bench.run(graphs)
    us = microseconds(bench, graphs)
    is_same, us_ordinary = is_same_without(bench, graphs)
    assert is_same, f"batch {batch}: dependent launches leave other bits than ordinary ones"
    figures: dict[str, object] = {
        "batch": batch,
        "context": context,
        "us": round(us, 1),
        "us_ordinary_launches": round(us_ordinary, 1),
    }
    if with_profile:
        figures["kernels"] = {
            name: (round(total, 1), count) for name, (total, count) in by_kernel(bench, graphs).items()
        }
    return figures


def main() -> None:
    """Prints each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:qwen3-0.6b")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--write", action="store_true", help="the figures to benchmarks/results/")
    arguments = parser.parse_args()
    files = resolve_model(arguments.model)
    figures = []
    with torch.inference_mode():
        model = load_model(files, device="cuda", dtype=torch.bfloat16, max_context=MAX_CONTEXT)
        for batch in arguments.batches:
            found = measure(model, batch, arguments.context, with_profile=arguments.profile)
            figures.append(found)
            print({key: value for key, value in found.items() if key != "kernels"}, flush=True)
            kernels = found.get("kernels")
            for name, cost in list(kernels.items())[:14] if isinstance(kernels, dict) else []:
                print("   ", name, *cost, flush=True)
    if arguments.write:
        shape = arguments.model.removeprefix("random:")
        print(write_result(f"decode-step-{shape}", {"rows": figures}, ["torch", "triton"]))


if __name__ == "__main__":
    main()
