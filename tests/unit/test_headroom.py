"""The bound on a step's memory against what a step allocates, and what it leaves to pages."""

import dataclasses
import os
import weakref
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker.execution.headroom import HISTORY_BYTES, LIBRARIES, step_bytes
from worker.execution.kv_pool import pages_that_fit
from worker.execution.sampler import BYTES_OF_TOKEN, ROWS_AT_ONCE, Sampler
from worker.execution.sampling_state import SamplingState
from worker.ids import Row, SequenceId
from worker.model.toy import toy_config
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import RowStart


class Peak(TorchDispatchMode):
    """Most bytes that were held at once of what operations within made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, int] = {}  # by address

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._held:
                storage = tensor.untyped_storage()
                self._held[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self._held.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self._held.values()))
        return made


def test_the_bound_holds_the_tensors_that_live_side_by_side_in_a_layer() -> None:
    config = dataclasses.replace(toy_config(), hidden_size=64, intermediate_size=256, vocab_size=1000)
    tokens, rows, itemsize = 100, 7, 2
    residual, gate_up, active = tokens * 64, tokens * 2 * 256, tokens * 256
    logits = rows * 1000 * (itemsize + 4)
    bound = step_bytes(config, max_step_tokens=tokens, max_running=rows, itemsize=itemsize) - LIBRARIES
    assert bound >= (2 * residual + gate_up + active) * itemsize + logits


def test_pages_leave_room_for_the_largest_step() -> None:
    """Where the ratio would leave less than a step needs, the step's need decides."""
    sizes = {"free_bytes": 10_000, "model_bytes": 2_000, "page_bytes": 100}
    assert pages_that_fit(memory_ratio=0.9, step_bytes=500, **sizes) == 69
    assert pages_that_fit(memory_ratio=0.9, step_bytes=3_000, **sizes) == 49


@pytest.mark.parametrize("num_rows", [8, 100])
def test_rows_that_want_all_there_is_need_no_more_than_is_counted(num_rows: int) -> None:
    """With 256 of them a step needed three times what was left for it, and the device was full."""
    vocab, device = 20_000, torch.device("cpu")
    state = SamplingState(max_running=num_rows, vocab_size=vocab, device=device)
    params = SamplingParams(temperature=1.5, seed=1, top_p=0.99, frequency_penalty=0.5, logprobs=5)
    rows = np.arange(num_rows, dtype=np.int32)
    logits = torch.randn(num_rows, vocab).bfloat16()
    with Peak() as peak:
        for row in range(num_rows):
            state.start_rows([RowStart(Row(row), SequenceId(row), 0, (1, 2), 1, params, frozenset())])
    assert peak.most <= num_rows * vocab * HISTORY_BYTES + 16 * vocab  # of one row's own counts
    with Peak() as peak:
        Sampler(state).sample(logits, rows, np.full(num_rows, 2, np.int32))
    tables = 5 * vocab * len(state.history.tables([])[0])
    assert peak.most <= min(num_rows, ROWS_AT_ONCE) * vocab * BYTES_OF_TOKEN + tables


@pytest.mark.parametrize("num_rows", [8, 100])
def test_lines_of_the_sampling_kernels_take_no_more_than_is_counted_while_they_grow(num_rows: int) -> None:
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    from worker.execution.special_rows import SpecialRows

    vocab = 20_000
    params = SamplingParams(temperature=1.5, seed=1, top_p=0.99, frequency_penalty=0.5, logprobs=5)
    with Peak() as peak:
        special = SpecialRows(num_rows, vocab, torch.device("cpu"))
        for row in range(num_rows):
            special.start_rows([RowStart(Row(row), SequenceId(row), 0, (1, 2), 1, params, frozenset())])
    assert len(special.edits.edited) == num_rows
    assert 9 * num_rows * vocab <= peak.most <= num_rows * vocab * HISTORY_BYTES
