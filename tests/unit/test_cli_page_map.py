"""The page map as text and as a picture: totals, width, and looks that can be told apart."""

import math
import xml.etree.ElementTree as ET
from itertools import combinations

import numpy as np
import pytest
from rich.console import Console

from kvatlas.cli import page_art, palette
from kvatlas.cli.pages import as_json, map_lines
from kvatlas.cli.svg import draw
from kvatlas.client.page_map import STATE_NAMES, PageMap, SequencePages
from kvatlas.v1 import cache_pb2 as pb

FREE, ACTIVE, CACHED, PINNED, RESERVED = sorted(STATE_NAMES)


def make_map(num_pages: int, seed: int = 1, page_size: int = 16) -> PageMap:
    random = np.random.default_rng(seed)
    page_map = PageMap()
    page_map.geometry = pb.PoolGeometry(
        worker_id="w", page_count=num_pages, page_size=page_size, page_bytes=1024
    )
    states = random.choice([FREE, ACTIVE, CACHED, PINNED], num_pages).astype("u1")
    states[-1] = RESERVED
    is_active = states == ACTIVE
    page_map.planes = {
        "states": states,
        "filled_slots": np.where(is_active, random.integers(1, page_size + 1, num_pages), 0).astype("<u2"),
        "ref_counts": np.where(is_active, random.integers(1, 4, num_pages), 0).astype("<u2"),
        "owners": np.where(is_active, random.integers(1, 4, num_pages), 0).astype("<u2"),
    }
    pages = np.flatnonzero(is_active)[:5].astype("<u4")
    page_map.sequences = {1: SequencePages(1, "<id&1>", 0, "decode", pages, 70, 60, 16)}
    page_map.is_stale = False
    return page_map


@pytest.mark.parametrize("by", ["state", "owner", "refs"])
@pytest.mark.parametrize("width", [20, 79, 80, 133])
def test_there_is_one_glyph_per_page_and_every_row_fits(by: str, width: int) -> None:
    page_map = make_map(301)
    rows = list(page_art.layout(page_map, by, width=width, pages_per_glyph=1))
    assert sum(len(row.cells) for row in rows) == 301
    assert all(len(cell.glyph) == 1 for row in rows for cell in row.cells)
    assert max(len(row.cells) for row in rows) + page_art.label_width(301) + 1 <= width
    assert [row.first_page for row in rows] == list(range(0, 301, len(rows[0].cells)))


def test_the_legend_adds_up_to_the_pool() -> None:
    page_map = make_map(500)
    assert sum(page_map.counts().values()) == 500
    words = [text for _, text in page_art.legend(page_map.counts())]
    assert sum(int(text.split()[-1].replace(",", "")) for text in words) == 500
    console = Console(width=100, color_system=None)
    lines = [line.plain for line in map_lines(page_map, "state", console, 1)]
    assert lines[-1].endswith("= 500 pages")


def test_glyphs_of_states_differ_without_colour() -> None:
    for looks in (
        {look.glyph for look in palette.LOOKS.values()} | set(palette.FILL_GLYPHS),
        {look.ascii for look in palette.LOOKS.values()},
    ):
        assert len(looks) >= len(palette.LOOKS)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_fill_bar_is_full_only_when_the_page_is(page_size: int) -> None:
    bars = [page_art.fill_glyph(filled, page_size) for filled in range(1, page_size + 1)]
    assert bars[-1] == "█"
    assert "█" not in bars[:-1]
    assert bars == sorted(bars)


def test_a_glyph_of_many_pages_shows_the_busiest() -> None:
    page_map = make_map(7)
    page_map.planes["states"] = np.array([FREE, CACHED, ACTIVE, FREE, FREE, FREE, RESERVED], "u1")
    assert page_art.merged(page_map, 2).tolist() == [CACHED, ACTIVE, FREE, RESERVED]
    assert page_art.fitting_pages_per_glyph(100_000, 80, 20) == 128
    rows = list(page_art.layout(make_map(100_000), "state", width=80, pages_per_glyph=128))
    assert len(rows) <= 20


def test_without_a_terminal_there_is_no_colour() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        for line in map_lines(make_map(64), "owner", console, 1):
            console.print(line)
    assert "\x1b" not in capture.get()


def test_one_page_is_no_plural() -> None:
    page_map = make_map(40)
    page_map.sequences[1] = SequencePages(1, "short", 0, "decode", np.array([3], "<u4"), 1, 0, 0)
    [(_, words)] = page_art.owner_legend(page_map)
    assert words.endswith("decode · 1 page · 1 token")
    assert ">1 page · 1 token<" in draw(page_map)


def test_json_has_the_whole_map() -> None:
    plain = as_json(make_map(40))
    assert sum(plain["counts"].values()) == plain["page_count"] == len(plain["pages"]["states"]) == 40
    assert plain["sequences"][0]["request_id"] == "<id&1>"


@pytest.mark.parametrize("num_pages", [1, 17, 300, 5000])
def test_the_picture_is_well_formed_and_tells_the_counts(num_pages: int) -> None:
    page_map = make_map(num_pages)
    document = ET.fromstring(draw(page_map))
    text = "".join(document.itertext())
    for state, count in page_map.counts().items():
        assert f"{state} {count:,}" in text
    assert f"= {num_pages:,} pages" in text
    assert "<id&1>" in text


# Colours: CIEDE2000 between every two states for four kinds of sight (Machado 2009, severity 1).

_MACHADO = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def linear_rgb(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(linear: np.ndarray) -> np.ndarray:
    matrix = np.array(
        [
            [0.4124564, 0.3575761, 0.1804375],
            [0.2126729, 0.7151522, 0.0721750],
            [0.0193339, 0.1191920, 0.9503041],
        ]
    )
    ratio = matrix @ np.clip(linear, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one: np.ndarray, two: np.ndarray) -> float:
    c1, c2 = math.hypot(one[1], one[2]), math.hypot(two[1], two[2])
    mean7 = ((c1 + c2) / 2) ** 7
    g = 0.5 * (1 - math.sqrt(mean7 / (mean7 + 25**7)))
    a1, a2 = (1 + g) * one[1], (1 + g) * two[1]
    c1, c2 = math.hypot(a1, one[2]), math.hypot(a2, two[2])
    h1, h2 = math.degrees(math.atan2(one[2], a1)) % 360, math.degrees(math.atan2(two[2], a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    d_l, d_c, d_h = two[0] - one[0], c2 - c1, 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    l_m, c_m, h_m = (one[0] + two[0]) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360
    t = (
        1
        - 0.17 * math.cos(math.radians(h_m - 30))
        + 0.24 * math.cos(math.radians(2 * h_m))
        + 0.32 * math.cos(math.radians(3 * h_m + 6))
        - 0.20 * math.cos(math.radians(4 * h_m - 63))
    )
    s_l = 1 + 0.015 * (l_m - 50) ** 2 / math.sqrt(20 + (l_m - 50) ** 2)
    s_c, s_h = 1 + 0.045 * c_m, 1 + 0.015 * c_m * t
    r_c = 2 * math.sqrt(c_m**7 / (c_m**7 + 25**7))
    r_t = -math.sin(math.radians(60 * math.exp(-(((h_m - 275) / 25) ** 2)))) * r_c
    return math.sqrt((d_l / s_l) ** 2 + (d_c / s_c) ** 2 + (d_h / s_h) ** 2 + r_t * d_c / s_c * d_h / s_h)


@pytest.mark.parametrize("sight", _MACHADO)
@pytest.mark.parametrize("column", ["dark", "light"])
def test_colours_of_states_differ_for_every_kind_of_sight(sight: str, column: str) -> None:
    matrix = np.array(_MACHADO[sight])
    colours = {
        state: lab(matrix @ linear_rgb(getattr(look, column))) for state, look in palette.LOOKS.items()
    }
    for one, two in combinations(colours, 2):
        assert ciede2000(colours[one], colours[two]) >= 16, (one, two)


@pytest.mark.parametrize(
    ("column", "ground"), [("dark", palette.GROUND_DARK), ("light", palette.GROUND_LIGHT)]
)
def test_all_but_free_stand_out_from_the_ground(column: str, ground: str) -> None:
    luminance = np.array([0.2126, 0.7152, 0.0722])
    dark = luminance @ linear_rgb(ground)
    for state, look in palette.LOOKS.items():
        if state != "free":
            own = luminance @ linear_rgb(getattr(look, column))
            assert (max(own, dark) + 0.05) / (min(own, dark) + 0.05) >= 3, state
