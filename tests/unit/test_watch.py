"""What the engine hands over: nothing counted twice, nothing counted never, though the observer is late."""

from array import array

from worker.channels import Handover
from worker.execution.fake_runner import FakeModel, FakeRunner
from worker.ids import SequenceId
from worker.pages.page_cache import CacheConfig
from worker.readers.memory import READ_SECONDS, MemoryMeter
from worker.readers.observation import Observation
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.settings import SchedulerConfig
from worker.watch import Watch


class Bench:
    """A scheduler under a watch, with a hand-over of one place."""

    def __init__(self) -> None:
        self.now = 0.0
        config = SchedulerConfig(CacheConfig(40, 4), max_running=8, max_step_tokens=64, max_context_tokens=64)
        self.scheduler = Scheduler(config)
        self.runner = FakeRunner(num_pages=40, page_size=4, max_running=8, row_width=64, model=FakeModel(50))
        self.handover: Handover[Observation] = Handover(1)
        self.watch = Watch(
            self.scheduler,
            self.runner,
            self.handover,
            audit_interval=0.2,
            debug=True,
            wake_observer=lambda: None,
            clock=lambda: self.now,
        )
        self.num_steps = 0
        self._next_id = 1

    def serve(self, num_requests: int) -> None:
        for _ in range(num_requests):
            spec = RequestSpec(
                SequenceId(self._next_id), array("I", [5] * 6), SamplingParams(max_tokens=3), source="s"
            )
            self._next_id += 1
            self.scheduler.add(spec, self.now)
            while self.scheduler.has_work(self.now):
                step = self.scheduler.schedule(self.now)
                assert step is not None
                self.now += 0.01
                self.scheduler.commit(step, self.runner.launch(step).result(), self.now)
                self.num_steps += 1
                self.watch.stepped(step, 0.01)
                self.watch.look(self.now)


def test_steps_bills_and_audits_of_a_late_observer_come_with_the_next_observation() -> None:
    bench = Bench()
    bench.serve(30)  # seconds of which the observer takes nothing
    assert bench.watch.wants_snapshot
    seen = bench.handover.take_all()
    bench.now += 1.0
    bench.watch.observe(bench.now)
    seen += bench.handover.take_all()
    assert [observation.snapshot is None for observation in seen] == [True, False]
    assert sum(len(observation.steps) for observation in seen) == bench.num_steps
    assert sum(len(observation.bills) for observation in seen) == 30
    assert sum(len(observation.audits) for observation in seen) >= 3
    bench.watch.observe(bench.now)
    (after,) = bench.handover.take_all()
    assert (len(after.steps), len(after.bills), len(after.audits)) == (0, 0, 0)


def test_memory_that_cannot_be_read_keeps_its_last_numbers() -> None:
    answers = [{"weights": 7, "free": -1}, RuntimeError("the driver says no"), {"weights": 9}]

    def read() -> dict[str, int]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    meter = MemoryMeter()
    meter.look(0.0)
    assert set(meter.bytes_by_kind.values()) == {0}
    meter.read_from(read)
    seen = []
    for now in (1.0, 1.0 + READ_SECONDS / 2, 1.0 + READ_SECONDS, 1.0 + 2 * READ_SECONDS):
        meter.look(now)
        seen.append((meter.bytes_by_kind["weights"], meter.bytes_by_kind["free"]))
    assert seen == [(7, 0), (7, 0), (7, 0), (9, 0)]
