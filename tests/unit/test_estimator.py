"""Estimates in a process of their own: answered in time or not at all, and never left running."""

import io
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from worker.execution.testing import small_config
from worker.readers.samples import LoggedRequest, Sample
from worker.trace import estimator as estimator_module
from worker.trace.counts import Setting
from worker.trace.estimate import EstimateTask, estimate, read_task, write_task
from worker.trace.estimator import MAX_WAITING, Answer, Estimate, EstimateBroken, EstimateLate, Estimator
from worker.trace.loading import limits_message, limits_of
from worker.trace.testing import RecordedWorker, conversations, hit_ratio, run_turns

PAGES = 120
TURNS = conversations(6, seconds=4, rate=20)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedWorker, Sample]:
    """A worker that ran, and the log of it."""
    config = small_config(PAGES, 16, 32, 512, 512, event_capacity=65536)
    worker = RecordedWorker(config, tmp_path_factory.mktemp("none"))
    run_turns(worker, TURNS)
    return worker, worker.recorder.log.sample(worker.recorder.now_us())


def task_of(worker: RecordedWorker, sample: Sample, *settings: Setting, **changes: object) -> EstimateTask:
    config = worker.scheduler.config
    task = EstimateTask(
        settings=settings or (Setting(PAGES, 16, "lru"),),
        limits=limits_of(limits_message(config), PAGES),
        page_size=16,
        num_pages=PAGES,
        policy="lru",
        granularity=sample.granularity,
        end_us=sample.time_us,
        window_us=0,
        is_whole=sample.is_whole,
        steps=sample.steps,
        looks=sample.looks,
        num_requests=len(sample.requests),
    )
    return replace(task, **changes)  # type: ignore[arg-type]


@pytest.fixture
def estimator() -> Iterator[Estimator]:
    found = Estimator()
    yield found
    found.close()


class Box:
    """Where an answer arrives."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._came = threading.Event()

    def put(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._came.set()

    def get(self) -> Answer:
        assert self._came.wait(100), "no answer"
        return self.answers[0]


def ask(
    estimator: Estimator,
    task: EstimateTask,
    requests: tuple[LoggedRequest, ...],
    box: Box,
    *,
    key: object = 1,
    seconds: float = 100.0,
) -> bool:
    return estimator.submit(Estimate(key, task, requests, time.monotonic() + seconds, box.put))


def test_a_task_crosses_in_pieces(sampled: tuple[RecordedWorker, Sample]) -> None:
    worker, sample = sampled
    pipe = io.BytesIO()
    task = task_of(worker, sample)
    write_task(task, sample.requests, pipe)
    pipe.seek(0)
    found, requests = read_task(pipe)
    assert found == task
    assert [request.sequence_id for request in requests] == [each.sequence_id for each in sample.requests]


def test_the_estimate_of_today_is_what_was_observed(sampled: tuple[RecordedWorker, Sample]) -> None:
    """The honesty check of EstimateCache: within three standard errors, or two points."""
    worker, sample = sampled
    settings = [Setting(pages, 16, "lru") for pages in (PAGES // 2, PAGES, PAGES * 4)]
    found = estimate(task_of(worker, sample, *settings), sample.requests)
    observed = found["observed"]
    assert isinstance(observed, dict)
    tokens = [
        observed[name]
        for name in ("hit_tokens", "miss_cold_tokens", "miss_evicted_tokens", "unaligned_tokens")
    ]
    assert observed["hit_tokens"] / sum(tokens) == pytest.approx(hit_ratio(worker))
    low, today, high = found["estimates"]  # type: ignore[misc]
    allowed = max(0.02, 3 * today["hit_ratio_error"])
    assert abs(today["hit_ratio"] - hit_ratio(worker)) <= allowed
    assert low["hit_ratio"] < today["hit_ratio"] <= high["hit_ratio"]
    assert found["request_count"] == len(TURNS)
    assert found["token_count"] == sum(len(turn.prompt) for turn in TURNS)


def test_a_burst_of_equal_prompts_hits_as_often_as_it_did(tmp_path: Path) -> None:
    """A few prompts fill a step: which find the pages of the first depends on single tokens."""
    config = small_config(PAGES, 16, 32, 128, 512, event_capacity=65536)
    worker = RecordedWorker(config, tmp_path)
    for _ in range(8):
        worker.add(list(range(120)), 4)
    while worker.step() is not None:
        pass
    worker.recorder.turn()
    sample = worker.recorder.log.sample(worker.recorder.now_us())
    (today,) = estimate(task_of(worker, sample), sample.requests)["estimates"]  # type: ignore[misc]
    assert hit_ratio(worker) > 0.5
    assert today["hit_ratio"] == pytest.approx(hit_ratio(worker))


def test_a_window_counts_only_what_came_in_it(sampled: tuple[RecordedWorker, Sample]) -> None:
    worker, sample = sampled
    found = estimate(task_of(worker, sample, window_us=1_000_000), sample.requests)
    since = sample.time_us - 1_000_000
    assert found["request_count"] == sum(request.time_us >= since for request in sample.requests)
    assert found["duration_us"] == 1_000_000
    (today,) = found["estimates"]  # type: ignore[misc]
    (whole,) = estimate(task_of(worker, sample), sample.requests)["estimates"]  # type: ignore[misc]
    observed = found["observed"]
    assert isinstance(observed, dict)
    for figures in (today, observed):
        assert 0 < figures["hit_tokens"] < whole["hit_tokens"] / 2


def test_a_sample_that_lost_its_beginning_warms_up_first(sampled: tuple[RecordedWorker, Sample]) -> None:
    worker, sample = sampled
    half = sample.requests[len(sample.requests) // 2 :]
    found = estimate(task_of(worker, sample, is_whole=False, num_requests=len(half)), half)
    count = found["request_count"]
    assert isinstance(count, int)
    assert 0 < count < len(half)
    assert found["start_us"] > half[0].time_us  # type: ignore[operator]


def test_no_requests_give_figures_of_zero(sampled: tuple[RecordedWorker, Sample]) -> None:
    worker, sample = sampled
    found = estimate(task_of(worker, sample, num_requests=0), ())
    (today,) = found["estimates"]  # type: ignore[misc]
    assert (today["hit_ratio"], today["evictions"], found["request_count"]) == (0.0, 0, 0)


def test_the_child_answers_as_the_function_does(
    estimator: Estimator, sampled: tuple[RecordedWorker, Sample]
) -> None:
    worker, sample = sampled
    task, box = task_of(worker, sample), Box()
    assert ask(estimator, task, sample.requests, box)
    assert box.get() == estimate(task, sample.requests)


def test_one_that_is_late_is_killed_and_said_so(
    estimator: Estimator, sampled: tuple[RecordedWorker, Sample]
) -> None:
    worker, sample = sampled
    many = [Setting(pages, 16, "lru") for pages in range(40, 296)]
    box = Box()
    ask(estimator, task_of(worker, sample, *many), sample.requests, box, seconds=0.5)
    assert isinstance(box.get(), EstimateLate)
    again = Box()
    ask(estimator, task_of(worker, sample), sample.requests, again)
    assert isinstance(again.get(), dict), "the next one is answered"


def test_what_nobody_waits_for_is_not_answered(
    estimator: Estimator, sampled: tuple[RecordedWorker, Sample], wait_until: Callable[..., None]
) -> None:
    worker, sample = sampled
    many = [Setting(pages, 16, "lru") for pages in range(40, 296)]
    running, waiting, last = Box(), Box(), Box()
    ask(estimator, task_of(worker, sample, *many), sample.requests, running, key="running")
    wait_until(lambda: estimator._child is not None, "the child")
    ask(estimator, task_of(worker, sample), sample.requests, waiting, key="waiting")
    ask(estimator, task_of(worker, sample), sample.requests, last, key="last")
    estimator.cancel("waiting")
    estimator.cancel("running")
    assert isinstance(last.get(), dict)
    assert (running.answers, waiting.answers) == ([], [])


def test_too_many_are_refused(estimator: Estimator, sampled: tuple[RecordedWorker, Sample]) -> None:
    worker, sample = sampled
    many = [Setting(pages, 16, "lru") for pages in range(40, 296)]
    taken = [
        ask(estimator, task_of(worker, sample, *many), sample.requests, Box(), key=number)
        for number in range(MAX_WAITING + 2)
    ]
    assert taken.count(True) in (MAX_WAITING, MAX_WAITING + 1), "one may run already"
    estimator.close()  # at once: what waits is not computed, or the test runs into its limit
    estimator.close()
    assert not ask(estimator, task_of(worker, sample), sample.requests, Box())


def test_a_child_that_breaks_is_an_answer(
    estimator: Estimator,
    sampled: tuple[RecordedWorker, Sample],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, sample = sampled
    monkeypatch.setattr(estimator_module.sys, "executable", "/bin/false")
    box = Box()
    ask(estimator, task_of(worker, sample), sample.requests, box)
    assert isinstance(box.get(), EstimateBroken)
    assert "Traceback" not in caplog.text, "it is no fault of ours"
    monkeypatch.setattr(estimator_module.sys, "executable", str(Path("/nowhere")))
    box = Box()
    ask(estimator, task_of(worker, sample), sample.requests, box)
    assert isinstance(box.get(), EstimateBroken)


CHILD = [sys.executable, "-c", "from worker.trace.estimate import main; main()"]


@pytest.mark.parametrize("is_whole", [True, False], ids=["computing", "still being asked"])
def test_a_child_whose_worker_is_killed_ends_without_a_word(
    sampled: tuple[RecordedWorker, Sample], is_whole: bool
) -> None:
    worker, sample = sampled
    settings = [Setting(PAGES + number, 16, "lru") for number in range(2_000)]  # minutes of work
    told = io.BytesIO()
    write_task(task_of(worker, sample, *settings), sample.requests, told)
    text = told.getvalue() if is_whole else told.getvalue()[:-5]
    pipe = subprocess.PIPE
    with subprocess.Popen(CHILD, stdin=pipe, stdout=pipe, stderr=pipe) as child:
        try:
            assert child.communicate(text, timeout=100) == (b"", b"")
        finally:
            child.kill()


def test_whatever_goes_wrong_with_one_estimate_the_next_is_answered(
    estimator: Estimator, sampled: tuple[RecordedWorker, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that failed, or a task that cannot be written, ended the thread: later ones waited on."""
    worker, sample = sampled
    task = task_of(worker, sample)

    def broken(answer: Answer) -> None:
        raise ZeroDivisionError

    estimator.submit(Estimate(1, task, sample.requests, time.monotonic() + 100, broken))
    with monkeypatch.context() as patched:
        patched.setattr(estimator_module, "write_task", lambda *_: 1 // 0)
        box = Box()
        ask(estimator, task, sample.requests, box)
        assert isinstance(box.get(), EstimateBroken)
    box = Box()
    ask(estimator, task, sample.requests, box)
    assert isinstance(box.get(), dict)
