"""Tokens per second on the CPU against transformers: `python -m benchmarks.cpu MODEL.gguf`.

One run drives both on the same dequantised weights, with the same random prompts and as many threads:
kvatlas with its real scheduler, page pool and runner, stepped as its engine does; transformers with sdpa, a
static batch and a dynamic cache, in fp32 and in bf16, one forward pass per token without the rest of
`generate`, which only costs it time.

prefill: tokens of all prompts over the time to the last first token.
decode:  batch over the time of a step in which every sequence takes one token.
Medians with p10 and p90. The limit of decode at batch 1 is what the weights' bytes take at the measured
bandwidth. Greedy tokens of kvatlas are compared with those of transformers in fp32.
"""

import argparse
import gc
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import percentile, write_result
from kernels.cpu.library import Precision, cpu_library
from kernels.cpu_backend import CpuBackend
from kvatlas.models.files import ModelFiles, ModelKind
from worker.execution.cpu_model import cpu_parts
from worker.execution.torch_runner import RunnerConfig, TorchRunner
from worker.ids import SequenceId
from worker.model.config import ModelConfig
from worker.model.parameters import parameter_shapes
from worker.model.source import load_model, open_checkpoint
from worker.pages.page_cache import CacheConfig
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig

PAGE_SIZE = 16
CHUNK = 512  # prompt tokens of a step
PACKAGES = ["torch", "transformers", "numpy"]
SHARES = (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    batch: int
    prompt: int  # tokens
    output: int

    def prompts(self) -> list[list[int]]:
        """Seeded ids, none of them special."""
        draw = torch.Generator().manual_seed(self.batch * 10_000 + self.prompt)
        return torch.randint(1000, 40_000, (self.batch, self.prompt), generator=draw).tolist()


@dataclass
class Measured:
    """One engine on one case."""

    prefill: list[float] = field(default_factory=list)  # tokens/s, by repeat
    step_seconds: list[float] = field(default_factory=list)  # full decode steps of all repeats
    tokens: list[list[int]] = field(default_factory=list)  # of the last repeat, by sequence

    def figures(self, batch: int) -> dict[str, float]:
        """Tokens/s."""
        found = {f"prefill_{name}": percentile(self.prefill, share) for name, share in SHARES}
        for name, share in SHARES:  # a slow step is a low rate
            found[f"decode_{name}"] = batch / percentile(self.step_seconds, 1.0 - share)
        return {name: round(value, 2) for name, value in found.items()}


class Kvatlas:
    """Scheduler and runner, without the processes around them."""

    name = "kvatlas"

    def __init__(self, path: Path, cases: Sequence[Case], precision: Precision) -> None:
        library = cpu_library()
        assert library is not None, "no C++ compiler: there is nothing to measure"
        library.use_precision(precision)
        parts = cpu_parts(library)
        model = load_model(
            files_of(path),
            linear_factory=parts.linear_factory,
            embedding_factory=parts.embedding_factory,
            operations=parts.operations,
        )
        self._context = max(case.prompt + case.output for case in cases)
        self._max_running = max(case.batch for case in cases)
        self._num_pages = self._max_running * (-(-self._context // PAGE_SIZE) + 1)
        config = RunnerConfig(
            max_running=self._max_running,
            max_context=self._context,
            num_pages=self._num_pages,
            page_size=PAGE_SIZE,
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            vocab_size=model.config.vocab_size,
            attention_scale=model.config.attention_scale,
        )
        self._runner = TorchRunner(model, CpuBackend(library), config, torch.device("cpu"))

    def measure(self, case: Case, repeats: int) -> Measured:
        """Each repeat fills the prompts alone, then runs the whole case."""
        measured = Measured()
        for _ in range(repeats):
            seconds = sum(self._run(case, 1, Measured(tokens=[[] for _ in range(case.batch)])))
            measured.prefill.append(case.batch * case.prompt / seconds)
            measured.tokens = [[] for _ in range(case.batch)]
            self._run(case, case.output, measured)
        return measured

    def _run(self, case: Case, num_outputs: int, measured: Measured) -> list[float]:
        """Seconds of every step; those of full decode steps go to `measured` too, with all tokens."""
        scheduler = self._scheduler(case, num_outputs)
        seconds = []
        last = perf_counter()
        while (step := scheduler.schedule(last)) is not None:
            result = self._runner.launch(step).result()
            scheduler.commit(step, result, last)
            for columns in scheduler.take_outputs().values():
                for sequence_id, token in zip(columns.sequence_ids, columns.token_ids, strict=True):
                    measured.tokens[sequence_id - 1].append(token)
            now = perf_counter()
            seconds.append(now - last)
            if step.num_decode == case.batch:
                measured.step_seconds.append(now - last)
            last = now
        return seconds

    def _scheduler(self, case: Case, num_outputs: int) -> Scheduler:
        config = SchedulerConfig(
            CacheConfig(self._num_pages, PAGE_SIZE),
            max_running=self._max_running,
            max_step_tokens=CHUNK + self._max_running,
            max_context_tokens=self._context,
            watermark_pages=0,
            start_time=perf_counter(),
        )
        scheduler = Scheduler(config)
        params = SamplingParams(max_tokens=num_outputs, stop_at_eos=False)
        for number, token_ids in enumerate(case.prompts(), start=1):
            spec = RequestSpec(SequenceId(number), array("I", token_ids), params, source="bench")
            outcome = scheduler.add(spec, perf_counter())
            assert outcome.status == AddStatus.ACCEPTED, outcome
        return scheduler


class Transformers:
    """Hugging Face on the same weights."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.name = f"transformers {str(dtype).removeprefix('torch.')}"
        self._model = hugging_face_model(path, dtype)

    def measure(self, case: Case, repeats: int) -> Measured:
        """A forward pass over all prompts, then one per token."""
        measured = Measured()
        for _ in range(repeats):
            self._run(case, measured)
        return measured

    @torch.inference_mode()
    def _run(self, case: Case, measured: Measured) -> None:
        began = perf_counter()
        ids, cache = self._forward(torch.tensor(case.prompts()), None)
        measured.prefill.append(case.batch * case.prompt / (perf_counter() - began))
        outputs = [ids]
        for _ in range(case.output - 1):
            began = perf_counter()
            ids, cache = self._forward(ids, cache)
            measured.step_seconds.append(perf_counter() - began)
            outputs.append(ids)
        measured.tokens = torch.cat(outputs, dim=1).tolist()

    def _forward(self, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(dim=-1, keepdim=True), out.past_key_values


def hugging_face_model(path: Path, dtype: torch.dtype) -> Any:
    """The network with the file's weights, dequantised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, checkpoint = open_checkpoint(files_of(path), 0)
    assert config.architecture == "LlamaForCausalLM", config.architecture
    peer = LlamaForCausalLM(LlamaConfig(**hugging_face_config(config), attn_implementation="sdpa"))
    weights = {
        name: checkpoint[name].dequantized(torch.float32, torch.device("cpu"))
        for name in peer.state_dict()
        if name in checkpoint
    }
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    peer.tie_weights()
    return peer.to(dtype).eval()


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Arguments of LlamaConfig."""
    assert config.rope.variant == "default", config.rope.variant
    return {
        "vocab_size": config.embedding_rows,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tied_head,
    }


def files_of(path: Path) -> ModelFiles:
    """A GGUF file on this disk."""
    return ModelFiles(ModelKind.GGUF, str(path), path.stem, "", path=path)


def read_bandwidth(threads: int, num_bytes: int = 1 << 29) -> float:
    """Bytes/s that summing a large tensor reads: the best of ten."""
    values = torch.ones(num_bytes // 4)
    best = float("inf")
    for _ in range(10):
        began = perf_counter()
        values.sum()
        best = min(best, perf_counter() - began)
    return num_bytes / best


def weight_bytes(path: Path) -> int:
    """What one token reads of the weights as they are stored; a tied head is counted once."""
    config, checkpoint = open_checkpoint(files_of(path), 0)
    return sum(checkpoint[name].raw().nbytes for name in parameter_shapes(config))


def share_of_equal_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Tokens before the first difference of each sequence, over all tokens."""
    equal = total = 0
    for a, b in zip(ours, theirs, strict=True):
        same = [x == y for x, y in zip(a, b, strict=True)]
        equal += same.index(False) if False in same else len(same)
        total += len(same)
    return equal / total


def measure_case(engines: Sequence[Kvatlas | Transformers], case: Case, repeats: int) -> dict[str, Any]:
    """All engines on one case, one after another; the peer is the better of the two dtypes."""
    measured = {}
    for engine in engines:
        gc.collect()
        measured[engine.name] = engine.measure(case, repeats)
    figures = {name: one.figures(case.batch) for name, one in measured.items()}
    ours, *peers = figures.values()
    line: dict[str, Any] = {"batch": case.batch, "prompt": case.prompt, "output": case.output, **figures}
    for what in ("decode", "prefill"):
        best = max((peer[f"{what}_p50"] for peer in peers), default=0.0)
        line[f"{what}_ratio"] = round(ours[f"{what}_p50"] / best, 3) if best else None
    if "transformers float32" in measured:
        theirs = measured["transformers float32"].tokens
        line["equal_tokens"] = round(share_of_equal_tokens(measured["kvatlas"].tokens, theirs), 4)
    return line


def print_line(line: dict[str, Any], names: Sequence[str]) -> None:
    """One case."""
    rates = "".join(f"{line[n]['decode_p50']:>15.1f}{line[n]['prefill_p50']:>9.0f}" for n in names)
    decode, prefill, equal = (line.get(key) for key in ("decode_ratio", "prefill_ratio", "equal_tokens"))
    print(f"{line['batch']:>5} {line['prompt']:>6}{rates}   {decode}x {prefill}x  equal {equal}", flush=True)


def main() -> None:
    """Measures all cases, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="a Llama-family model in GGUF")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--precision", choices=["exact", "fast"], default="exact")
    parser.add_argument("--alone", action="store_true", help="kvatlas only, nothing written")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = [Case(b, p, arguments.output) for p in arguments.prompt for b in arguments.batch]
    engines: list[Kvatlas | Transformers] = [Kvatlas(arguments.model, cases, arguments.precision)]
    if not arguments.alone:
        engines += [Transformers(arguments.model, dtype) for dtype in (torch.float32, torch.bfloat16)]
    bandwidth, size = read_bandwidth(arguments.threads), weight_bytes(arguments.model)
    limit = bandwidth / size
    print(
        f"{bandwidth / 1e9:.1f} GB/s, {size / 1e6:.0f} MB of weights: at most {limit:.0f} tokens/s at batch 1"
    )
    names = [engine.name for engine in engines]
    print("batch prompt" + "".join(f"{name:>24}" for name in names) + "   (decode, prefill; tokens/s)")
    lines = []
    measure_case(engines, Case(1, 32, 8), 1)  # warm-up
    for case in cases:
        lines.append(measure_case(engines, case, arguments.repeats))
        print_line(lines[-1], names)
    if not arguments.alone:
        figures = {
            "threads": arguments.threads,
            "precision": arguments.precision,
            "read_bandwidth_gb_s": round(bandwidth / 1e9, 2),
            "weight_mb": round(size / 1e6, 1),
            "decode_limit_batch_1": round(limit, 1),
            "cases": lines,
        }
        print(write_result(f"cpu-{arguments.precision}", figures, PACKAGES))


if __name__ == "__main__":
    main()
