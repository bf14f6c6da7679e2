"""The runner of `--deterministic` on a GPU: what a row draws does not depend on who else is in the step.

Products and attention are those of the model and the backend it is given (worker/model/invariant.py,
kernels/invariant_backend.py). Owns what is left: rows drawn by the kernel and rows drawn by the plain sampler
are kept apart, and the plain sampler gets each row alone, since torch sums rows of other batches otherwise.
"""

from torch import Tensor

from worker.execution.constraint_masks import StepMasks
from worker.execution.cuda_runner import CudaRunner
from worker.execution.sampler import HostRows, Sampled, merged
from worker.execution.sampling_state import any_of
from worker.execution.step_tensors import StepTensors


class InvariantRunner(CudaRunner):
    """See CudaRunner."""

    def _sample(self, tensors: StepTensors, hidden: Tensor, masks: StepMasks | None) -> Sampled | None:
        rows, ends = tensors.sampled_rows_host, tensors.sampled_ends_host
        if len(rows) == 0 or self._is_plain(rows):
            return super()._sample(tensors, hidden, masks)
        logits = self._logits(hidden[tensors.sampled_tokens])
        there = (tensors.sampled_rows, tensors.sampled_ends)
        sampled = self._draw_special(logits, rows, ends, there, masks)
        self.token_pool.write(*there, sampled.ids)
        return sampled

    def _draw_special(
        self,
        logits: Tensor,
        rows: HostRows,
        ends: HostRows,
        there: tuple[Tensor, Tensor],
        masks: StepMasks | None,
    ) -> Sampled:
        of_row = masks.by_index() if masks is not None else {}
        return merged([self._one(logits, rows, ends, there, i, of_row.get(i)) for i in range(len(rows))])

    def _one(
        self,
        logits: Tensor,
        rows: HostRows,
        ends: HostRows,
        there: tuple[Tensor, Tensor],
        index: int,
        masks: StepMasks | None,
    ) -> Sampled:
        """The row at `index` of the sampled ones."""
        here = slice(index, index + 1)
        if not self._is_plain(rows[here]):
            return self._sampler.sample(logits[here], rows[here], ends[here], masks)
        # Copies, and the token pool: else the kernel of unaligned rows, or without a pool, is compiled here.
        ids, is_finite = self._draw(
            there[0][here].clone(),
            there[1][here].clone(),
            logits[here],
            with_filters=any_of(rows[here], self._filtered_rows),
        )
        return Sampled(ids.long(), is_finite.clone(), [], [], None)
