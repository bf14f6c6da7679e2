"""fp8 on a GPU: rows, products, weights and pages against their plain-torch specification."""

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import fp8, reference
from kernels.batch import KvLayer
from kernels.dependent_launch import dependent_launches
from kernels.fp8_rows import norm_rows, quantize_rows, silu_rows
from kernels.matvec import matvec
from kernels.rotary_store import Rotary, rotary_store
from kernels.store_kv import store_kv
from kernels.testing import assert_no_worse, random_paged_problem
from kernels.triton_backend import TritonBackend
from kvatlas.models.resolve import resolve_model
from worker.model.quantized import Fp8Linear, fp8_linear
from worker.model.quantized_kv import measure_kv_scales
from worker.model.source import load_model
from worker.scheduling.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="the device has no fp8 products",
    ),
]
BF16 = torch.bfloat16


@pytest.mark.parametrize("width", [64, 576, 1024, 4096, 14336])
def test_rows_are_quantised_bit_for_bit_as_specified(width: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(37, width, device="cuda") * torch.logspace(-6, 4, 37, device="cuda")[:, None]).to(BF16)
    x[3], x[4, 5] = 0.0, torch.nan
    rows, scales = quantize_rows(x)
    wanted, wanted_scales = fp8.quantize_rows(x)
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)
    finite = [i for i in range(37) if i != 4]
    assert torch.equal(rows.view(torch.uint8)[finite], wanted.view(torch.uint8)[finite])


@pytest.mark.parametrize("width", [576, 3072, 4096, 14336])
def test_rows_behind_a_norm_or_the_activation_are_those_of_what_these_leave(width: int) -> None:
    """As near as their own steps, whichever way a compiler rounds between; rows with a NaN have no scale."""
    torch.manual_seed(0)
    x, residual = (torch.randn(37, width, device="cuda").to(BF16) for _ in "xr")
    gain, gate_up = (
        torch.randn(width, device="cuda").to(BF16),
        torch.randn(37, 2 * width, device="cuda").to(BF16),
    )
    x[3, 1], gate_up[3, 1] = torch.nan, torch.nan
    plain, total = reference.add_rms_norm(x, residual, gain, 1e-5)
    alone = reference.rms_norm(residual, gain, 1e-5)
    found = [norm_rows(None, residual, gain, 1e-5), norm_rows(x, residual, gain, 1e-5), silu_rows(gate_up)]
    torch.testing.assert_close(residual, total, rtol=0, atol=0, equal_nan=True)
    whole = [i for i in range(37) if i != 3]
    for (rows, scales), wanted in zip(found, (alone, plain, reference.silu_mul(gate_up)), strict=True):
        stands, wide = (rows.float() * scales)[whole], wanted.float()[whole]
        assert ((stands - wide).abs() <= 0.08 * wide.abs() + 2**-9 * scales[whole]).all()
        assert stands.abs().amax(1).sub(wide.abs().amax(1)).abs().max() <= 0.01 * wide.abs().max()
    assert [scales.isnan().nonzero()[:, 0].tolist() for _, scales in found] == [[], [3], [3]]


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1024, 3072), (6144, 1024), (70, 576)]
)
def test_a_product_of_one_row_is_that_of_the_numbers_weights_stand_for(outputs: int, inputs: int) -> None:
    """No worse than plain torch with them in bf16: norm before it, activation or residual behind it."""
    torch.manual_seed(1)
    weight, scale = fp8.quantize_rows(torch.randn(outputs, inputs, device="cuda") * inputs**-0.5)
    x, gain = torch.randn(1, inputs, device="cuda").to(BF16), torch.randn(inputs, device="cuda").to(BF16)
    stands, scale = weight.double() * scale, scale.flatten()
    exact, plain = x.double() @ stands.T, torch.nn.functional.linear(x, stands.to(BF16))
    assert_no_worse(matvec(x, weight, scale=scale), plain=plain, exact=exact)
    gate, up = exact.chunk(2, dim=-1)
    gated = matvec(x, weight, scale=scale, gated=True)
    assert_no_worse(gated, plain=reference.silu_mul(plain), exact=torch.nn.functional.silu(gate) * up)
    residual = torch.randn(1, outputs, device="cuda").to(BF16)
    wanted, plain_total = residual.double() + exact, residual + plain
    assert_no_worse(matvec(x, weight, scale=scale, residual=residual), plain=plain_total, exact=wanted)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * gain.double()
    plain = torch.nn.functional.linear(reference.rms_norm(x, gain, 1e-5), stands.to(BF16))
    ours = matvec(x, weight, scale=scale, norm=gain, eps=1e-5)
    assert_no_worse(ours, plain=plain, exact=normed @ stands.T)


@pytest.mark.parametrize("num_rows", [1, 7, 16, 17, 64, 65, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1024, 3072), (960, 576)])
def test_a_product_is_that_of_the_scaled_numbers(outputs: int, inputs: int, num_rows: int) -> None:
    """Sums of the tensor cores against fp32: as near as the rounding of the bf16 result, and of theirs."""
    torch.manual_seed(1)
    dense = torch.randn(outputs, inputs, device="cuda", dtype=BF16) * inputs**-0.5
    weight, scale = fp8.quantize_rows(dense)
    x = torch.randn(num_rows, inputs, device="cuda", dtype=BF16)
    out = Fp8Linear(weight, scale.flatten(), None)(x)
    expected = fp8.scaled_product(*fp8.quantize_rows(x), weight, scale.flatten())
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_dependent_launches_leave_the_same_bits(num_rows: int) -> None:
    """A chain of norms, activations and products in a graph, replayed, against ordinary launches."""
    torch.manual_seed(4)
    linears = []
    for outputs, inputs in [(6144, 4096), (4096, 6144)] * 4:
        dense = torch.randn(outputs, inputs, device="cuda", dtype=BF16) * inputs**-0.5
        weight, scale = fp8.quantize_rows(dense)
        linears.append(
            (Fp8Linear(weight, scale.flatten(), None), torch.ones(inputs, device="cuda", dtype=BF16))
        )
    x = torch.randn(num_rows, 4096, device="cuda", dtype=BF16)

    def chain() -> torch.Tensor:
        value = x.clone()
        for linear, gain in linears:
            rows = norm_rows(None, value, gain, 1e-6)
            value = linear(value) + linear.of_rows(*rows, BF16)
        return value

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with dependent_launches():
        chain()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = chain()
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_a_row_with_a_nan_stays_not_finite_and_alone() -> None:
    weight, scale = fp8.quantize_rows(torch.randn(64, 64, device="cuda"))
    x = torch.randn(5, 64, device="cuda", dtype=BF16)
    x[2, 7] = torch.nan
    finite = Fp8Linear(weight, scale.flatten(), None)(x).isfinite().all(dim=1).tolist()
    assert finite == [True, True, False, True, True]


def fp8_layer(kv: KvLayer, k_scale: float, v_scale: float) -> KvLayer:
    k, v = fp8.to_pages(kv.k, fp8.E4M3, k_scale), fp8.to_pages(kv.v, fp8.E4M3, v_scale)
    return KvLayer(k, v, k_scale, v_scale)


def test_rows_are_stored_bit_for_bit_as_specified() -> None:
    torch.manual_seed(2)
    k, v = (torch.randn(50, 8, 128, device="cuda", dtype=BF16) * 9 for _ in "kv")
    slots = torch.randperm(64, device="cuda", dtype=torch.int32)[:50]
    pools = [torch.zeros(2, 64, 8, 128, device="cuda").to(fp8.E4M3) for _ in range(2)]
    ours, plain = (KvLayer(pool[0], pool[1], 0.0625, 0.125) for pool in pools)
    store_kv(ours, slots, k, v)
    reference.store_kv(k, v, plain, slots)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))


def test_rotated_rows_are_stored_as_specified() -> None:
    torch.manual_seed(3)
    heads, kv_heads, dim, count = 4, 2, 64, 20
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim, device="cuda", dtype=BF16)
    pool = torch.zeros(2, 32, kv_heads, dim, device="cuda").to(fp8.E4M3)
    kv = KvLayer(pool[0], pool[1], 0.03125, 0.0625)
    slots = torch.randperm(32, device="cuda", dtype=torch.int32)[:count]
    positions = torch.arange(count, device="cuda", dtype=torch.int32)
    angles = torch.randn(count, dim // 2, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    out_q = torch.empty(count, heads, dim, device="cuda", dtype=BF16)
    rotary_store(qkv, kv, slots, positions, Rotary(cos_sin), out_q)
    parts = qkv.view(count, -1, dim)
    k = reference.rotary(parts[:, heads : heads + kv_heads].float(), angles.cos(), angles.sin())
    v = parts[:, heads + kv_heads :]
    stored_k = kv.k[slots.long()].float() * kv.k_scale
    stored_v = kv.v[slots.long()].float() * kv.v_scale
    torch.testing.assert_close(stored_k, k, rtol=0.07, atol=1e-3)  # one step of e4m3 is 1/8 to 1/16
    torch.testing.assert_close(stored_v, fp8.to_fp8(v, kv.v_scale).float() * kv.v_scale, rtol=0, atol=0)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (16, 1, 256)])
def test_attention_reads_fp8_pages_like_the_reference(heads, kv_heads, head_dim, page_size) -> None:
    """Decode and prefill spans, other scales for K and V, unused slots NaN."""
    problem = random_paged_problem(
        q_lens=[1, 1, 1, 10, 70], kv_lens=[1, 300, 17, 10, 200], num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, page_size=page_size, dtype=BF16, device="cuda",
    )  # fmt: skip
    kv, again = (fp8_layer(problem.kv, 0.0625, 0.125) for _ in range(2))
    ours, plain = TritonBackend(heads, kv_heads, head_dim, 1024), reference.ReferenceBackend()
    outs = []
    for backend, layer in ((ours, kv), (plain, again)):
        backend.plan(problem.batch)
        outs.append(backend.run(layer, problem.q, problem.k, problem.v, scale=problem.scale))
    torch.testing.assert_close(outs[0], outs[1], rtol=3e-2, atol=3e-2)
    assert torch.equal(kv.k.view(torch.uint8), again.k.view(torch.uint8))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_at_eos=False)


def runs_of(prompts: list[list[int]], answers: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Every fourth token of the answers starts anew, so that one other token does not change all after it."""
    return [
        (prompt + answer[:at], answer[at : at + 4])
        for prompt, answer in zip(prompts, answers, strict=True)
        for at in range(0, len(answer), 4)
    ]


@pytest.mark.model
@pytest.mark.parametrize(("weights", "pages"), [(False, True), (True, False), (True, True)])
def test_whole_answers_follow_those_of_bf16(
    gpu_engine, gpu_model, model_path, weights: bool, pages: bool
) -> None:
    """The real model through graphs, mixed steps and overlap, scales as measured: most greedy tokens stay."""
    dense: Any = gpu_model(model_path, BF16)
    model = dense
    if weights:
        model = load_model(
            resolve_model(str(model_path)), device="cuda", dtype=BF16, linear_factory=fp8_linear
        )
    scales = measure_kv_scales(model, torch.device("cuda", 0)) if pages else ()
    draw = random.Random(5)
    prompts = [[draw.randrange(100, 40_000) for _ in range(9 + 50 * i)] for i in range(10)]
    settings: dict[str, Any] = {"num_pages": 2048, "max_step_tokens": 256, "max_running": 16}
    runs = runs_of(prompts, gpu_engine(dense, **settings).answer([(p, greedy(16)) for p in prompts]).tokens)
    engine = gpu_engine(model, kv_scales=scales, **settings)
    found = engine.answer([(start, greedy(4)) for start, _ in runs]).tokens
    firsts = sum(tokens[0] == run[0] for tokens, (_, run) in zip(found, runs, strict=True))
    assert firsts >= 0.7 * len(runs), f"{firsts} first tokens of {len(runs)} are the same"
