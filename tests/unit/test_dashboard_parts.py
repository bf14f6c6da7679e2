"""The dashboard's parts that need no browser: tree, ghosts, checks, spectrogram, palette, mapping, config."""

import asyncio
import ctypes
import io
import json
import math
import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboard import allocator, charts, demo_messages, frames
from dashboard.config import ConfigError, from_args
from dashboard.demo_pool import DemoPool
from dashboard.demo_source import DemoSource
from dashboard.facts import Estimate, EstimateReport
from dashboard.ghosts import Ghost, Ghosts
from dashboard.history import History
from dashboard.kernel_mapping import KernelMapping
from dashboard.live_map import LiveMap
from dashboard.live_pages import STALE_SECONDS, Follower, LivePages, Status
from dashboard.mirror_checks import check_mirror
from dashboard.spectrogram import FIGURES, Moment, Spectrogram
from dashboard.theme import PALETTE, options
from dashboard.tree import NO_PAGE, build_tree
from dashboard.view_parts import counted, span
from dashboard.viewer import Viewer
from dashboard.web import GoneTabs
from kernels.paged_cuda.shape import KernelShape
from kvatlas.v1 import cache_pb2 as pb

SEALED, PINNED = pb.PAGE_FLAG_SEALED, pb.PAGE_FLAG_PINNED


def live_map(pool: DemoPool) -> LiveMap:
    live = LiveMap("w")
    for message in demo_messages.snapshot(pool):
        live.apply(message)
    demo_messages.forget_changes(pool)
    return live


# tree


def planes_of(parents: dict[int, int | None], count: int = 32) -> dict[str, np.ndarray]:
    planes = {
        "flags": np.zeros(count, np.uint8),
        "ref_counts": np.zeros(count, np.uint16),
        "hit_counts": np.zeros(count, np.uint16),
        "parent_page_ids": np.full(count, NO_PAGE, np.uint32),
        "used_ms": np.zeros(count, np.uint32),
        "fingerprints": np.arange(count).astype(np.uint64) + 100,
    }
    for page, parent in parents.items():
        planes["flags"][page] = SEALED
        planes["parent_page_ids"][page] = NO_PAGE if parent is None else parent
    return planes


def test_a_run_of_pages_without_a_branch_is_one_node() -> None:
    #  5 → 9 → 2 ┬→ 7 → 1
    #            └→ 8        and 30 alone
    planes = planes_of({5: None, 9: 5, 2: 9, 7: 2, 1: 7, 8: 2, 30: None})
    planes["hit_counts"][9] = 4
    planes["used_ms"][[5, 2]] = (100, 900)
    tree = build_tree(planes, uptime_ms=1000)
    by_page = {node.page: node for node in tree.nodes}
    assert {page: (node.pages, node.weight) for page, node in by_page.items()} == {
        5: (3, 6),
        7: (2, 2),
        8: (1, 1),
        30: (1, 1),
    }
    assert by_page[7].parent == by_page[8].parent == by_page[5].id
    assert by_page[5].hits == 4
    assert by_page[5].idle_ms == 100
    assert by_page[5].fingerprint == f"{102:016x}", "of its last page"
    assert (tree.num_pages, tree.num_roots, tree.depth) == (7, 2, 5)


def test_the_tree_of_a_pool_holds_each_sealed_page_once() -> None:
    pool = DemoPool(400, seed=3).run(25)
    tree = build_tree(pool.planes, pool.now_ms - pool.epoch // 1_000_000)
    sealed = int((pool.planes["flags"] & SEALED).astype(bool).sum())
    assert sum(node.pages for node in tree.nodes) == sealed == tree.num_pages
    assert sum(node.weight for node in tree.nodes if node.parent is None) == sealed
    longest = 0
    for page in np.flatnonzero(pool.planes["flags"] & SEALED):
        depth, at = 1, int(page)
        while (at := int(pool.planes["parent_page_ids"][at])) != NO_PAGE:
            depth += 1
        longest = max(longest, depth)
    assert tree.depth == longest


def test_what_is_too_small_to_draw_is_gathered() -> None:
    pool = DemoPool(400, seed=3).run(25)
    whole = build_tree(pool.planes, 0)
    few = build_tree(pool.planes, 0, max_nodes=5)
    assert len([node for node in few.nodes if not node.is_rest]) == 5
    total = sum(node.weight for node in whole.nodes if node.parent is None)
    assert sum(node.weight for node in few.nodes if node.parent is None) == total
    names = {node.id for node in few.nodes}
    assert all(node.parent is None or node.parent in names for node in few.nodes)


def test_ghosts_hang_where_they_continued() -> None:
    planes = planes_of({5: None, 9: 5})
    gone = [Ghost(1, 109, 4000.0, 2, True), Ghost(2, 1, 3000.0, 0, True), Ghost(3, 0, 1000.0, 1, True)]
    lost = Ghost(4, 77, 1000.0, 0, True)  # nobody knows what it continued
    tree = build_tree(planes, 0, [*gone, lost], clock_ms=5000.0)
    ghosts = {node.parent: node for node in tree.nodes if node.is_ghost}
    assert ghosts.keys() == {"p5", None}
    assert (ghosts["p5"].pages, ghosts["p5"].returns, ghosts["p5"].idle_ms) == (2, 2, 1000)


def test_only_pinned_prefixes_where_asked() -> None:
    planes = planes_of({5: None, 9: 5, 20: None})
    planes["flags"][[5, 9]] |= PINNED
    tree = build_tree(planes, 0, is_pinned_only=True)
    assert [(node.page, node.pages, node.is_pinned) for node in tree.nodes] == [(5, 2, True)]
    assert build_tree(planes_of({}), 0).nodes == ()


def test_a_ghost_that_comes_back_is_counted_and_the_oldest_is_forgotten() -> None:
    ghosts = Ghosts(2)
    ghosts.leave(1, 0, 10.0)
    ghosts.enter([1, 99])
    assert (ghosts.returns_of(1), list(ghosts.gone())) == (1, [])
    ghosts.leave(1, 0, 20.0)
    ghosts.leave(2, 1, 30.0)
    assert [(ghost.fingerprint, ghost.returns) for ghost in ghosts.gone()] == [(2, 0), (1, 1)]
    ghosts.leave(3, 0, 40.0)
    assert [ghost.fingerprint for ghost in ghosts.gone()] == [3, 2]


def test_ghosts_follow_the_evictions_of_a_pool() -> None:
    pool = DemoPool(160, seed=5).run(10)
    live = live_map(pool)
    number = pool.number
    for _ in range(100):
        pool.run(0.3)
        live.apply(demo_messages.delta(pool, number))
        number = pool.number
    gone = {ghost.fingerprint for ghost in live.ghosts.gone()}
    present = set(pool.planes["fingerprints"].tolist())
    assert gone
    assert not gone & present
    assert len(live.ghosts) <= pool.page_count


# checks of the copy


@pytest.mark.parametrize(
    ("check", "plane", "wanted", "value"),
    [
        ("sum", "states", pb.PAGE_STATE_ACTIVE, 0),
        ("references", "ref_counts", pb.PAGE_STATE_ACTIVE, 999),
        ("owners", "owners", pb.PAGE_STATE_FREE, 3),
        ("parents", "flags", pb.PAGE_STATE_CACHED, 0),
    ],
)
def test_each_check_of_the_copy_finds_its_fault(check: str, plane: str, wanted: int, value: int) -> None:
    pool = DemoPool(800, seed=5).run(8)
    live = live_map(pool)
    assert [each.name for each in check_mirror(live.page_map) if each.num_faults] == []
    planes = live.page_map.planes
    pages = np.flatnonzero(planes["states"] == wanted)
    if check == "parents":  # one that is another's parent
        pages = np.intersect1d(pages, planes["parent_page_ids"])
    planes[plane][pages[0]] = value
    faults = {each.name: each for each in check_mirror(live.page_map) if each.num_faults}
    assert check in faults
    if check != "parents":
        assert pages[0] in faults[check].pages


# history and spectrogram


def test_history_keeps_its_bounds_and_begins_with_a_key_frame() -> None:
    """B119: however long a session looks."""
    pool = DemoPool(128, seed=1).run(3)
    live = LiveMap("w", history_seconds=120)
    for message in demo_messages.snapshot(pool):
        live.apply(message)
    number = demo_messages.forget_changes(pool)
    for _ in range(150):
        pool.run(4)
        live.apply(demo_messages.delta(pool, number))
        number = pool.number
    start, end = live.history.start_ms, live.history.end_ms
    assert start is not None
    assert end == pool.now_ms
    assert 120_000 <= end - start <= 120_000 + 2 * 60_000
    early = live.past(0.0)
    assert early is not None
    assert early.clock_ms == start, "a past older than what is held snaps to its start"


def test_history_drops_the_oldest_when_bytes_run_out() -> None:
    live = live_map(DemoPool(128, seed=1).run(3))
    columns, used = live.columns(), live.planes(["used_ms"])["used_ms"].astype(np.uint32)
    one = History(1000)
    one.add_key(0.0, 0, columns, used)
    history = History(1000, max_bytes=3 * one.num_bytes)
    for second in range(20):
        history.add_key(second * 1000.0, 0, columns, used)
    assert history.num_bytes <= 3 * one.num_bytes
    assert history.end_ms == 19_000.0
    assert History(10).at(0.0) is None


def test_a_column_says_what_its_band_is_like() -> None:
    gram = Spectrogram(10)
    gram.resize(8, is_restart=False)
    states = np.array([2, 2, 3, 1, 1, 1, 4, 5], np.uint8)
    born = np.zeros(8, np.uint32)
    gram.count(np.array([0, 1], np.uint32))
    figures = tuple(range(len(FIGURES)))
    gram.add(1000.0, Moment(states, born, 3000, figures))
    columns, times, cuts = gram.columns(0)
    assert columns.shape == (1, 4, 8)
    active, cached, churn, age = columns[0]
    assert active.tolist() == [255, 255, 0, 0, 0, 0, 0, 0]
    assert cached.tolist() == [0, 0, 255, 0, 0, 0, 255, 0]
    assert churn.tolist() == [255, 255, 0, 0, 0, 0, 0, 0]
    assert age[0] == int(28 * math.log2(1 + 3.0))
    assert (times.tolist(), cuts.tolist()) == ([1000.0], [False])
    assert gram.figures(0)[0].tolist() == [list(figures)]
    assert not gram.is_due(1500.0)
    assert gram.is_due(2000.0)


def test_columns_are_bounded_and_a_restart_is_a_cut() -> None:
    gram = Spectrogram(5)
    gram.resize(1000, is_restart=False)
    moment = Moment(np.ones(1000, np.uint8), np.zeros(1000, np.uint32), 0, (0,) * len(FIGURES))
    for second in range(8):
        if second == 6:
            gram.resize(1000, is_restart=True)
        gram.add(second * 1000.0, moment)
    columns, times, cuts = gram.columns(0)
    assert columns.shape == (5, 4, 256)
    assert times.tolist() == [3000.0, 4000.0, 5000.0, 6000.0, 7000.0]
    assert cuts.tolist() == [False, False, False, True, False]
    assert gram.columns(7)[1].tolist() == [7000.0]


def test_no_column_is_older_than_the_seconds_that_are_kept_where_nothing_was_heard_for_a_while() -> None:
    """Figures of nineteen minutes were drawn as those of ten."""
    gram = Spectrogram(5)
    gram.resize(10, is_restart=False)
    assert gram.first_number == 0, "none yet"
    moment = Moment(np.ones(10, np.uint8), np.zeros(10, np.uint32), 0, (0,) * len(FIGURES))
    for second in (0, 1, 2, 5, 6):
        gram.add(second * 1000.0, moment)
    assert gram.first_number == 2
    assert gram.figures(0)[1].tolist() == gram.columns(0)[1].tolist() == [2000.0, 5000.0, 6000.0]
    gram.add(60_000.0, moment)
    assert gram.columns(3)[1].tolist() == [60_000.0]


def test_a_reader_of_columns_goes_on_with_a_pool_of_another_size() -> None:
    """It has all columns before a number, and asks for that one next."""
    gram = Spectrogram(5)

    def add(seconds: range, pages: int) -> None:
        moment = Moment(np.ones(pages, np.uint8), np.zeros(pages, np.uint32), 0, (0,) * len(FIGURES))
        for second in seconds:
            gram.add(second * 1000.0, moment)

    gram.resize(100, is_restart=False)
    add(range(8), 100)
    has = gram.next_number
    gram.resize(200, is_restart=True)
    assert gram.columns(0)[1].tolist() == [], "none of the other size"
    add(range(8, 10), 200)
    first = gram.first_for(has)
    assert first == has
    assert gram.columns(first)[1].tolist() == [8000.0, 9000.0]
    assert gram.columns(first)[2].tolist() == [True, False]
    assert gram.first_for(0) == gram.first_number
    assert gram.first_for(5000) == gram.first_number, "it read the columns of another process"


def test_a_counter_that_fell_began_anew_and_no_rate_is_negative() -> None:
    """B120: a worker that starts again counts from 0."""
    figures = np.zeros((4, len(FIGURES)), np.uint32)
    figures[:, FIGURES.index("allocated")] = (100, 150, 3, 20)
    rates = charts.rates(figures, np.array([0.0, 1000.0, 2000.0, 4000.0]), "allocated")
    assert rates.tolist() == [50.0, 3.0, 8.5]


# charts


@pytest.mark.parametrize("seconds", [3, 150, 151, 299, 600])
def test_charts_over_time_have_few_points_however_long_they_are(seconds: int) -> None:
    figures, times = np.zeros((seconds, len(FIGURES)), np.uint32), np.arange(seconds) * 1000.0
    for chart, num_series in ((charts.states_over_time, 5), (charts.rates_over_time, 3)):
        (rows,) = json.loads(chart(figures, times, "dark").to_json())["datasets"].values()
        assert len({row["time"] for row in rows}) * num_series == len(rows)
        assert min(seconds - 1, 75) <= len(rows) / num_series <= 150


def report() -> EstimateReport:
    tokens = {"hit": 60, "miss_cold": 30, "miss_evicted": 5, "unaligned": 5}
    estimates = tuple(
        Estimate(1600 * times, size, "lru", tokens, 0.1 * times, 0.01, 3, 2.0)
        for times in (1, 2, 4)
        for size in (8, 16)
    )
    observed = Estimate(3200, 16, "lru", tokens, 0.21, 0.0, 3, 2.0)
    return EstimateReport(estimates, observed, 0.1, 50, 1000, 60.0, 8)


def test_the_curve_shows_one_setting_and_what_was_observed() -> None:
    chart = json.loads(charts.hit_rate_curve(report(), 3200, 16, "lru", "dark").to_json())
    data = [row for rows in chart["datasets"].values() for row in rows]
    assert sorted(row["times today"] for row in data if "slots" in row) == [0.5, 1.0, 2.0]
    assert [row["y"] for row in data if row.get("what") == "observed"] == [0.21]
    table = charts.page_sizes(report(), 3200)
    assert table["page size"].tolist() == [8, 16]


def test_misses_add_up_to_all_tokens() -> None:
    chart = json.loads(
        charts.misses({"hit": 1, "miss_cold": 2, "miss_evicted": 0, "unaligned": 1}, "light").to_json()
    )
    (rows,) = chart["datasets"].values()
    assert [row["share"] for row in rows] == [0.25, 0.5, 0.0, 0.25]


# the kernel's mapping


@pytest.mark.parametrize("page_size", [8, 16, 32])
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
def test_the_drawn_mapping_is_the_one_that_the_emulation_executes(page_size: int, head_size: int) -> None:
    drawn, shape = KernelMapping(page_size, head_size), KernelShape(head_size, page_size)
    assert drawn.exists
    assert (drawn.thread_group_size, drawn.vec_size) == (shape.thread_group_size, shape.vec_size)
    key_lanes = drawn.key_lanes()
    value_lanes = drawn.value_lanes()
    for lane in range(32):
        group, offset = divmod(lane, shape.thread_group_size)
        for vec in shape.vecs_of_thread(offset).tolist():
            assert key_lanes[vec][group % page_size] == lane
        tokens = shape.value_tokens_of_lane(lane)
        for row in shape.value_rows_of_lane(lane).tolist():
            if row < head_size:
                assert value_lanes[row][tokens[0] // shape.v_vec_size] == lane
    assert [drawn.warp_of(position) for position in range(6)] == [0, 1, 2, 3, 0, 1]


def test_the_mapping_knows_what_was_never_compiled() -> None:
    assert not KernelMapping(64, 64).exists
    assert not KernelMapping(16, 300).exists
    assert not KernelMapping(16, 63).exists


# colours: Machado 2009 at severity 1 for kinds of sight, CIEDE2000 for distance

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


# config


def test_flags_win_over_the_environment() -> None:
    environment = {"KVATLAS_DASHBOARD_SERVER": "a:1", "KVATLAS_DASHBOARD_BASE_PATH": "/kv/"}
    config = from_args(["--server", "b:2"], environment)
    assert (config.server, config.prefix, config.host, config.port) == ("b:2", "/kv", "127.0.0.1", 8501)
    assert from_args(["--listen", "[::1]:0"], {}).host == "::1"
    assert 'server = "b:2"' in config.printable()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--listen", "8501"], "listen"),
        (["--ready-file", "/nowhere/ready.json"], "ready_file"),
        (["--listen", "127.0.0.1:²"], "listen"),
        (["--allowed-origins", "https://ours.example,http://[x"], "allowed_origins: 'http://\\[x' is not"),
        (["--allowed-origins", "ours.example"], "allowed_origins"),
        (["--server", "http://a:1"], "server: 'http://a:1': gRPC's addresses have no http://"),
        (["--server", ""], "server: the address is empty"),
        (["--token-file", "/nowhere/token"], "token_file"),
        (["--max-viewers", "0"], "max_viewers"),
    ],
)
def test_a_bad_setting_is_named(arguments: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        from_args(arguments, {})


def test_a_ready_file_of_a_run_before_does_not_outlive_a_start_that_fails(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "dashboard",
            "--demo",
            "--listen",
            listen,
            "--ready-file",
            str(ready),
        ]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, ready.exists()) == (1, False), done.stderr


def test_the_token_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    config = from_args(["--token-file", str(path)], {})
    assert config.read_token() == "first"
    path.write_text("second\n")
    assert config.read_token() == "second"
    assert "first" not in config.printable()


def test_a_snapshot_can_be_read_by_numpy() -> None:
    live = live_map(DemoPool(128, seed=1).run(3))
    packed = io.BytesIO(live.snapshot_bytes())
    told = np.load(packed)
    assert (told["states"] == live.page_map.planes["states"]).all()
    assert told["revision"].tolist() == [live.page_map.revision.epoch, live.page_map.revision.number]


def shown_by(viewer: Viewer) -> list[str]:
    """What a browser gets at one look: kinds of text, and of maps whether they are of now."""

    async def take() -> list[str]:
        found = []
        async for frame in viewer.frames():
            if isinstance(frame, str):
                found.append(str(json.loads(frame)["type"]))
            else:
                kind, _, flags, *_ = frames.HEADER.unpack(frame[: frames.HEADER.size])
                assert kind == frames.SNAPSHOT
                found.append("past" if flags & frames.PAST else "now")
        return [what for what in found if what not in ("status", "tick")]

    return asyncio.run(take())


@pytest.mark.parametrize(("pages", "what"), [(128, "past"), (64, "now")])
def test_who_looks_at_the_past_of_a_worker_that_starts_again_sees_a_map(pages: int, what: str) -> None:
    """The browser forgets its map with hello; a past of another size is none of this pool's."""
    subscriber = LivePages(DemoSource(64, is_frozen=True))
    follower = Follower(subscriber.source, "w", 600, lambda: 0.0)
    subscriber._followers["w"] = follower
    pool = DemoPool(128, seed=1).run(3)
    for message in demo_messages.snapshot(pool):
        follower.live_map.apply(message)
    viewer = Viewer(subscriber, {})
    assert shown_by(viewer) == ["hello", "now"]
    viewer.take_wish({"at": pool.now_ms})
    assert shown_by(viewer) == ["past"]
    assert shown_by(viewer) == [], "it stands still"
    again = DemoPool(pages, seed=2).run(3)
    again.epoch, again.now_ms = again.epoch + 1, pool.now_ms + 1000
    for message in demo_messages.snapshot(again):
        follower.live_map.apply(message)
    seen = shown_by(viewer)
    assert seen[0] == "hello"
    assert [*seen[1:], *shown_by(viewer)] == [what]


def test_a_worker_that_the_service_has_lost_is_stale_before_its_silence_is() -> None:
    now = [0.0]
    follower = Follower(DemoSource(64), "w", 60, lambda: now[0])
    follower._status = Status("live")
    now[0], follower.lost_at = 0.2, 0.1
    assert (follower.status.kind, follower.status.reason) == ("stale", "the service has lost the worker")
    follower._fresh_at = 0.15
    assert follower.status.kind == "live", "news from after that word"
    follower.lost_at = None
    now[0] += STALE_SECONDS
    assert (follower.status.kind, follower.status.reason[:16]) == ("stale", "nothing is heard")


def test_a_tab_that_is_gone_is_no_crash_and_other_faults_are() -> None:
    class WebSocketDisconnected(RuntimeError):
        """As Starlette's."""

    async def call(kind: str, fault: Exception) -> None:
        async def fail(*_: Any) -> None:
            raise fault

        await GoneTabs(fail)({"type": kind, "path": "/_stcore/stream"}, None, None)

    asyncio.run(call("websocket", WebSocketDisconnected("closed")))
    for kind, fault in (("http", WebSocketDisconnected("closed")), ("websocket", RuntimeError("a bug"))):
        with pytest.raises(RuntimeError):
            asyncio.run(call(kind, fault))


def test_the_allocator_is_set_where_there_is_one_to_set() -> None:
    allocator.settle()  # twice is as good as once
    allocator.settle()
    assert ctypes.CDLL(None).mallopt(allocator.M_ARENA_MAX, allocator.ARENAS) == 1, "glibc took it"


def test_durations_and_counts_are_said_as_people_say_them() -> None:
    assert [span(seconds) for seconds in (0.04, 119.94, 120, 7199, 7200)] == [
        "0.0 s",
        "119.9 s",
        "2 min",
        "120 min",
        "2.0 h",
    ]
    assert [counted(number, "hit") for number in (0, 1, 1234)] == ["0 hits", "1 hit", "1,234 hits"]
