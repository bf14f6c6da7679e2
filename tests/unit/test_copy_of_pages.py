"""A backend with a copy of the pages hears of every change that it did not make itself."""

from array import array

import torch
from torch import Tensor

from kernels.backend import CopyOfPages
from kernels.reference import ReferenceBackend
from tests.toy_runners import sizes_for
from worker.execution.torch_runner import TorchRunner
from worker.ids import PageId, Row, SequenceId
from worker.model.toy import toy_model
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import PageCopy, RowStart, Step

MODEL = toy_model()
PAGE_SIZE = 4


class Copying(ReferenceBackend):
    """Remembers which pages it was told of, and what they held then."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[list[int], Tensor]] = []
        self.runner: TorchRunner | None = None

    def refresh_pages(self, page_ids: Tensor) -> None:
        assert self.runner is not None
        self.told.append((page_ids.tolist(), self.runner.kv_pool.buffer[:, :, page_ids].clone()))


def runner_with(backend: ReferenceBackend) -> TorchRunner:
    shape = MODEL.config
    config = sizes_for(
        shape,
        max_running=2,
        max_context=32,
        num_pages=12,
        page_size=PAGE_SIZE,
        poison=True,
    )
    return TorchRunner(MODEL, backend, config, torch.device("cpu"))


def step_of(row: int, start: int, end: int, pages: list[int], copies: list[PageCopy]) -> Step:
    begin = RowStart(Row(row), SequenceId(row), 0, tuple(range(1, 8)), 7, SamplingParams(), frozenset())
    return Step(
        number=1,
        sequence_ids=(begin.sequence_id,),
        rows=array("i", (row,)),
        starts=array("i", (start,)),
        ends=array("i", (end,)),
        sampled=(0,),
        num_decode=int(end - start == 1),
        row_starts=(begin,),
        new_page_rows=array("i", (row,)) * len(pages),
        new_page_indexes=array("i", range(len(pages))),
        new_page_ids=array("i", pages),
        page_copies=copies,
    )


def test_copied_and_poisoned_pages_are_told_with_what_they_hold_by_then() -> None:
    """After the copy and before the step reads it; pages that `run` writes are not."""
    backend = Copying()
    assert isinstance(backend, CopyOfPages)
    backend.runner = runner = runner_with(backend)
    assert not runner.launch(step_of(0, 0, 7, [2, 5], [])).result().failed
    assert backend.told == []
    copies = [PageCopy(PageId(2), PageId(8)), PageCopy(PageId(5), PageId(9))]
    original = runner.kv_pool.buffer[:, :, [2, 5]].clone()
    assert not runner.launch(step_of(1, 6, 7, [8, 9], copies)).result().failed
    (pages, held), *others = backend.told
    assert (pages, others) == ([8, 9], [])
    assert torch.equal(held.nan_to_num(), original.nan_to_num())
    runner.poison_pages([8])
    pages, held = backend.told[-1]
    assert pages == [8]
    assert held.isnan().all()
    runner.close()


def test_a_backend_without_a_copy_is_not_asked() -> None:
    assert not isinstance(ReferenceBackend(), CopyOfPages)
