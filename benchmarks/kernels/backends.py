"""One layer's attention by backend: Triton's and FlashInfer's, prefill and decode, and what planning costs.

`python -m benchmarks.kernels.backends` on a CUDA device; FlashInfer stands beside ours where it is installed
and its kernels are compiled. Decode runs inside a CUDA graph after one plan, prefill eagerly; the time of
`plan` is the host's, once a step, with the device idle. --out writes JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.testing import do_bench

from kernels.backend import GraphBackend
from kernels.batch import KvLayer, PagedBatch
from kernels.flashinfer_backend import FlashInferBackend, compiled_kernels, is_installed
from kernels.triton_backend import TritonBackend

BF16 = torch.bfloat16
HEADS = [(32, 8, 128), (16, 8, 128)]
DECODE = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 32768), (64, 8192)]
PREFILL = [((512,), 0), ((2048,) * 4, 0), ((8192,), 0), ((2048,), 30720), ((64,) * 32, 1024)]
"""(new tokens of each span, tokens cached before them)."""


def make_batch(q_lens: tuple[int, ...], cached: int, page: int) -> PagedBatch:
    """Spans whose pages lie in random order."""
    count, longest = len(q_lens), max(q_lens) + cached
    pages = -(-longest // page)
    ids = torch.randperm(count * pages, device="cuda", dtype=torch.int32).view(count, pages)
    offsets = torch.arange(page, device="cuda", dtype=torch.int32)
    table = (ids[:, :, None] * page + offsets).view(count, -1).contiguous()
    q_indptr = torch.zeros(count + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(q_lens), 0, dtype=torch.int32, out=q_indptr[1:])
    positions = torch.cat([torch.arange(cached, cached + n, dtype=torch.int32) for n in q_lens])
    lens = [cached + n for n in q_lens]
    is_decode = max(q_lens) == 1
    return PagedBatch(
        page_table=table,
        rows=torch.arange(count, device="cuda", dtype=torch.int32),
        kv_lens=torch.tensor(lens, device="cuda", dtype=torch.int32),
        q_indptr=q_indptr.cuda(),
        positions=positions.cuda(),
        write_slots=positions.cuda(),
        num_decode=count if is_decode else 0,
        max_q_len=max(q_lens),
        max_kv_len=longest,
        page_size=page,
        rows_host=list(range(count)),
        kv_lens_host=lens,
        q_lens_host=list(q_lens),
    )


def backends(heads: tuple[int, int, int], page: int) -> dict[str, GraphBackend]:
    """Those that are there."""
    device = torch.device("cuda", torch.cuda.current_device())
    found: dict[str, GraphBackend] = {"triton": TritonBackend(*heads, 40_000)}
    for family in compiled_kernels(heads[2], BF16) if is_installed() else ():
        found[f"flashinfer_{family}"] = FlashInferBackend(
            *heads, page_size=page, dtype=BF16, device=device, prefill=family
        )
    return found


def decode_us(backend: GraphBackend, batch: PagedBatch, kv: KvLayer, q: torch.Tensor) -> float:
    """Microseconds of one layer in a graph of 8, its plan apart."""
    decode = backend.static_decode(batch.page_table, len(batch.rows_host))
    decode.prepare(len(batch.rows_host), batch.kv_lens_host)
    scale = q.shape[2] ** -0.5

    def layers() -> None:
        for _ in range(8):
            decode.attend(kv, q, scale=scale)

    decode.begin(batch.rows, batch.kv_lens)
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.begin(batch.rows, batch.kv_lens)
        layers()
    return float(do_bench(graph.replay, return_mode="median", warmup=10, rep=40)) / 8 * 1e3


def prefill_us(backend: GraphBackend, batch: PagedBatch, kv: KvLayer, q: torch.Tensor) -> float:
    """Microseconds of one layer."""
    backend.plan(batch)
    scale = q.shape[2] ** -0.5
    run = lambda: backend.attend(kv, q, scale=scale)  # noqa: E731
    return float(do_bench(run, return_mode="median", warmup=10, rep=40)) * 1e3


def host_us(work: Callable[[], object]) -> float:
    """Median microseconds of the host, the device idle before each."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e6


def attention_flops(batch: PagedBatch, heads: int, dim: int) -> int:
    """Two products over the keys that each query sees."""
    pairs = sum(
        q * kv - q * (q - 1) // 2 for q, kv in zip(batch.q_lens_host, batch.kv_lens_host, strict=True)
    )
    return 4 * heads * dim * pairs


def measure(kind: str, heads: tuple[int, int, int], q_lens: tuple[int, ...], cached: int, page: int) -> Any:
    """All backends on one batch."""
    torch.manual_seed(0)
    batch = make_batch(q_lens, cached, page)
    slots = batch.page_table.numel()
    pool = torch.randn(2, slots, heads[1], heads[2], device="cuda", dtype=BF16)
    kv = KvLayer(pool[0], pool[1])
    q = torch.randn(sum(q_lens), heads[0], heads[2], device="cuda", dtype=BF16)
    record: dict[str, Any] = {"kind": kind, "heads": heads, "page": page, "spans": len(q_lens)}
    record |= {"new": q_lens[0], "cached": cached}
    for name, backend in backends(heads, page).items():
        if kind == "decode" and name.endswith("fa3"):
            continue  # decode is fa2's in both
        time_us = (decode_us if kind == "decode" else prefill_us)(backend, batch, kv, q)
        record[f"{name}_us"] = round(time_us, 1)
        record[f"{name}_plan_us"] = round(host_us(partial(backend.plan, batch)), 1)
        if kind == "decode":
            record[f"{name}_tb_s"] = round(2 * pool[0].nbytes / time_us / 1e6, 2)
        else:
            record[f"{name}_tflops"] = round(attention_flops(batch, heads[0], heads[2]) / time_us / 1e6, 1)
    return record


def main() -> None:
    """Prints a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, nargs="*", default=[16])
    parser.add_argument("--kinds", nargs="*", default=["prefill", "decode"])
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    records = []
    for heads in HEADS:
        for page in arguments.pages:
            cells = [("prefill", q_lens, cached) for q_lens, cached in PREFILL]
            cells += [("decode", (1,) * batch, context - 1) for batch, context in DECODE]
            for kind, q_lens, cached in [cell for cell in cells if cell[0] in arguments.kinds]:
                records.append(measure(kind, heads, q_lens, cached, page))
                print(json.dumps(records[-1]), flush=True)
                torch.cuda.empty_cache()
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": records}, file
            )


if __name__ == "__main__":
    main()
