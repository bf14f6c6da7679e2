"""The fused GPU network, through Triton's interpreter, against the plain one on the same parameters."""

import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import fp8, reference, ring_launch, sliced_launch
from kernels.batch import KvLayer
from kernels.decode_inputs import decode_inputs
from kernels.few_rows import runs_beside
from worker.model.fused import FusedModel, LastRows, OwnRows
from worker.model.layers import Linear, TorchLinear
from worker.model.llama import DecoderLayer
from worker.model.quantized import Fp8Linear
from worker.model.toy import toy_config, toy_model


@pytest.mark.parametrize(
    ("num_tokens", "is_decode", "own_rows"),
    [
        (4, False, OwnRows(3, 0, 0)),  # the library
        (3, True, OwnRows(0, 3, 0)),  # the library, but for the activation and the head
        (1, True, OwnRows(3, 0, 0)),
        (3, True, OwnRows(3, 0, 0)),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"has_qk_norm": True, "has_qkv_bias": True}])
def test_the_fused_network_computes_what_the_plain_one_does(
    num_tokens: int, is_decode: bool, own_rows: OwnRows, changes: dict[str, bool]
):
    config = toy_config(**changes)
    model = toy_model(config)
    fused = FusedModel(model, own_rows=own_rows)
    ids = torch.randint(0, config.vocab_size, (num_tokens,), dtype=torch.int32)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    slots = torch.randperm(num_tokens + 4)[:num_tokens].int()
    scale = config.head_dim**-0.5

    def plain(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, positions, scale=scale)

    def stored(kv: KvLayer, q: Tensor) -> Tensor:
        return reference.attention(q, kv.k[slots.long()], kv.v[slots.long()], positions, scale=scale)

    shape = (num_tokens + 4, config.num_kv_heads, config.head_dim)
    kv = [KvLayer(torch.full(shape, float("nan")), torch.full(shape, float("nan"))) for _ in model.layers]
    expected = model.logits(model.forward(ids, positions, plain))
    inputs = fused.embedding[ids.long()].clone()
    if is_decode:
        logits = fused.decode(inputs, kv, fused.stored_first(positions, slots, stored))
    else:
        logits = fused.logits(fused.forward(inputs, positions, slots, kv, stored))
    torch.testing.assert_close(logits.float(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "own_rows", "products"),
    [
        ([3], OwnRows(3, 3, 0), []),
        ([0, 2, 3], OwnRows(3, 3, 0), []),
        ([0, 2, 3], OwnRows(0, 0, 0), [3, 3, 3]),
        ([0, 1, 2, 4, 5], OwnRows(3, 3, 0, beside=8), []),
        ([*range(66)], OwnRows(3, 0, 0), [72, 72, 72]),
    ],
)
def test_behind_the_last_attention_tokens_go_the_way_of_decode_steps(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], own_rows: OwnRows, products: list[int]
):
    """By our own products or by the library's for the next size of a decode step, as if for all tokens."""
    config = toy_config()
    fused = FusedModel(toy_model(config), own_rows=own_rows)
    num_tokens = tokens[-1] + 2
    positions = torch.arange(num_tokens, dtype=torch.int32)
    at, scale = torch.tensor(tokens, dtype=torch.int32), config.head_dim**-0.5

    def attend(kv: KvLayer, q: Tensor, at: Tensor = positions) -> Tensor:
        return reference.attention(q, kv.k, kv.v, at, scale=scale)

    shape = (num_tokens, config.num_kv_heads, config.head_dim)
    kv = [KvLayer(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
    inputs = fused.embedding[torch.randint(0, config.vocab_size, (num_tokens,))]
    expected = fused.forward(inputs.clone(), positions, positions, kv, attend)
    residual, rows = inputs.clone(), []
    q = fused.store(residual, positions, positions, kv, attend)

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        rows.append(x.shape[0])
        return x @ weight.T

    monkeypatch.setattr("worker.model.fused.library_product", counted)
    before = residual.clone()
    last = LastRows(at, lambda kv, q: attend(kv, q, at))
    found = fused.finish(q, residual, kv[-1], last)
    torch.testing.assert_close(found, expected[tokens], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.logits(found), fused.logits(expected)[tokens], rtol=1e-4, atol=1e-4)
    assert torch.equal(residual, before)
    assert rows == products


def in_fp8(layer: DecoderLayer, is_dense: bool = False) -> DecoderLayer:
    """The layer with weights of e4m3, or with the dense ones that these stand for."""

    def of(linear: Linear) -> Linear:
        assert isinstance(linear, TorchLinear)
        weight, scale = fp8.quantize_rows(linear.weight)
        if is_dense:
            return TorchLinear(weight.float() * scale, linear.bias)
        return Fp8Linear(weight, scale.flatten(), linear.bias)

    parts = {name: of(getattr(layer, name)) for name in ("qkv", "output", "gate_up", "down")}
    return replace(layer, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_tokens", "close"), [(1, 1e-5), (3, 0.2)], ids=["one row", "scaled rows"])
def test_e4m3_weights_are_read_as_the_numbers_they_stand_for(num_tokens: int, close: float):
    """A decode step, against the plain network of those numbers as dense weights; one row is not scaled."""
    config = toy_config(has_qk_norm=True, has_qkv_bias=True)
    model, stands = toy_model(config), toy_model(config)
    model.layers = [in_fp8(layer) for layer in model.layers]
    stands.layers = [in_fp8(layer, is_dense=True) for layer in stands.layers]
    positions, scale = torch.arange(num_tokens, dtype=torch.int32), config.head_dim**-0.5

    def plain(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, positions, scale=scale)

    def stored(kv: KvLayer, q: Tensor) -> Tensor:
        return reference.attention(q, kv.k[: len(q)], kv.v[: len(q)], positions, scale=scale)

    ids = torch.randint(0, config.vocab_size, (num_tokens,), dtype=torch.int32)
    expected = stands.logits(stands.forward(ids, positions, plain))
    fused = FusedModel(model, own_rows=OwnRows(1, 0, 0))
    shape = (num_tokens, config.num_kv_heads, config.head_dim)
    kv = [KvLayer(torch.zeros(shape), torch.zeros(shape)) for _ in model.layers]
    inputs = fused.embedding[ids.long()].clone()
    logits = fused.decode(inputs, kv, fused.stored_first(positions, positions, stored)).float()
    error = (logits - expected).norm() / expected.norm()
    assert error < close, f"{error:.1e}"


def test_decode_inputs_reads_the_last_token_of_each_row():
    """M-03, M-04, M-25: padding points at the dummy row and feeds token 0."""
    table = torch.arange(4 * 32, dtype=torch.int32).view(4, 32)
    table[3] = 999
    token_ids = torch.randint(0, 50, (4, 32), dtype=torch.int32)
    token_ids[3] = 0
    embedding = torch.randn(50, 24)
    rows, kv_lens = torch.tensor([2, 0, 3, 3]).int(), torch.tensor([7, 32, 1, 1]).int()
    positions, slots, hidden = torch.zeros(4).int(), torch.zeros(4).int(), torch.zeros(4, 24)
    decode_inputs(rows, kv_lens, table, token_ids, embedding, positions, slots, hidden)
    assert positions.tolist() == [6, 31, 0, 0]
    assert slots.tolist() == [int(table[2, 6]), int(table[0, 31]), 999, 999]
    expected = embedding[[int(token_ids[2, 6]), int(token_ids[0, 31]), 0, 0]]
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("outputs", "width", "gated", "adds", "expected"),
    [
        (4096, 1024, False, False, True),
        (1024, 2048, False, True, True),
        (6144, 1024, True, False, True),
        (1024, 3072, False, True, True),
        (4096, 14_336, False, True, False),  # its programs count who has arrived
        (512, 256, False, False, False),  # few programs, as in few_rows.py
    ],
)
def test_products_run_beside_others_where_their_programs_share_no_counters(
    monkeypatch: pytest.MonkeyPatch, outputs: int, width: int, gated: bool, adds: bool, expected: bool
):
    weight = torch.empty(outputs, width, dtype=torch.bfloat16)
    assert not runs_beside(weight, gated=gated, adds=adds), "a processor"
    for launches in (ring_launch, sliced_launch):
        monkeypatch.setattr(launches, "is_there", lambda device: True)
    assert runs_beside(weight, gated=gated, adds=adds) == expected


def test_our_own_products_take_the_weights_they_know_as_far_as_measured(monkeypatch: pytest.MonkeyPatch):
    config = toy_config()
    small = toy_model(config, dtype=torch.bfloat16)
    assert OwnRows.of(small) == OwnRows(chain=64, gated=64, dependent=256)
    assert OwnRows.of(toy_model(config)) == OwnRows(chain=1, gated=0, dependent=0)
    small.layers = [in_fp8(layer) for layer in small.layers]
    assert OwnRows.of(small) == OwnRows(chain=1, gated=64, dependent=64)
    monkeypatch.setattr("worker.model.fused.ONE_ROW_BYTES", 1000)
    assert OwnRows.of(small) == OwnRows(chain=0, gated=64, dependent=64)
    small.head = lambda x: x  # some other implementation
    assert OwnRows.of(small) == OwnRows(chain=0, gated=0, dependent=0)
