"""What the times of one request become in the metrics, value by value, on a clock of the test's own."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from service.handlers.account import MAX_EVENTS, RequestAccount
from service.metrics import ServiceMetrics
from service.request import PrefixCounts, SequenceStart

Sums = Callable[[str], tuple[float, float]]


@pytest.fixture
def metrics() -> ServiceMetrics:
    return ServiceMetrics(CollectorRegistry(), version="0", commit="")


@pytest.fixture
def sums(metrics: ServiceMetrics) -> Sums:
    """How often a histogram was told something, and the sum of it."""

    def read(name: str) -> tuple[float, float]:
        value = metrics.registry.get_sample_value
        count, total = value(f"kvatlas_{name}_count"), value(f"kvatlas_{name}_sum")
        assert count is not None
        assert total is not None
        return count, total

    return read


def start_with(hit_tokens: int) -> SequenceStart:
    return SequenceStart(1, PrefixCounts(hit_tokens, 2, 0, 1), reused_pages=1, queue_us=0, resumed=False)


def test_admission_is_counted_from_the_receipt_with_what_the_cache_had(
    metrics: ServiceMetrics, sums: Sums
) -> None:
    account = RequestAccount(metrics, received=100.0)
    assert account.queue_seconds == 0.0
    account.admitted(101.5, prompt_tokens=7, start=start_with(4))
    assert account.queue_seconds == 1.5
    assert sums("request_queue_seconds") == (1, 1.5)
    assert sums("request_prompt_tokens") == (1, 7)
    assert sums("request_cached_tokens") == (1, 4)
    assert metrics.registry.get_sample_value("kvatlas_prompt_tokens_total") == 7


def test_what_was_not_looked_up_says_nothing_of_the_cache(metrics: ServiceMetrics, sums: Sums) -> None:
    RequestAccount(metrics, received=100.0).admitted(101.0, prompt_tokens=7, start=None)
    assert sums("request_prompt_tokens") == (1, 7)
    assert sums("request_cached_tokens") == (0, 0)


def test_latencies_of_tokens_are_each_samples_own(metrics: ServiceMetrics, sums: Sums) -> None:
    account = RequestAccount(metrics, received=100.0)
    account.admitted(101.5, prompt_tokens=1, start=None)
    account.tokens(0, 1, 102.0, are_sent=True)
    account.tokens(1, 1, 102.125, are_sent=True)  # the first of another sample follows nothing
    account.tokens(0, 2, 102.25, are_sent=True)
    account.tokens(1, 1, 103.0, are_sent=True)
    assert sums("time_to_first_token_seconds") == (1, 2.0)
    assert sums("request_prefill_seconds") == (1, 0.5)
    assert sums("inter_token_latency_seconds") == (2, 0.25 + 0.875)
    assert metrics.registry.get_sample_value("kvatlas_generated_tokens_total") == 5


def test_tokens_that_are_put_by_have_no_latency_between_them(metrics: ServiceMetrics, sums: Sums) -> None:
    account = RequestAccount(metrics, received=100.0)
    account.tokens(0, 1, 101.0, are_sent=False)
    account.tokens(0, 1, 102.0, are_sent=False)
    assert sums("time_to_first_token_seconds") == (1, 1.0)
    assert sums("request_prefill_seconds") == (0, 0), "its admission was not told"
    assert sums("inter_token_latency_seconds") == (0, 0)


def test_the_end_tells_all_tokens_and_the_time_of_one_in_the_longest_sample(
    metrics: ServiceMetrics, sums: Sums
) -> None:
    account = RequestAccount(metrics, received=100.0)
    account.admitted(101.0, prompt_tokens=1, start=None)
    account.tokens(0, 1, 102.0, are_sent=True)
    account.tokens(0, 4, 104.0, are_sent=True)
    account.ended("completed", 106.0, [5, 2])
    assert sums("request_generated_tokens") == (1, 7)
    assert sums("request_time_per_output_token_seconds") == (1, 0.5)  # 2 s for the four behind the first
    value = metrics.registry.get_sample_value
    assert value("kvatlas_requests_total", {"outcome": "completed"}) == 1
    assert value("kvatlas_request_duration_seconds_sum", {"outcome": "completed"}) == 6.0


def test_a_single_token_has_no_time_between_tokens(metrics: ServiceMetrics, sums: Sums) -> None:
    account = RequestAccount(metrics, received=100.0)
    account.admitted(101.0, prompt_tokens=1, start=None)
    account.tokens(0, 1, 102.0, are_sent=True)
    account.ended("completed", 103.0, [1])
    assert sums("request_generated_tokens") == (1, 1)
    assert sums("request_time_per_output_token_seconds") == (0, 0)


def test_what_was_never_admitted_has_an_outcome_and_a_duration_alone(
    metrics: ServiceMetrics, sums: Sums
) -> None:
    RequestAccount(metrics, received=100.0).ended("rejected", 100.25, [])
    value = metrics.registry.get_sample_value
    assert value("kvatlas_requests_total", {"outcome": "rejected"}) == 1
    assert value("kvatlas_request_duration_seconds_sum", {"outcome": "rejected"}) == 0.25
    assert sums("request_generated_tokens") == (0, 0)
    assert sums("request_queue_seconds") == (0, 0)


def test_only_a_write_that_stalls_is_counted(metrics: ServiceMetrics) -> None:
    account = RequestAccount(metrics, received=100.0)
    account.written(0.1)
    account.written(0.25)
    assert metrics.registry.get_sample_value("kvatlas_stream_send_blocked_seconds_total") == 0.25


def test_of_a_request_that_is_preempted_for_ever_so_many_events_are_kept(metrics: ServiceMetrics) -> None:
    account = RequestAccount(metrics, received=100.0)
    for number in range(MAX_EVENTS + 1):
        account.happened("readmitted", 100.0 + number, waited_seconds=0.5)
    assert len(account.events) == MAX_EVENTS
    assert account.events[-1] == ("readmitted", 99.0 + MAX_EVENTS, {"waited_seconds": 0.5})
