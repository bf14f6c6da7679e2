"""Who stops, who passes whom: the order in which sequences are served, seen from outside, over random loads.

The rank is computed here once more: arrival less what the priority is worth, then number of arrival.
"""

import random
from dataclasses import dataclass, field

import pytest

from worker.execution.fake_runner import FakeModel
from worker.execution.testing import Harness, small_config
from worker.ids import SequenceId
from worker.scheduling.request import AddStatus, RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.stats import SequenceView

AGING_SECONDS = 0.5
Rank = tuple[float, int]


@dataclass
class Load:
    """Requests on a pool that is short of pages and of rows."""

    seed: int
    overlap: bool
    ranks: dict[int, Rank] = field(default_factory=dict)  # by sequence
    passed: dict[int, int] = field(default_factory=dict)  # by what waits: later ones that were let in
    num_preempted: int = 0
    num_resumed: int = 0  # preempted ones that were let in beside others

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self.max_skips, self.watermark = draw.choice([0, 1, 3]), draw.choice([0, 0, 4])
        config = small_config(
            num_pages=draw.choice([10, 12, 16, 24]),
            max_running=draw.choice([3, 6, 8]),
            max_step_tokens=draw.choice([12, 24, 64]),
            max_context_tokens=40,
            max_skips=self.max_skips,
            watermark_pages=self.watermark,
            max_scanned=draw.choice([1, 2, 8]),
            aging_seconds=AGING_SECONDS,
            sharing=draw.random() < 0.7,
        )
        self.harness = Harness(config, FakeModel(50), overlap=self.overlap, audit=False)
        self.next_id = 1

    def add(self) -> None:
        draw, now = self.draw, self.harness.now
        samples = draw.choice([1, 1, 1, 3])
        prompt = [draw.randrange(3) for _ in range(draw.choice([1, 3, 9, 20, 30]))]
        spec = RequestSpec(
            SequenceId(self.next_id),
            prompt,
            SamplingParams(max_tokens=draw.choice([2, 8, 30]), temperature=1.0),
            sample_count=samples,
            priority=draw.choice([0, 0, 0, 1, -1]),
        )
        if self.harness.add(spec).status == AddStatus.ACCEPTED:
            for number in range(samples):
                self.ranks[self.next_id + number] = (
                    now - spec.priority * AGING_SECONDS,
                    self.next_id + number,
                )
        self.next_id += samples

    def views(self) -> dict[int, SequenceView]:
        return {view.sequence_id: view for view in self.harness.scheduler.sequence_views()}

    def turn(self) -> None:
        """A turn of the engine; compares what it did with the ranks."""
        before = self.views()
        starts = {number: answer.num_starts for number, answer in self.harness.answers.items()}
        if self.harness.launch() is None:
            self.harness.settle()
        after = self.views()
        self._check_victims(before, after)
        answers = self.harness.answers
        admitted = [number for number in starts if answers[number].num_starts > starts[number]]
        for number in admitted:
            self._count_passed(number, before, after)
        if len(admitted) == 1 and admitted[0] in after:
            self._check_room_left(after[admitted[0]], before, after)
        keep = 1 if self.overlap else 0
        while self.harness.scheduler.num_in_flight > keep:
            self.harness.commit()

    def _check_victims(self, before: dict[int, SequenceView], after: dict[int, SequenceView]) -> None:
        victims = {n for n, view in after.items() if n in before and view.preemptions > before[n].preemptions}
        self.num_preempted += len(victims)
        running = {number for number, view in before.items() if view.row is not None}
        holders = {number for number in running if before[number].page_ids}
        for victim in victims:
            for other in (holders & after.keys()) - victims:
                assert self.ranks[other] < self.ranks[victim], (self.seed, victim, other)
        if victims:
            assert min(running, key=self.ranks.__getitem__) not in victims, (self.seed, victims)

    def _check_room_left(
        self, admitted: SequenceView, before: dict[int, SequenceView], after: dict[int, SequenceView]
    ) -> None:
        """The watermark; and a page for each that ran, or one that was preempted would soon be so again."""
        runs = {
            number
            for number, view in before.items()
            if view.row is not None and number in after and after[number].preemptions == view.preemptions
        }
        head_room = max(self.watermark, len(runs) if admitted.preemptions else 0)
        if runs:
            assert self.harness.scheduler.cache.num_available >= head_room, (self.seed, admitted)
            self.num_resumed += admitted.preemptions > 0

    def _count_passed(
        self, admitted: int, before: dict[int, SequenceView], after: dict[int, SequenceView]
    ) -> None:
        """Those that waited before and still wait, though they go before the one that was let in."""
        for number, view in before.items():
            is_entry = view.choice_index == 0 or view.preemptions  # samples that wait share one entry
            waits = view.row is None and number in after and after[number].row is None
            if is_entry and waits and self.ranks[number] < self.ranks[admitted]:
                self.passed[number] = self.passed.get(number, 0) + 1
                assert self.passed[number] <= self.max_skips, (self.seed, number, admitted)

    def run(self, num_requests: int) -> None:
        for _ in range(num_requests):
            for _ in range(self.draw.choice([0, 1, 1, 3])):
                self.add()
            self.turn()
        for _ in range(5000):
            if not self.harness.scheduler.has_work(self.harness.now):
                return
            self.turn()
        raise AssertionError(f"seed {self.seed}: {self.harness.scheduler.sequence_views()}")


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_who_goes_last_stops_first_and_nobody_is_passed_too_often(overlap: bool) -> None:
    """B035, M-20: whatever else waits or runs; and all get through."""
    loads = [Load(seed, overlap) for seed in range(6)]
    for load in loads:
        load.run(num_requests=30)
        assert all(answer.end is not None for answer in load.harness.answers.values())
    assert sum(load.num_preempted for load in loads) > 10
    assert sum(load.num_resumed for load in loads) > 3
    assert any(load.passed for load in loads)
