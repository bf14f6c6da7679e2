"""`kvatlas pages`: the page map in the terminal, once or live, as JSON or as a picture."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvatlas.cli import page_art
from kvatlas.cli.connecting import connect
from kvatlas.cli.exits import DONE, USAGE, CommandFailed
from kvatlas.cli.tables import Output
from kvatlas.client.page_map import PageMap
from kvatlas.client.sync import Client

RECONNECT_SECONDS = 30.0
OWNERS_SHOWN = 12


def run(settings: Namespace) -> int:
    """Shows the map once, or until Ctrl-C."""
    with connect(settings) as client:
        if settings.watch:
            return _watch(client, settings)
        page_map = client.page_map(settings.worker_id)
    if settings.svg:
        write_svg(page_map, settings.svg)
    elif settings.json:
        print(json.dumps(as_json(page_map)))
    else:
        print_map(page_map, settings.by, width=settings.width, pages_per_glyph=settings.pages_per_glyph)
    return DONE


def print_map(
    page_map: PageMap, by: str, *, width: int = 0, pages_per_glyph: int = 0, title: str = ""
) -> None:
    """The whole map on stdout, with colour if that is a terminal."""
    console = Output(highlight=False, width=width or None)
    for line in map_lines(page_map, by, console, pages_per_glyph or 1, title):
        console.print(line, soft_wrap=True)


def map_lines(
    page_map: PageMap, by: str, console: Console, pages_per_glyph: int, title: str = ""
) -> Iterator[Text]:
    """Headline, rows, legend."""
    is_ascii = "utf" not in console.encoding.lower()
    pages_per_glyph = min(pages_per_glyph, page_map.page_count)  # more would only be room in memory
    yield Text(f"{title} " if title else "", "bold").append(page_art.headline(page_map), "not bold")
    if pages_per_glyph > 1:
        yield Text(f"one glyph is {pages_per_glyph} pages and shows the busiest of them", "dim")
    label_width = page_art.label_width(page_map.page_count)
    rows = page_art.layout(
        page_map, by, width=console.width, pages_per_glyph=pages_per_glyph, is_ascii=is_ascii
    )
    for row in rows:
        line = Text(f"{row.first_page:>{label_width}} ", "dim")
        for cell in row.cells:
            line.append(cell.glyph, f"not dim {cell.colour}")
        yield line
    yield _legend_line(page_map, is_ascii)
    if by == "owner":
        yield from _owner_lines(page_map)


def _legend_line(page_map: PageMap, is_ascii: bool) -> Text:
    counts = page_map.counts()
    line = Text()
    for cell, words in page_art.legend(counts):
        glyph = page_art.state_cell(words.split()[0], is_ascii=True).glyph if is_ascii else cell.glyph
        line.append(glyph, cell.colour).append(f" {words}   ")
    return line.append(f"= {sum(counts.values()):,} pages", "dim")


def _owner_lines(page_map: PageMap) -> Iterator[Text]:
    entries = page_art.owner_legend(page_map)
    for cell, words in entries[:OWNERS_SHOWN]:
        yield Text("  ").append(cell.glyph, cell.colour).append(f" {words}")
    if len(entries) > OWNERS_SHOWN:
        yield Text(f"  and {len(entries) - OWNERS_SHOWN} more", "dim")


def _watch(client: Client, settings: Namespace) -> int:
    if settings.svg:
        raise CommandFailed("--svg makes one picture: leave --watch out", USAGE)
    maps = client.watch_pages(
        settings.worker_id, interval_seconds=settings.interval, reconnect_seconds=RECONNECT_SECONDS
    )
    try:
        if settings.json:
            for page_map in maps:
                print(json.dumps(as_json(page_map)), flush=True)
        else:
            _show(maps, settings)
    except KeyboardInterrupt:
        pass  # the way to leave
    finally:
        maps.close()
    return DONE


def _show(maps: Iterator[PageMap], settings: Namespace) -> None:
    console = Output(highlight=False, width=settings.width or None)
    if console.is_terminal:
        _show_live(maps, settings, console)
        return
    for page_map in maps:  # a live picture of no terminal is held back until all is over
        print_map(page_map, settings.by, width=settings.width, pages_per_glyph=settings.pages_per_glyph)
        sys.stdout.flush()


def _show_live(maps: Iterator[PageMap], settings: Namespace, console: Console) -> None:
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for page_map in maps:
            room = max(4, console.height - 4)
            room -= min(OWNERS_SHOWN, len(page_map.sequences)) if settings.by == "owner" else 0
            pages_per_glyph = settings.pages_per_glyph or page_art.fitting_pages_per_glyph(
                page_map.page_count, console.width, max(4, room)
            )
            lines = map_lines(page_map, settings.by, console, pages_per_glyph)
            live.update(Group(*lines), refresh=True)


def write_svg(page_map: PageMap, file_name: str) -> None:
    """A picture of the map."""
    from kvatlas.cli.svg import draw

    try:
        Path(file_name).write_text(draw(page_map))
    except OSError as error:
        raise CommandFailed(f"cannot write {file_name}: {error.strerror}", USAGE) from None
    print(f"{file_name}: {page_map.page_count} pages", file=sys.stderr)


def as_json(page_map: PageMap) -> dict[str, Any]:
    """Everything the map holds, as plain values."""
    geometry, stats = page_map.geometry, page_map.stats
    return {
        "worker_id": geometry.worker_id,
        "epoch": page_map.revision.epoch,
        "revision": page_map.revision.number,
        "page_count": geometry.page_count,
        "page_size": geometry.page_size,
        "page_bytes": geometry.page_bytes,
        "counts": page_map.counts(),
        "stats": {field.name: getattr(stats, field.name) for field in stats.DESCRIPTOR.fields},
        "pages": {name: plane.tolist() for name, plane in page_map.planes.items()},
        "sequences": [
            {
                "owner": sequence.owner,
                "request_id": sequence.request_id,
                "choice_index": sequence.choice_index,
                "state": sequence.state,
                "page_ids": sequence.page_ids.tolist(),
                "token_count": sequence.token_count,
                "prompt_tokens": sequence.prompt_tokens,
                "hit_tokens": sequence.hit_tokens,
            }
            for sequence in page_map.sequences.values()
        ],
    }
