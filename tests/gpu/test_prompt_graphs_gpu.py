"""Steps with prompts through captured graphs, whole and in pieces: the bits of the same steps run eagerly."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.batch import KvLayer, LastQueries, PagedBatch
from kernels.testing import assert_no_worse
from kernels.triton_backend import TritonBackend
from worker.execution.prompt_graphs import PromptGraphs, token_sizes
from worker.execution.whole_sizes import grids_of
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


def last_of(batch: PagedBatch, sampled: list[int]) -> LastQueries:
    """The last tokens of some spans."""
    at = torch.tensor(sampled, dtype=torch.long, device=DEVICE)
    tokens = batch.q_indptr[at + 1] - 1
    spans = replace(
        batch,
        rows=batch.rows[at],
        kv_lens=batch.kv_lens[at],
        q_indptr=torch.arange(len(sampled) + 1, dtype=torch.int32, device=DEVICE),
        positions=batch.positions[tokens.long()],
        num_decode=len(sampled),
        max_q_len=1,
        rows_host=[batch.rows_host[span] for span in sampled],
        kv_lens_host=[batch.kv_lens_host[span] for span in sampled],
        q_lens_host=[1] * len(sampled),
    )
    return LastQueries(tokens, spans)


def test_captured_steps_leave_the_bits_of_eager_ones(
    gpu_model: Callable[[str | Path, torch.dtype], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M-24, B083: prompts alone and beside decodes, one graph or pieces, three times each on other tokens,
    with the last layer for all tokens, for the last of each span, and for none; few and many decodes."""
    monkeypatch.setattr("worker.execution.whole_sizes.WHOLE_TOKENS", 300)
    monkeypatch.setattr("worker.execution.whole_sizes.DECODES", 2)
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
    steps += [[(20 * n, 1) for n in range(1, 6)] + [(0, new)] for new in (3, 330)]
    assert [grid.room for grid in grids_of(config, token_sizes(512), max_running=ROWS - 1)] == [0, 2, 7]
    with torch.inference_mode():
        (captured, stored), (eager, plain) = graphs(True), graphs(False)
        captured.capture_all()
        assert set(captured._graphs) == {320, 384, 448, 512}, "others when a step is in pieces"
        for turn in range(3 * len(steps)):
            batch = batch_of(steps[turn % len(steps)], table)
            ids = torch.randint(0, config.vocab_size, (len(batch.positions),), device=DEVICE)
            last = [None, last_of(batch, list(range(len(batch.rows_host)))), last_of(batch, [])][turn % 3]
            found = captured.run(fused.embedding[ids], batch, last).clone()
            assert found.isfinite().all()
            assert torch.equal(found, eager.run(fused.embedding[ids], batch, last))
            for left, right in zip(stored, plain, strict=True):
                assert torch.equal(left.k[:SLOTS], right.k[:SLOTS])
                assert torch.equal(left.v[:SLOTS], right.v[:SLOTS])
    assert set(captured._graphs) == {64, 96, 320, 384, 448, 512}, "scored prompts beside decodes"
    captured.close()


def test_tokens_that_are_read_are_no_worse_than_with_a_whole_last_layer(
    gpu_model: Callable[[str | Path, torch.dtype], Model],
) -> None:
    """bf16, one graph and pieces: against the same step in fp32."""
    batches = [[(0, 100), (5, 300)], [(400, 1), (0, 61)], [(0, 40)] * 7 + [(200, 9)]]
    table = torch.randperm(SLOTS, device=DEVICE).view(ROWS, WIDTH).int()
    outcomes: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = gpu_model("random:tiny", dtype)
        config, fused = model.config, FusedModel(model)
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        zeros = torch.zeros(SLOTS + 1, *heads[1:], dtype=dtype, device=DEVICE)
        for is_pruned in (False, True):
            made = PromptGraphs(
                fused,
                TritonBackend(*heads, WIDTH),
                [KvLayer(zeros.clone(), zeros.clone()) for _ in model.layers],
                table,
                max_tokens=512,
                dummy_slot=SLOTS,
                scale=config.head_dim**-0.5,
                capture=False,
            )
            found = outcomes[dtype, is_pruned] = []
            for spans in batches:
                batch = batch_of(spans, table)
                last = last_of(batch, list(range(len(spans))))
                ids = torch.arange(len(batch.positions), device=DEVICE) * 7 % config.vocab_size
                with torch.inference_mode():
                    hidden = made.run(fused.embedding[ids], batch, last if is_pruned else None)
                    found.append(fused.logits(hidden[last.tokens]).float())
    for number in range(len(batches)):
        exact = outcomes[torch.float32, False][number]
        plain, ours = (outcomes[torch.bfloat16, is_pruned][number] for is_pruned in (False, True))
        assert_no_worse(ours, plain=plain, exact=exact)
        single = outcomes[torch.float32, True][number]
        torch.testing.assert_close(single, exact, rtol=1e-2, atol=1e-2)  # TF32 in attention


@pytest.mark.parametrize(("min_keys", "adding_rows"), [(1024, 4096), (64, 1)])
def test_a_whole_step_leaves_the_bits_of_its_pieces(
    gpu_model: Callable[[str | Path, torch.dtype], Model],
    monkeypatch: pytest.MonkeyPatch,
    min_keys: int,
    adding_rows: int,
) -> None:
    """The attention in the graph is the one outside; where keys are split, and where products add, too."""
    monkeypatch.setattr("kernels.prefill_plan.MIN_KEYS", min_keys)
    monkeypatch.setattr("worker.model.fused.ADDING_ROWS", adding_rows)
    model = gpu_model("random:tiny", torch.bfloat16)
    config, fused = model.config, FusedModel(model)
    shape = (SLOTS + 1, config.num_kv_heads, config.head_dim)
    table = torch.randperm(SLOTS, device=DEVICE).view(ROWS, WIDTH).int()
    batch = batch_of([(0, 300), (17, 64), (0, 9)], table)
    ids = torch.randint(0, config.vocab_size, (len(batch.positions),), device=DEVICE)
    found = []
    for whole_tokens in (0, 512):
        monkeypatch.setattr("worker.execution.whole_sizes.WHOLE_TOKENS", whole_tokens)
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
            whole = made.whole_size(batch, len(ids))
            assert whole == ((384, min_keys == 64, 0) if whole_tokens else None)
            found.append(made.run(fused.embedding[ids], batch).clone())
        made.close()
    assert torch.equal(*found)
