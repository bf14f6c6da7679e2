"""Who waited for whom: idle time of a device and turns of its host, from the times of the same steps."""

import time
from array import array

import pytest

from benchmarks.fixed_device import FixedDevice, fixed_mark
from benchmarks.launch_marks import MarkedRunner, StepTimes, host_mark
from worker.ids import SequenceId
from worker.scheduling.step import Step


def step(number: int) -> Step:
    one = array("i", (0,))
    ends = array("i", (number + 1,))
    return Step(number, (SequenceId(1),), one, array("i", (number,)), ends, (0,), num_decode=1)


def test_a_device_is_idle_from_a_steps_end_to_the_next_launch() -> None:
    # The third launch comes 0.5 after the second step's end; the others are ahead of the device.
    times = StepTimes.of(launched=[0.0, 0.2, 3.5, 4.0], ended=[1.0, 3.0, 5.0, 6.0])
    assert (times.idle, times.late_steps) == (0.5, 1)
    assert times.turn_max == 2.5  # from 1.0 to 3.5; the other one from 3.0 to 4.0
    assert times.turn_p50 == pytest.approx(1.75)


def test_steps_that_nobody_was_behind_tell_nothing() -> None:
    assert StepTimes.of([1.0, 2.0], [1.5, 2.5]) == StepTimes(0.0, 0, 0.0, 0.0, 0.0)


def test_a_fixed_device_takes_its_steps_one_after_the_other() -> None:
    device = FixedDevice(0.02, 1, context=64, page_size=16)
    first, second = device.launch(step(0)), device.launch(step(1))
    assert second.ready == pytest.approx(first.ready + 0.02)
    assert second.result().token_ids == [7]
    assert first.is_ready()
    late = device.launch(step(2))
    assert late.ready >= second.ready + 0.02


def test_a_marked_device_knows_how_long_it_waited() -> None:
    runner = MarkedRunner(FixedDevice(0.001, 1, context=64, page_size=16), fixed_mark)
    began = 0.0
    for number in range(3):
        handle = runner.launch(step(number))
        handle.result()
        if number == 1:
            began = time.perf_counter()
            while time.perf_counter() < began + 0.01:  # the host is busy with something else
                pass
    times = runner.times()
    assert times.idle >= 0.01
    assert times.late_steps == 2, "each launch waited for the result before it"
    assert times.turn_max >= 0.01


def test_a_host_that_is_its_own_device_is_late_with_every_step() -> None:
    runner = MarkedRunner(FixedDevice(0.0, 1, context=64, page_size=16), host_mark)
    for number in range(4):
        runner.launch(step(number)).result()
    assert runner.times().late_steps == 3
