"""Fixtures of the GPU tests: models on the device, and a CudaRunner with a scheduler before it."""

import gc
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.reference import ReferenceBackend
from kvatlas.models.resolve import resolve_model
from tests.toy_runners import sizes_for
from worker.execution.runner import StepHandle
from worker.execution.torch_runner import RunnerConfig, TorchRunner
from worker.ids import SequenceId
from worker.model.llama import Model
from worker.model.source import load_model
from worker.pages.page_cache import CacheConfig
from worker.scheduling.output import NO_TOKEN, FinishCode
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step

LIMIT_SECONDS = 100.0
DEVICE = torch.device("cuda", 0)
FP8 = torch.float8_e4m3fn


@dataclass
class Outcome:
    """What came of a batch of requests."""

    tokens: list[list[int]]  # of each request
    logprobs: list[list[float]]  # of the drawn tokens; empty for who did not ask
    preemptions: int = 0
    pages: set[int] = field(default_factory=set)  # that were written into the page table


class GpuEngine:
    """One CudaRunner; each batch of requests gets a scheduler of its own, so an empty prefix cache."""

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        page_size: int = 16,
        max_running: int = 64,
        max_context: int = 2048,
        max_step_tokens: int = 2048,
        capture: bool = True,
        backend: str = "triton",
        kv_scales: tuple[tuple[float, float], ...] = (),
    ) -> None:
        # Here and not above: Triton has wheels for Linux only.
        from worker.execution.cuda_runner import CudaRunner

        shape = model.config
        self._scheduling = SchedulerConfig(
            cache=CacheConfig(num_pages=num_pages, page_size=page_size),
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_context_tokens=max_context,
            watermark_pages=0,
        )
        config = sizes_for(
            shape,
            max_running=max_running,
            max_context=max_context,
            max_step_tokens=max_step_tokens,
            num_pages=num_pages,
            page_size=page_size,
            kv_dtype=FP8 if kv_scales else model.embedding.weight.dtype,  # type: ignore[attr-defined]
            kv_scales=kv_scales,
        )
        attention = _attention(backend, config, shape.num_heads)
        self.runner: Any
        if backend in ("triton", "invariant", "flashinfer", "flashinfer+triton"):
            self.runner = CudaRunner(model, attention, config, DEVICE, capture=capture)
        else:
            self.runner = TorchRunner(model, attention, config, DEVICE)

    def answer(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        held_pages: int = 0,
        overlap: bool = True,
    ) -> Outcome:
        """Answers all of them at once. The first `held_pages` pages of the pool are somebody else's."""
        scheduler = Scheduler(self._scheduling)
        held = scheduler.cache.pool.allocate(array("H", [0]) * held_pages)
        assert held is not None, "too few pages to hold"
        for number, (prompt, params) in enumerate(requests):
            spec = RequestSpec(SequenceId(number + 1), array("I", prompt), params)
            added = scheduler.add(spec, time.monotonic())
            assert added.status is AddStatus.ACCEPTED, added
        outcome = Outcome([[] for _ in requests], [[] for _ in requests])
        self._drive(scheduler, outcome, keep=1 if overlap else 0)
        outcome.preemptions = scheduler.counts().preemptions_total
        scheduler.cache.pool.release(held, 0)
        violations = scheduler.check()
        assert not violations, "\n".join(map(str, violations))
        return outcome

    def close(self) -> None:
        """Gives the memory back."""
        self.runner.close()
        self.runner = None
        gc.collect()
        torch.cuda.empty_cache()

    def _drive(self, scheduler: Scheduler, outcome: Outcome, keep: int) -> None:
        limit = time.monotonic() + LIMIT_SECONDS
        in_flight: deque[tuple[Step, StepHandle]] = deque()
        while in_flight or scheduler.has_work(time.monotonic()):
            step = scheduler.schedule(time.monotonic())
            if step is not None:
                outcome.pages.update(step.new_page_ids)
                in_flight.append((step, self.runner.launch(step)))
            while len(in_flight) > (keep if step is not None else 0):
                oldest, handle = in_flight.popleft()
                result = handle.result()
                assert not result.failed, result.failed
                scheduler.commit(oldest, result, time.monotonic())
            _collect(scheduler, outcome)
            assert time.monotonic() < limit, "the answers do not end"


def _attention(name: str, config: RunnerConfig, num_heads: int) -> Any:
    from kernels.flashinfer_backend import FlashInferBackend, compiled_kernels, is_installed
    from kernels.invariant_backend import InvariantBackend
    from kernels.paged_cuda.backend import PagedCudaBackend
    from kernels.triton_backend import TritonBackend

    heads = (num_heads, config.num_kv_heads, config.head_dim)
    paged = {"page_size": config.page_size, "dtype": config.kv_dtype, "device": DEVICE}
    uses_it = name.startswith("flashinfer") and is_installed()
    there = compiled_kernels(config.head_dim, config.kv_dtype) if uses_it else ()
    prefill = {"prefill": there[-1] if there else "auto"}
    match name:
        case "invariant":
            return InvariantBackend(*heads[:2])
        case "reference":
            return ReferenceBackend()
        case "paged_cuda":
            return PagedCudaBackend(*heads, **paged)
        case "flashinfer":
            return FlashInferBackend(*heads, **paged, **prefill)
        case "flashinfer+triton":
            return FlashInferBackend(
                *heads, **paged, **prefill, beside=TritonBackend(*heads, config.max_context), least_pairs=0
            )
        case _:
            return TritonBackend(*heads, config.max_context)


def _collect(scheduler: Scheduler, outcome: Outcome) -> None:
    for columns in scheduler.take_outputs().values():
        for entry, (number, token) in enumerate(zip(columns.sequence_ids, columns.token_ids, strict=True)):
            if token != NO_TOKEN:
                outcome.tokens[number - 1].append(token)
            if entry in columns.logprobs:
                outcome.logprobs[number - 1].append(columns.logprobs[entry].logprob)
        for end in columns.ends:
            assert end.code is FinishCode.MAX_TOKENS, end


@pytest.fixture
def gpu_engine() -> Iterator[Callable[..., GpuEngine]]:
    """Makes engines: `gpu_engine(model, num_pages=512, capture=False)`; all are closed at the end."""
    made: list[GpuEngine] = []

    def make(model: Model, **settings: Any) -> GpuEngine:
        made.append(GpuEngine(model, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def gpu_model() -> Callable[[str | Path, torch.dtype], Model]:
    """Models on the device, each loaded once: `gpu_model("random:tiny", torch.bfloat16)`."""
    loaded: dict[tuple[str, torch.dtype], Model] = {}

    def load(name: str | Path, dtype: torch.dtype) -> Model:
        key = (str(name), dtype)
        if key not in loaded:
            loaded[key] = load_model(resolve_model(str(name)), device=DEVICE, dtype=dtype)
        return loaded[key]

    return load
