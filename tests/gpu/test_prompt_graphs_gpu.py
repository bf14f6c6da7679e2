"""Steps with prompts through captured graphs, whole and in pieces: the bits of the same steps run eagerly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.batch import KvLayer, PagedBatch
from kernels.triton_backend import TritonBackend
from worker.execution.prompt_graphs import PromptGraphs
from worker.model.fused import FusedModel
from worker.model.llama import Model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
ROWS, WIDTH = 8, 512
SLOTS = ROWS * WIDTH


def batch_of(spans: list[tuple[int, int]], table: torch.Tensor) -> PagedBatch:
    """Spans (tokens cached, tokens new), each in a row of its own; single tokens first are decodes."""
    q_lens, kv_lens = [new for _, new in spans], [cached + new for cached, new in spans]

    def there(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)

    rows = list(range(len(spans)))
    token_rows = there([row for row, new in zip(rows, q_lens, strict=True) for _ in range(new)])
    positions = there([at for cached, new in spans for at in range(cached, cached + new)])
    return PagedBatch(
        page_table=table,
        rows=there(rows),
        kv_lens=there(kv_lens),
        q_indptr=there([0, *q_lens]).cumsum(0).int(),
        positions=positions,
        write_slots=table[token_rows.long(), positions.long()],
        num_decode=sum(new == 1 for new in q_lens),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        page_size=1,
        rows_host=rows,
        kv_lens_host=kv_lens,
        q_lens_host=q_lens,
    )


def test_captured_steps_leave_the_bits_of_eager_ones(
    gpu_model: Callable[[str | Path, torch.dtype], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M-24, B083: prompts alone and beside decodes, one graph or pieces, three times each on other tokens."""
    monkeypatch.setattr("worker.execution.prompt_graphs.WHOLE_TOKENS", 300)
    model = gpu_model("random:tiny", torch.bfloat16)
    config, fused = model.config, FusedModel(model)
    shape = (SLOTS + 1, config.num_kv_heads, config.head_dim)
    table = torch.randperm(SLOTS, device=DEVICE).view(ROWS, WIDTH).int()
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)

    def graphs(capture: bool) -> tuple[PromptGraphs, list[KvLayer]]:
        make: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
        layers = [KvLayer(torch.zeros(shape, **make), torch.zeros(shape, **make)) for _ in model.layers]
        made = PromptGraphs(
            fused,
            TritonBackend(*heads, WIDTH),
            layers,
            table,
            max_tokens=512,
            dummy_slot=SLOTS,
            scale=config.head_dim**-0.5,
            capture=capture,
        )
        return made, layers

    steps = [[(0, 100)], [(0, 256), (40, 30), (2, 3)], [(9, 1), (0, 80)], [(0, 7)], [(0, 500)]]
    with torch.inference_mode():
        (captured, stored), (eager, plain) = graphs(True), graphs(False)
        captured.capture_all()
        for turn in range(3 * len(steps)):
            batch = batch_of(steps[turn % len(steps)], table)
            ids = torch.randint(0, config.vocab_size, (len(batch.positions),), device=DEVICE)
            found = captured.run(fused.embedding[ids], batch).clone()
            assert found.isfinite().all()
            assert torch.equal(found, eager.run(fused.embedding[ids], batch))
            for left, right in zip(stored, plain, strict=True):
                assert torch.equal(left.k[:SLOTS], right.k[:SLOTS])
                assert torch.equal(left.v[:SLOTS], right.v[:SLOTS])
    captured.close()


def test_a_whole_step_leaves_the_bits_of_its_pieces(
    gpu_model: Callable[[str | Path, torch.dtype], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention in the graph is the one outside."""
    model = gpu_model("random:tiny", torch.bfloat16)
    config, fused = model.config, FusedModel(model)
    shape = (SLOTS + 1, config.num_kv_heads, config.head_dim)
    table = torch.randperm(SLOTS, device=DEVICE).view(ROWS, WIDTH).int()
    batch = batch_of([(0, 300), (17, 64), (0, 9)], table)
    ids = torch.randint(0, config.vocab_size, (len(batch.positions),), device=DEVICE)
    found = []
    for whole_tokens in (0, 512):
        monkeypatch.setattr("worker.execution.prompt_graphs.WHOLE_TOKENS", whole_tokens)
        layers = [
            KvLayer(
                torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE),
                torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE),
            )
            for _ in model.layers
        ]
        backend = TritonBackend(config.num_heads, config.num_kv_heads, config.head_dim, WIDTH)
        made = PromptGraphs(
            fused,
            backend,
            layers,
            table,
            max_tokens=512,
            dummy_slot=SLOTS,
            scale=config.head_dim**-0.5,
            capture=True,
        )
        with torch.inference_mode():
            made.capture_all()
            assert bool(made.whole_sizes) == bool(whole_tokens)
            found.append(made.run(fused.embedding[ids], batch).clone())
        made.close()
    assert torch.equal(*found)
