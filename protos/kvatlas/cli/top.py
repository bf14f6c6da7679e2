"""`kvatlas top`: sequences, pool and load, live."""

import json
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvatlas.cli.connecting import connect
from kvatlas.cli.exits import DONE
from kvatlas.cli.page_art import short_name
from kvatlas.cli.palette import FREE_IN_TERMINAL, LOOKS
from kvatlas.cli.tables import Output
from kvatlas.client.page_map import state_name
from kvatlas.client.sync import Client
from kvatlas.v1 import cache_pb2, server_pb2

MAX_BAR = 72

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """What one refresh saw. The three answers may be a step apart."""

    time_seconds: float
    pool: cache_pb2.GetPagePoolResponse
    load: server_pb2.Load
    listing: cache_pb2.ListSequencesResponse


def run(settings: Namespace) -> int:
    """One picture, some, or pictures until Ctrl-C."""
    console = Output(highlight=False)
    count = settings.count or (0 if console.is_terminal and not settings.json else 1)
    with connect(settings) as client:
        try:
            if settings.json:
                _print_json(client, settings, count)
            elif count == 1 or not console.is_terminal:
                _print_plain(client, settings, console, count)
            else:
                _show_live(client, settings, console, count)
        except KeyboardInterrupt:
            pass  # the way to leave
    return DONE


def look(client: Client, worker_id: str) -> Picture:
    """Asks for everything once."""
    return Picture(
        time.monotonic(),
        client.page_pool(worker_id),
        client.load(),
        client.sequences(worker_id),
    )


def _print_json(client: Client, settings: Namespace, count: int) -> None:
    for number in range(count):
        if number:
            time.sleep(settings.interval)
        print(json.dumps(as_json(look(client, settings.worker_id))), flush=True)


def _print_plain(client: Client, settings: Namespace, console: Console, count: int) -> None:
    before: Picture | None = None
    for number in range(count):
        if number:
            time.sleep(settings.interval)
        picture = look(client, settings.worker_id)
        console.print(render(picture, before, console.width, settings.rows or 1000))
        before = picture


def _show_live(client: Client, settings: Namespace, console: Console, count: int) -> None:
    before: Picture | None = None
    number = 0
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while count == 0 or number < count:
            picture = look(client, settings.worker_id)
            rows = settings.rows or max(3, console.height - 8)
            live.update(render(picture, before, console.width, rows), refresh=True)
            before, number = picture, number + 1
            if number != count:
                time.sleep(settings.interval)


def render(picture: Picture, before: Picture | None, width: int, max_rows: int) -> RenderableType:
    """The whole screen."""
    return Group(
        _load_line(picture),
        _pool_bar(picture.pool.stats, min(width - 2, MAX_BAR)),
        _pool_line(picture.pool.stats),
        _sequence_table(picture, before, max_rows),
    )


def _load_line(picture: Picture) -> Text:
    geometry = picture.pool.geometry
    worker = next((w for w in picture.load.workers if w.worker_id == geometry.worker_id), None)
    text = Text(geometry.worker_id or "worker", "bold")
    if worker is None:
        return text.append("  not heard of by this service", "not bold")
    state = server_pb2.ServerState.Name(worker.state).removeprefix("SERVER_STATE_").lower()
    step_ms = worker.mean_step_time.ToNanoseconds() / 1e6
    return text.append(
        f"  {state} · {worker.running_sequences} running, {worker.waiting_requests} waiting\n"
        f"tokens/s {worker.output_tokens_per_second:.1f} out, {worker.prompt_tokens_per_second:.1f} in"
        f" · step {step_ms:.1f} ms · prefix hits {worker.prefix_hit_rate:.0%}",
        "not bold",
    )


def _pool_bar(stats: cache_pb2.PoolStats, width: int) -> Text:
    counts = _counts(stats)
    total = max(1, sum(counts.values()))
    bar = Text("[")
    drawn, seen = 0, 0
    for state in ("active", "cached", "pinned", "reserved", "free"):
        seen += counts[state]
        end = round(width * seen / total)
        colour = FREE_IN_TERMINAL if state == "free" else LOOKS[state].dark
        bar.append(LOOKS[state].glyph * (end - drawn), colour)
        drawn = end
    return bar.append("]")


def _pool_line(stats: cache_pb2.PoolStats) -> Text:
    counts = _counts(stats)
    words = " · ".join(f"{state} {counts[state]:,}" for state in LOOKS)
    return Text(
        f"{words} = {sum(counts.values()):,} pages\n"
        f"shared {stats.shared_pages:,} · evicted {stats.evictions_total:,}"
        f" · preempted {stats.preemptions_total:,}",
    )


def _counts(stats: cache_pb2.PoolStats) -> Mapping[str, int]:
    return {state: getattr(stats, f"{state}_pages") for state in LOOKS}


def _sequence_table(picture: Picture, before: Picture | None, max_rows: int) -> RenderableType:
    sequences = picture.listing.sequences
    if not sequences:
        return Text("no sequences", "dim")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    # 80 columns hold the names, and words as long as "preempted"; a reason to wait may take a second line.
    table.add_column("request", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("pages", "tokens", "prompt", "cached", "tok/s", "prio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("waits for")
    earlier = _token_counts(before)
    for info in sequences[:max_rows]:
        table.add_row(*_sequence_cells(info, picture, before, earlier))
    hidden = picture.listing.total_count - min(len(sequences), max_rows)
    return Group(table, Text(f"and {hidden} more", "dim")) if hidden > 0 else table


def _sequence_cells(
    info: cache_pb2.SequenceInfo, picture: Picture, before: Picture | None, earlier: Mapping[Key, int]
) -> list[str]:
    key = (info.request_id, info.choice_index)
    speed = ""
    if before is not None and key in earlier:
        seconds = max(1e-3, picture.time_seconds - before.time_seconds)
        speed = f"{max(0, info.token_count - earlier[key]) / seconds:.1f}"
    wait = cache_pb2.WaitReason.Name(info.wait_reason).removeprefix("WAIT_REASON_").lower().replace("_", " ")
    needs = f" ({info.needed_pages})" if info.needed_pages else ""
    return [
        short_name(info.request_id, info.choice_index),
        state_name(info.state),
        str(len(info.page_ids) // 4),  # a plane of u32
        str(info.token_count),
        str(info.prompt_tokens),
        str(info.prefix.hit_tokens) if info.HasField("prefix") else "",
        speed,
        str(info.priority),
        "" if wait == "unspecified" else wait + needs,
    ]


def _token_counts(picture: Picture | None) -> dict[Key, int]:
    if picture is None:
        return {}
    return {(s.request_id, s.choice_index): s.token_count for s in picture.listing.sequences}


def as_json(picture: Picture) -> dict[str, Any]:
    """The same figures as plain values."""
    worker = next(
        (w for w in picture.load.workers if w.worker_id == picture.pool.geometry.worker_id),
        server_pb2.WorkerLoad(),
    )
    return {
        "worker_id": picture.pool.geometry.worker_id,
        "running_sequences": worker.running_sequences,
        "waiting_requests": worker.waiting_requests,
        "output_tokens_per_second": worker.output_tokens_per_second,
        "prompt_tokens_per_second": worker.prompt_tokens_per_second,
        "prefix_hit_rate": worker.prefix_hit_rate,
        "pages": _counts(picture.pool.stats),
        "sequences": [
            {
                "request_id": info.request_id,
                "choice_index": info.choice_index,
                "state": state_name(info.state),
                "pages": len(info.page_ids) // 4,
                "token_count": info.token_count,
                "prompt_tokens": info.prompt_tokens,
            }
            for info in picture.listing.sequences
        ],
    }
