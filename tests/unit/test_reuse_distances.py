"""Reuse distances from a sample of contents against those of all of them."""

import random
from itertools import accumulate

import pytest

from worker.pages.events import EventRing, PageEventKind
from worker.readers import reuse
from worker.readers.event_arrays import EventArrays
from worker.readers.ledger import Ledger
from worker.readers.reuse import ReuseDistances

NUM_PAGES = 6_000
NUM_USES = 32_000


def folded(seed: int) -> ReuseDistances:
    """Uses of contents of very different popularity, as page events."""
    draw = random.Random(seed)
    contents = [draw.getrandbits(64) | 1 for _ in range(8 * NUM_PAGES)]
    weights = list(accumulate(1 / (rank + 20) for rank in range(len(contents))))
    ledger, distances = Ledger(NUM_PAGES, 16), ReuseDistances(NUM_PAGES)
    ring = EventRing(1 << 16)
    for content in draw.choices(contents, cum_weights=weights, k=NUM_USES):
        ring.append(PageEventKind.SEALED, 0, 1, 1, tag=content)
    events = ring.read(0, NUM_USES)
    assert events is not None
    distances.fold(ledger, EventArrays(events))
    return distances


def curve(distances: ReuseDistances) -> list[float]:
    """Share of uses that a pool of each size of the table would have had."""
    ((counts, _),) = distances.frozen().values()
    total = sum(counts)
    assert total > 500
    return [seen / total for seen in accumulate(counts)]


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_of_contents_gives_the_curve_of_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARDS: within five points of the exact curve at every size, from a sixth of the contents."""
    sampled = folded(seed)
    assert 0.1 < sampled.rate < 0.2
    monkeypatch.setattr(reuse, "SAMPLED_PAGES", NUM_PAGES)
    exact = folded(seed)
    assert exact.rate == 1.0
    assert curve(sampled) == pytest.approx(curve(exact), abs=0.05)
    assert curve(exact)[3] < curve(exact)[7] - 0.1, "or there would be nothing to get wrong"


def test_what_is_remembered_is_bounded() -> None:
    distances = ReuseDistances(4)
    ring = EventRing(1 << 10)
    for content in range(1, 200):
        ring.append(PageEventKind.SEALED, 0, 1, 1, tag=content)
    for content in (199, 170, 1):  # just now; behind 29 others; long forgotten
        ring.append(PageEventKind.SEALED, 0, 1, 1, tag=content)
    events = ring.read(0)
    assert events is not None
    distances.fold(Ledger(4, 16), EventArrays(events))
    ((counts, total),) = distances.frozen().values()
    assert sum(counts) == 2
    assert total == 1 + 30
