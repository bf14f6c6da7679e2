"""The real device, on `cuda` and on `cpu`: a step in, sampled tokens out.

Owns the page table, the token pool, the KV pool and the sampling state of every row. Knows rows and pages,
not why they were chosen. Used by the engine thread alone.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kernels.backend import AttentionBackend, CopyOfPages
from kernels.batch import KvLayer, LastQueries, PagedBatch
from kernels.cpu_backend import CpuBackend
from worker.execution.constraint_masks import ConstraintMasks, StepMasks
from worker.execution.cpu_model import cpu_model
from worker.execution.cpu_sampler import CpuSampler
from worker.execution.kv_pool import KvPool, KvScales
from worker.execution.on_the_way import OnTheWay
from worker.execution.page_table import PageTable
from worker.execution.prompt_logprobs import PromptLogprobs
from worker.execution.runner import BrokenHandle, RowsRead, StepHandle
from worker.execution.sampler import HostRows, Sampled, Sampler
from worker.execution.sampling_state import SamplingState
from worker.execution.step_tensors import HostColumn, StepTensors, build_step_tensors
from worker.execution.token_pool import TokenPool
from worker.model.llama import Attend
from worker.model.llama import Model as LlamaModel
from worker.scheduling.audit import RowSpan
from worker.scheduling.step import RowStart, Step, StepResult, TokenLogprob

log = logging.getLogger(__name__)

NO_TOKEN_ID = -1
"""In StepResult.token_ids where the span failed: nothing that could be taken for a token."""

BAD_HIDDEN, BAD_LOGITS = "non-finite hidden state", "non-finite logits"
"""Why a span failed, in StepResult.failed."""

NOTHING_LEFT = "min_tokens or logit_bias forbid all tokens that the constraint allows"


class Model(Protocol):
    """What the runner asks of a network."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, [num_tokens, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, at least vocab_size]."""
        ...


@runtime_checkable
class PagedModel(Protocol):
    """A network that stores K and V and attends on its own; the runner's backend is then not asked."""

    def forward_paged(
        self, input_ids: Tensor, batch: PagedBatch, kv_layers: Sequence[KvLayer], last: LastQueries | None
    ) -> Tensor:
        """As Model.forward, over the pages of `batch`; with `last`, rows of other tokens are not yet through
        the last layer: what it reads of them.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Sizes, all resolved."""

    max_running: int
    max_context: int
    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int  # of this rank
    head_dim: int
    vocab_size: int  # ids from here on are padding and never sampled
    attention_scale: float
    kv_dtype: torch.dtype = torch.float32
    poison: bool = False
    max_step_tokens: int = 0  # of the largest step, to warm up with; 0: unknown
    kv_scales: KvScales = ()  # of an fp8 pool


class TorchRunner:
    """A `Runner` (worker.execution.runner) over torch."""

    def __init__(
        self, model: Model, backend: AttentionBackend, config: RunnerConfig, device: torch.device
    ) -> None:
        self._weight_bytes = 0  # what is on the GPU before anything else is
        if device.type == "cuda":
            self._weight_bytes = torch.cuda.memory_allocated(device)
        self._model = model
        self._paged_model = _paged_model(model, backend, config.kv_dtype)
        self._backend = backend
        self._config = config
        self._device = device
        self.page_table = PageTable(
            max_running=config.max_running,
            max_context=config.max_context,
            num_pages=config.num_pages,
            page_size=config.page_size,
            device=device,
        )
        num_rows, width = self.page_table.slots.shape
        self.token_pool = TokenPool(num_rows=num_rows, width=width, device=device)
        self.kv_pool = KvPool(
            num_layers=config.num_layers,
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=config.kv_dtype,
            device=device,
            poison=config.poison,
            scales=config.kv_scales,
        )
        self.constraint_masks = ConstraintMasks(config.vocab_size)
        self._prompt_logprobs = PromptLogprobs(config.vocab_size, self.token_pool, self._logits)
        log.info(
            "event=runner_ready device=%s backend=%s pages=%d page_size=%d kv_bytes=%d",
            device,
            backend.name,
            config.num_pages,
            config.page_size,
            self.kv_pool.num_bytes,
        )

    def launch(self, step: Step) -> StepHandle:
        """Queues a step. What goes wrong is raised by the handle, so that one place deals with it."""
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                return self._run(step, began)
        except Exception as error:
            return BrokenHandle(error)

    def read_rows(self, rows: list[int], num_slots: list[int]) -> list[list[int]]:
        """Slots [0, num_slots[i]) of rows[i] as they are on the device."""
        return self.page_table.read_rows(rows, num_slots)

    def begin_read(self, spans: Sequence[RowSpan]) -> RowsRead:
        """Begins to copy parts of rows from the device; never waits."""
        return self.page_table.begin_read([(span.row, span.first, len(span.slots)) for span in spans])

    def memory_bytes(self) -> dict[str, int]:
        """Memory of the GPU by use, as docs/metrics.md names it; empty without one. From any thread."""
        if self._device.type != "cuda":
            return {}
        used, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        pool = self.kv_pool.num_bytes
        return {
            "weights": self._weight_bytes,
            "kv_pool": pool,
            "workspace": used - self._weight_bytes - pool,
            "torch_reserved": reserved - used,
            "free": torch.cuda.mem_get_info(self._device)[0],
        }

    def poison_pages(self, pages: Sequence[int]) -> None:
        """For poison mode: fills pages that became FREE with NaN. Call once no step in flight has them."""
        with torch.inference_mode():  # in which a backend made its copy of them
            self.kv_pool.poison_pages(pages)
            self._refresh(pages)

    def close(self) -> None:
        """Lets go of the model and the pool; the runner is of no use afterwards."""
        self.constraint_masks.close()
        for name in (
            "_model",
            "_paged_model",
            "kv_pool",
            "token_pool",
            "page_table",
            "_sampler",
            "_prompt_logprobs",
        ):
            self.__dict__.pop(name, None)
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # a failed device: the worker ends with why it failed, not with this
                torch.cuda.empty_cache()

    @cached_property
    def _sampler(self) -> Sampler:
        """The plain one, where nothing else draws."""
        sizes = {"max_running": self._config.max_running, "vocab_size": self._config.vocab_size}
        state = SamplingState(**sizes, device=self._device)
        if isinstance(self._backend, CpuBackend) and self._backend.library is not None:
            return CpuSampler(state, self._backend.library)
        return Sampler(state)

    def _run(self, step: Step, began: float) -> StepHandle:
        self._start_rows(step.row_starts)
        return self._run_started(step, began)

    def _start_rows(self, starts: Sequence[RowStart]) -> None:
        """How sequences that enter a row are sampled."""
        self._sampler.start_rows(starts)
        self.constraint_masks.start_rows(starts)
        self._prompt_logprobs.start_rows(starts)

    def _run_started(self, step: Step, began: float) -> StepHandle:
        """A step whose rows are known on the host."""
        self.token_pool.start_rows(step.row_starts)
        self.page_table.write_pages(step.new_page_rows, step.new_page_indexes, step.new_page_ids)
        self.kv_pool.copy_pages(step.page_copies)
        self._refresh([copy.target for copy in step.page_copies])
        tensors = build_step_tensors(step, self.page_table, self.token_pool)
        rows, ends = tensors.sampled_rows_host, tensors.sampled_ends_host
        pending = self.constraint_masks.begin(rows, ends)
        # Who scores a prompt reads all of it behind the last layer.
        last = None if self._prompt_logprobs.asked(step) else tensors.last
        hidden = self._forward(tensors, last)
        masks = pending.result() if pending is not None else None
        sampled = self._sample(tensors, hidden, masks)
        prompt = self._prompt_logprobs.of_step(step, tensors, hidden)
        check = HiddenCheck(nonfinite_tokens(hidden), tensors.q_indptr_host)
        launched = Launched(step, sampled, masks, began, check=check, prompt=prompt)
        if launched.ids is not None:
            self.constraint_masks.sampled(rows, ends, launched.ids)
        return launched

    def _refresh(self, pages: Sequence[int]) -> None:
        if pages and isinstance(self._backend, CopyOfPages):
            self._backend.refresh_pages(torch.tensor(pages, dtype=torch.int64))

    def _forward(self, tensors: StepTensors, last: LastQueries | None) -> Tensor:
        """[num_tokens, hidden]: hidden states of the tokens in `last`, None: of all. Rows of others are those
        before the last layer, all that K and V are made of: not finite where a token read what is not.
        """
        if self._paged_model is not None:
            where = (tensors.batch, self.kv_pool.layers)
            return self._paged_model.forward_paged(tensors.input_ids, *where, last)
        self._backend.plan(tensors.batch)
        return self._model.forward(tensors.input_ids, tensors.batch.positions, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self.kv_pool.layers[layer]
        return self._backend.run(kv, q, k, v, scale=self._config.attention_scale)

    def _sample(self, tensors: StepTensors, hidden: Tensor, masks: StepMasks | None) -> Sampled | None:
        if len(tensors.sampled_rows_host) == 0:
            return None
        logits = self._logits(hidden[tensors.sampled_tokens])
        there = (tensors.sampled_rows, tensors.sampled_ends)
        return self._draw(logits, tensors.sampled_rows_host, tensors.sampled_ends_host, there, masks)

    def _draw(
        self,
        logits: Tensor,
        rows: HostRows,
        ends: HostRows,
        there: tuple[Tensor, Tensor],
        masks: StepMasks | None,
    ) -> Sampled:
        """One token per row, into the token pool too. `there`: rows and ends on the device."""
        sampled = self._sampler.sample(logits, rows, ends, masks)
        self.token_pool.write(*there, sampled.ids)
        return sampled

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def _paged_model(model: Model, backend: AttentionBackend, kv_dtype: torch.dtype) -> PagedModel | None:
    """The network that runs all its layers at once, where there is one; None: layer by layer."""
    if isinstance(model, PagedModel):
        return model
    if isinstance(model, LlamaModel) and isinstance(backend, CpuBackend) and kv_dtype == torch.float32:
        return cpu_model(model, backend.library)
    return None


def nonfinite_tokens(hidden: Tensor) -> Tensor:
    """Which tokens' hidden states hold NaN or infinity, bool [num_tokens]: one pass, no mask of full size."""
    return ~hidden.sum(dim=-1, dtype=torch.float32).isfinite()


class HiddenCheck:
    """Which spans have hidden states that are not finite, once their flags have arrived."""

    def __init__(self, nonfinite: Tensor, q_indptr: HostColumn) -> None:
        self._nonfinite = OnTheWay(nonfinite)  # bool [num_tokens]
        self._q_indptr = q_indptr

    def is_ready(self) -> bool:
        """Whether `spans` would not wait."""
        return self._nonfinite.is_ready()

    def spans(self) -> list[int]:
        """Waits for the flags."""
        nonfinite = self._nonfinite.arrived()
        if not nonfinite.any():
            return []
        of_spans = np.add.reduceat(nonfinite, self._q_indptr[:-1], dtype=np.int64).nonzero()[0]
        found: list[int] = of_spans.tolist()
        return found


def is_over(query: Callable[[], bool]) -> bool:
    """What a device says of a step; one that failed is over, and its result says why."""
    try:
        return query()
    except RuntimeError:
        return True


class Launched:
    """A step on the device; small results travel to pinned memory behind it."""

    def __init__(
        self,
        step: Step,
        sampled: Sampled | None,
        masks: StepMasks | None,
        began: float,
        *,
        check: HiddenCheck | None = None,
        prompt: Mapping[int, Callable[[], list[TokenLogprob]]] = MappingProxyType({}),
        is_replayed: bool = False,
    ) -> None:
        self.is_replayed = is_replayed
        self._step = step
        self._sampled = sampled
        self._masks = masks
        self._prompt = prompt
        self._began = began
        self._check = check
        logprobs = sampled.logprobs if sampled else None
        self._logprobs = logprobs.on_the_way(sampled.logprob_counts) if sampled and logprobs else None
        self.ids = OnTheWay(sampled.ids) if sampled else None
        self._is_finite = OnTheWay(sampled.is_finite) if sampled else None

    def is_ready(self) -> bool:
        """See StepHandle."""
        last = self._is_finite or self._check  # what was queued last; the stream is in order
        return last is None or is_over(last.is_ready)

    def result(self) -> StepResult:
        """Waits for the copies, then reads them."""
        failed, dead_ends = self._failed()
        return StepResult(
            token_ids=self._token_ids(failed),
            logprobs=self._logprobs_by_span(failed),
            prompt_logprobs={span: read() for span, read in self._prompt.items() if span not in failed},
            failed=failed,
            seconds=time.perf_counter() - self._began,
            dead_ends=dead_ends,
        )

    def _failed(self) -> tuple[dict[int, str], list[int]]:
        """Why by span, and those of them whose constraint left no token."""
        failed: dict[int, str] = {}
        dead_ends: list[int] = []
        if self._check is not None:
            failed = dict.fromkeys(self._check.spans(), BAD_HIDDEN)
        if self._is_finite is not None:
            for i in np.flatnonzero(~self._is_finite.arrived()).tolist():
                span = self._step.sampled[i]
                if self._masks is not None and i in self._masks.indexes and span not in failed:
                    failed[span] = self._masks.dead_ends.get(i, NOTHING_LEFT)
                    dead_ends.append(span)
                failed.setdefault(span, BAD_LOGITS)
        return failed, dead_ends

    def _token_ids(self, failed: dict[int, str]) -> list[int]:
        if self.ids is None:
            return []
        ids: list[int] = self.ids.arrived().tolist()
        if failed:
            return [NO_TOKEN_ID if s in failed else t for s, t in zip(self._step.sampled, ids, strict=True)]
        return ids

    def _logprobs_by_span(self, failed: dict[int, str]) -> dict[int, TokenLogprob]:
        if self._sampled is None or self._logprobs is None:
            return {}
        spans = [self._step.sampled[i] for i in self._sampled.logprob_indexes]
        return {s: record for s, record in zip(spans, self._logprobs(), strict=True) if s not in failed}
