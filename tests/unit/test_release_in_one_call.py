"""Pages go back by the sequence and step, not one by one."""

import pytest

from worker.execution.fake_runner import FakeModel
from worker.execution.testing import Harness, small_config
from worker.ids import SequenceId
from worker.pages.pool import PagePool
from worker.scheduling.output import FinishCode
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams


def test_the_pages_of_an_ended_sequence_are_released_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """M-13: three sequences of four pages end in one step: three releases, all within its commit."""
    calls: list[list[int]] = []
    release = PagePool.release

    def counting(pool: PagePool, pages: list[int], owner: int) -> list[int]:
        if pages:
            calls.append(list(pages))
        return release(pool, pages, owner)

    monkeypatch.setattr(PagePool, "release", counting)
    harness = Harness(small_config(page_size=4), FakeModel(1000))
    for number in range(3):
        prompt = [100 * number + token for token in range(12)]
        params = SamplingParams(max_tokens=4)
        harness.add(RequestSpec(SequenceId(number + 1), prompt, params))
    while harness.answers[1].code == FinishCode.NONE:
        before = len(calls)
        harness.launch()
        launched = len(calls)
        harness.commit()
    assert before == launched == 0, "nothing was released before the end, or by scheduling"
    assert [harness.answers[number].code for number in (1, 2, 3)] == [FinishCode.MAX_TOKENS] * 3
    assert [len(pages) for pages in calls] == [4, 4, 4]
    assert harness.scheduler.cache.pool.num_active == 0
