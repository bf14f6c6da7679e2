"""Plans are copied to the device behind the host's back: none may be overwritten before its copy has run."""

import random

import pytest
import torch
from torch import Tensor

from kernels.plan_buffers import PlanBuffers
from kernels.testing_stream import SlowEvent, SlowStream


def copies(buffers: PlanBuffers, stream: SlowStream, num_plans: int, seed: int = 0) -> list[int]:
    """Plans 0, 1, 2, ... are written and queued, while the device keeps its own pace; what it received."""
    draw = random.Random(seed)
    received: list[int] = []
    for number in range(num_plans):
        with buffers.piece() as piece:
            piece.fill_(number)
            stream.enqueue(lambda source=piece: received.append(int(source[0])))
        stream.run(draw.randint(stream.done, stream.queued))
    stream.run(stream.queued)
    return received


@pytest.mark.parametrize("count", [1, 2, 6])
def test_every_copy_carries_the_plan_it_was_queued_with(count: int) -> None:
    """H9, B083: the next plan waits for the copy of the last one in the same memory, however late it runs."""
    stream = SlowStream()
    buffers = PlanBuffers(count, 16, lambda: SlowEvent(stream))
    assert copies(buffers, stream, 100) == list(range(100))


def test_memory_without_an_owner_mixes_plans() -> None:
    """The same load over one piece that is reused at once: the race is there to be seen."""
    stream = SlowStream()
    shared = PlanBuffers(1, 16, lambda: _Careless())
    assert copies(shared, stream, 100) != list(range(100))


class _Careless:
    def record(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        return True


def test_the_host_waits_only_when_all_pieces_are_in_flight() -> None:
    stream = SlowStream()
    buffers = PlanBuffers(3, 16, lambda: SlowEvent(stream))
    seen: list[Tensor] = []
    for _ in range(3):
        with buffers.piece() as piece:
            seen.append(piece)
            stream.enqueue(lambda: None)
    assert stream.waits == 0
    assert len({piece.data_ptr() for piece in seen}) == 3
    with buffers.piece():
        assert stream.waits == 1
        assert stream.done == 1, "waited for the oldest copy and no other"


def test_a_plan_that_fails_still_frees_its_piece() -> None:
    stream = SlowStream()
    buffers = PlanBuffers(1, 16, lambda: SlowEvent(stream))
    with pytest.raises(RuntimeError, match="no plan"), buffers.piece():
        raise RuntimeError("no plan")
    assert copies(buffers, stream, 3) == [0, 1, 2]
    assert torch.equal(buffers._pieces[0][0], torch.full((16,), 2, dtype=torch.uint8))
