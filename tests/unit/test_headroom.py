"""The bound on a step's memory against what a step allocates, and what it leaves to pages."""

import dataclasses

from worker.execution.headroom import LIBRARIES, step_bytes
from worker.execution.kv_pool import pages_that_fit
from worker.model.toy import toy_config


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
