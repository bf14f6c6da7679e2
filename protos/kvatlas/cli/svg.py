"""A page map as a picture: a grid of pages, a legend that adds up, and one ribbon per sequence.

Pure: a PageMap in, an SVG document out. The README's picture is made by it.
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from kvatlas.cli.counted import counted
from kvatlas.cli.page_art import headline, short_name
from kvatlas.cli.palette import GROUND_DARK, LOOKS
from kvatlas.client.page_map import STATE_NAMES, PageMap, SequencePages

WIDTH = 920
MARGIN = 28
MIN_CELL, MAX_CELL = 4, 18
GRID_HEIGHT = 320  # at most, while cells are not smaller than MIN_CELL
RIBBONS = 8
RIBBON_HEIGHT = 26
CHARACTER = 8  # width of one, at the size used here
TEXT = "#d7dce6"
FAINT = "#8b93a3"
EDGE = "#2b3140"
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def draw(page_map: PageMap) -> str:
    """The document. Pages that several sequences use carry a white mark; fill levels are drawn."""
    cell = _cell_size(page_map.page_count)
    columns = (WIDTH - 2 * MARGIN) // cell
    num_rows = -(-page_map.page_count // columns)
    sequences = sorted(page_map.sequences.values(), key=lambda s: (-len(s.page_ids), s.owner))[:RIBBONS]
    grid_top = 72
    legend_top = grid_top + num_rows * cell + 30
    ribbons_top = legend_top + 26
    height = ribbons_top + len(sequences) * RIBBON_HEIGHT + (MARGIN if sequences else 0)
    parts = [
        *_frame(page_map, height),
        *_grid(page_map, grid_top, cell, columns),
        *_legend(page_map, legend_top),
        *_ribbons(page_map, sequences, ribbons_top),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _cell_size(page_count: int) -> int:
    """The largest cell at which the grid is not too high."""
    for cell in range(MAX_CELL, MIN_CELL, -1):
        columns = (WIDTH - 2 * MARGIN) // cell
        if -(-page_count // columns) * cell <= GRID_HEIGHT:
            return cell
    return MIN_CELL


def _frame(page_map: PageMap, height: int) -> Iterator[str]:
    counts = page_map.counts()
    words = ", ".join(f"{counts[state]} {state}" for state in LOOKS)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="{FONT}" font-size="13" role="img">'
    )
    yield f"<title>Page map: {escape(words)}</title>"
    cached = LOOKS["reserved"].dark
    yield (
        '<defs><pattern id="reserved" width="4" height="4" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="2" height="4" fill="{cached}"/></pattern></defs>'
    )
    yield f'<rect width="{WIDTH}" height="{height}" rx="12" fill="{GROUND_DARK}"/>'
    title = "KV cache, page by page"
    yield f'<text x="{MARGIN}" y="36" fill="{TEXT}" font-size="16" font-weight="600">{title}</text>'
    yield f'<text x="{MARGIN}" y="56" fill="{FAINT}">{escape(headline(page_map))}</text>'


def _grid(page_map: PageMap, top: int, cell: int, columns: int) -> Iterator[str]:
    planes = zip(
        page_map["states"].tolist(),
        page_map["filled_slots"].tolist(),
        page_map["ref_counts"].tolist(),
        strict=True,
    )
    for page, (number, filled, refs) in enumerate(planes):
        x, y = MARGIN + page % columns * cell, top + page // columns * cell
        share = filled / page_map.geometry.page_size
        yield from _page(x, y, cell - 2, STATE_NAMES.get(number, "free"), share, refs)


def _page(x: float, y: float, size: int, state: str, share: float, refs: int) -> Iterator[str]:
    """One page: its ground, as much colour as it is full, and a mark where it is shared."""
    radius = 2 if size >= 8 else 0
    look, free = LOOKS[state], LOOKS["free"]
    if state == "reserved":
        yield _rect(x, y, size, size, "url(#reserved)", radius)
    elif state == "active" and share < 1:
        yield _rect(x, y, size, size, free.dark, radius)
        filled = max(1.0, round(size * share, 1))
        yield _rect(x, y + size - filled, size, filled, look.dark, radius)
    else:
        yield _rect(x, y, size, size, look.dark, radius)
    if state == "pinned" and size >= 8:
        yield f'<path d="M{x} {y}h{size / 2}l-{size / 2} {size / 2}z" fill="{GROUND_DARK}"/>'
    if refs > 1 and size >= 6:
        yield f'<circle cx="{x + size / 2}" cy="{y + size / 2}" r="{size / 5:.1f}" fill="#ffffff"/>'


def _rect(x: float, y: float, width: float, height: float, fill: str, radius: int = 0) -> str:
    corner = f' rx="{radius}"' if radius else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{corner}/>'


def _legend(page_map: PageMap, y: int) -> Iterator[str]:
    counts = page_map.counts()
    x = float(MARGIN)
    for state in LOOKS:
        yield from _page(x, y - 11, 12, state, 1.0, 0)
        words = f"{state} {counts[state]:,}"
        yield f'<text x="{x + 18:g}" y="{y}" fill="{TEXT}">{words}</text>'
        x += 18 + 8 * len(words) + 18
    yield from _page(x, y - 11, 12, "active", 1.0, 2)
    yield f'<text x="{x + 18:g}" y="{y}" fill="{TEXT}">shared</text>'
    total = f"= {sum(counts.values()):,} pages"
    yield f'<text x="{WIDTH - MARGIN}" y="{y}" fill="{FAINT}" text-anchor="end">{total}</text>'


def _ribbons(page_map: PageMap, sequences: list[SequencePages], top: int) -> Iterator[str]:
    """Pages of each sequence in token order: what it shares and how far its last page is filled."""
    labels = [_label(sequence) for sequence in sequences]
    left = MARGIN + CHARACTER * max(map(len, labels), default=0) + 20
    right = WIDTH - MARGIN - 170
    longest = max((len(s.page_ids) for s in sequences), default=1)
    step = max(2.0, min(20.0, (right - left) / max(longest, 1)))
    refs, size = page_map["ref_counts"], page_map.geometry.page_size
    for number, (label, sequence) in enumerate(zip(labels, sequences, strict=True)):
        y = top + number * RIBBON_HEIGHT
        yield f'<text x="{MARGIN}" y="{y + 14}" fill="{TEXT}">{escape(label)}</text>'
        for place, page in enumerate(sequence.page_ids.tolist()):
            x = left + place * step
            filled = min(1.0, max(0.0, (sequence.token_count - place * size) / size))
            yield from _page(x, y + 2, max(1, int(step) - 2), "active", filled, int(refs[page]))
        facts = f"{counted(len(sequence.page_ids), 'page')} · {counted(sequence.token_count, 'token')}"
        yield f'<text x="{WIDTH - MARGIN}" y="{y + 14}" fill="{FAINT}" text-anchor="end">{facts}</text>'


def _label(sequence: SequencePages) -> str:
    return f"{short_name(sequence.request_id, sequence.choice_index)} {sequence.state}"
