"""Steps with prompts through captured pieces: the bits of the same pieces run eagerly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import KvLayer
from worker.execution.prompt_graphs import PromptGraphs
from worker.model.fused import FusedModel
from worker.model.llama import Model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SLOTS = 400


def test_captured_pieces_leave_the_bits_of_eager_ones(
    gpu_model: Callable[[str | Path, torch.dtype], Model],
) -> None:
    """M-24: steps of three sizes, three times each on other tokens."""
    model = gpu_model("random:tiny", torch.bfloat16)
    config, fused = model.config, FusedModel(model)
    shape = (SLOTS + 1, config.num_kv_heads, config.head_dim)

    def graphs(capture: bool) -> tuple[PromptGraphs, list[KvLayer]]:
        make = {"dtype": torch.bfloat16, "device": DEVICE}
        layers = [KvLayer(torch.zeros(shape, **make), torch.zeros(shape, **make)) for _ in model.layers]
        made = PromptGraphs(fused, layers, max_tokens=256, dummy_slot=SLOTS, device=DEVICE, capture=capture)
        return made, layers

    with torch.inference_mode():
        (captured, stored), (eager, plain) = graphs(True), graphs(False)
        captured.capture_all()
        for turn in range(9):
            num_tokens = (100, 256, 7)[turn % 3]
            ids = torch.randint(0, config.vocab_size, (num_tokens,), device=DEVICE)
            positions = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)
            slots = torch.randperm(SLOTS, device=DEVICE)[:num_tokens].int()

            def attend(kv: KvLayer, q: Tensor, slots: Tensor = slots, at: Tensor = positions) -> Tensor:
                scale = config.head_dim**-0.5
                return reference.attention(q, kv.k[slots.long()], kv.v[slots.long()], at, scale=scale)

            found = captured.run(fused.embedding[ids], positions, slots, attend).clone()
            assert found.isfinite().all()
            assert torch.equal(found, eager.run(fused.embedding[ids], positions, slots, attend))
            for left, right in zip(stored, plain, strict=True):
                assert torch.equal(left.k[:SLOTS], right.k[:SLOTS])
                assert torch.equal(left.v[:SLOTS], right.v[:SLOTS])
    captured.close()
