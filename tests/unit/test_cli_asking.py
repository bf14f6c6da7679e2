"""From settings to a request and back to a line: what is not said stays unsaid, and the summary adds up."""

import pytest

from kvatlas.cli import config
from kvatlas.cli.asking import describe, sampling_options
from kvatlas.cli.exits import CommandFailed
from kvatlas.cli.pull import progress_line
from kvatlas.client.events import KvBill, Prefix, Summary, Timing, Usage
from kvatlas.client.request import build_spec
from kvatlas.models.progress import FetchProgress


def summary(prefix: Prefix | None, kv: KvBill, decode_seconds: float = 2.0) -> Summary:
    return Summary(Usage(20, 11, prefix, kv), Timing(0.0, 0.1, 0.25, decode_seconds))


def test_without_flags_nothing_is_set() -> None:
    settings = config.read(["generate", "hi"], {})
    assert sampling_options(settings) == {}


def test_every_sampling_flag_reaches_its_field() -> None:
    flags = [
        *("-n", "3", "-t", "0.5", "--top-p", "0.9", "--top-k", "4", "--min-p", "0.1", "--seed", "7"),
        *("--repetition-penalty", "1.1", "--frequency-penalty", "0.2", "--presence-penalty", "0.3"),
        *("--stop", "a", "--stop", "b", "--stop-token-id", "5", "--min-tokens", "1", "--ignore-eos"),
        *("--include-stop", "--logit-bias", "3=-1.5", "--max-duration", "2.5", "--no-cache-read"),
        *("--no-cache-write", "--salt", "s", "--priority", "-3", "--queue-timeout", "1"),
    ]
    spec = build_spec("hi", sampling_options(config.read(["generate", "hi", *flags], {})))
    sampling, stop = spec.sampling, spec.stop
    assert (stop.max_tokens, stop.min_tokens, stop.ignore_eos, stop.include_stop_in_output) == (
        3,
        1,
        True,
        True,
    )
    assert (list(stop.stop_strings), list(stop.stop_token_ids)) == (["a", "b"], [5])
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 4, 7)
    assert [round(value, 3) for value in (sampling.top_p, sampling.min_p, sampling.repetition_penalty)] == [
        0.9,
        0.1,
        1.1,
    ]
    assert [round(value, 3) for value in (sampling.frequency_penalty, sampling.presence_penalty)] == [
        0.2,
        0.3,
    ]
    assert dict(sampling.logit_bias) == {3: -1.5}
    assert stop.max_duration.ToMilliseconds() == 2500
    assert (spec.cache.read, spec.cache.write, spec.cache.salt) == (False, False, "s")
    assert spec.cache.HasField("read")  # what is unsaid reads as False, and is on
    assert spec.cache.HasField("write")
    assert (spec.scheduling.priority, spec.scheduling.queue_timeout.ToSeconds()) == (-3, 1)


@pytest.mark.parametrize("pair", ["5", "x=1", "5=much", "="])
def test_a_bias_that_is_no_pair_is_refused(pair: str) -> None:
    settings = config.read(["generate", "hi", "--logit-bias", pair], {})
    with pytest.raises(CommandFailed, match="is not ID=X"):
        sampling_options(settings)


def test_the_summary_tells_cache_speed_and_pages() -> None:
    lines = describe(summary(Prefix(16, 0, 0, 4), KvBill(page_seconds=1.5, peak_pages=3, reused_pages=1)))
    assert lines == [
        "prompt 20 tokens, 16 of them from cached pages · answer 11 tokens"
        " · first after 250 ms, then 5.0 tokens/s",
        "pages: 3 at most, 1 from the cache · 1.50 page-seconds",
    ]


def test_the_summary_tells_trouble_and_what_was_not_looked_up() -> None:
    bill = KvBill(peak_pages=3, copied_pages=2, preemptions=1, recomputed_tokens=9)
    lines = describe(summary(None, bill, decode_seconds=0.0))
    assert "cache not looked up" in lines[0]
    assert "tokens/s" not in lines[0]
    assert "2 copied" in lines[1]
    assert "1 preemption, 9 tokens computed again" in lines[1]
    assert "resumed" not in lines[1]
    assert describe(Summary(Usage(20, 1, None, bill, resumes=3), Timing(0, 0, 0.25, 2.0)))[1].endswith(
        " · resumed 3 times"
    )
    assert describe(summary(None, bill), client_resumes=2)[2].endswith("went on (2 times)")
    assert "5 had been evicted" in describe(summary(Prefix(0, 10, 5, 5), bill))[0]


def test_progress_tells_how_far_it_is() -> None:
    line = progress_line(FetchProgress("file", "download", 25_000_000, 100_000_000))
    assert line == f"download [{'█' * 6:24}]  25%  25.0 of 100.0 MB  file"
    assert progress_line(FetchProgress("file", "wait", 0, 0)) == "wait     0.0 MB  file"
