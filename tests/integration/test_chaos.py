"""A slice of the chaos run: everything dies under open streams, and every stream ends as if nothing had."""

import asyncio

import pytest

from benchmarks.chaos import Outcome, Run, run
from benchmarks.chaos_plan import WITHOUT_NETWORK, Kind


def told(outcome: Outcome) -> str:
    return f"{outcome.faults()}\n" + "\n".join(outcome.tally.notes)


def test_streams_survive_both_workers_and_then_a_service() -> None:
    asked = Run(
        streams=12,  # so many that both services have some when one dies
        requests=6,
        runner="fake",
        kinds=(Kind.KILL_BOTH, Kind.KILL_SERVICE),
        max_disturbances=2,
        max_pause_seconds=0.2,
        worker_settings={"fake-step-ms": 4},
    )
    outcome = asyncio.run(run(asked))
    assert outcome.faults() == [], told(outcome)
    assert outcome.disturbances.total() == 2
    assert outcome.tally.server_resumes > 0
    assert outcome.tally.client_resumes > 0
    assert outcome.tally.ended["whole"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 150 s on a quiet machine, and it ends what hangs by itself
def test_streams_of_the_real_engine_survive_every_kind_of_disturbance() -> None:
    asked = Run(seed=5, streams=24, requests=24, kinds=WITHOUT_NETWORK, max_disturbances=len(WITHOUT_NETWORK))
    outcome = asyncio.run(run(asked))
    assert outcome.faults() == [], told(outcome)
    assert set(outcome.disturbances) == {kind.value for kind in WITHOUT_NETWORK}
    assert outcome.tally.server_resumes > 0
    assert outcome.tally.client_resumes > 0
