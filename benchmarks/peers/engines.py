"""How each engine is loaded with random weights of a shape, and asked to answer a workload.

An engine is a function: a workload in, the number of output tokens back, when all are on the host. Only
kvatlas and transformers run on a CPU too. This engine is there with other options as well, for their cost.
Options are those its own benchmark uses, where it has one, but for the pool of keys and values, of one size
for all. What an engine needs is imported in its function.
"""

import importlib.metadata
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.folder import write_folder
from benchmarks.peers.sizes import PAGE_SIZE, device_share, token_bytes
from benchmarks.workloads import TEMPERATURE, Workload, id_limit

MAX_SEQUENCES, MAX_CONTEXT, STEP_TOKENS = 256, 4096, 16_384

Generate = Callable[[Workload], int]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be loaded, where."""

    model: str  # random:SHAPE
    device: str  # cuda, cpu
    tokens: int  # that the pool of keys and values holds, a multiple of PAGE_SIZE
    scratch: Path  # folder for the model's files


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that is ready, and the options it runs with."""

    generate: Generate
    options: dict[str, Any]
    explain: Callable[[], dict[str, Any]] = field(default=dict)  # more of the last pass, for its row


def load_kvatlas(request: Request, variant: Mapping[str, Any]) -> Loaded:
    """This engine, as benchmarks/offline.py runs it: pages of 16, one prefix cache for all passes.

    `variant`: options of WorkerConfig that are not the default's.
    """
    from benchmarks.offline import Engine, Tally
    from worker.config import WorkerConfig

    options: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "num_pages": request.tokens // PAGE_SIZE,
        "max_running": MAX_SEQUENCES,
        "max_batch_tokens": STEP_TOKENS,
        "max_context": MAX_CONTEXT,
        **variant,
    }
    engine = Engine(WorkerConfig(model=request.model, device=request.device, **options))
    last: deque[Tally] = deque(maxlen=1)

    def generate(workload: Workload) -> int:
        last.append(engine.run(workload))
        return last[-1].output_tokens

    def explain() -> dict[str, Any]:
        return {"slowest_turns": last[-1].slowest.report()}

    return Loaded(generate, options | {"overlap": engine.overlap}, explain)


def load_vllm(request: Request) -> Loaded:
    """vLLM as `LLM` comes: its engine in a process of its own, compiled, CUDA graphs, steps overlapped."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": MAX_CONTEXT,
        "max_num_seqs": MAX_SEQUENCES,
        "max_num_batched_tokens": STEP_TOKENS,
        # A pool of a given size is not profiled for, so others may take and free memory meanwhile.
        "kv_cache_memory_bytes": request.tokens * token_bytes(request.model),
        "gpu_memory_utilization": device_share(request.model, request.tokens),
    }
    engine = LLM(str(write_folder(request.model, request.scratch)), **options)

    def generate(workload: Workload) -> int:
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in workload.output_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        answers = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return Loaded(generate, options | _chosen_by_vllm(engine))


def _chosen_by_vllm(engine: Any) -> dict[str, str]:
    """What was left to vLLM and is worth knowing; what this version does not tell is absent."""
    config = engine.llm_engine.vllm_config
    places = {
        "async_scheduling": ("scheduler_config", "async_scheduling"),
        "enable_prefix_caching": ("cache_config", "enable_prefix_caching"),
        "block_size": ("cache_config", "block_size"),
        "cudagraph_mode": ("compilation_config", "cudagraph_mode"),
        "compilation_mode": ("compilation_config", "mode"),
    }
    found = {name: getattr(getattr(config, part, None), key, None) for name, (part, key) in places.items()}
    found["v2_model_runner"] = getattr(config, "use_v2_model_runner", None)
    return {name: str(value) for name, value in found.items() if value is not None}


def load_mini_sglang(request: Request) -> Loaded:
    """mini-sglang with FlashInfer and overlap. Its dummy weights know one scale only: drawn here instead.

    On Hopper its own choice for prompts is FlashAttention 3 of sgl-kernel, which has to be installed.
    """
    import minisgl.engine.config as engine_config
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
    # Its port is one for all, so a second engine on the host would not start.
    meeting = f"file://{request.scratch / 'rendezvous'}"
    engine_config.EngineConfig.distributed_addr = property(lambda self: meeting)
    _read_new_rope_settings(config_module)
    from minisgl.llm import LLM

    options: dict[str, Any] = {
        "max_seq_len_override": MAX_CONTEXT,
        "max_extend_tokens": STEP_TOKENS,
        "max_running_req": MAX_SEQUENCES,
        "cuda_graph_max_bs": MAX_SEQUENCES,
        "use_dummy_weight": True,
        "attention_backend": "fi",
        "page_size": 1,  # FlashInfer's wrappers here know no other
        "num_page_override": request.tokens,
    }
    engine = LLM(str(write_folder(request.model, request.scratch)), **options)
    engine.eos_token_id = -1  # a last token of that id would be left out of the answer
    engine.tokenizer.decode = lambda ids: ""  # the others make no text either

    def generate(workload: Workload) -> int:
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=count)
            for count in workload.output_tokens
        ]
        return sum(len(answer["token_ids"]) for answer in engine.generate(workload.prompts, params))

    return Loaded(generate, options)


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


def load_transformers(request: Request) -> Loaded:
    """Hugging Face `generate` with torch's attention: one sequence after the other."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(write_folder(request.model, request.scratch)))
    with torch.device(request.device):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    limit = id_limit(request.model)

    def generate(workload: Workload) -> int:
        total = 0
        for prompt, count in zip(workload.within(limit).prompts, workload.output_tokens, strict=True):
            ids = torch.tensor([prompt], device=request.device)
            lengths = {"min_new_tokens": count, "max_new_tokens": count}
            # Of its own accord it would draw from the best 50 only, which the others do not look for.
            draw = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
            out = network.generate(ids, pad_token_id=0, **draw, **lengths)
            total += int((out[0] >= 0).sum()) - len(prompt)  # reads them: the device is done
        return total

    return Loaded(generate, {"attention": config._attn_implementation})


VARIANTS: dict[str, dict[str, Any]] = {
    "kvatlas": {},
    "kvatlas_fp8_weights": {"weight_dtype": "fp8"},
    "kvatlas_fp8_pages": {"kv_dtype": "fp8"},
    "kvatlas_fp8": {"weight_dtype": "fp8", "kv_dtype": "fp8"},
    "kvatlas_deterministic": {"deterministic": True},
}
"""This engine by its options."""

ENGINES: dict[str, Callable[[Request], Loaded]] = {
    **{name: partial(load_kvatlas, variant=options) for name, options in VARIANTS.items()},
    "vllm": load_vllm,
    "mini_sglang": load_mini_sglang,
    "transformers": load_transformers,
}
DISTRIBUTIONS = {"vllm": "vllm", "mini_sglang": "flashinfer-python", "transformers": "transformers"}
"""The installed package whose version says what ran; mini-sglang is run from its source."""

ENVIRONMENT = {
    "vllm": {
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
        "seconds": round(seconds, 5),
        "tokens_per_second": round(tokens / seconds, 3),
    }
