"""What the dashboard holds has a bound, and what it no longer needs goes back. Counts, not megabytes."""

import asyncio
import ctypes
import gc
import mmap
import os
import subprocess
import sys
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.growth import growth
from dashboard import allocator, demo_messages
from dashboard import history as history_module
from dashboard.blocks import BLOCK_BYTES, Blocks
from dashboard.demo_pool import GHOSTS_PER_PAGE, DemoPool
from dashboard.frames import Columns
from dashboard.ghosts import Ghost, Ghosts
from dashboard.history import KEY_FRAME_MS, History
from dashboard.live_map import RECENT_MESSAGES, LiveMap
from kvatlas.v1 import cache_pb2 as pb

ROOT = Path(__file__).parents[2]


def live_map(pool: DemoPool) -> LiveMap:
    live = LiveMap("w")
    for message in demo_messages.snapshot(pool):
        live.apply(message)
    demo_messages.forget_changes(pool)
    return live


def columns(count: int) -> Columns:
    empty, wide = np.zeros(count, np.uint8), np.zeros(count, np.uint16)
    return Columns(empty, empty, wide, wide)


def test_the_past_comes_and_goes_a_minute_at_a_time() -> None:
    history, seconds = History(seconds=180), 600
    for second in range(seconds):
        clock_ms, used = second * 1000.0, np.full(2, second, np.uint32)
        if history.needs_key(clock_ms):
            history.add_key(clock_ms, 0, columns(2), used)
        else:
            history.add_delta(clock_ms, 0, np.array([1], np.uint32), columns(1), used[:1])
    held = 180_000 / KEY_FRAME_MS + 1  # and the minute that is written
    assert history.num_segments == held
    assert history.start_ms == seconds * 1000.0 - held * KEY_FRAME_MS
    for second in (seconds - 240, seconds - 181, seconds - 180, seconds - 179, seconds - 1):
        past = history.at(second * 1000.0)
        assert past is not None
        assert past.used_ms.tolist() == [second - second % 60, second], (
            "the key frame's page, and the delta's"
        )


@pytest.mark.parametrize(("interval_ms", "kept"), [(100.0, 10), (50.0, 10), (20.0, 12.5), (250.0, 4)])
def test_the_past_has_each_message_of_ten_a_second_and_not_more_of_faster_ones(
    interval_ms: float, kept: float
) -> None:
    """A millisecond early is not too early: every second message waited for the next one, or did not."""
    history, random, seconds = History(seconds=600), np.random.default_rng(1), 40
    history.add_key(0.0, 0, columns(1), np.zeros(1, np.uint32))
    written = 1
    for number in range(1, round(seconds * 1000 / interval_ms)):
        clock_ms = float(np.floor(number * interval_ms + random.uniform(-3.0, 3.0)))
        if history.is_due(clock_ms):
            history.add_delta(clock_ms, 0, np.zeros(1, np.uint32), columns(1), np.zeros(1, np.uint32))
            written += 1
    assert written == pytest.approx(seconds * kept, rel=0.03)


def test_a_renewed_watch_takes_no_new_memory_for_the_same_pool() -> None:
    pool = DemoPool(64, seed=1).run(3)
    live = live_map(pool)
    large = [*live.page_map.planes.values(), live._changed_at, live._used_at]
    for message in demo_messages.snapshot(pool):
        live.apply(message)
    again = [*live.page_map.planes.values(), live._changed_at, live._used_at]
    assert len(large) == len(again)
    assert all(old is new for old, new in zip(large, again, strict=True))
    assert live.since(live.snapshot_revision - 1) is None, "a viewer needs the whole map"


class MallInfo(ctypes.Structure):
    """`mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def heap_bytes() -> int:
    """Of the C library in use, mapped blocks included."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        pytest.skip("needs glibc 2.33")
    ask.restype = MallInfo
    found = ask()
    return int(found.uordblks + found.hblkhd)


def test_the_past_is_no_part_of_the_heap() -> None:
    """A large block that lay in it for ten minutes would keep what came to lie behind it where it is."""
    random, pages = np.random.default_rng(1), 100_000
    used = random.integers(0, 2**32, pages, np.uint32)  # cannot be compressed
    history = History(seconds=600)
    gc.collect()
    before = heap_bytes()
    for minute in range(8):
        history.add_key(minute * KEY_FRAME_MS, 0, columns(pages), used)
        for second in range(1, 20):
            ids = np.arange(second, dtype=np.uint32)
            history.add_delta(minute * KEY_FRAME_MS + second * 1000.0, 0, ids, columns(second), used[:second])
    gc.collect()
    assert history.num_bytes > 8 * used.nbytes
    assert heap_bytes() - before < used.nbytes
    past = history.at(8 * KEY_FRAME_MS)
    assert past is not None
    assert (past.used_ms == used).all()


CHURN = """
import sys
import streamlit  # about as many names as a dashboard has at its start
from dashboard import allocator
from tests.unit.test_dashboard_memory import heap_bytes
{settle}
import grpc, pandas, pyarrow  # and as many as it has when it was looked at
before = heap_bytes()
for number in range(100_000):
    sys.intern(f"comes and goes {{number}}")
print(heap_bytes() - before)
"""


def test_whether_names_stay_is_what_this_python_does() -> None:
    before = sys.getallocatedblocks()
    for number in range(10_000):
        sys.intern(f"held by nobody {number}")
    assert (sys.getallocatedblocks() - before > 5_000) == allocator.names_stay()


@pytest.mark.skipif(allocator.names_stay(), reason="a name stays for ever here")
def test_names_that_come_and_go_do_not_make_their_table_larger() -> None:
    grown = {
        settle: int(
            subprocess.run(
                [sys.executable, "-c", CHURN.format(settle=settle)], cwd=ROOT, capture_output=True, check=True
            ).stdout
        )
        for settle in ("allocator.settle_names()", "")
    }
    assert abs(grown["allocator.settle_names()"]) < 500_000
    assert grown[""] > 500_000, "what it is for"  # 1 to 2 MB, by how many names libraries bring


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_what_is_written_is_read_whatever_its_size(size: int) -> None:
    blocks, written = Blocks(), []
    for number, length in enumerate((3, size, 5, size, BLOCK_BYTES // 2, size, 0, 1)):
        data = bytes([number + 1]) * length
        written.append((blocks.add(data), data))
    assert all(blocks.read(place) == data for place, data in written)
    assert blocks.num_bytes == sum(len(data) for _, data in written)


def test_a_past_that_is_over_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    maps: list[weakref.ref[mmap.mmap]] = []

    class Mapped(mmap.mmap):
        pass

    def make(*parts: int, **named: int) -> mmap.mmap:
        made = Mapped(*parts, **named)
        maps.append(weakref.ref(made))
        return made

    monkeypatch.setattr("dashboard.blocks.mmap.mmap", make)
    history, minutes = History(seconds=180), 40
    for minute in range(minutes):
        history.add_key(minute * KEY_FRAME_MS, 0, columns(2), np.zeros(2, np.uint32))
    assert len(maps) == minutes
    assert sum(each() is not None for each in maps) == history.num_segments == 5


def test_all_threads_share_one_heap() -> None:
    script = """
import ctypes, sys, tempfile, threading
from dashboard import allocator, process
allocator.settle()
import dashboard.web
from concurrent.futures import ThreadPoolExecutor
library = ctypes.CDLL(None)
if not hasattr(library, "malloc_info"):
    sys.exit("<heap nr> of no glibc")
met = threading.Barrier(8)
def hold(number):
    met.wait()
    return [bytes(1000 * n) for n in range(200)]
with ThreadPoolExecutor(8) as pool:
    held = list(pool.map(hold, range(8)))
library.fdopen.restype = ctypes.c_void_p
with tempfile.TemporaryFile() as file:
    stream = ctypes.c_void_p(library.fdopen(file.fileno(), b"w"))
    library.malloc_info(0, stream)
    library.fflush(stream)
    file.seek(0)
    print(file.read().decode().count("<heap nr"))
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if "no glibc" in told.stderr:
        pytest.skip("needs glibc")
    assert told.stdout.strip() == "1", told.stderr


def test_a_simulated_pool_forgets_what_was_evicted_long_ago() -> None:
    pool = DemoPool(64, seed=1).run(300)
    assert pool.totals["evictions_total"] > 2 * GHOSTS_PER_PAGE * 64
    assert 64 < len(pool.ghosts) <= GHOSTS_PER_PAGE * 64


def test_the_start_can_be_asked_for_while_a_key_frame_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes milliseconds of another thread's time, and viewers ask without a lock."""
    told: list[float | None] = []

    def pack(*parts: object) -> bytes:
        told.append(past.start_ms)
        return b""

    past = History(seconds=180)
    monkeypatch.setattr(history_module, "_pack", pack)
    for clock_ms in (0.0, KEY_FRAME_MS):
        past.add_key(clock_ms, 0, columns(2), np.zeros(2, np.uint32))
    assert told == [None, 0.0]


def test_changes_do_not_heap_up_while_a_worker_s_clock_stands_still() -> None:
    pool = DemoPool(128, seed=1).run(3)
    live, number, longest = live_map(pool), pool.number, 0
    for _ in range(3 * RECENT_MESSAGES):
        pool.run(0.1)
        message = demo_messages.delta(pool, number)
        number, moment = pool.number, message.observe_time
        message.ClearField("observe_time")
        live.apply(message)
        longest = max(longest, live.num_unwritten)
    assert RECENT_MESSAGES / 2 < longest <= RECENT_MESSAGES + 1
    heartbeat = pb.WatchPageMapResponse(base_number=number, heartbeat=pb.WatchHeartbeat())
    heartbeat.revision.epoch, heartbeat.revision.number = pool.epoch, number
    heartbeat.observe_time.CopyFrom(moment)
    live.apply(heartbeat)
    past, now = live.past(live.clock_ms), live.columns()
    assert past is not None
    assert live.num_unwritten == 0
    for name in Columns.__slots__:
        assert (getattr(past.columns, name) == getattr(now, name)).all(), name


def test_it_is_tidied_at_intervals_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    async def run() -> None:
        loop, enough = asyncio.get_running_loop(), asyncio.Event()

        def trim(pad: int) -> int:
            calls.append(pad)
            if len(calls) == 3:
                loop.call_soon_threadsafe(enough.set)
            return 1

        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trim))
        task = asyncio.ensure_future(allocator.keep_tidy())
        await enough.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(allocator, "TIDY_SECONDS", 0.001)
    asyncio.run(run())
    assert len(calls) >= 3
    assert set(calls) == {0}


def test_what_holds_itself_is_collected_although_little_is_new() -> None:
    class Session:
        def __init__(self) -> None:
            self.itself = self

    gone = weakref.ref(Session())
    allocator.tidy()
    assert gone() is None


def test_the_collector_has_no_work_with_ghosts() -> None:
    ghosts = Ghosts(5000)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(8000):
        ghosts.leave(number % 6000 + 1000, 7, float(number))
        ghosts.enter([number % 500 + 1000])
    gc.collect()
    assert len(ghosts) == 5000
    assert len(gc.get_objects()) - before < 500


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 64, 500])
def test_ghosts_are_those_of_a_plain_list(limit: int) -> None:
    """Beside the shortest way to say it; fingerprints of a few kinds, so that their places collide."""
    random = np.random.default_rng(limit)
    prints = [1, 2**64 - 1, *(int(each) << 40 for each in range(1, 60)), *range(2, 3 * limit + 60)]
    ghosts, plain = Ghosts(limit), list[Ghost]()
    for clock in range(6000):
        fingerprint = prints[random.integers(len(prints))]
        known = next((each for each in plain if each.fingerprint == fingerprint), None)
        if random.random() < 0.6:
            plain = [each for each in plain if each is not known]
            plain.append(Ghost(fingerprint, clock, clock / 2, known.returns if known else 0, True))
            plain = plain[-limit:] if limit else []
            ghosts.leave(fingerprint, clock, clock / 2)
        else:
            if known is not None and known.is_gone:
                back = replace(known, returns=known.returns + 1, is_gone=False)
                plain = [back if each is known else each for each in plain]
            ghosts.enter([fingerprint])
        now = next((each.returns for each in plain if each.fingerprint == fingerprint), 0)
        assert ghosts.returns_of(fingerprint) == now
        if clock % 50 == 0:
            assert list(ghosts.gone()) == [each for each in reversed(plain) if each.is_gone]
            assert list(ghosts.gone(2)) == [
                each for each in reversed(plain) if each.is_gone and each.returns >= 2
            ]
    assert len(ghosts) == len(plain) == min(limit, len(prints))


def test_ghosts_that_come_and_go_ask_for_no_memory() -> None:
    """A table that is made anew now and then is megabytes that leave and megabytes that come."""
    ghosts = Ghosts(1000)
    for number in range(1000):
        ghosts.leave(number + 1, 0, 1.0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for number in range(1000, 20_000):
            ghosts.leave(number + 1, 7, 2.0)
            ghosts.enter([number - 5])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(ghosts) == 1000
    assert peak - before < 5000


@pytest.mark.parametrize(("wanted", "found"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_tables_come_from_the_same_heap_unless_someone_says_otherwise(wanted: str | None, found: str) -> None:
    script = (
        "from dashboard import allocator; allocator.settle();"
        "import streamlit; import pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    )
    pool = allocator.ARROW_POOL.decode()
    environment = {name: value for name, value in os.environ.items() if name != pool}
    environment |= {"PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}"}
    environment |= {pool: wanted} if wanted else {}
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.strip() == found


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    allocator.settle()
    allocator.tidy()


@pytest.mark.parametrize("slope", [-1.0, 0.9, 1.1, 30.0])
def test_growth_is_that_of_the_line_after_the_beginning(slope: float) -> None:
    wave = [0.4, -0.4] * 180
    samples = [(ten * 10.0, 200 + slope * ten / 360 + wave[ten]) for ten in range(360)]
    samples[:90] = [(seconds, 50 + seconds) for seconds, _ in samples[:90]]  # what fills up first
    found = growth(samples, settled=900.0)
    assert found["mib_per_hour"] == pytest.approx(slope, abs=0.1)
    assert found["is_flat"] == (slope <= 1.0)
    assert found["mib_max"] == pytest.approx(200 + max(slope, slope / 4) + 0.4, abs=0.5)
    assert len(found["mib"]) == 60


def test_one_sample_at_the_end_weighs_no_more_than_another() -> None:
    samples = [(ten * 10.0, 200.0) for ten in range(360)]
    assert abs(growth([*samples, (3600.0, 203.0)], 900.0)["mib_per_hour"]) < 0.3


def test_growth_that_wanders_is_not_called_certain() -> None:
    still = [(ten * 10.0, 200 + 0.5 * (-1) ** ten) for ten in range(360)]
    wander = [(seconds, 200 + 0.5 * np.sin(seconds / 150)) for seconds, _ in still]
    assert growth(wander, 900.0)["standard_error"] > 5 * growth(still, 900.0)["standard_error"]
