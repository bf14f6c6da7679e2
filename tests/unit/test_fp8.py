"""fp8: numbers, pages and weights, as the reference has them; and the CPU backends over fp8 pages."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import math
from array import array
from itertools import pairwise
from typing import Any

import pytest
import torch

from kernels import fp8, reference
from kernels.batch import KvLayer
from kernels.cpu_backend import CpuBackend
from kernels.testing import random_paged_problem
from worker.config import WorkerConfig
from worker.execution.kv_pool import KvPool
from worker.ids import PageId, Row, SequenceId
from worker.model.layers import LinearWeights, Placement, TorchLinear
from worker.model.quantized import HEAD, Fp8Linear, fp8_linear
from worker.model.quantized_kv import HEADROOM, measure_kv_scales, scale_for
from worker.model.random_weights import RandomSource
from worker.model.toy import toy_model
from worker.scheduling.sampling import SamplingParams
from worker.scheduling.step import PageCopy, RowStart, Step
from worker.torch_device import TorchDevice

CPU = torch.device("cpu")


def test_numbers_are_kept_within_the_range_and_nan_stays_nan() -> None:
    x = torch.tensor([0.0, 1.0, 447.0, 448.0, 1e9, -1e9, math.inf, math.nan])
    values = fp8.to_fp8(x, 1.0).float()
    assert values[:7].tolist() == [0.0, 1.0, 448.0, 448.0, 448.0, -448.0, 448.0]
    assert values[7].isnan()


def test_the_relative_error_of_a_number_in_range_is_at_most_a_sixteenth() -> None:
    """Three bits of fraction: half a step is 2 ** -4 of the number."""
    x = torch.logspace(-1.8, 2.6, 5000)
    error = (fp8.to_fp8(x, 1.0).float() - x).abs() / x
    assert 0.03 < error.max() <= 2**-4


def test_rows_use_the_whole_range_each_by_its_own_scale() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=draw) * torch.tensor([1e-4, 1.0, 0.0, 1e4])[:, None]
    rows, scales = fp8.quantize_rows(x)
    assert rows.float().abs().amax(dim=1).tolist() == [448.0, 448.0, 0.0, 448.0]
    error = (rows.float() * scales - x).abs()
    # Half a step: a sixteenth of the number, or half the smallest one.
    assert (error <= x.abs() * 2**-4 + scales * 2**-10).all()
    assert scales[2].item() == 1.0


def test_a_row_with_a_nan_has_no_scale() -> None:
    x = torch.randn(3, 8)
    x[1, 2] = math.nan
    assert fp8.quantize_rows(x)[1].isnan().flatten().tolist() == [False, True, False]


def test_the_kernel_finds_the_scales_and_the_values() -> None:
    """Through the interpreter, on values that e4m3 holds exactly: how others round is shown on a GPU."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    from kernels.fp8_rows import quantize_rows

    codes = torch.randint(0, 0x7E, (7, 100), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    exact = codes.view(fp8.E4M3).float() * torch.tensor([1.0, -1.0]).repeat(50)
    exact[:, 0] = 448.0
    x = exact * torch.tensor([2.0**k for k in range(-6, 1)])[:, None]
    x[3] = 0.0
    rows, scales = quantize_rows(x)
    wanted, wanted_scales = fp8.quantize_rows(x)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(rows.float(), wanted.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100])
def test_rows_behind_a_norm_or_the_activation_are_those_of_what_these_leave(width, dtype) -> None:  # type: ignore[no-untyped-def]
    """In the same bits, with the residual added or not."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    from kernels.fp8_rows import norm_rows, quantize_rows, silu_rows
    from kernels.rms_norm import add_rms_norm, rms_norm
    from kernels.silu_mul import silu_mul

    draw = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, width, generator=draw).to(dtype) for _ in "xr")
    gain, gate_up = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((width,), (5, 2 * width)))
    before, again = residual.clone(), residual.clone()
    wanted = [
        quantize_rows(rms_norm(residual, gain, 1e-5)),
        quantize_rows(add_rms_norm(x, before, gain, 1e-5)),
        quantize_rows(silu_mul(gate_up)),
    ]
    found = [norm_rows(None, residual, gain, 1e-5), norm_rows(x, again, gain, 1e-5), silu_rows(gate_up)]
    assert torch.equal(again, before)
    for (rows, scales), (wanted_rows, wanted_scales) in zip(found, wanted, strict=True):
        assert torch.equal(scales, wanted_scales)
        assert torch.equal(rows.view(torch.uint8), wanted_rows.view(torch.uint8))


def test_a_product_of_one_row_reads_what_the_weight_stands_for() -> None:
    """With bias, with the norm before it, added to the residual, with the activation."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    from kernels.matvec import matvec

    draw = torch.Generator().manual_seed(0)
    x, norm, bias = torch.randn(1, 304, generator=draw), torch.rand(304, generator=draw), torch.randn(1, 100)
    weight, scale = fp8.quantize_rows(torch.randn(100, 304, generator=draw))
    stands, scale = weight.float() * scale, scale.flatten()
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(matvec(x, weight, scale=scale, bias=bias[0]), x @ stands.T + bias, **close)
    normed = reference.rms_norm(x, norm, 1e-5) @ stands.T
    torch.testing.assert_close(
        matvec(x, weight, scale=scale, norm=norm, eps=1e-5, gated=True), reference.silu_mul(normed), **close
    )
    added = matvec(x, weight, scale=scale, residual=bias.clone())
    torch.testing.assert_close(added, x @ stands.T + bias, **close)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("num_rows", "outputs", "inputs"), [(1, 100, 300), (5, 64, 128), (33, 40, 192)])
def test_the_kernel_of_few_rows_gives_the_product(
    num_rows: int, outputs: int, inputs: int, parts: int
) -> None:
    """Odd sides, rows of padding, sums in parts; the counters of arrived parts are back at zero."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    from kernels.fp8_matmul import Fp8Launch, _scratch_of, fp8_matmul

    draw = torch.Generator().manual_seed(num_rows)
    x, x_scale = fp8.quantize_rows(torch.randn(num_rows, inputs, generator=draw))
    weight, scale = fp8.quantize_rows(torch.randn(outputs, inputs, generator=draw))
    bias = torch.randn(outputs, generator=draw)
    launch = Fp8Launch(outputs=32, block=64, parts=parts)
    for given in (bias, None):
        ours = fp8_matmul(
            x, x_scale, weight, scale.flatten(), out_dtype=torch.float32, bias=given, launch=launch
        )
        exact = fp8.scaled_product(x, x_scale, weight, scale.flatten()) + (bias if given is not None else 0)
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-4)
    assert not _scratch_of(CPU)[1].any()


@pytest.mark.parametrize(
    "backend", [reference.ReferenceBackend, lambda: CpuBackend(compiled=False), CpuBackend]
)
def test_attention_reads_what_the_pages_stand_for(backend) -> None:  # type: ignore[no-untyped-def]
    """As exact attention over the rounded K and V, each with its own scale; unused slots are NaN."""
    problem = random_paged_problem(
        q_lens=[1, 1, 9, 1], kv_lens=[1, 17, 9, 30], num_heads=6, num_kv_heads=2, head_dim=16, page_size=4
    )
    k_scale, v_scale = 0.0625, 0.25
    stored = KvLayer(
        fp8.to_pages(problem.kv.k, fp8.E4M3, k_scale),
        fp8.to_pages(problem.kv.v, fp8.E4M3, v_scale),
        k_scale,
        v_scale,
    )
    ours = backend()
    ours.plan(problem.batch)
    out = ours.run(stored, problem.q, problem.k, problem.v, scale=problem.scale)
    dense = KvLayer(stored.k.float() * k_scale, stored.v.float() * v_scale)
    exact = reference.paged_attention(problem.q, dense, problem.batch, scale=problem.scale)
    torch.testing.assert_close(out, exact)
    slots = problem.batch.write_slots.long()
    assert torch.equal(dense.k[slots], fp8.to_fp8(problem.k, k_scale).float() * k_scale)


def fp8_pool(**more: object) -> KvPool:
    return KvPool(
        num_layers=2, num_pages=4, page_size=2, num_kv_heads=1, head_dim=8, dtype=fp8.E4M3, device=CPU, **more
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_pool_of_fp8_has_a_byte_for_each_number_and_a_scale_for_each_layer() -> None:
    pool = fp8_pool(scales=((0.5, 0.25), (2.0, 1.0)))
    assert pool.num_bytes == 2 * 2 * 5 * 2 * 8
    assert [(layer.k_scale, layer.v_scale) for layer in pool.layers] == [(0.5, 0.25), (2.0, 1.0)]
    assert [(layer.k_scale, layer.v_scale) for layer in fp8_pool().layers] == [(1.0, 1.0)] * 2


def test_fp8_pages_are_copied_and_poisoned_like_others() -> None:
    """S1-28, H5: bytes move whole, freed pages are NaN, the canary of the dummy page shows damage."""
    pool = fp8_pool(poison=True)
    assert pool.buffer[:, :, :4].float().isnan().all()
    assert pool.damaged_dummy_slots() == []
    pool.buffer[:, :, 1] = 3.0
    pool.copy_pages([PageCopy(PageId(1), PageId(3))])
    assert (pool.buffer[:, :, 3].float() == 3.0).all()
    pool.poison_pages([1])
    assert pool.buffer[:, :, 1].float().isnan().all()
    pool.buffer[0, 1, 4, 1] = 0.0
    assert pool.damaged_dummy_slots() == [1]


def linear_weights(name: str, rows: tuple[int, ...], width: int) -> LinearWeights:
    parts = [RandomSource(f"{name}.{i}.weight", (count, width), 0) for i, count in enumerate(rows)]
    return LinearWeights(name, parts, [])


def test_weights_become_fp8_by_output_and_products_follow_them() -> None:
    """q, k and v stacked; against the dense layer: as near as e4m3 of both sides allows."""
    weights, placement = (
        linear_weights("model.layers.0.qkv", (32, 16, 16), 64),
        Placement(CPU, torch.bfloat16),
    )
    linear = fp8_linear(weights, placement)
    assert isinstance(linear, Fp8Linear)
    assert (linear.weight.dtype, linear.weight.shape, linear.scale.shape) == (fp8.E4M3, (64, 64), (64,))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense = torch.cat([part.dequantized(torch.float32, CPU) for part in weights.parts])
    exact = x.float() @ dense.T
    error = (linear(x).float() - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.06


@pytest.mark.parametrize(("name", "rows"), [(HEAD, 64), ("model.layers.0.mlp.down", 40)])
def test_the_head_and_odd_shapes_stay_dense(name: str, rows: int) -> None:
    linear = fp8_linear(linear_weights(name, (rows,), 64), Placement(CPU, torch.bfloat16))
    assert isinstance(linear, TorchLinear)


def test_scales_are_powers_of_two_with_room_to_spare() -> None:
    for largest in (1e-3, 0.7, 5.0, 448.0, 9000.0):
        scale = scale_for(largest)
        assert math.log2(scale).is_integer()
        assert largest * HEADROOM <= scale * fp8.LARGEST < 2 * largest * HEADROOM
    assert scale_for(0.0) == scale_for(math.nan) == 1.0


def test_measured_scales_are_those_of_the_models_own_keys_and_values() -> None:
    """One pair a layer, the same on every worker, and the largest K and V of other tokens fit."""
    model = toy_model()
    scales = measure_kv_scales(model, CPU)
    assert scales == measure_kv_scales(model, CPU)
    assert len(scales) == model.config.num_layers
    ids, largest = torch.arange(100) % model.config.vocab_size, []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        largest.append((float(k.abs().max()), float(v.abs().max())))
        return reference.attention(q, k, v, torch.arange(100), scale=model.config.attention_scale)

    model.forward(ids, torch.arange(100), attend)
    for (k, v), (k_scale, v_scale) in zip(largest, scales, strict=True):
        assert k <= k_scale * fp8.LARGEST
        assert v <= v_scale * fp8.LARGEST
        assert k > k_scale * fp8.LARGEST / 16, "and the range is used"


def tokens_of(backend: str, kv_dtype: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens of one sequence through a worker's device: a prompt in two chunks, then decode."""
    config = WorkerConfig(
        model="random:tiny", page_size=4, num_pages=16, max_running=2, threads=1,
        attention_backend=backend, kv_dtype=kv_dtype,
    )  # fmt: skip
    runner = TorchDevice().build(config.resolved(model_context=64, automatic_pages=16))
    begin = RowStart(Row(0), SequenceId(0), 0, prompt, len(prompt), SamplingParams(), frozenset())
    edges = [0, 6, *range(len(prompt), len(prompt) + count)]
    found: list[int] = []
    for start, end in pairwise(edges):
        is_first = start == 0
        pages = array("i", range(-(-(len(prompt) + count) // 4) if is_first else 0))
        step = Step(
            number=1,
            sequence_ids=(begin.sequence_id,),
            rows=array("i", (0,)),
            starts=array("i", (start,)),
            ends=array("i", (end,)),
            sampled=(0,) if end >= len(prompt) else (),
            num_decode=int(end - start == 1),
            row_starts=(begin,) if is_first else (),
            new_page_rows=array("i", (0,)) * len(pages),
            new_page_indexes=pages,
            new_page_ids=pages,
        )
        result = runner.launch(step).result()
        assert not result.failed
        found += result.token_ids
    runner.close()
    return found


def test_a_worker_answers_over_fp8_pages_alike_with_both_backends_of_a_processor() -> None:
    """The same bytes are stored and read, whoever does it; the first token is that over fp32 pages."""
    prompt = tuple((13 * i + 5) % 250 + 1 for i in range(17))
    ours = tokens_of("cpu", "fp8", prompt, 12)
    assert ours == tokens_of("reference", "fp8", prompt, 12)
    assert len(ours) == 12
    assert ours[0] == tokens_of("reference", "auto", prompt, 12)[0]
