"""`kvatlas top` on a terminal of 80 columns."""

import io

import pytest
from rich.console import Console

from kvatlas.cli.top import Picture, render
from kvatlas.client.page_map import state_name
from kvatlas.v1 import cache_pb2, server_pb2

COLUMNS = ("request", "state", "pages", "tokens", "prompt", "cached", "tok/s", "prio", "waits for")
ID = "01a23161-3c99-7a5c-9b22-58f4b747ed74"


def picture(seconds: float, tokens: int, **more: int) -> Picture:
    info = cache_pb2.SequenceInfo(
        request_id=ID,
        token_count=tokens,
        prompt_tokens=8000,
        page_ids=bytes(4 * 12345),
        priority=-100,
        **more,
    )
    info.prefix.hit_tokens = 7999
    listing = cache_pb2.ListSequencesResponse(sequences=[info], total_count=1)
    return Picture(seconds, cache_pb2.GetPagePoolResponse(), server_pb2.Load(), listing)


def shown(now: Picture, before: Picture) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(render(now, before, 80, 10))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("state", list(cache_pb2.SequenceState.values())[1:])
def test_neither_a_heading_nor_a_cell_is_cut_short(state: int) -> None:
    lines = shown(picture(1.0, 8123, state=state), picture(0.0, 8000))
    heading = next(line for line in lines if line.startswith("request"))
    assert heading.split("waits")[0].split() == list(COLUMNS[:-1])
    assert heading.endswith("waits for")
    row = lines[lines.index(heading) + 1].split()
    assert row == [
        "01a23161…8f4b747ed74#0",
        state_name(state),
        "12345",
        "8123",
        "8000",
        "7999",
        "123.0",
        "-100",
    ]


def test_a_reason_to_wait_is_shown_whole() -> None:
    waiting = cache_pb2.SEQUENCE_STATE_PREEMPTED
    reason = cache_pb2.WAIT_REASON_STEP_TOKENS
    lines = shown(picture(1.0, 8123, state=waiting, wait_reason=reason, needed_pages=12), picture(0.0, 8000))
    assert "…" not in "".join(lines).replace("01a23161…", "")
    assert [line.split()[-1] for line in lines[-3:]] == ["step", "tokens", "(12)"]
