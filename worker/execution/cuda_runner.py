"""The runner on a GPU: decode steps and steps with prompts are CUDA graphs over the same fused kernels.

Owns the graphs and the device's copy of the rows' sampling parameters. A step with rows whose requests want
penalties, a bias, masked stop tokens, a constraint or log-probabilities has its draw behind the graph, by the
same kernels and some more (worker/execution/special_rows.py): its other rows are drawn as ever.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from kernels.backend import GraphBackend
from kernels.batch import LastQueries
from kernels.compile_ahead import compile_queue
from kernels.compile_watch import CompileWatch
from kernels.sample import make_scratch, sample
from kernels.sample_columns import SampleRow, make_columns, write_rows
from kernels.sample_edits import SampleEdits
from worker.execution.constraint_masks import StepMasks
from worker.execution.cuda_graphs import NO_PAGES, DecodeGraphs, DecodeTables, NewPages
from worker.execution.graph_sizes import kernel_sizes
from worker.execution.on_the_way import OnTheWay
from worker.execution.prompt_graphs import PromptGraphs
from worker.execution.prompt_steps import PromptSteps
from worker.execution.runner import StepHandle
from worker.execution.sampler import HostRows, Sampled
from worker.execution.sampling_state import any_of, mark
from worker.execution.special_rows import SpecialRows
from worker.execution.step_buffers import StepOutcome
from worker.execution.step_tensors import StepTensors, build_step_tensors
from worker.execution.torch_runner import (
    BAD_HIDDEN,
    BAD_LOGITS,
    NO_TOKEN_ID,
    Launched,
    RunnerConfig,
    TorchRunner,
    is_over,
    nonfinite_tokens,
)
from worker.execution.warm_steps import warm_steps
from worker.log import log_phase
from worker.model.fused import FusedModel
from worker.model.llama import Model
from worker.scheduling.step import RowStart, Step, StepResult

log = logging.getLogger("worker.device")


class CudaRunner(TorchRunner):
    """A `Runner` (worker.execution.runner) over fused kernels and CUDA graphs."""

    def __init__(
        self,
        model: Model,
        backend: GraphBackend,
        config: RunnerConfig,
        device: torch.device,
        *,
        max_graph_batch: int = 256,
        capture: bool = True,
    ) -> None:
        with log_phase(log, "pool"):
            super().__init__(model, backend, config, device)
        self._fused = FusedModel(model)
        self._late = CompileWatch()
        self._attention = backend
        self._columns = make_columns(config.max_running + 1, device)
        self._scratch = make_scratch(config.max_running, config.vocab_size, device)
        self._filtered_rows: set[int] = set()
        self._special = SpecialRows(config.max_running, config.vocab_size, device)
        tables = DecodeTables(
            page_table=self.page_table.slots,
            token_ids=self.token_pool.ids,
            kv=self.kv_pool.layers,
            columns=self._columns,
            dummy_row=config.max_running,
            page_size=config.page_size,
        )
        self.graphs = DecodeGraphs(
            self._fused,
            backend,
            tables,
            max_batch=min(max_graph_batch, config.max_running),
            scale=config.attention_scale,
            capture=capture,
        )
        with torch.inference_mode():
            self.prompt_graphs = PromptGraphs(
                self._fused,
                backend,
                self.kv_pool.layers,
                self.page_table.slots,
                max_tokens=config.max_step_tokens,
                dummy_slot=self.page_table.dummy_slot,
                scale=config.attention_scale,
                capture=capture,
            )
            self.prompt_steps = PromptSteps(
                self.prompt_graphs,
                self._fused,
                self.page_table,
                self.token_pool,
                self._columns,
                self._scratch,
                capture=capture,
            )
            self._warm_up(capture)

    def _warm_up(self, capture: bool) -> None:
        """Compiles, captures and runs what steps of all sizes need, so that no request waits for it."""
        if self._device.type != "cuda":
            return
        steps = self.warm_steps()
        if self._attention.name == "triton":
            with compile_queue(self._device) as queue:
                with log_phase(log, "ask_for_kernels"), queue.asking(), self._fused.shallow():
                    for run in self.kernel_groups(steps):
                        run()
                        queue.next_group()
                self._capture_all(capture, queue.compile_group)
                with log_phase(log, "compile_rest"):
                    queue.compile_all()
        else:  # a library's kernels would run, on what ours did not compute
            self.run_bodies()
            self._capture_all(capture)
        with log_phase(log, "warm_steps"):
            for step in steps:
                self._run_dummies(step)
            self._draw_dummies()
            self.token_pool.ids[self._config.max_running] = 0  # the dummy row feeds token 0
            torch.cuda.synchronize()

    def warm_steps(self) -> list[Step]:
        """Eager steps of all sizes, in the dummy row."""
        config, width = self._config, self.page_table.slots.shape[1]
        return warm_steps(
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            max_context=min(config.max_context, width),
            dummy_row=config.max_running,
        )

    def run_bodies(self) -> None:
        """Decode steps that meet the kernels of all their graphs, so that none is loaded in a capture: those
        of filters are captured while requests run, without a warm-up.
        """
        with self._fused.shallow():
            self.graphs.run_bodies()

    def kernel_groups(self, steps: Sequence[Step]) -> tuple[Callable[[], None], ...]:
        """What launches all that requests can need: of decode graphs, of steps with prompts, of the rest."""

        def run_prompts() -> None:
            self.prompt_steps.run_bodies()
            self.prompt_graphs.run_bodies()
            for step in steps:
                self._run_dummies(step)

        return self.graphs.run_bodies, run_prompts, self._draw_dummies

    def _capture_all(self, capture: bool, compile_group: Callable[[int], None] = lambda number: None) -> None:
        """The graphs of each of the first two groups, as soon as its kernels are there."""
        with log_phase(log, "compile"):
            compile_group(0)
        if capture:
            with log_phase(log, "capture"):
                self.graphs.capture_all()
        with log_phase(log, "compile_prompts"):
            compile_group(1)
        if capture:
            with log_phase(log, "capture_prompts"):
                self.prompt_graphs.capture_all()
                self.prompt_steps.capture_all()

    def _run_dummies(self, step: Step) -> None:
        """An eager step without its results; its rows are the dummy row."""
        tensors = build_step_tensors(step, self.page_table, self.token_pool)
        hidden = self._forward(tensors, tensors.last)
        self._logits(hidden[tensors.sampled_tokens])
        OnTheWay(nonfinite_tokens(hidden)).arrived()

    def _draw_dummies(self) -> None:
        """Head and draw for every number of rows that has a kernel of its own."""
        dummy_row, embedding = self._config.max_running, self._fused.embedding
        rows = torch.full((dummy_row,), dummy_row, dtype=torch.int32, device=self._device)
        for size in kernel_sizes(self.graphs.sizes):
            hidden = torch.zeros(size, embedding.shape[1], dtype=embedding.dtype, device=self._device)
            logits = self._logits(hidden)
            there = (rows[:size], torch.ones_like(rows[:size]))
            for with_filters, edits in product((False, True), (None, self._special.edits)):
                ids, _ = self._launch_draw(logits, there, with_filters=with_filters, edits=edits)
            self._special.launch_logprobs(logits, there[0], ids)

    def _run(self, step: Step, began: float) -> StepHandle:
        self._start_rows(step.row_starts)
        values = self._sample_rows(step.row_starts)
        handle = self._run_prompts(step, values, began) if step.num_decode == 0 else None
        if handle is not None:
            return handle
        write_rows(self._columns, [start.row for start in step.row_starts], values)
        return self._run_started(step, began)

    def _start_rows(self, starts: Sequence[RowStart]) -> None:
        self._special.start_rows(starts)
        self.constraint_masks.start_rows(starts)
        self._prompt_logprobs.start_rows(starts)

    def _run_started(self, step: Step, began: float) -> StepHandle:
        if step.num_decode != len(step.rows) or not self.graphs.fits(len(step.rows)):
            return super()._run_started(step, began)
        self.token_pool.start_rows(step.row_starts)
        pages = NewPages(step.new_page_rows, step.new_page_indexes, step.new_page_ids)
        if len(pages.ids) > self.graphs.page_room:
            self.page_table.write_pages(pages.rows, pages.indexes, pages.ids)
            pages = NO_PAGES
        self.kv_pool.copy_pages(step.page_copies)
        rows = np.frombuffer(step.rows, dtype=np.int32)
        if self._special.has_any(rows):
            return self._run_special(step, pages, began)
        with_filters = any_of(rows, self._filtered_rows)
        outcome = self.graphs.run(step.rows, step.ends, with_filters=with_filters, new_pages=pages)
        return _Replayed(step, outcome, began, is_replayed=self.graphs.captures)

    def _run_prompts(self, step: Step, values: Sequence[SampleRow], began: float) -> StepHandle | None:
        """A step of a few short prompts without special rows; None where it is not one."""
        rows = np.frombuffer(step.rows, dtype=np.int32)
        if self._special.has_any(rows) or self._prompt_logprobs.asked(step):
            return None
        self.kv_pool.copy_pages(step.page_copies)
        with_filters = any_of(rows, self._filtered_rows)
        outcome = self.prompt_steps.run(step, values, with_filters=with_filters)
        if outcome is None:
            return None
        return _ReplayedPrompts(step, outcome, began, is_replayed=self.graphs.captures)

    def _run_special(self, step: Step, pages: NewPages, began: float) -> StepHandle:
        """A decode step with special rows: the network from a graph, then the draw.

        Masks of constraints are made meanwhile.
        """
        rows, ends = (np.frombuffer(column, dtype=np.int32) for column in (step.rows, step.ends))
        pending = self.constraint_masks.begin(rows, ends)
        logits, there = self.graphs.run_forward(step.rows, step.ends, new_pages=pages)
        masks = pending.result() if pending is not None else None
        sampled = self._draw(logits, rows, ends, there, masks)
        launched = Launched(step, sampled, masks, began, is_replayed=self.graphs.captures)
        if launched.ids is not None:
            self.constraint_masks.sampled(rows, ends, launched.ids)
        return launched

    def watch_compilers(self) -> None:
        """The start is over: from now on the log tells of every kernel that was not there."""
        self._late.begin()

    def close(self) -> None:
        """Lets go of the graphs, the model and the pool; the runner is of no use afterwards."""
        if "_late" in self.__dict__:
            self._late.end()
        if "graphs" in self.__dict__:
            self.graphs.close()
            self.prompt_steps.close()
            self.prompt_graphs.close()
        steps = ("graphs", "prompt_steps", "prompt_graphs")
        for name in (*steps, "_fused", "_attention", "_columns", "_scratch", "_special"):
            self.__dict__.pop(name, None)
        super().close()

    def _sample_rows(self, starts: Sequence[RowStart]) -> list[SampleRow]:
        """How sequences that enter a row are sampled; notes on the host who has filters."""
        values = []
        for start in starts:
            params = start.params
            has_filters = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
            mark(self._filtered_rows, start.row, has_filters)
            values.append(
                SampleRow(
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=params.seed,
                    choice=start.choice_index,
                )
            )
        return values

    def _forward(self, tensors: StepTensors, last: LastQueries | None) -> Tensor:
        hidden = torch.nn.functional.embedding(tensors.input_ids, self._fused.embedding)
        return self.prompt_graphs.run(hidden, tensors.batch, last)

    def _draw(
        self,
        logits: Tensor,
        rows: HostRows,
        ends: HostRows,
        there: tuple[Tensor, Tensor],
        masks: StepMasks | None,
    ) -> Sampled:
        with_filters = any_of(rows, self._filtered_rows)
        edits = self._special.edits if self._special.has_any(rows) else None
        if masks is not None:
            self._special.allow(rows, masks)
        drawn = self._launch_draw(logits, there, with_filters=with_filters, edits=edits)
        return self._special.sampled(logits, rows, there[0], *drawn)

    def _launch_draw(
        self, logits: Tensor, there: tuple[Tensor, Tensor], *, with_filters: bool, edits: SampleEdits | None
    ) -> tuple[Tensor, Tensor]:
        where = (*there, self._columns, self._scratch, self._config.vocab_size)
        pool = self.token_pool.ids
        return sample(logits, *where, edits=edits, with_filters=with_filters, token_pool=pool)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._fused.logits(hidden)


class _Replayed:
    """A replayed graph, whose ids and flags are written to pinned memory behind it."""

    def __init__(self, step: Step, outcome: StepOutcome, began: float, *, is_replayed: bool) -> None:
        self.is_replayed = is_replayed
        self._step = step
        self._began = began
        self._outcome = outcome

    def is_ready(self) -> bool:
        """See StepHandle."""
        return is_over(self._outcome.is_ready)

    def result(self) -> StepResult:
        """Waits for the step, then reads them."""
        drawn, is_finite = self._outcome.arrived()
        ids: list[int] = drawn.tolist()
        failed = {}
        if not is_finite.all():
            failed = dict.fromkeys((is_finite == 0).nonzero()[0].tolist(), BAD_LOGITS)
        for i in failed:
            ids[i] = NO_TOKEN_ID
        return StepResult(token_ids=ids, failed=failed, seconds=time.perf_counter() - self._began)


class _ReplayedPrompts(_Replayed):
    """The same for prompts: not every span has a token, and hidden states of all are looked at."""

    def result(self) -> StepResult:
        """Waits for the step, then reads them."""
        step = self._step
        drawn, is_finite, is_broken = self._outcome.arrived()
        broken = is_broken[: len(step.rows)].nonzero()[0].tolist()
        failed = dict.fromkeys(broken, BAD_HIDDEN)
        for i, span in enumerate(step.sampled):
            if not is_finite[i]:
                failed.setdefault(span, BAD_LOGITS)
        ids = drawn[: len(step.sampled)].tolist()
        if failed:
            ids = [NO_TOKEN_ID if s in failed else t for s, t in zip(step.sampled, ids, strict=True)]
        return StepResult(token_ids=ids, failed=failed, seconds=time.perf_counter() - self._began)
