"""A scheduler over a device of lists and a small pool, and requests for it."""

from collections.abc import Iterable

import pytest

from worker.execution.fake_runner import FakeModel, answer_alone
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


def alone(spec: RequestSpec, context: int = 64, choice: int = 0) -> list[int]:
    """What this request gets where there is no other, in a context of so many tokens."""
    return answer_alone(MODEL, spec.prompt_token_ids, spec.params, choice, frozenset(), context)


def stop(harness: Harness, sequence_id: int) -> None:
    """Preempts this one, whoever would be chosen."""
    books = harness.scheduler._books
    preempt(books, books.sequences[SequenceId(sequence_id)], harness.now)
    harness.audit()


def check_answers(harness: Harness, *specs: RequestSpec) -> None:
    """Each got what it would have got alone."""
    for spec in specs:
        for choice in range(spec.sample_count):
            assert harness.answers[spec.sequence_id + choice].tokens == alone(spec, choice=choice)


def pages(harness: Harness, sequence_id: int) -> list[int]:
    """Of a live sequence, in token order."""
    views = {view.sequence_id: view for view in harness.scheduler.sequence_views()}
    return list(views[SequenceId(sequence_id)].page_ids)


def state(harness: Harness) -> tuple[object, ...]:
    """All that a decision without effect leaves as it was."""
    cache = harness.scheduler.cache
    return (
        cache.events.number,
        cache.pool.counts_by_state(),
        list(cache.pool.free_slots()),
        harness.scheduler.counts().waiting_requests,
    )
