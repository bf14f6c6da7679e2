"""`paged_cuda` and the reference run the whole engine: prompts, mixed steps, shared and copied pages."""

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from worker.scheduling.sampling import SamplingParams

pytestmark = pytest.mark.gpu


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts with a common start, lengths around the edges of pages, greedy."""
    draw = random.Random(3)
    start = [draw.randrange(100_000) for _ in range(40)]
    params = SamplingParams(max_tokens=12, stop_at_eos=False)
    lengths = (1, 15, 16, 17, 33, 100, 200, 310)
    return [(start + [draw.randrange(100_000) for _ in range(n)], params) for n in lengths] + [([7], params)]


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_paged_cuda_gives_the_answers_of_the_reference(gpu_engine, gpu_model, page_size: int) -> None:
    """The historical kernel through the runner, steps mixed and decode alone.

    Prefill beside it multiplies in TF32, so runs of the reference start anew every 4 tokens.
    """
    model: Any = gpu_model("random:qwen3-0.6b", torch.float32)
    settings: dict[str, Any] = {"num_pages": 512, "page_size": page_size, "max_step_tokens": 128}
    asked = requests()
    answers = gpu_engine(model, backend="reference", **settings).answer(asked).tokens
    runs = [
        (prompt + answer[:at], answer[at : at + 4])
        for (prompt, _), answer in zip(asked, answers, strict=True)
        for at in range(0, 12, 4)
    ]
    params = SamplingParams(max_tokens=4, stop_at_eos=False)
    engine = gpu_engine(model, backend="paged_cuda", **settings)
    found = engine.answer([(start, params) for start, _ in runs]).tokens
    same = sum(tokens == run for tokens, (_, run) in zip(found, runs, strict=True))
    assert same >= 0.9 * len(runs), f"{same} runs of {len(runs)} are the same"


def test_a_head_size_that_was_never_compiled_is_refused(gpu_engine, gpu_model) -> None:
    """B085: at the start, by name."""
    model: Any = gpu_model("random:tiny", torch.float32)
    assert model.config.head_dim == 16
    with pytest.raises(ValueError, match="head_dim 16"):
        gpu_engine(model, backend="paged_cuda", num_pages=64)


def test_pages_that_are_copied_or_poisoned_reach_its_own_layout(gpu_engine, gpu_model) -> None:
    """A copy of a page is read by the very next decode step; a poisoned page is seen as such."""
    from array import array

    from worker.ids import PageId, Row, SequenceId
    from worker.scheduling.step import PageCopy, RowStart, Step

    model: Any = gpu_model("random:qwen3-0.6b", torch.float32)
    runner = gpu_engine(model, backend="paged_cuda", num_pages=64, max_running=4).runner
    prompt = tuple(random.Random(4).randrange(100_000) for _ in range(20))
    params = SamplingParams(max_tokens=8)

    def start(row: int, pages: list[int], **more: Any) -> dict[str, Any]:
        begin = RowStart(Row(row), SequenceId(row), 0, prompt, len(prompt), params, frozenset())
        return {
            "number": 1, "sequence_ids": (begin.sequence_id,), "rows": array("i", (row,)), "sampled": (0,),
            "row_starts": (begin,), "new_page_rows": array("i", (row,) * len(pages)),
            "new_page_indexes": array("i", range(len(pages))), "new_page_ids": array("i", pages), **more,
        }  # fmt: skip

    whole = Step(starts=array("i", (0,)), ends=array("i", (20,)), num_decode=0, **start(0, [5, 9]))
    first = runner.launch(whole).result().token_ids
    last = {"starts": array("i", (19,)), "ends": array("i", (20,)), "num_decode": 1}
    copies = [PageCopy(PageId(5), PageId(30)), PageCopy(PageId(9), PageId(31))]
    copied = Step(**last, **start(1, [30, 31], page_copies=copies))
    assert runner.launch(copied).result().token_ids == first
    runner.poison_pages([30])
    assert runner.launch(Step(**last, **start(2, [30, 31]))).result().failed
