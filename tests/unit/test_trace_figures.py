"""Figures of what-if by themselves, against sums that are made by hand: errors, steps, what was observed."""

import json
from array import array
from pathlib import Path

import pytest

from tests.estimate_task import estimate_task
from worker.ids import SequenceId
from worker.readers.samples import LoggedEnd, LoggedRequest
from worker.scheduling.output import PrefixCounts, SequenceStart
from worker.scheduling.step import Step
from worker.trace import mooncake
from worker.trace.building import trace_requests
from worker.trace.counts import NUM_STRETCHES, Counts, Setting
from worker.trace.estimate import estimate
from worker.trace.observed import observe
from worker.trace.step_time import MIN_STEPS, StepTime, fit
from worker.trace.what_if import (
    COARSEST,
    EXACT_REQUESTS,
    BadQuestion,
    Question,
    notes_of,
    resolution_of,
    result_of,
    settings_of,
)
from worker.trace.workload import CachedPage, Limits, Trace
from worker.traffic import StepCount


def admitted(lookups: list[tuple[int, int]]) -> Counts:
    counts = Counts(Setting(8, 16, "lru"))
    for number, (hit, tokens) in enumerate(lookups):
        prefix = (hit, tokens - hit, 0, 0)
        counts.admit(SequenceStart(SequenceId(number), PrefixCounts(*prefix), 0, float(number), False))
    return counts


def test_the_error_of_a_hit_rate_is_the_jackknife_over_stretches() -> None:
    """Means without one stretch each; their spread times n - 1 over n, under the root."""
    lookups = [(number % 7, 10) for number in range(2 * NUM_STRETCHES)]
    without = [
        sum(hit for at, (hit, _) in enumerate(lookups) if at // 2 != left) / (10 * 2 * (NUM_STRETCHES - 1))
        for left in range(NUM_STRETCHES)
    ]
    mean = sum(without) / NUM_STRETCHES
    variance = (NUM_STRETCHES - 1) / NUM_STRETCHES * sum((each - mean) ** 2 for each in without)
    assert admitted(lookups).hit_ratio_error == pytest.approx(variance**0.5) != 0.0


@pytest.mark.parametrize("count", [0, 1, NUM_STRETCHES])
def test_too_few_look_ups_have_no_error(count: int) -> None:
    counts = admitted([(number % 2, 1) for number in range(count)])
    assert (counts.hit_ratio_error, counts.hit_ratio) == (0.0, pytest.approx(count // 2 / max(1, count)))


def test_one_look_up_more_than_stretches_is_made_of_pairs() -> None:
    """An odd one at the end is a stretch as well."""
    counts = admitted([(0, 10)] * NUM_STRETCHES + [(10, 10)])
    assert counts.hit_ratio_error > 0.0


def test_waits_are_said_by_share_of_requests() -> None:
    result = result_of(admitted([(0, 1)] * 1000))
    assert result["queue_seconds"] == {"p50": 500.0, "p90": 900.0, "p99": 990.0}
    assert result["mean_queue_seconds"] == 499.5
    alone = result_of(admitted([(0, 1)]))
    assert alone["queue_seconds"] == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert result_of(admitted([]))["queue_seconds"] == {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def step(spans: list[tuple[int, int]], num_decode: int, sampled: list[int]) -> Step:
    ids = [SequenceId(number) for number in range(len(spans))]
    starts, ends = (array("i", [span[at] for span in spans]) for at in (0, 1))
    return Step(1, ids, array("i", range(len(spans))), starts, ends, sampled, num_decode)


MODEL = StepTime(base=1000.0, per_prompt_token=100.0, per_sequence=10.0, per_context_token=1.0)


@pytest.mark.parametrize(
    ("spans", "num_decode", "sampled", "resolution", "seconds"),
    [
        ([(4, 5), (8, 9)], 2, [0, 1], 1, 1000 + 20 + 14),
        ([(0, 6)], 0, [0], 1, 1000 + 600 + 6),
        ([(4, 5), (0, 6)], 1, [0, 1], 1, 1000 + 600 + 10 + 11),
        ([(4, 5), (0, 6)], 1, [0, 1], 8, 4800 + 8 * (1000 + 10 + 88)),  # eight steps, the prompt once
        ([(0, 6)], 0, [], 8, 4800 + 1000 + 48),  # a piece of a prompt is one step
    ],
)
def test_a_step_takes_what_its_parts_take(
    spans: list[tuple[int, int]], num_decode: int, sampled: list[int], resolution: int, seconds: float
) -> None:
    assert MODEL.seconds(step(spans, num_decode, sampled), resolution) == seconds


def test_the_slowest_hundredth_and_steps_of_no_time_do_not_count() -> None:
    prompts = [number % 50 for number in range(200)]
    seconds = [0.01 + 1e-4 * tokens for tokens in prompts]
    for at in (7, 90):
        seconds[at] = 100.0
    seconds[33] = 0.0
    found = fit(seconds, prompts, [0] * 200, [0] * 200)
    assert found is not None
    assert (found.base, found.per_prompt_token) == (pytest.approx(0.01), pytest.approx(1e-4))
    assert (found.per_sequence, found.per_context_token) == (0.0, 0.0)
    assert (found.num_steps, found.median_error) == (197, pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize("count", [0, 1, MIN_STEPS])
def test_too_few_steps_tell_nothing(count: int) -> None:
    """Of eight the slowest is left out."""
    assert fit([0.01 + number for number in range(count)], [1] * count, [1] * count, [1] * count) is None


def test_the_error_of_a_fit_is_relative() -> None:
    found = fit([1.0, 3.0] * 50, [0] * 100, [0] * 100, [0] * 100)
    assert found is not None
    assert found.median_error == pytest.approx((abs(found.base - 1.0) + abs(found.base - 3.0) / 3.0) / 2)


def logged(time_us: int, *ends: LoggedEnd) -> LoggedRequest:
    return LoggedRequest(
        time_us, 0, SequenceId(1), "r", 2, 20, 9, 0, True, True, array("Q", [1, 2]), ends=list(ends)
    )


def ended(
    time_us: int, queue_us: int, preemptions: int, prefix: tuple[int, int, int, int] | None
) -> LoggedEnd:
    return LoggedEnd(time_us, 0, SequenceId(1), 3, 1, preemptions, prefix, queue_us, array("Q"))


def test_what_was_admitted_and_preempted_within_a_stretch_is_observed() -> None:
    """Both ends of the stretch belong to it; a request counts where it left the queue, once."""
    requests = [
        logged(100, ended(2_000, 0, 1, (1, 2, 3, 4)), ended(5_001, 0, 2, (1, 2, 3, 4))),  # before
        logged(500, ended(3_000, 500, 4, (10, 20, 30, 40)), ended(5_000, 500, 8, (10, 20, 30, 40))),
        logged(3_000, ended(4_000, 2_000, 16, (100, 200, 300, 400))),
        logged(3_000, ended(999, 2_001, 32, (7, 7, 7, 7))),  # admitted behind it
        logged(3_000, ended(4_000, 0, 64, None)),  # never admitted
        logged(3_000),  # still waits
    ]
    found = observe(requests, 1_000, 5_000)
    tokens = (found.hit_tokens, found.miss_cold_tokens, found.miss_evicted_tokens, found.unaligned_tokens)
    assert (found.num_requests, tokens) == (2, (110, 220, 330, 440))
    assert found.preemptions == 1 + 4 + 8 + 16 + 64
    assert found.mean_queue_seconds == pytest.approx(0.00125)
    assert found.hit_ratio == 0.1
    nothing = observe([], 0, 0)
    assert (nothing.hit_ratio, nothing.mean_queue_seconds, nothing.evictions) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("end", "is_counted"),
    [
        (None, False),  # it waits, and came before the trace
        (ended(2_000, 500, 0, None), True),
        (ended(2_000, 499, 0, (1, 0, 0, 0)), False),
        (ended(2_000, 500, 0, (1, 0, 0, 0)), True),
        (ended(2_000, 0, 0, (1, 0, 0, 0)), False),
    ],
)
def test_one_that_came_before_the_trace_counts_if_it_was_admitted_within(
    end: LoggedEnd | None, is_counted: bool
) -> None:
    (found,) = trace_requests([logged(500, *([end] if end else []))], 1_000, 512)
    assert (found.arrival, found.is_counted) == (0.0, is_counted)


def test_a_mooncake_trace_begins_with_its_earliest_line(tmp_path: Path) -> None:
    """Milliseconds, in any order; only whole blocks have keys; nobody puts out nothing."""
    lines = [
        {"timestamp": 5_500, "input_length": 1_023, "output_length": 0, "hash_ids": [1, 2]},
        {"timestamp": 4_000, "input_length": 512, "output_length": 7, "hash_ids": [1]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = mooncake.load(path, num_pages=8)
    first, second = trace.requests
    assert (first.arrival, second.arrival, trace.seconds) == (0.0, 1.5, 1.5)
    assert (list(first.keys), list(second.keys)) == ([second.keys[0]], [first.keys[0]])
    assert [request.outputs[0].num_tokens for request in (first, second)] == [7, 1]
    assert trace.limits.max_context_tokens == 1_023 + 1 + 1


def test_a_multiple_of_the_pool_has_as_many_slots_whatever_the_page() -> None:
    trace = Trace([], 8, 16, 100, "lru", Limits(8, 256, 512), 1.0)
    found = settings_of(trace, ["1x", "0.5x", "7"], [8, 16, 32], [])
    assert [(each.page_size, each.num_pages) for each in found] == [
        (8, 200),
        (8, 100),
        (8, 7),
        (16, 100),
        (16, 50),
        (16, 7),
        (32, 50),
        (32, 25),
        (32, 7),
    ]


def test_who_comes_back_after_a_preemption_is_no_other_request() -> None:
    """Tokens that the last unit of a prompt does not have are taken from those that no page is for."""
    counts = Counts(Setting(8, 16, "lru"), resolution=8)
    counts.admit(SequenceStart(SequenceId(1), PrefixCounts(2, 4, 0, 1), 2, 0.5, False), excess=3)
    counts.admit(SequenceStart(SequenceId(1), None, 0, 9.0, True))
    assert (counts.num_requests, counts.queue_seconds, counts.lookups) == (1, [0.5], [(16, 53)])
    assert (counts.unaligned_tokens, counts.looked_up_tokens) == (5, 53)


def at_each_second(first: int, last: int) -> list[LoggedRequest]:
    """Requests of 20 tokens that took a second."""
    return [
        LoggedRequest(
            second * 1_000_000,
            0,
            SequenceId(second),
            f"r{second}",
            1,
            20,
            9,
            0,
            True,
            True,
            array("Q", [2 * second, 2 * second + 1]),
            ends=[
                LoggedEnd(
                    (second + 1) * 1_000_000, 0, SequenceId(second), 3, 1, 0, (0, 16, 0, 4), 0, array("Q")
                )
            ],
        )
        for second in range(first, last + 1)
    ]


STEPS = [
    StepCount(0, 0, 0.01 + 1e-4 * prompt + 1e-3 * decode, prompt, decode, 0)
    for prompt in range(0, 30, 3)
    for decode in range(5)
]


@pytest.mark.parametrize(
    ("is_whole", "window_s", "from_s", "count"),
    [
        (True, 0, 0, 7),
        (True, 100, 0, 7),  # longer than the worker lives
        (True, 4, 8, 2),
        (False, 0, 6, 4),  # the first third of nine seconds is its warm-up
        (False, 100, 6, 4),
        (False, 4, 8, 2),
    ],
)
def test_estimated_and_observed_are_of_the_same_stretch(
    is_whole: bool, window_s: int, from_s: int, count: int
) -> None:
    """Requests of the seconds 3 to 9 of twelve; one that comes where it begins is in it."""
    requests = at_each_second(3, 9)
    task = estimate_task(
        end_us=12_000_000,
        window_us=window_s * 1_000_000,
        is_whole=is_whole,
        steps=STEPS,
        looks=(),
        num_requests=len(requests),
    )
    found = estimate(task, requests)
    assert (found["start_us"], found["duration_us"]) == (from_s * 1_000_000, (12 - from_s) * 1_000_000)
    assert (found["request_count"], found["token_count"]) == (count, 20 * count)
    (today,), observed = found["estimates"], found["observed"]  # type: ignore[misc]
    for figures in (today, observed):
        assert [figures[name] for name in ("hit_tokens", "miss_cold_tokens", "unaligned_tokens")] == [
            0,
            16 * count,
            4 * count,
        ]
    # Twelve slots are empty behind the prompt, then eleven, while such steps last; then none to the end.
    wasted = 12 * (0.01 + 20 * 1e-4) + 11 * (0.01 + 1e-3)
    assert today["mean_wasted_slots"] == pytest.approx(count * wasted / (12 - from_s))


def question(num_requests: int, granularity: int, *settings: Setting) -> Question:
    requests = trace_requests(at_each_second(1, num_requests), 0, 512)
    trace = Trace(requests, granularity, 16, 100, "lru", Limits(8, 256, 512), 1.0)
    return Question(trace, MODEL, settings)


@pytest.mark.parametrize(
    ("num_requests", "granularity", "page_sizes", "resolution"),
    [
        (EXACT_REQUESTS, 8, (16,), 1),
        (EXACT_REQUESTS + 1, 8, (16,), COARSEST),
        (EXACT_REQUESTS + 1, 512, (512, 1024), COARSEST),
        (EXACT_REQUESTS + 1, 8, (16, 4), 4),
        (EXACT_REQUESTS + 1, 8, (16, 3), 1),
    ],
)
def test_units_divide_pages_and_keys_and_are_eight_tokens_at_most(
    num_requests: int, granularity: int, page_sizes: tuple[int, ...], resolution: int
) -> None:
    settings = [Setting(8, size, "lru") for size in page_sizes]
    assert resolution_of(question(num_requests, granularity, *settings)) == resolution


def test_what_makes_answers_less_than_exact_is_said_where_it_holds() -> None:
    trace = Trace([], 8, 16, 100, "lru", Limits(8, 256, 512), 1.0, cached=[CachedPage(1, None, 0)])
    as_large = [Setting(100, 16, "lru"), Setting(200, 8, "lru")]
    assert notes_of(trace, as_large, None) == []
    (larger,) = notes_of(trace, [*as_large, Setting(51, 32, "lru")], None)
    assert "warm" in larger
    (finer,) = notes_of(trace, [Setting(8, 12, "lru"), Setting(8, 4, "lru")], None)
    assert "pages of 4, 12 a prefix" in finer


def test_a_pool_of_one_page_is_a_setting_and_one_of_none_is_not() -> None:
    trace = Trace([], 8, 16, 100, "lru", Limits(8, 256, 512), 1.0)
    assert settings_of(trace, ["0.01x", "1"], [], []) == [Setting(1, 16, "lru")] * 2
    for text in ("0", "0.001x", "-1", "-1x"):
        with pytest.raises(BadQuestion, match="pages are not possible"):
            settings_of(trace, [text], [], [])
