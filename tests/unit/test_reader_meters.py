"""Figures of readers at their edges: one page, a clock set back, turns far apart, memory not known."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from worker.pages.events import HIT_TAG, EventColumns, PageEventKind
from worker.readers.buckets import Buckets
from worker.readers.constraint_meter import ConstraintMeter
from worker.readers.event_arrays import EventArrays
from worker.readers.ledger import Ledger
from worker.readers.lives import PageLives
from worker.readers.load import LoadMeter
from worker.readers.memory import READ_SECONDS, MemoryMeter
from worker.readers.metric_table import BANDS, MEMORY_KINDS
from worker.readers.pressure import PressureMeter
from worker.readers.reuse import REMEMBERED_POOLS, SAMPLED_PAGES, ReuseDistances
from worker.readers.step_meter import StepMeter
from worker.stats import EngineCounts, PoolTotals, StepStats

Kind = PageEventKind
POOL = PoolTotals(0, 0, 1, 0, 0, 0, 1)


def columns(first: int, *events: tuple[Kind, int, int, int, int]) -> EventArrays:
    """Kind, page, references after it, tag and time of each."""
    count = len(events)
    return EventArrays(
        EventColumns(
            first,
            bytes(event[0] for event in events),
            array("I", [event[1] for event in events]),
            array("H", [1]) * count,
            array("H", [event[2] for event in events]),
            array("I", [0]) * count,
            array("Q", [event[3] for event in events]),
            array("Q", [1]) * count,
            array("Q", [event[4] for event in events]),
            (),
        )
    )


def test_rates_after_a_long_turn_are_over_that_turn() -> None:
    """They were 0: of samples within ten seconds there was only the one just taken."""
    meter = LoadMeter(0.0)
    meter.step(StepStats(1, 0.5, 1, 0, 1))
    counts = EngineCounts(output_tokens_total=1000, prompt_tokens_computed_total=3000)
    load = meter.view(100.0, counts, POOL)
    assert (load.output_tokens_per_second, load.prompt_tokens_per_second) == (10.0, 30.0)
    assert load.mean_step_seconds == 0.5


def test_rates_of_turns_close_together_are_over_half_a_second_at_least() -> None:
    """A turn follows another within a millisecond; one token then is not a thousand a second."""
    meter = LoadMeter(0.0)
    load = meter.view(0.001, EngineCounts(output_tokens_total=1), POOL)
    assert load.output_tokens_per_second == 2.0
    load = meter.view(0.6, EngineCounts(output_tokens_total=6), POOL)
    assert load.output_tokens_per_second == 10.0


def test_rates_forget_what_is_ten_seconds_old() -> None:
    meter = LoadMeter(0.0)
    for half in range(101):
        prompt = 100 * half if half <= 60 else 6000 + 10 * (half - 60)
        load = meter.view(half / 2, EngineCounts(prompt_tokens_computed_total=prompt), POOL)
    assert load.prompt_tokens_per_second == 20.0


@pytest.mark.parametrize("kind", ["miss_cold", "miss_evicted", "unaligned"])
def test_each_token_that_was_no_hit_is_a_miss_for_a_minute(kind: str) -> None:
    meter = LoadMeter(0.0)
    for half in range(401):
        found = {f"{kind}_tokens_total": 30 * min(half, 200), "hit_tokens_total": 10 * half}
        load = meter.view(half / 2, EngineCounts(**found), POOL)
        if half in (200, 300):
            shares = load.prefix_hit_rate
            assert shares == pytest.approx(0.25 if half == 200 else 1200 / (1200 + 600), abs=1e-9)
    assert load.prefix_hit_rate == 1.0, "hits alone for more than a minute"


def test_memory_is_read_every_five_seconds_and_what_is_not_known_is_zero(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meter = MemoryMeter()
    meter.look(0.0)
    assert meter.bytes_by_kind == dict.fromkeys(MEMORY_KINDS, 0)
    answers: list[dict[str, int] | Exception] = [{"weights": 7, "free": -1}, OSError("gone"), {"weights": 9}]
    asked: list[float] = []

    def read() -> dict[str, int]:
        found = answers[len(asked)]
        asked.append(now)
        if isinstance(found, Exception):
            raise found
        return found

    meter.read_from(read)
    for now in (1.0, 1.0 + READ_SECONDS - 0.1, 1.0 + READ_SECONDS, 2.0 + READ_SECONDS):
        meter.look(now)
        assert meter.bytes_by_kind == dict.fromkeys(MEMORY_KINDS, 0) | {"weights": 7}
    assert asked == [1.0, 1.0 + READ_SECONDS], "one that failed is not asked again at once"
    assert caplog.text.count("event=memory_unknown") == 1
    now = 1.0 + 2 * READ_SECONDS
    meter.look(now)
    assert meter.bytes_by_kind["weights"] == 9


@pytest.mark.parametrize("watermark", [0, 1])
def test_a_pool_of_one_page_is_exhausted_or_well(watermark: int) -> None:
    ledger, meter = Ledger(1, 16), PressureMeter(1, watermark)
    taken, given = (Kind.ALLOCATED, 0, 1, 0, 2_000_000), (Kind.FREED, 0, 0, 0, 5_000_000)
    meter.fold(ledger, columns(1, taken, given))
    meter.run_to(6_000_000)
    assert meter.seconds() == {"ok": 3.0, "low": 0.0, "critical": 0.0, "exhausted": 3.0}


@pytest.mark.parametrize(
    ("num_pages", "watermark", "bands"),
    [
        (4, 0, ("ok", "ok", "ok", "ok", "exhausted")),
        (10, 0, ("ok",) * 9 + ("low", "exhausted")),
        (10, 3, ("ok",) * 8 + ("critical", "critical", "exhausted")),
        (10, 2, ("ok",) * 9 + ("critical", "exhausted")),
        (10, 10, ("ok",) + ("critical",) * 9 + ("exhausted",)),
    ],
)
def test_bands_begin_below_their_edges(num_pages: int, watermark: int, bands: Sequence[str]) -> None:
    """Fewer than a fifth: low, than the watermark: critical, none: exhausted; one page less a second."""
    meter = PressureMeter(num_pages, watermark)
    events = [(Kind.ALLOCATED, page, 1, 0, (page + 1) * 1_000_000) for page in range(num_pages)]
    meter.fold(Ledger(num_pages, 16), columns(1, *events))
    meter.run_to((num_pages + 1) * 1_000_000)
    assert meter.seconds() == {band: float(bands.count(band)) for band in BANDS}


def test_no_band_loses_time_where_the_clock_is_set_back() -> None:
    """Counters that fall are taken for a restart."""
    ledger, meter = Ledger(1, 16), PressureMeter(1, 0)
    meter.run_to(5_000_000)
    meter.run_to(3_000_000)
    back, again = (Kind.ALLOCATED, 0, 1, 0, 4_000_000), (Kind.FREED, 0, 0, 0, 3_000_000)
    meter.fold(ledger, columns(1, back, again))
    assert meter.seconds() == {"ok": 5.0, "low": 0.0, "critical": 0.0, "exhausted": 0.0}
    meter.fold(ledger, columns(3, (Kind.ALLOCATED, 0, 1, 0, 4_500_000), (Kind.FREED, 0, 0, 0, 7_000_000)))
    assert meter.seconds() == {"ok": 5.0, "low": 0.0, "critical": 0.0, "exhausted": 2.0}


def sealed(first: int, *contents: int) -> EventArrays:
    return columns(first, *[(Kind.SEALED, 0, 1, content, 0) for content in contents])


def test_of_one_page_eight_contents_are_remembered_and_the_one_used_last_longest() -> None:
    ledger, meter = Ledger(1, 16), ReuseDistances(1)
    meter.fold(ledger, sealed(1, *range(1, REMEMBERED_POOLS + 1), 1, 99))  # 99 takes the place of 2
    meter.fold(ledger, sealed(11, 1, 2, 99))
    ((counts, total),) = meter.frozen().values()
    assert (sum(counts), total) == (3, 8.0 + 2.0 + 3.0)


def test_what_has_no_fingerprint_is_no_content() -> None:
    """A hit on a page whose seal was lost with other events."""
    meter = ReuseDistances(4)
    hit = (Kind.SHARED, 2, 2, HIT_TAG, 0)
    meter.fold(Ledger(4, 16), columns(1, hit, hit))
    ((counts, _),) = meter.frozen().values()
    assert sum(counts) == 0


def test_a_copy_of_buckets_is_made_anew_after_each_value() -> None:
    buckets = Buckets((1.0,))
    assert buckets.frozen() == ((0, 0), 0.0)
    buckets.observe(1.0)
    assert buckets.frozen() == ((1, 0), 1.0)
    assert buckets.frozen() is buckets.frozen()
    buckets.observe_all(np.array([0.5, 3.0]))
    assert buckets.frozen() == ((2, 1), 4.5)


def test_steps_are_counted_by_phase_size_and_how_they_ran() -> None:
    meter = StepMeter()
    meter.step(StepStats(1, 0.5, 2, 300, 0))
    meter.step(StepStats(2, 0.25, 3, 0, 3, is_replayed=True))
    meter.step(StepStats(3, 0.125, 9, 20, 8, is_replayed=True))
    meter.check(0.001)
    meter.bills((2.0, 4.0))
    found = {key: (sum(counts), total) for key, (counts, total) in meter.frozen().items()}
    assert found == {
        ("step_seconds", ("prefill",)): (1, 0.5),
        ("step_seconds", ("decode",)): (1, 0.25),
        ("step_seconds", ("mixed",)): (1, 0.125),
        ("step_tokens", ()): (3, 331.0),
        ("step_sequences", ()): (3, 14.0),
        ("integrity_check_seconds", ()): (1, 0.001),
        ("request_page_seconds", ()): (2, 6.0),
    }
    assert meter.graphs == (2, 1)


def test_constraints_are_counted_by_where_they_came_from_and_masks_by_row() -> None:
    meter = ConstraintMeter()
    meter.compiled(0.5)
    meter.found()
    meter.found()
    meter.masks(4, 0.5)
    assert meter.lookups == {("hit",): 2, ("miss",): 1}
    found = {key[0]: (sum(counts), total) for key, (counts, total) in meter.frozen().items()}
    assert found == {"constraint_compile_seconds": (1, 0.5), "constraint_mask_seconds": (1, 0.125)}


def test_of_a_large_pool_as_many_contents_are_remembered_as_eight_samples_of_it_have() -> None:
    ledger, meter = Ledger(2 * SAMPLED_PAGES, 16), ReuseDistances(2 * SAMPLED_PAGES)
    kept = REMEMBERED_POOLS * SAMPLED_PAGES
    meter.fold(ledger, sealed(1, *range(1, kept + 2), 1))
    ((counts, _),) = meter.frozen().values()
    assert sum(counts) == 0, "the first is forgotten"
    meter.fold(ledger, sealed(kept + 3, kept + 1))
    ((counts, total),) = meter.frozen().values()
    assert (sum(counts), total) == (1, 3.0), "one other of a sample of half, itself included"


LIFE = [(Kind.ALLOCATED, 1), (Kind.SEALED, 1), (Kind.RELEASED, 0), (Kind.CACHED, 0), (Kind.EVICTED, 0)]


def lives_of(meter: PageLives) -> dict[str, tuple[int, float]]:
    found = meter.frozen()
    ends = {end: found["page_lifetime_seconds", (end,)] for end in ("freed", "evicted")}
    return {end: (sum(counts), total) for end, (counts, total) in ends.items()}


def test_after_a_loss_a_page_that_was_evicted_before_it_has_another_life() -> None:
    """What frees it later is the end of that, not of the one that was counted as evicted."""
    meter, ledger = PageLives(1), Ledger(1, 16)
    meter.fold(ledger, columns(1, *[(kind, 0, refs, 5, 1_000_000) for kind, refs in LIFE]))
    meter.restart()
    ledger.fold_arrays(columns(1, (Kind.ALLOCATED, 0, 1, 0, 4_000_000)))
    meter.fold(ledger, columns(2, (Kind.RELEASED, 0, 0, 0, 6_000_000), (Kind.FREED, 0, 0, 0, 6_000_000)))
    assert lives_of(meter) == {"freed": (1, 2.0), "evicted": (1, 0.0)}


@pytest.mark.parametrize("cut", [0, 1])
def test_a_life_over_the_wrap_of_milliseconds_has_its_length(cut: int) -> None:
    """32 bits of them are 49.7 days; in one batch or in two."""
    wrap_us = (1 << 32) * 1000
    meter, ledger = PageLives(1), Ledger(1, 16)
    events = [(Kind.ALLOCATED, 0, 1, 0, wrap_us - 500_000), (Kind.RELEASED, 0, 0, 0, wrap_us + 1_500_000)]
    events.append((Kind.FREED, 0, 0, 0, wrap_us + 1_500_000))
    for batch in (columns(1, *events[:cut]), columns(1 + cut, *events[cut:])):
        meter.fold(ledger, batch)
        ledger.fold_arrays(batch)
    assert lives_of(meter) == {"freed": (1, 2.0), "evicted": (0, 0.0)}
    assert ledger.used_ms.tolist() == [1500, 0]


def test_after_a_loss_cached_pages_are_available() -> None:
    meter, ledger = PressureMeter(1, 0), Ledger(1, 16)
    meter.fold(ledger, columns(1, (Kind.ALLOCATED, 0, 1, 0, 1_000_000)))
    meter.run_to(2_000_000)
    ledger.fold_arrays(columns(1, *[(kind, 0, refs, 5, 0) for kind, refs in LIFE[:-1]]))
    meter.restart(ledger)
    meter.run_to(5_000_000)
    assert meter.seconds() == {"ok": 4.0, "low": 0.0, "critical": 0.0, "exhausted": 1.0}
