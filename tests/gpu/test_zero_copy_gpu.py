"""Batches and results through pinned memory on the GPU: the host is far ahead, and nothing mixes."""

import random
from collections import deque

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux only")

from kernels.plan_buffers import new_event
from kernels.zero_copy import (
    KV_LENS,
    NO_PAGE,
    PAGE_IDS,
    PAGE_INDEXES,
    PAGE_ROWS,
    ROWS,
    read_batch,
    write_results,
)
from worker.execution.page_table import PageTable
from worker.execution.step_buffers import DEPTH, StepBuffers, StepOutcome, decode_shapes

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
MAX_BATCH, PAGE_SIZE, PAGES, STEPS = 200, 16, 4000, 400


def page_table() -> PageTable:
    return PageTable(
        max_running=MAX_BATCH, max_context=1024, num_pages=PAGES, page_size=PAGE_SIZE, device=DEVICE
    )


def test_steps_far_ahead_of_a_busy_device_do_not_mix() -> None:
    """H9, B083: every step gives back its own rows and lengths, every page is where a scatter puts it."""
    draw = random.Random(5)
    buffers = StepBuffers(decode_shapes(MAX_BATCH), lambda: new_event(DEVICE), is_pinned=True)
    expected, found = page_table(), page_table()
    rows, kv_lens = torch.zeros(2, 224, dtype=torch.int32, device=DEVICE)
    flags = torch.zeros(MAX_BATCH, dtype=torch.int8, device=DEVICE)
    in_flight: deque[tuple[list[int], StepOutcome]] = deque()
    for _ in range(STEPS):
        count, num_pages = draw.randint(1, MAX_BATCH), draw.choice([0, 1, 7, 60])
        sent = [draw.randrange(2**20) for _ in range(count)]
        entries = draw.sample(range(MAX_BATCH * 64), num_pages)
        pages = ([n // 64 for n in entries], [n % 64 for n in entries], draw.sample(range(PAGES), num_pages))
        with buffers.next() as buffer:
            into = buffer.batch_columns
            into[ROWS, :count], into[KV_LENS, :count] = sent, [n % 7 for n in sent]
            into[PAGE_ROWS] = NO_PAGE
            for column, values in zip((PAGE_ROWS, PAGE_INDEXES, PAGE_IDS), pages, strict=True):
                into[column, :num_pages] = values
            torch.cuda._sleep(draw.choice([0, 0, 100_000]))  # type: ignore[no-untyped-call]
            room = max(count, num_pages)
            read_batch(buffer.batch, found.slots, rows, kv_lens, room, page_size=PAGE_SIZE)
            flags.copy_(kv_lens[:MAX_BATCH] == 0)
            write_results(rows[:MAX_BATCH], flags, buffer.results, count)
        expected.write_pages(*pages)
        in_flight.append((sent, StepOutcome(buffer, count)))
        if len(in_flight) == DEPTH:
            check(*in_flight.popleft())
    while in_flight:
        check(*in_flight.popleft())
    assert torch.equal(found.slots, expected.slots)


def check(sent: list[int], outcome: StepOutcome) -> None:
    ids, is_finite = outcome.arrived()
    assert ids.tolist() == sent
    assert is_finite.tolist() == [int(n % 7 == 0) for n in sent]
