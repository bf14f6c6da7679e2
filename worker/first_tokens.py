"""When first tokens leave: before the next step is decided if the device has them, before books are written.

With overlap the next step is launched before the last one's result is looked at. That launch is shorter than
what the device takes for a prompt, so nobody waits for a result before it; a first token that is there
already does not wait for it either. Owns these rules alone; the loop is engine.py's.
"""

import time
from collections.abc import Callable, Sequence

from worker.execution.runner import StepHandle
from worker.scheduling.step import Step

POLL_SECONDS = 0.00002
POLLS = 4
CLOSE_TOKENS = 1024
"""A step of more takes so long that a thread more or less on the way of its tokens is nothing."""


def has_any(step: Step) -> bool:
    """Whether prompts end in this step."""
    return len(step.sampled) > step.num_decode


def is_long(step: Step) -> bool:
    """Whether it takes long, its launch too."""
    return step.num_tokens > CLOSE_TOKENS


def are_close(steps: Sequence[Step]) -> bool:
    """Whether the oldest of the steps in flight has first tokens soon, and none behind it has any."""
    return bool(steps) and has_any(steps[0]) and not is_long(steps[0]) and not any(map(has_any, steps[1:]))


def are_there(step: Step, handle: StepHandle) -> bool:
    """Whether the step has first tokens that can be had now."""
    return has_any(step) and handle.is_ready()


def let_them_go(are_taken: Callable[[], bool], *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Leaves the interpreter to the thread that sends them, until it has taken them; a fraction of a ms.

    For when the device has its next step: else that thread would wait for the books of this one, and for the
    step after next to be launched.
    """
    for _ in range(POLLS):
        if are_taken():
            return
        sleep(POLL_SECONDS)
