"""Slots without a token in what-if: of a page that several sequences refer to, once."""

from pathlib import Path

import pytest

from worker.execution.testing import small_config
from worker.trace.counts import Counts, Setting
from worker.trace.testing import RecordedWorker


@pytest.mark.parametrize("samples", [1, 8])
def test_a_part_filled_page_of_many_samples_is_wasted_once(tmp_path: Path, samples: int) -> None:
    """It was counted for each of them: more was said to be unfilled than all pages in use have."""
    worker = RecordedWorker(small_config(24, 64, 8, 64, 128), tmp_path)
    worker.add([7] * 20, 5, samples=samples)
    for number in range(3):
        worker.step()
        counts = Counts(Setting(24, 64, "lru"))
        counts.look(worker.scheduler, 1.0)
        stored = [view.token_count for view in worker.scheduler.sequence_views()]
        own_pages = [64 - num_tokens for num_tokens in stored]
        assert worker.scheduler.cache.pool.num_active == (samples if number else 1)
        assert counts.wasted_slot_seconds == (sum(own_pages) if number else 64 - 20)
