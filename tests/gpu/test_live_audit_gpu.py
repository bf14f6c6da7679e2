"""The live audit on a GPU: rows are read without holding up the device; memory is told by use."""

import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from worker.execution.page_table import PageTable
from worker.ids import SequenceId
from worker.live_audit import LiveAudit
from worker.model.llama import Model
from worker.scheduling.request import RequestSpec
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import Step

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def table() -> PageTable:
    made = PageTable(max_running=4, max_context=4096, num_pages=1000, page_size=16, device=DEVICE)
    made.write_pages([1] * 8, list(range(8)), [7, 3, 9, 1, 12, 500, 999, 0])
    return made


def test_a_read_is_begun_behind_a_busy_device_and_never_waits(table: PageTable) -> None:
    """engine.md 2: asked for while 200 ms of work are queued, it returns at once and is not ready yet."""
    table.begin_read([(1, 0, 16)]).result()  # the first pinned buffer is made outside of the measured time
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # cycles, about 0.2 s
    began = time.perf_counter()
    read = table.begin_read([(1, 16, 32), (1, 96, 32)])
    seconds = time.perf_counter() - began
    assert not read.is_ready()
    table.write_pages([1], [1], [77])  # queued behind the copy: not in it
    first, second = read.result()
    assert read.is_ready()
    assert first == [*range(48, 64), *range(144, 160)]
    assert second == [*range(999 * 16, 1000 * 16), *range(16)]
    assert seconds < 0.05


@pytest.mark.parametrize("capture", [True, False])
def test_rounds_beside_overlapping_steps_find_nothing(
    gpu_engine: Callable[..., Any], gpu_model: Callable[..., Model], capture: bool
) -> None:
    """Rows of sequences that decode, from graphs or eagerly, are those of the books in every round."""
    engine = gpu_engine(
        gpu_model("random:tiny", torch.bfloat16), num_pages=256, max_running=8, capture=capture
    )
    scheduler = Scheduler(engine._scheduling)
    audit = LiveAudit(scheduler, engine.runner, interval_seconds=0.0, clock=time.perf_counter)
    params = SamplingParams(max_tokens=120, stop_at_eos=False)
    for number in range(8):
        spec = RequestSpec(SequenceId(number + 1), array("I", [number + 3] * 40), params)
        scheduler.add(spec, time.monotonic())
    compared, replayed, flight = 0, 0, deque[tuple[Step, Any]]()
    while scheduler.has_work(time.monotonic()):
        step = scheduler.schedule(time.monotonic())
        if step is not None:
            flight.append((step, engine.runner.launch(step)))
        while len(flight) > (step is not None):
            oldest, handle = flight.popleft()
            replayed += handle.is_replayed
            scheduler.commit(oldest, handle.result(), time.monotonic())
        found = audit.look(time.perf_counter() + 1e6 * compared)  # due at once
        if found is not None:
            assert not found.findings, found.findings
            compared += "device_table" in found.checks
    assert compared >= 5
    assert (replayed > 100) == capture
    memory = engine.runner.memory_bytes()
    assert set(memory) == {"weights", "kv_pool", "workspace", "torch_reserved", "free"}
    assert memory["kv_pool"] == engine.runner.kv_pool.num_bytes
    assert min(memory.values()) >= 0
    assert memory["free"] > 0
