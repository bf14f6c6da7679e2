"""The engine that benchmarks run: one scheduler for its life, an empty prefix cache where one is wanted."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks import special_rows
from benchmarks.engine_alone import first_tokens, new_prompts
from benchmarks.offline import Engine, measure
from benchmarks.serving_marks import Marks
from benchmarks.workloads import fixed
from worker.config import WorkerConfig
from worker.execution.runner import StepHandle
from worker.execution.torch_runner import TorchRunner
from worker.scheduling.step import Step, StepResult


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(
        WorkerConfig(
            model="random:tiny",
            device="cpu",
            num_pages=512,
            page_size=4,
            max_running=4,
            max_context=64,
            max_batch_tokens=64,
        )
    )
    yield engine
    engine.runner.close()
    gc.unfreeze()


def test_a_measured_pass_finds_nothing_in_the_prefix_cache(engine: Engine) -> None:
    """The same prompts three times; a run without `forget` before it would find them."""
    workload = fixed(2, 24, 4).within(engine.vocab_size)
    scheduler = engine._scheduler
    for _ in range(3):
        assert measure(engine, workload)["output_tokens"] == 8
    assert scheduler.counts().hit_tokens_total == 0
    engine.run(workload)
    assert scheduler.counts().hit_tokens_total == 2 * 20, "whole pages, the last token is computed anyway"
    assert engine._scheduler is scheduler, "made once: its making is no part of a pass"


def test_first_tokens_of_the_engine_alone_are_computed_whole(engine: Engine) -> None:
    """Those in a row were of the prompts that came after pauses: 496 of their 512 tokens were cached."""
    for prompts in new_prompts(24, engine.vocab_size).values():
        assert all(seconds > 0 for seconds in first_tokens(engine, prompts, 0.0, Marks()))
    assert engine._scheduler.counts().hit_tokens_total == 0
    first_tokens(engine, prompts, 0.0, Marks())
    assert engine._scheduler.counts().hit_tokens_total > 0, "the cache is on"


def test_a_collection_in_a_pass_does_not_walk_what_was_loaded(engine: Engine) -> None:
    """It took as long as hundreds of steps, in whichever pass it fell."""
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10


def test_ids_outside_the_vocabulary_are_answered_with_others(engine: Engine) -> None:
    """`--model random:tiny` met an index out of range."""
    workload = fixed(2, 24, 4)
    assert max(map(max, workload.prompts)) >= engine.vocab_size
    row = measure(engine, workload)
    assert row["output_tokens"] == 8
    assert row["slowest_turns"]["decode"][0]["launched"] == {"rows": 2, "tokens": 2}


class NoNumbers:
    """A step that is over, and all of whose spans have failed."""

    is_replayed = False

    def __init__(self, step: Step, handle: StepHandle) -> None:
        failed = dict.fromkeys(range(len(step.rows)), "non-finite logits")
        self._result = handle.result()._replace(failed=failed)

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


def test_a_pass_that_lost_tokens_is_no_figure(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that failed made its pass shorter, and was counted as if it had been answered."""
    launch = TorchRunner.launch
    monkeypatch.setattr(TorchRunner, "launch", lambda runner, step: NoNumbers(step, launch(runner, step)))
    assert engine.run(fixed(2, 24, 4)).output_tokens == 0
    with pytest.raises(AssertionError, match="0 tokens of 8"):
        measure(engine, fixed(2, 24, 4))


def test_what_came_is_counted(engine: Engine) -> None:
    assert engine.run(fixed(2, 24, 4)).output_tokens == 8
    assert engine.run(fixed(1, 24, 3, seed=2)).output_tokens == 3


def test_special_rows_are_measured_beside_plain_ones(engine: Engine) -> None:
    """Every case answers in full, so a step's time is of as many rows."""
    rows = special_rows.measure(engine, num_sequences=3, num_tokens=4, repeats=1)
    assert [row["case"] for row in rows] == list(special_rows.cases(3))
    assert all(row["decode_step_us"] > 0 for row in rows)


def test_the_constraint_of_the_benchmark_leaves_every_second_token() -> None:
    progress, words = special_rows.EvenTokens().begin((8, 6)), np.zeros(2, np.int32)
    progress.take((4,))
    progress.take_back(2)
    assert progress.num_tokens == 1
    progress.write_mask(words.ctypes.data, words.nbytes)
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
    assert allowed.tolist() == list(range(0, 64, 2))
