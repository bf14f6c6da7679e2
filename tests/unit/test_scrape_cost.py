"""What a scrape costs: nothing that grows with pages or with requests served."""

import time

from prometheus_client import CollectorRegistry, generate_latest

from tests.quiet_turn import quiet_turn
from worker.channels import Handover
from worker.description import ModelDescription, PoolDescription, WorkerDescription
from worker.pages.events import EventRing, PageEventKind
from worker.readers.metrics import WorkerCollector
from worker.readers.observation import Observation
from worker.readers.observer import Fold, Observer
from worker.stats import PoolTotals, StepStats

NUM_PAGES = 1_000_000
MOST_SECONDS = 0.020


class Nowhere:
    """A sink that publishes nothing."""

    dropped_events = 0

    def open(self) -> None:
        pass

    def publish(self, fold: Fold, pool: PoolTotals, now: float) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Served:
    """An observer of a large pool, and the registry over it."""

    def __init__(self) -> None:
        self.ring = EventRing()
        self.handover: Handover[Observation] = Handover(10)
        self.observer = Observer(
            self.ring,
            self.handover,
            num_pages=NUM_PAGES,
            page_size=16,
            ask_for_snapshot=lambda: None,
            on_load=lambda load: None,
            on_failure=lambda: None,
            sink=Nowhere(),
        )
        pool = PoolDescription(NUM_PAGES, 16, 256, 4096, "lru")
        description = WorkerDescription("w", 1, ModelDescription("m", 9, 32), pool, 1, 32, 0, (), "", b"")
        self.registry = CollectorRegistry()
        WorkerCollector(
            self.registry,
            description,
            view=lambda: self.observer.metrics,
            mismatches=lambda: 0,
            watermark_pages=10_000,
        )

    def serve(self, num_requests: int) -> None:
        """So many requests of one page each come and go, and as many steps."""
        for number in range(num_requests):
            self.ring.time_us += 100
            page = number % NUM_PAGES
            self.ring.append(PageEventKind.ALLOCATED, page, 1, 1)
            self.ring.append(PageEventKind.RELEASED, page, 1, 0)
            self.ring.append(PageEventKind.FREED, page, 1, 0)
        observation = quiet_turn(
            revision=self.ring.number,
            time_us=self.ring.time_us,
            steps=[StepStats(1, 0.01, 1, 0, 1)] * num_requests,
            bills=[0.5] * num_requests,
        )
        assert self.handover.put(observation)
        self.observer.turn()

    def scrape(self) -> tuple[float, str]:
        """Processor time of the shortest of a few, and what it says."""
        times, text = [], ""
        for _ in range(5):
            began = time.thread_time()
            text = generate_latest(self.registry).decode()
            times.append(time.thread_time() - began)
        return min(times), text


def test_a_scrape_of_a_million_pages_is_short_and_flat_in_requests_served() -> None:
    served = Served()
    served.serve(100)
    first_seconds, first = served.scrape()
    for _ in range(10):
        served.serve(5_000)
    last_seconds, last = served.scrape()
    assert 'kvatlas_pages{state="free"} 1e+06' in last
    assert "kvatlas_request_page_seconds_count 50100.0" in last
    assert 'kvatlas_page_lifetime_seconds_count{end="freed"} 50100.0' in last
    assert first_seconds < MOST_SECONDS
    assert last_seconds < MOST_SECONDS
    assert len(first.splitlines()) == len(last.splitlines())
    assert len(last) < len(first) + 1_000  # digits
