"""A page map as rows of glyphs: what each page looks like, how many fit a line, and the legend.

Pure: a PageMap in, strings and style names out. Knows no terminal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvatlas.cli.counted import counted
from kvatlas.cli.palette import FILL_GLYPHS, FREE_IN_TERMINAL, LOOKS, owner_colour
from kvatlas.client.page_map import STATE_NAMES, PageMap
from kvatlas.v1 import cache_pb2 as pb

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

# What one glyph of several pages shows: the state that says most, if any page has it.
_DOMINANCE = (
    pb.PAGE_STATE_RESERVED,
    pb.PAGE_STATE_PINNED,
    pb.PAGE_STATE_ACTIVE,
    pb.PAGE_STATE_CACHED,
    pb.PAGE_STATE_FREE,
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One glyph and its colour."""

    glyph: str
    colour: str


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the map."""

    first_page: int
    cells: Sequence[Cell]


def page_cells(page_map: PageMap, by: str, *, is_ascii: bool = False) -> list[Cell]:
    """One cell per page, in the order of page ids."""
    states = [STATE_NAMES.get(number, "free") for number in page_map["states"].tolist()]
    cells = [state_cell(state, is_ascii=is_ascii) for state in states]
    if by == "owner":
        owners = page_map["owners"].tolist()
        return [_owner_cell(owner) if owner else cell for owner, cell in zip(owners, cells, strict=True)]
    if by == "refs":
        refs = page_map["ref_counts"].tolist()
        return [
            Cell(str(count) if count < 10 else "+", cell.colour) if count else cell
            for count, cell in zip(refs, cells, strict=True)
        ]
    if is_ascii:
        return cells
    filled = page_map["filled_slots"].tolist()
    size = page_map.geometry.page_size
    return [
        Cell(fill_glyph(slots, size), cell.colour) if state == "active" else cell
        for state, slots, cell in zip(states, filled, cells, strict=True)
    ]


def state_cell(state: str, *, is_ascii: bool = False) -> Cell:
    """How a page of that state looks where nothing else is told."""
    look = LOOKS[state]
    return Cell(look.ascii if is_ascii else look.glyph, FREE_IN_TERMINAL if state == "free" else look.dark)


def fill_glyph(filled_slots: int, page_size: int) -> str:
    """A bar that is full only when the page is."""
    steps = len(FILL_GLYPHS)
    return FILL_GLYPHS[max(0, min(steps, filled_slots * steps // page_size) - 1)]


def merged(page_map: PageMap, pages_per_glyph: int) -> NDArray[np.uint8]:
    """The state that stands for each run of pages; its glyph is that of the state, whatever the fill."""
    states = page_map["states"]
    num_glyphs = -(-len(states) // pages_per_glyph)
    padded = np.full(num_glyphs * pages_per_glyph, pb.PAGE_STATE_FREE, np.uint8)
    padded[: len(states)] = states
    runs = padded.reshape(num_glyphs, pages_per_glyph)
    result = np.full(num_glyphs, pb.PAGE_STATE_FREE, np.uint8)
    for state in reversed(_DOMINANCE):
        result[(runs == state).any(axis=1)] = state
    return result


def layout(
    page_map: PageMap, by: str, *, width: int, pages_per_glyph: int, is_ascii: bool = False
) -> Iterator[Row]:
    """Rows that fit `width` columns, the number of the first page included."""
    if pages_per_glyph == 1:
        cells = page_cells(page_map, by, is_ascii=is_ascii)
    else:
        states = merged(page_map, pages_per_glyph).tolist()
        cells = [state_cell(STATE_NAMES[state], is_ascii=is_ascii) for state in states]
    columns = columns_of(page_map.page_count, width)
    for first in range(0, len(cells), columns):
        yield Row(first * pages_per_glyph, cells[first : first + columns])


def columns_of(page_count: int, width: int) -> int:
    """Glyphs per line: a multiple of 16 where it fits, of 8 or 1 where it does not."""
    room = max(1, width - label_width(page_count) - 1)
    unit = 16 if room >= 16 else 8 if room >= 8 else 1
    return room // unit * unit


def label_width(page_count: int) -> int:
    """Columns of the page number at the start of a line."""
    return len(str(max(page_count - 1, 0)))


def fitting_pages_per_glyph(page_count: int, width: int, max_rows: int) -> int:
    """The smallest power of two at which the map has at most `max_rows` rows."""
    columns, pages_per_glyph = columns_of(page_count, width), 1
    while -(-page_count // pages_per_glyph) > columns * max_rows:
        pages_per_glyph *= 2
    return pages_per_glyph


def headline(page_map: PageMap) -> str:
    """Which pool, how large, as of when."""
    geometry = page_map.geometry
    size_mib = geometry.page_count * geometry.page_bytes / 2**20
    size = f" · {size_mib:,.1f} MiB" if size_mib else ""  # a device of lists holds no bytes
    return (
        f"{geometry.worker_id or 'worker'} · {geometry.page_count:,} pages of {geometry.page_size} tokens"
        f"{size} · revision {page_map.revision.number:,}"
    )


def short_name(request_id: str, choice_index: int) -> str:
    """A sequence in at most 24 columns: both ends of its request's id, since ids made at once begin alike."""
    name = request_id or "(other tenant)"
    short = name if len(name) <= 20 else f"{name[:8]}…{name[-11:]}"
    return f"{short}#{choice_index}"


def legend(counts: Mapping[str, int]) -> list[tuple[Cell, str]]:
    """A glyph and `name count` for every state; the counts add up to the pool."""
    return [(state_cell(state), f"{state} {counts[state]:,}") for state in LOOKS]


def owner_legend(page_map: PageMap) -> list[tuple[Cell, str]]:
    """A glyph and a sentence for every sequence that holds pages, the largest first."""
    sequences = sorted(page_map.sequences.values(), key=lambda s: (-len(s.page_ids), s.owner))
    return [
        (
            _owner_cell(sequence.owner),
            f"{short_name(sequence.request_id, sequence.choice_index)} · {sequence.state}"
            f" · {counted(len(sequence.page_ids), 'page')} · {counted(sequence.token_count, 'token')}",
        )
        for sequence in sequences
    ]


def _owner_cell(owner: int) -> Cell:
    return Cell(LETTERS[(owner - 1) % len(LETTERS)], owner_colour(owner))
