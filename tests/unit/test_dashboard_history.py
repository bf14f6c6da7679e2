"""What the dashboard keeps of the past: the map's history, the spectrogram's columns, and their bounds."""

import math

import numpy as np

from dashboard import demo_messages
from dashboard.demo_pool import DemoPool
from dashboard.history import History
from dashboard.live_map import LiveMap
from dashboard.spectrogram import FIGURES, Moment, Spectrogram
from tests.demo_map import live_map


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
