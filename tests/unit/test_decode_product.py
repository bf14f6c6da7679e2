"""Decode attention that takes the qkv product, through Triton's interpreter, against its two kernels."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before the imports below

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels import fp8
from kernels.batch import KvLayer
from kernels.decode_plan import BESIDE, FEW, MANY, DecodeLaunch
from kernels.store_kv import store_kv
from kernels.testing_decode import DecodeProblem, bits, copied

SHAPES = [  # heads, KV heads, head_dim, page size, kv lengths, norm of heads
    (4, 2, 64, 16, [1, 130, 300], True),
    (7, 1, 80, 1, [129, 65], False),
    (9, 3, 32, 4, [5, 64, 128, 100], True),
    (2, 2, 128, 64, [63, 64, 65, 2], False),
    (16, 1, 256, 16, [66], True),
    (4, 2, 32, 16, [70, 1, 2, 16, 17, 33], True),
    (2, 1, 32, 4, [1, 2, 31, 32, 33, 34, 63, 64, 65, 66, 95, 96, 97, 98, 3, 200], False),
]
ONE_PROGRAM = DecodeLaunch(block=16, warps=4, stages=3, programs_per_sm=1, wave_per_sm=2)


@pytest.mark.parametrize("launch", [FEW, MANY, BESIDE, ONE_PROGRAM])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page", "kv_lens", "with_norm"), SHAPES)
def test_one_launch_leaves_what_two_kernels_do(heads, kv_heads, dim, page, kv_lens, with_norm, launch):
    """Attention, K and V of the new token, and no other slot; also where a chunk is the new token alone."""
    case = DecodeProblem((heads, kv_heads, dim), page, kv_lens, with_norm=with_norm)
    two, one = copied(case.kv), copied(case.kv)
    plan = case.plan(launch, 1)
    expected = case.by_two_kernels(two, plan)
    for _ in range(2):  # its counters are as before
        torch.testing.assert_close(case.by_one(one, plan), expected, rtol=1e-5, atol=1e-5)
    assert plan.arrived.count_nonzero() == 0
    assert plan.queue.item() == 0
    slots = case.slots.long()
    torch.testing.assert_close(one.k[slots], two.k[slots], rtol=1e-5, atol=1e-6)
    assert torch.equal(one.v[slots], two.v[slots])
    one.k[slots], two.k[slots] = 0.0, 0.0
    assert torch.equal(bits(one), bits(two))


def test_e4m3_pages_get_and_give_what_two_kernels_do():
    """The new token counts as it is stored: rounded to e4m3, cut off at its largest."""
    case = DecodeProblem((4, 2, 64), 16, [1, 130, 200], with_norm=True)
    case.qkv[1] *= 50.0
    pool = KvLayer(fp8.to_fp8(case.kv.k, 0.02), fp8.to_fp8(case.kv.v, 0.05), 0.02, 0.05)
    two, one, plan = copied(pool), copied(pool), case.plan(FEW, 1)
    expected = case.by_two_kernels(two, plan)
    torch.testing.assert_close(case.by_one(one, plan), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(bits(one), bits(two))


@pytest.mark.parametrize("attend", [DecodeProblem.by_one, DecodeProblem.by_two_kernels])
def test_what_is_no_number_is_not_stored_as_the_largest_in_e4m3_pages(attend):
    """As store_kv leaves it, bit for bit: what the interpreter makes of it, and on a device no number."""
    heads, kv_heads, dim = 4, 2, 64
    case = DecodeProblem((heads, kv_heads, dim), 16, [3, 70], with_norm=False)
    case.qkv[1, heads * dim :] = float("nan")
    pool = KvLayer(fp8.to_fp8(case.kv.k, 0.02), fp8.to_fp8(case.kv.v, 0.05), 0.02, 0.05)
    ours, expected = copied(pool), copied(pool)
    attend(case, ours, case.plan())
    nothing = torch.full((1, kv_heads, dim), float("nan"))
    store_kv(expected, case.slots[1:], nothing, nothing)
    slot = case.slots[1].long()
    assert torch.equal(bits(ours)[:, slot], bits(expected)[:, slot])


def test_padding_writes_the_dummy_slot_and_changes_no_other_row():
    """Several rows of one token may share a slot: each attends to its own out of registers."""
    case = DecodeProblem((4, 2, 64), 16, [70, 3], with_norm=True)
    alone, padded_kv = copied(case.kv), copied(case.kv)
    expected = case.by_two_kernels(alone, case.plan())
    dummy = len(alone.k) - 1
    case.page_table[2] = dummy
    case.rows = torch.cat([case.rows, torch.full((3,), 2, dtype=torch.int32)])
    case.kv_lens = torch.cat([case.kv_lens, torch.ones(3, dtype=torch.int32)])
    case.qkv = torch.cat([case.qkv, torch.ones(3, case.qkv.shape[1])])
    ours = case.by_one(padded_kv, case.plan())
    torch.testing.assert_close(ours[:2], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[2:], torch.ones(3, 4, 64), rtol=0, atol=0)
    alone.v[dummy] = 1.0
    assert torch.equal(padded_kv.v.view(torch.uint8), alone.v.view(torch.uint8))


def test_a_product_of_another_width_is_refused():
    case = DecodeProblem((4, 2, 64), 16, [3], with_norm=False)
    case.qkv = case.qkv[:, :-1]
    with pytest.raises(AssertionError, match="qkv is"):
        case.by_one(case.kv, case.plan())
