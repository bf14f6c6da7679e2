"""How each engine is loaded with random weights of a shape, and asked to answer a workload.

An engine is a function: a workload in, the number of output tokens back, when all are on the host. Only
kvatlas and transformers run on a CPU too. Options
are those its own benchmark uses, where it has one. Everything of an engine is imported in its function.
"""

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.folder import write_folder
from benchmarks.workloads import TEMPERATURE, Workload, id_limit

MAX_SEQUENCES, MAX_CONTEXT, STEP_TOKENS = 256, 4096, 16_384
MEMORY_RATIO = 0.8

Generate = Callable[[Workload], int]


def load_kvatlas(model: str, scratch: Path, device: str) -> Generate:
    """This engine, as benchmarks/offline.py runs it: pages of 16, an empty prefix cache each time."""
    from benchmarks.offline import Engine
    from worker.config import WorkerConfig

    engine = Engine(
        WorkerConfig(
            model=model,
            device=device,
            page_size=16,
            max_running=MAX_SEQUENCES,
            max_batch_tokens=8192,
            max_context=MAX_CONTEXT,
            memory_ratio=MEMORY_RATIO,
            num_pages=0 if device == "cuda" else 4096,
        )
    )
    limit = id_limit(model)

    def generate(workload: Workload) -> int:
        engine.run(workload.within(limit))
        return sum(workload.output_tokens)

    return generate


def load_vllm(model: str, scratch: Path, device: str) -> Generate:
    """vLLM with its engine in this process, CUDA graphs and compilation as by default."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(write_folder(model, scratch)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_CONTEXT,
        max_num_seqs=MAX_SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        gpu_memory_utilization=MEMORY_RATIO,
    )

    def generate(workload: Workload) -> int:
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in workload.output_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        answers = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return generate


def load_mini_sglang(model: str, scratch: Path, device: str) -> Generate:
    """mini-sglang with FlashInfer and overlap. Its dummy weights are zeros: they are drawn here instead."""
    import minisgl.engine.engine as engine_module
    import minisgl.models.config as config_module
    import torch
    from minisgl.core import SamplingParams

    def draw_weights(self: Any, config: Any) -> dict[str, Any]:
        state = self.model.state_dict().items()
        return {
            name: torch.empty_like(old, device=self.device).normal_(0, 0.02).to(old.dtype)
            for name, old in state
        }

    engine_module.Engine._load_weight_state_dict = draw_weights
    _read_new_rope_settings(config_module)
    from minisgl.llm import LLM

    engine = LLM(
        str(write_folder(model, scratch)),
        max_seq_len_override=MAX_CONTEXT,
        max_extend_tokens=STEP_TOKENS,
        max_running_req=MAX_SEQUENCES,
        cuda_graph_max_bs=MAX_SEQUENCES,
        use_dummy_weight=True,
        attention_backend="fi",
        memory_ratio=MEMORY_RATIO,
    )

    def generate(workload: Workload) -> int:
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count)
            for count in workload.output_tokens
        ]
        return sum(len(answer["token_ids"]) for answer in engine.generate(workload.prompts, params))

    return generate


def _read_new_rope_settings(config_module: Any) -> None:
    """transformers 5 moved rope_theta into rope_parameters; mini-sglang 20fcd7f reads the old places."""
    read = config_module.ModelConfig.from_hf.__func__

    def from_hf(cls: Any, config: Any) -> Any:
        parameters = getattr(config, "rope_parameters", None) or {}
        base = parameters.get("rope_theta") or getattr(config, "rope_theta", 10_000.0)
        config.rope_theta = base
        found = read(cls, config)
        # Without scaling: the same work, and the old code knows no other kinds.
        return replace(found, rotary_config=replace(found.rotary_config, base=base, scaling=None))

    config_module.ModelConfig.from_hf = classmethod(from_hf)


def load_transformers(model: str, scratch: Path, device: str) -> Generate:
    """Hugging Face `generate` with torch's attention: one sequence after the other."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(write_folder(model, scratch)))
    with torch.device(device):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    limit = id_limit(model)

    def generate(workload: Workload) -> int:
        total = 0
        for prompt, count in zip(workload.within(limit).prompts, workload.output_tokens, strict=True):
            ids = torch.tensor([prompt], device=device)
            lengths = {"min_new_tokens": count, "max_new_tokens": count}
            out = network.generate(ids, do_sample=True, temperature=TEMPERATURE, pad_token_id=0, **lengths)
            total += int((out[0] >= 0).sum()) - len(prompt)  # reads them: the device is done
        return total

    return generate


ENGINES: dict[str, Callable[[str, Path, str], Generate]] = {
    "kvatlas": load_kvatlas,
    "vllm": load_vllm,
    "mini_sglang": load_mini_sglang,
    "transformers": load_transformers,
}
DISTRIBUTIONS = {"vllm": "vllm", "mini_sglang": "flashinfer-python", "transformers": "transformers"}
"""The installed package whose version says what ran; mini-sglang is run from its source."""

ENVIRONMENT = {
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
    },
    "mini_sglang": {"HF_HUB_OFFLINE": "1"},
    "transformers": {"HF_HUB_OFFLINE": "1"},
}


def version_of(engine: str) -> str:
    """Of a peer's package; empty for this engine."""
    name = DISTRIBUTIONS.get(engine)
    return importlib.metadata.version(name) if name else ""


def timed(generate: Generate, workload: Workload) -> dict[str, Any]:
    """One pass; AssertionError when tokens are missing."""
    began = time.perf_counter()
    tokens = generate(workload)
    seconds = time.perf_counter() - began
    assert tokens == sum(workload.output_tokens), f"{tokens} tokens of {sum(workload.output_tokens)}"
    return {
        "workload": workload.name,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }
