"""What of a what-if run counts: nothing of its warm-up, and time in which nothing runs as such."""

from array import array
from collections.abc import Sequence

import pytest

from worker.trace.counts import Counts, Setting
from worker.trace.simulation import LOOK_STEPS, Simulation
from worker.trace.step_time import StepTime
from worker.trace.workload import Limits, Output, Trace, TraceRequest

STEP_SECONDS = 0.01
PAGE_SIZE = 16


def request(arrival: float, num_prompt: int, num_output: int) -> TraceRequest:
    return TraceRequest(
        arrival, num_prompt, num_output, array("Q"), (Output(num_output, array("Q"), arrival + 1.0),)
    )


def run(
    requests: Sequence[TraceRequest],
    *,
    seconds: float,
    num_pages: int = 64,
    count_from: float = 0.0,
    resolution: int = 1,
) -> Counts:
    trace = Trace(requests, 8, PAGE_SIZE, num_pages, "lru", Limits(8, 256, 512), seconds)
    setting = Setting(num_pages, PAGE_SIZE, "lru")
    return Simulation(
        trace, setting, StepTime(STEP_SECONDS), resolution=resolution, count_from=count_from
    ).run()


EVICTING = [request(at, 100, 10) for at in range(20)]  # on 12 pages: each needs those of the one before


def test_what_the_warm_up_did_is_in_no_total() -> None:
    """As if the half that counts had been all; the first evictions are the warm-up's."""
    all_of_it = run(EVICTING, num_pages=12, seconds=20.0)
    half = run(EVICTING, num_pages=12, seconds=20.0, count_from=9.5)
    assert all_of_it.num_requests == 2 * half.num_requests == 20
    assert all_of_it.prompt_tokens_computed == 2 * half.prompt_tokens_computed == 2000
    assert all_of_it.output_tokens == 2 * half.output_tokens == 200
    assert all_of_it.num_steps == 2 * half.num_steps
    assert half.evictions == 10 * (
        all_of_it.evictions - run(EVICTING[:19], num_pages=12, seconds=19.0).evictions
    )
    assert half.seconds == pytest.approx(10.5)


def test_preemptions_of_the_warm_up_are_in_no_total() -> None:
    crowd = [request(0.0, 30, 90) for _ in range(4)]
    calm = [request(90.0, 30, 90)]
    all_of_it = run(crowd + calm, num_pages=20, seconds=100.0)
    counted = run(crowd + calm, num_pages=20, seconds=100.0, count_from=80.0)
    assert (all_of_it.preemptions > 0, all_of_it.recomputed_tokens > 0) == (True, True)
    assert (counted.preemptions, counted.recomputed_tokens, counted.prompt_tokens_computed) == (0, 0, 30)


@pytest.mark.parametrize("seconds", [20.0, 100.0])
def test_a_warm_up_that_outlasts_the_trace_leaves_nothing_to_count(seconds: float) -> None:
    counts = run(EVICTING, num_pages=12, seconds=seconds, count_from=1000.0)
    totals = (counts.evictions, counts.prompt_tokens_computed, counts.num_steps, counts.num_requests)
    assert (totals, counts.seconds, counts.mean_wasted_slots) == ((0, 0, 0, 0), 0.0, 0.0)


def wasted_by_one(num_prompt: int, num_output: int) -> float:
    """Slot-seconds that a request alone wastes: after each step but its last one, for that step's length."""
    stored = range(num_prompt, num_prompt + num_output - 1)
    return sum(-num_tokens % PAGE_SIZE for num_tokens in stored) * STEP_SECONDS


@pytest.mark.parametrize("num_output", [2, 20, LOOK_STEPS, 3 * LOOK_STEPS + 1])
def test_one_request_alone_is_looked_at_after_each_step(num_output: int) -> None:
    """It was said to waste nothing where it took fewer than 64 steps."""
    counts = run([request(0.0, 20, num_output)], seconds=0.0)
    assert counts.wasted_slot_seconds == pytest.approx(wasted_by_one(20, num_output))
    assert counts.mean_wasted_slots == pytest.approx(
        wasted_by_one(20, num_output) / (num_output * STEP_SECONDS)
    )


def test_nothing_is_wasted_while_nothing_runs() -> None:
    """The pool as a step left it was taken for the minutes before, in which it was empty."""
    counts = run([request(at * 60.0, 20, 50) for at in range(10)], seconds=600.0)
    assert counts.seconds == 600.0
    assert counts.wasted_slot_seconds == pytest.approx(10 * wasted_by_one(20, 50))
    assert counts.active_page_seconds < 10 * 50 * STEP_SECONDS * 5


def test_a_mean_is_over_the_idle_end_of_a_trace_as_well() -> None:
    busy, idle = (run([request(0.0, 20, 50)], seconds=seconds) for seconds in (0.5, 50.0))
    assert idle.mean_wasted_slots == pytest.approx(busy.mean_wasted_slots / 100) != 0.0
    assert idle.fragmentation == pytest.approx(busy.fragmentation)


def test_only_what_is_wasted_after_the_warm_up_counts() -> None:
    counts = run([request(0.0, 20, 50), request(60.0, 20, 50)], seconds=100.0, count_from=60.0)
    assert counts.seconds == 40.0
    assert counts.wasted_slot_seconds == pytest.approx(wasted_by_one(20, 50))


def test_units_of_eight_tokens_are_said_in_tokens() -> None:
    """Three units of prompt and four of output, in pages of two: one unit is empty, then none, then one."""
    counts = run([request(0.0, 24, 25)], seconds=0.0, resolution=8)
    assert counts.seconds == pytest.approx(4 * 8 * STEP_SECONDS)
    assert counts.wasted_slot_seconds == pytest.approx((8 + 0 + 8) * 8 * STEP_SECONDS)
    assert counts.fragmentation == pytest.approx((8 + 0 + 8) / ((2 + 2 + 3) * PAGE_SIZE))
    assert (counts.prompt_tokens_computed, counts.output_tokens) == (24, 32)


def test_what_was_computed_again_in_units_is_said_in_tokens() -> None:
    crowd = [request(0.0, 32, 96) for _ in range(4)]
    roomy, tight = (run(crowd, seconds=0.0, num_pages=pages, resolution=8) for pages in (64, 20))
    assert (roomy.preemptions, roomy.recomputed_tokens, roomy.prompt_tokens_computed) == (0, 0, 128)
    assert tight.preemptions == 2
    assert tight.recomputed_tokens == tight.prompt_tokens_computed - 128 - 2 * 8 > 0, "a last unit had no KV"


def test_only_what_is_refused_after_the_warm_up_counts() -> None:
    too_long = [request(at, 400, 10) for at in (0.0, 5.0, 9.0)]
    assert run(too_long, num_pages=12, seconds=10.0).num_refused == 3
    assert run(too_long, num_pages=12, seconds=10.0, count_from=5.0).num_refused == 2
