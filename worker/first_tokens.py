"""When the result of a step with prompts is taken before the next step is decided.

With overlap the next step is launched before the last one's result is looked at. A small model's step with a
prompt is over when the host has launched it, so its first tokens would wait for the next launch: 0.6 to 1 ms
of 6 for a prompt of 512 tokens (Qwen3-0.6B, H200). Owns that rule alone; the loop is engine.py's.
"""

import time
from collections.abc import Callable

from worker.execution.runner import StepHandle
from worker.scheduling.step import Step

WAIT_SECONDS = 0.0005  # about what the next launch takes: at worst that comes so much later
POLL_SECONDS = 0.00002


def has_any(step: Step) -> bool:
    """Whether prompts end in this step."""
    return len(step.sampled) > step.num_decode


def let_them_go() -> None:
    """Leaves the interpreter to the thread that sends them, for the moment that it takes to wake up.

    For when the device has its next step: else that thread would wait for the one after to be launched.
    """
    time.sleep(POLL_SECONDS)


def are_there(
    step: Step,
    handle: StepHandle,
    num_live: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether the step has first tokens that can be had now.

    Waits a little for them where nobody else streams or waits for a step, so of `num_live` sequences none is
    outside of this one; other threads have the interpreter meanwhile.
    """
    if not has_any(step):
        return False
    if step.num_decode or num_live > len(step.rows):
        return handle.is_ready()
    end = clock() + WAIT_SECONDS
    while not handle.is_ready():
        if clock() >= end:
            return False
        sleep(POLL_SECONDS)
    return True
