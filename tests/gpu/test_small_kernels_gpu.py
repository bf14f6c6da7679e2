"""The kernels between attention and sampling, on a GPU in bf16 and fp32: no worse than plain torch."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import reference
from kernels.batch import KvLayer
from kernels.decode_inputs import decode_inputs
from kernels.few_rows import FewRowsLaunch, add_product, product
from kernels.matvec import matvec
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary_store import Rotary, rotary_store
from kernels.silu_mul import silu_mul
from kernels.testing import assert_no_worse

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
EPS = 1e-5


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def silu64(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@DTYPES
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 576), (3, 896), (257, 1024), (64, 4096), (5, 100)])
def test_norms_are_no_worse_than_plain_torch(num_tokens, width, dtype):
    x, residual = noise(num_tokens, width, dtype=dtype), noise(num_tokens, width, dtype=dtype, seed=1)
    weight = noise(width, dtype=dtype, seed=2)
    assert_no_worse(
        rms_norm(x, weight, EPS), plain=reference.rms_norm(x, weight, EPS), exact=norm64(x, weight)
    )
    plain, total = reference.add_rms_norm(x, residual, weight, EPS)
    exact = norm64(x.double() + residual.double(), weight)
    ours = add_rms_norm(x, residual, weight, EPS)
    assert_no_worse(ours, plain=plain, exact=exact)
    assert torch.equal(residual, total)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1536), (7, 3072), (64, 14_336), (3, 50)])
def test_the_gated_activation_is_no_worse_than_plain_torch(num_tokens, width, dtype):
    gate_up = noise(num_tokens, 2 * width, dtype=dtype)
    assert_no_worse(silu_mul(gate_up), plain=reference.silu_mul(gate_up), exact=silu64(gate_up))


@DTYPES
@pytest.mark.parametrize(("num_outputs", "width"), [(1024, 1024), (100, 576), (70, 14_336), (4096, 4096)])
def test_a_product_of_one_row_is_no_worse_than_plain_torch(num_outputs, width, dtype):
    """Alone; with the norm before it; with bias, residual or the gated activation behind it."""
    x, weight = noise(1, width, dtype=dtype), noise(num_outputs, width, dtype=dtype, seed=1)
    weight = weight * width**-0.5
    norm, bias = noise(width, dtype=dtype, seed=2), noise(num_outputs, dtype=dtype, seed=3)
    exact = x.double() @ weight.double().T
    linear = torch.nn.functional.linear
    assert_no_worse(matvec(x, weight, bias=bias), plain=linear(x, weight, bias), exact=exact + bias.double())
    residual = noise(1, num_outputs, dtype=dtype, seed=4)
    plain, wanted = residual + linear(x, weight), residual.double() + exact
    assert_no_worse(matvec(x, weight, residual=residual), plain=plain, exact=wanted)
    exact = norm64(x, norm) @ weight.double().T
    plain = linear(reference.rms_norm(x, norm, EPS), weight)
    assert_no_worse(matvec(x, weight, norm=norm, eps=EPS), plain=plain, exact=exact)
    gated = matvec(x, weight, norm=norm, eps=EPS, gated=True)
    assert_no_worse(gated, plain=reference.silu_mul(plain), exact=silu64(exact))


@pytest.mark.parametrize(
    "launch",
    [
        None,
        FewRowsLaunch(splits=1),
        FewRowsLaunch(splits=4),
        FewRowsLaunch(splits=4, is_early=False, ahead=1),
    ],
    ids=["chosen", "whole", "split", "waits first"],
)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "width"),
    [
        *(
            (2, 4096, 1024),
            (5, 70, 896),
            (8, 1024, 3072),
            (16, 1536, 576),
            (33, 1024, 2048),
            (64, 4096, 1024),
        ),
        *((8, 6144, 4096), (8, 4096, 14_336)),
    ],
)
def test_products_of_few_rows_are_no_worse_than_plain_torch(num_rows, num_outputs, width, launch):
    """Alone, with bias or the activation; then added to a residual whose norm the next product takes."""
    bf16 = torch.bfloat16
    x, weight = noise(num_rows, width, dtype=bf16), noise(num_outputs, width, dtype=bf16, seed=1)
    weight = weight * width**-0.5
    bias, gain = noise(num_outputs, dtype=bf16, seed=3), noise(num_outputs, dtype=bf16, seed=2)
    linear = torch.nn.functional.linear
    exact, plain = x.double() @ weight.double().T, linear(x, weight)
    ours = product(x, weight, bias=bias, launch=launch)
    assert_no_worse(ours, plain=linear(x, weight, bias), exact=exact + bias.double())
    gated = product(x, weight, gated=True, launch=launch)
    assert_no_worse(gated, plain=reference.silu_mul(plain), exact=silu64(exact))
    residual = noise(num_rows, num_outputs, dtype=bf16, seed=4)
    wanted, plain_total = residual.double() + exact, residual + plain
    scaled = add_product(x, weight, residual, gain, launch=launch)
    assert_no_worse(residual, plain=plain_total, exact=wanted)
    back = noise(256, num_outputs, dtype=bf16, seed=5) * num_outputs**-0.5
    ours = product(scaled, back, eps=EPS, launch=launch)
    plain = linear(reference.rms_norm(plain_total, gain, EPS), back)
    assert_no_worse(ours, plain=plain, exact=norm64(wanted, gain) @ back.double().T)


@pytest.mark.parametrize("num_rows", [8, 64])
def test_the_gated_product_of_a_large_layer_is_no_worse_than_plain_torch(num_rows):
    x, weight = noise(num_rows, 4096, dtype=torch.bfloat16), noise(28_672, 4096, dtype=torch.bfloat16, seed=1)
    weight /= 64
    plain = reference.silu_mul(torch.nn.functional.linear(x, weight))
    assert_no_worse(product(x, weight, gated=True), plain=plain, exact=silu64(x.double() @ weight.double().T))


@DTYPES
@pytest.mark.parametrize("with_norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (9, 3, 64), (7, 1, 80), (32, 8, 128)])
def test_rotary_and_store_are_no_worse_than_plain_torch(heads, kv_heads, dim, with_norm, dtype):
    num_tokens = 21
    qkv = noise(num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    kv = KvLayer(*noise(2, 40, kv_heads, dim, dtype=dtype, seed=1).fill_(torch.nan))
    slots = torch.randperm(40, device="cuda")[:num_tokens].int()
    positions = torch.randint(0, 512, (num_tokens,), device="cuda").int()
    angles = noise(512, dim, dtype=torch.float32, seed=2)
    norms = [noise(dim, dtype=dtype, seed=3 + n) if with_norm else None for n in range(2)]
    out_q = torch.empty(num_tokens, heads, dim, dtype=dtype, device="cuda")
    rotary_store(qkv, kv, slots, positions, Rotary(angles, *norms, eps=EPS), out_q)

    q, k, v = qkv.view(num_tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = angles[positions.long()].chunk(2, dim=1)
    for ours, source, norm in ((out_q, q, norms[0]), (kv.k[slots.long()], k, norms[1])):
        normed = source if norm is None else reference.rms_norm(source, norm, EPS)
        wide = source.double() if norm is None else norm64(source, norm)
        low, high = wide.chunk(2, dim=-1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        exact = torch.cat((low * c - high * s, high * c + low * s), dim=-1)
        assert_no_worse(ours, plain=reference.rotary(normed, cos, sin), exact=exact)
    assert torch.equal(kv.v[slots.long()], v)
    others = torch.ones(40, dtype=torch.bool, device="cuda")
    others[slots.long()] = False
    assert kv.k[others].isnan().all()
    assert kv.v[others].isnan().all()


@pytest.mark.parametrize("num_rows", [1, 9, 256])
def test_decode_inputs_reads_the_last_token_of_each_row(num_rows):
    """M-25: ids, slots, positions and embedding rows as the tables have them."""
    table = torch.randint(0, 2**30, (num_rows + 1, 4096), device="cuda").int()
    ids = torch.randint(0, 1000, (num_rows + 1, 4096), device="cuda").int()
    embedding = noise(1000, 576, dtype=torch.bfloat16)
    rows = torch.randperm(num_rows + 1, device="cuda")[:num_rows].int()
    lens = torch.randint(1, 4097, (num_rows,), device="cuda").int()
    positions, slots = torch.empty_like(lens), torch.empty_like(lens)
    hidden = torch.empty(num_rows, 576, dtype=torch.bfloat16, device="cuda")
    decode_inputs(rows, lens, table, ids, embedding, positions, slots, hidden)
    at = (rows.long(), lens.long() - 1)
    assert torch.equal(positions, lens - 1)
    assert torch.equal(slots, table[at])
    assert torch.equal(hidden, embedding[ids[at].long()])
