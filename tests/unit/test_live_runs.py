"""Who in a service hears what one step of a worker did."""

from typing import Any

import pytest

from service.fleet.codec import StepColumns
from service.fleet.live_runs import LiveRuns
from service.request import Run, SequenceStart


class Heard:
    """A receiver of a run, and a box for each of its samples."""

    def __init__(self) -> None:
        self.starts: list[SequenceStart] = []

    def started(self, start: SequenceStart) -> None:
        self.starts.append(start)


@pytest.mark.parametrize("sequence_id", [10, 11, 12])
def test_a_start_after_a_preemption_is_heard_of_each_sample(sequence_id: int) -> None:
    """The worker tells it with the id of that sample; only the first start is one of them all."""
    runs, heard = LiveRuns(), Heard()
    receiver: Any = heard
    runs.add(Run(10, 3), receiver, [receiver] * 3)
    runs.add(Run(20, 1), receiver, [receiver])
    first = SequenceStart(10, None, 0, 5, resumed=False)
    again = SequenceStart(sequence_id, None, 2, 0, resumed=True)
    unknown = SequenceStart(13, None, 2, 0, resumed=True)
    runs.fan_out(StepColumns((), (), b"", None, [first], (), ()))
    runs.fan_out(StepColumns((), (), b"", None, [again, unknown], (), ()))
    assert heard.starts == [first, again]


def test_the_first_start_is_heard_though_the_first_sample_has_ended() -> None:
    runs, heard = LiveRuns(), Heard()
    receiver: Any = heard
    runs.add(Run(10, 2), receiver, [receiver] * 2)
    runs.forget(10)
    first = SequenceStart(10, None, 0, 5, resumed=False)
    runs.fan_out(StepColumns((), (), b"", None, [first], (), ()))
    assert heard.starts == [first]
