"""Memory that a step in flight reads and writes: no later step's, however slow the device is."""

import random
from collections import deque

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.testing_stream import SlowEvent, SlowStream
from worker.execution.step_buffers import StepBuffer, StepBuffers, StepOutcome, decode_shapes


class Careless(SlowEvent):
    """Nobody waits for it."""

    def synchronize(self) -> None:
        """At once."""


class Failed(SlowEvent):
    """Of a device that came to grief."""

    def synchronize(self) -> None:
        super().synchronize()
        raise RuntimeError("an illegal memory access was encountered")


def step(buffer: StepBuffer) -> None:
    """On the device: the id is the row, doubled."""
    buffer.results[0, 0] = 2 * buffer.batch[0, 0]
    buffer.results[1, 0] = 1


def answers(buffers: StepBuffers, stream: SlowStream, num_steps: int, ahead: int, seed: int) -> list[int]:
    """Steps 0, 1, 2, ..., launched `ahead` of the one that is read; the device keeps its own pace."""
    draw = random.Random(seed)
    in_flight: deque[StepOutcome] = deque()
    found = []
    for number in range(num_steps):
        with buffers.next() as buffer:
            buffer.batch_columns[0, 0] = number
            stream.enqueue(lambda buffer=buffer: step(buffer))
        in_flight.append(StepOutcome(buffer, 1))
        stream.run(draw.randint(stream.done, stream.queued))
        while len(in_flight) > (ahead if number < num_steps - 1 else 0):
            found.append(int(in_flight.popleft().arrived()[0][0]))
    return found


@pytest.mark.parametrize(("depth", "ahead"), [(1, 0), (2, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_reads_its_own_batch_and_leaves_its_own_results(depth: int, ahead: int, seed: int) -> None:
    """H9, B083: however far the device is behind, and however many steps there were."""
    stream = SlowStream()
    buffers = StepBuffers(decode_shapes(1), lambda: SlowEvent(stream), is_pinned=False, depth=depth)
    assert answers(buffers, stream, 60, ahead, seed) == [2 * number for number in range(60)]


def test_without_events_steps_mix() -> None:
    """The same load where nobody waits: the race is there to be seen."""
    stream = SlowStream()
    buffers = StepBuffers(decode_shapes(1), lambda: Careless(stream), is_pinned=False, depth=2)
    assert answers(buffers, stream, 60, 1, 0) != [2 * number for number in range(60)]


def test_the_host_waits_only_when_all_buffers_are_in_flight() -> None:
    stream = SlowStream()
    buffers = StepBuffers(decode_shapes(1), lambda: SlowEvent(stream), is_pinned=False, depth=3)
    for _ in range(3):
        with buffers.next():
            stream.enqueue(lambda: None)
    assert (stream.waits, stream.done) == (0, 0)
    with buffers.next():
        assert (stream.waits, stream.done) == (1, 1), "waited for the oldest step and no other"


def test_a_result_is_not_read_after_its_buffer_has_another_step() -> None:
    """A handle that was forgotten can never give another step's tokens."""
    stream = SlowStream()
    buffers = StepBuffers(decode_shapes(1), lambda: SlowEvent(stream), is_pinned=False, depth=2)
    outcomes = []
    for _ in range(3):
        with buffers.next() as buffer:
            stream.enqueue(lambda: None)
        outcomes.append(StepOutcome(buffer, 1))
    with pytest.raises(AssertionError, match="has another one already"):
        outcomes[0].arrived()
    outcomes[1].arrived()


def test_a_launch_that_fails_still_guards_what_it_queued() -> None:
    """What was queued before the failure may read the buffer yet."""
    stream = SlowStream()
    buffers = StepBuffers(decode_shapes(1), lambda: SlowEvent(stream), is_pinned=False, depth=1)

    def fail(buffer: StepBuffer) -> None:
        stream.enqueue(lambda: step(buffer))
        raise RuntimeError("no graph")

    with pytest.raises(RuntimeError, match="no graph"), buffers.next() as buffer:
        fail(buffer)
    assert answers(buffers, stream, 3, 0, 0) == [0, 2, 4]


def test_memory_is_let_go_only_when_the_device_is_past_every_step() -> None:
    stream = SlowStream()
    buffers = StepBuffers(decode_shapes(1), lambda: SlowEvent(stream), is_pinned=False, depth=4)
    for _ in range(3):
        with buffers.next() as buffer:
            stream.enqueue(lambda buffer=buffer: step(buffer))
    buffers.close()
    assert stream.done == 3


def test_the_end_of_a_failed_device_is_no_failure_of_its_own() -> None:
    """Else nothing of what is closed after the buffers would be closed."""
    stream = SlowStream()
    buffers = StepBuffers(decode_shapes(1), lambda: Failed(stream), is_pinned=False, depth=4)
    for buffer in buffers._buffers:
        stream.enqueue(lambda: None)
        buffer.event.record()
    buffers.close()
    assert stream.done == 4, "waited for all of them"
