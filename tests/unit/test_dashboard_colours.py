"""Colours can be told apart: Machado 2009 at severity 1 for kinds of sight, CIEDE2000 for distance."""

import math
from itertools import combinations

import numpy as np
import pytest

from dashboard.theme import PALETTE, options

SIGHTS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = to_xyz @ np.clip(rgb, 0, 1) / (0.95047, 1.0, 1.08883)
    fx, fy, fz = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return np.array([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)])


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """CIEDE2000 (Sharma, Wu, Dalal 2005)."""
    mean = (np.hypot(*one[1:]) + np.hypot(*two[1:])) / 2
    g = 0.5 * (1 - math.sqrt(mean**7 / (mean**7 + 25**7)))
    (a1, b1), (a2, b2) = (one[1] * (1 + g), one[2]), (two[1] * (1 + g), two[2])
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    turn = ((h2 - h1 + 180) % 360 - 180) if c1 * c2 else 0.0
    d_l, d_c = two[0] - one[0], c2 - c1
    d_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    l_m, c_m, h_m = (one[0] + two[0]) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360
    cos = lambda degrees: math.cos(math.radians(degrees))  # noqa: E731
    t = 1 - 0.17 * cos(h_m - 30) + 0.24 * cos(2 * h_m) + 0.32 * cos(3 * h_m + 6) - 0.2 * cos(4 * h_m - 63)
    s_l = 1 + 0.015 * (l_m - 50) ** 2 / math.sqrt(20 + (l_m - 50) ** 2)
    s_c, s_h = 1 + 0.045 * c_m, 1 + 0.015 * c_m * t
    r_c = 2 * math.sqrt(c_m**7 / (c_m**7 + 25**7))
    r_t = -math.sin(math.radians(60 * math.exp(-(((h_m - 275) / 25) ** 2)))) * r_c
    return math.sqrt((d_l / s_l) ** 2 + (d_c / s_c) ** 2 + (d_h / s_h) ** 2 + r_t * d_c / s_c * d_h / s_h)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("kind", ["dark", "light"])
@pytest.mark.parametrize("group", ["states", "results", "bands"])
def test_colours_of_a_group_differ_in_every_kind_of_sight(group: str, kind: str, sight: str) -> None:
    matrix = np.array(SIGHTS[sight])
    seen = {name: lab(matrix @ linear(looks[kind])) for name, looks in PALETTE[group].items()}
    for one, two in combinations(seen, 2):
        assert distance(seen[one], seen[two]) >= 16, (one, two)


def test_distances_are_those_of_the_published_pairs() -> None:
    """Two rows of the paper's table 1."""
    one = distance(np.array([50.0, 2.6772, -79.7751]), np.array([50.0, 0.0, -82.7485]))
    two = distance(np.array([50.0, 2.5, 0.0]), np.array([73.0, 25.0, -18.0]))
    assert (round(one, 4), round(two, 4)) == (2.0425, 27.1492)


@pytest.mark.parametrize("kind", ["dark", "light"])
def test_all_but_free_stand_out_from_the_ground(kind: str) -> None:
    luminance = np.array([0.2126, 0.7152, 0.0722])
    ground = luminance @ linear(PALETTE["ground"]["background"][kind])
    for group in ("states", "results", "bands"):
        for name, looks in PALETTE[group].items():
            own = luminance @ linear(looks[kind])
            contrast = (max(own, ground) + 0.05) / (min(own, ground) + 0.05)
            assert name == "free" or contrast >= 3, (group, name)
    for name in ("text", "muted"):
        own = luminance @ linear(PALETTE["ground"][name][kind])
        assert (max(own, ground) + 0.05) / (min(own, ground) + 0.05) >= 4.5, name


def test_the_theme_is_made_of_the_palette() -> None:
    told = options("dark")
    assert told["theme.base"] == "dark"
    assert told["theme.light.backgroundColor"] == PALETTE["ground"]["background"]["light"]
    assert "theme.base" not in options("auto")
