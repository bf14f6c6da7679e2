"""A scheduler over a device of lists and a small pool, and requests for it."""

from collections.abc import Iterable

import pytest

from worker.execution.fake_runner import FakeModel
from worker.execution.testing import Harness, small_config
from worker.ids import SequenceId
from worker.scheduling.preemption import preempt
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams

MODEL = FakeModel(1000)
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def make(overlap: bool = False, model: FakeModel = MODEL, **changes: object) -> Harness:
    """``changes``: fields of SchedulerConfig and CacheConfig."""
    return Harness(small_config(**changes), model, overlap=overlap)  # type: ignore[arg-type]


def request(number: int, prompt: Iterable[int], max_tokens: int = 4, **more: object) -> RequestSpec:
    """``more``: fields of SamplingParams and RequestSpec."""
    params = {"max_tokens": max_tokens} | {k: v for k, v in more.items() if k in SamplingParams.__slots__}
    fields = {k: v for k, v in more.items() if k not in SamplingParams.__slots__}
    return RequestSpec(SequenceId(number), list(prompt), SamplingParams(**params), **fields)  # type: ignore[arg-type]


def stop(harness: Harness, sequence_id: int) -> None:
    """Preempts this one, whoever would be chosen."""
    books = harness.scheduler._books
    preempt(books, books.sequences[SequenceId(sequence_id)])
    harness.audit()
