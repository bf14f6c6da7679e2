"""What the host pays for a step: `python -m benchmarks.control_plane`.

The real scheduler, page pool and prefix trie without a device: tokens are handed to commit as if a
runner had made them. Measured is schedule, commit and taking the outputs, in microseconds a step; the
budget is 400 us at 256 running sequences. Every pool is full when measuring starts: what is not in use
is cached, so each page that is allocated is evicted first, as on a server that has been up for a while.

Beside it stand one snapshot of the pool, one round of the live audit (2048 pages), and a whole one.

steady: every sequence takes one token in each step; none ends.
churn:  sequences end after 64 to 192 tokens, and others with fresh prompts take their places.
"""

import argparse
import gc
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from benchmarks.record import percentile, write_result
from worker.ids import SequenceId
from worker.pages.page_cache import CacheConfig
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.scheduling.step import Step, StepResult

EOS = frozenset({1, 2})
AUDIT_PAGES = 2048  # of one round of the live audit


@dataclass(frozen=True)
class Case:
    """One line of the table. ``shared``: tokens of the prompts that are the same in all of them."""

    mode: str
    sequences: int
    context: int
    shared: int
    pages: int
    page_size: int = 16
    policy: str = "lru"

    @property
    def name(self) -> str:
        """For the table."""
        share = f", {self.shared} shared" if self.shared else ""
        return f"{self.mode} {self.sequences} x {self.context}{share}"


class Load:
    """A scheduler under a constant number of sequences."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.random = random.Random(seed)
        cache = CacheConfig(case.pages, case.page_size, eviction_policy=case.policy, fingerprint_key=b"bench")
        config = SchedulerConfig(
            cache,
            max_running=case.sequences,
            max_step_tokens=max(8192, 2 * case.sequences),
            max_context_tokens=case.context + 4096,
            max_queued_requests=2 * case.sequences,
            eos_token_ids=EOS,
        )
        self.scheduler = Scheduler(config)
        self.common = self._tokens(case.shared)
        self.next_id = 1
        self.now = 0.0

    def _tokens(self, count: int) -> "array[int]":
        return array("I", [self.random.randrange(3, 150_000) for _ in range(count)])

    def add(self) -> None:
        """One more request."""
        case = self.case
        own = case.context - case.shared
        if case.mode == "churn":
            max_tokens = self.random.randint(64, 192)
            own -= 64
        else:
            max_tokens = 4000
            own -= self.random.randrange(case.page_size)  # or all would touch page edges in the same step
        spec = RequestSpec(
            SequenceId(self.next_id),
            self.common + self._tokens(own),
            SamplingParams(max_tokens=max_tokens),
            source="bench",
        )
        self.next_id += 1
        outcome = self.scheduler.add(spec, self.now)
        assert outcome.status == AddStatus.ACCEPTED, outcome

    def fill_with_cached_pages(self) -> None:
        """Chains of 64 pages that nobody refers to, until nothing is free."""
        cache, size = self.scheduler.cache, self.case.page_size
        number = 1_000_000
        while cache.pool.num_free:
            pages = cache.allocate(array("H", (1,)) * min(64, cache.pool.num_free))
            assert pages is not None
            parent: int | None = None
            for page in pages:
                number += 1
                parent = cache.seal(page, parent, b"", array("I", (number,)).tobytes() * size, 1)
            cache.release(pages, 1)

    def step(self) -> tuple[float, float, Step]:
        """Seconds of schedule and of commit with the outputs taken."""
        self.now += 0.01
        begin = perf_counter()
        step = self.scheduler.schedule(self.now)
        planned = perf_counter()
        assert step is not None
        result = StepResult([3 + at for at in range(len(step.sampled))])
        launched = perf_counter()
        self.scheduler.commit(step, result, self.now)
        outputs = self.scheduler.take_outputs()
        done = perf_counter()
        if self.case.mode == "churn":
            for columns in outputs.values():
                for _ in columns.ends:
                    self.add()
        return planned - begin, done - launched, step

    def warm_up(self) -> None:
        """All sequences decode, and the pool is full."""
        for _ in range(self.case.sequences):
            self.add()
        while self.scheduler.counts().running_sequences < self.case.sequences or self._prefilling():
            self.step()
        self.fill_with_cached_pages()
        for _ in range(40):
            self.step()

    def _prefilling(self) -> bool:
        return self.case.mode == "steady" and self.step()[2].num_decode < self.case.sequences


def milliseconds(call: Callable[[], object]) -> float:
    """What one call takes."""
    begin = perf_counter()
    call()
    return (perf_counter() - begin) * 1e3


def measure(case: Case, num_steps: int) -> dict[str, object]:
    """One case."""
    load = Load(case, seed=7)
    load.warm_up()
    gc.collect()
    gc.freeze()
    schedule: list[float] = []
    commit: list[float] = []
    prompts = 0
    events = load.scheduler.cache.events.number
    for _ in range(num_steps):
        planning, committing, step = load.step()
        schedule.append(planning * 1e6)
        commit.append(committing * 1e6)
        prompts += step.num_decode < len(step.rows)
    both = [one + other for one, other in zip(schedule, commit, strict=True)]
    gc.unfreeze()
    snapshot_ms = milliseconds(load.scheduler.snapshot)
    audit_ms = milliseconds(lambda: load.scheduler.check(AUDIT_PAGES))
    full_audit_ms = milliseconds(load.scheduler.check)
    assert load.scheduler.check() == []
    return {
        "case": case.name,
        "pages": case.pages,
        "page_size": case.page_size,
        "policy": case.policy,
        "steps": num_steps,
        "steps_with_prompts": prompts,
        "events_per_step": (load.scheduler.cache.events.number - events) / num_steps,
        "schedule_us": percentile(schedule, 0.5),
        "commit_us": percentile(commit, 0.5),
        "step_us": percentile(both, 0.5),
        "step_us_p10": percentile(both, 0.1),
        "step_us_p90": percentile(both, 0.9),
        "step_us_mean": sum(both) / len(both),
        "snapshot_ms": snapshot_ms,
        "audit_ms": audit_ms,
        "full_audit_ms": full_audit_ms,
    }


def cases(quick: bool) -> list[Case]:
    """What is measured."""
    small, middle, large = 10_000, 100_000, 1_000_000
    found = [Case("steady", 256, 4000, 3880, pages) for pages in (small, middle, large)]
    found += [Case("steady", 256, context, context - 400, middle) for context in (1000, 16_000)]
    found += [Case("steady", 256, 4000, 0, middle), Case("churn", 256, 1000, 500, middle)]
    if quick:
        return found[:2]
    found += [Case("steady", 256, 4000, 0, large)]
    found += [Case("steady", 256, 4000, 3880, middle, page_size=size) for size in (1, 64)]
    found += [Case("steady", 256, 4000, 3880, middle, policy=name) for name in ("lfu", "fifo", "cost")]
    found += [Case("steady", 4096, 1000, 984, pages) for pages in (middle, large)]
    found += [Case("steady", 4096, 1000, 0, large), Case("churn", 4096, 1000, 900, large)]
    return found


def main() -> None:
    """Measures all cases, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="measured steps of each case")
    parser.add_argument("--quick", action="store_true", help="two cases, nothing written")
    arguments = parser.parse_args()
    lines = []
    print(
        f"{'case':34} {'pages':>9} {'size':>4} {'policy':>6} {'schedule':>8} {'commit':>8} {'step':>8}",
        end="",
    )
    print(
        f" {'p10':>8} {'p90':>8} {'mean':>8} {'events':>7} {'snapshot':>9} {'audit':>7} {'whole':>7}  us; ms"
    )
    for case in cases(arguments.quick):
        line = measure(case, arguments.steps)
        lines.append(line)
        print(f"{case.name:34} {case.pages:9} {case.page_size:4} {case.policy:>6}", end="")
        for key in ("schedule_us", "commit_us", "step_us", "step_us_p10", "step_us_p90", "step_us_mean"):
            print(f" {line[key]:8.0f}", end="")
        print(f" {line['events_per_step']:7.1f} {line['snapshot_ms']:9.1f}", end="")
        print(f" {line['audit_ms']:7.1f} {line['full_audit_ms']:7.1f}", flush=True)
    if not arguments.quick:
        print(write_result("control_plane", {"cases": lines}, []))


if __name__ == "__main__":
    main()
