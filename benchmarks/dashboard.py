"""What the dashboard costs: `python -m benchmarks.dashboard [--pages 131072] [--soak 3600]`.

A synthetic feed over real gRPC, the dashboard in a process of its own, one Chromium. Measured after a
warm-up: the first map, bytes and paints of the browser, its longest task, frames and heap; CPU and memory of
the dashboard's process with one tab, and with more viewers on the socket alone. Needs a quiet machine: both
cores are shared with the browser. With --soak: memory over that time, tabs opened and closed meanwhile; what
the process holds (anonymous pages) apart from what it has read of files (libraries).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from playwright.sync_api import Error, Page, sync_playwright
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from benchmarks.growth import FLAT_MIB_PER_HOUR, growth
from benchmarks.record import percentile, write_result
from benchmarks.stack import ending
from dashboard.testing import FeedServer

ROOT = Path(__file__).parents[1]
WARM_UP_SECONDS = 8.0
READY_SECONDS = 120.0
PATIENCE_MS = 180_000
RINGS_FULL_SECONDS = 900.0  # ten minutes of history, and two key frames more
GUEST_SECONDS, SAMPLE_SECONDS = 30.0, 10.0
GUEST_PATIENCE_MS = 60_000
VIEWS = ("", "requests", "prefix_tree", "what_if", "timeline", "integrity", "playground", "explain")
LIVE_HEAP = "() => { gc(); return performance.memory.usedJSHeapSize; }"
FLAGS = [
    "--js-flags=--expose-gc",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--enable-precise-memory-info",
]
WATCH = """() => {
  window.kv = { frames: 0, longest: 0, longTasks: 0 };
  const count = () => { window.kv.frames++; requestAnimationFrame(count); };
  requestAnimationFrame(count);
  new PerformanceObserver((list) => {
    for (const task of list.getEntries()) {
      window.kv.longTasks++;
      window.kv.longest = Math.max(window.kv.longest, task.duration);
    }
  }).observe({ entryTypes: ["longtask"] });
}"""


@contextmanager
def running_dashboard(server: str) -> Iterator[tuple[str, psutil.Process]]:
    """Its URL and its process."""
    with tempfile.TemporaryDirectory() as name:
        ready = Path(name) / "ready.json"
        command = [sys.executable, "-m", "dashboard", "--server", server, "--listen", "127.0.0.1:0"]
        command += ["--parent-watch"]  # nothing is left of a benchmark that is killed
        with ending(subprocess.Popen([*command, "--ready-file", str(ready)], cwd=ROOT)) as process:
            until = time.monotonic() + READY_SECONDS
            while not ready.exists():
                assert process.poll() is None, "the dashboard did not start"
                assert time.monotonic() < until, "the dashboard was not ready in time"
                time.sleep(0.02)
            yield json.loads(ready.read_text())["url"], psutil.Process(process.pid)


def cpu_share(process: psutil.Process, seconds: float, page: Page | None = None) -> float:
    """Cores that the process keeps busy."""
    times, start = process.cpu_times(), time.monotonic()
    if page is not None:
        page.wait_for_timeout(seconds * 1000)  # events come only inside Playwright's own calls
    else:
        time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - times.user - times.system
    return round(used / (time.monotonic() - start), 4)


def open_map(page: Page, url: str, count: int) -> float:
    """Seconds from opening the page to the first whole map."""
    page.set_default_timeout(PATIENCE_MS)
    start = time.monotonic()
    page.goto(url)
    node = page.locator(".kvatlas").first
    node.wait_for()
    while sum(map(int, (node.get_attribute("data-counts") or "0").split(","))) != count:
        page.wait_for_timeout(10)
    return time.monotonic() - start


def measure_tab(page: Page, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """One open map."""
    node = page.locator(".kvatlas").first
    page.wait_for_timeout(WARM_UP_SECONDS * 1000)
    page.evaluate(WATCH)
    before, start = int(node.get_attribute("data-bytes") or 0), time.monotonic()
    paints: list[float] = []
    times = process.cpu_times()
    while time.monotonic() - start < seconds:
        page.wait_for_timeout(250)
        paints.append(float(node.get_attribute("data-draw-ms") or 0))
    spent, after = time.monotonic() - start, process.cpu_times()
    told = page.evaluate("() => window.kv")
    return {
        "bytes_per_second": round((int(node.get_attribute("data-bytes") or 0) - before) / spent),
        "paint_ms_median": median(paints),
        "paint_ms_p95": percentile(paints, 0.95),
        "longest_task_ms": round(told["longest"], 1),
        "long_tasks": told["longTasks"],
        "frames_per_second": round(told["frames"] / spent, 1),
        "heap_mib": round(page.evaluate("() => performance.memory.usedJSHeapSize") / 2**20, 1),
        "dashboard_cores": round((after.user + after.system - times.user - times.system) / spent, 4),
        "dashboard_mib": round(process.memory_info().rss / 2**20, 1),
    }


def measure_viewers(url: str, process: psutil.Process, counts: list[int], seconds: float) -> dict[str, float]:
    """Cores with so many viewers on the socket and no tab."""
    shares = {"0": cpu_share(process, seconds)}
    for count in counts:
        with ExitStack() as stack:
            ended = threading.Event()
            for _ in range(count):
                socket = stack.enter_context(
                    connect(f"ws{url[4:]}live/pages", compression=None, max_size=None)
                )
                threading.Thread(target=_drain, args=(socket, ended), daemon=True).start()
            time.sleep(2)
            shares[str(count)] = cpu_share(process, seconds)
            ended.set()
    return shares


def _drain(socket: Any, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            socket.recv(timeout=1)
        except TimeoutError:
            continue
        except ConnectionClosed:
            return


def soak(browser: Any, url: str, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """Memory of the process and of a tab that stays open, while other tabs look at one view each.

    Flat: when all rings are full, the line through the samples rises by no more than FLAT_MIB_PER_HOUR.
    Samples are taken while no other tab is open.
    """
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(url, timeout=PATIENCE_MS)
    resident: list[tuple[float, float]] = []
    anonymous: list[tuple[float, float]] = []
    tab: list[tuple[float, float]] = []
    threads: list[int] = []
    views, failed = cycle(VIEWS), 0
    start, next_guest = time.monotonic(), 0.0
    while (now := time.monotonic() - start) < seconds:
        if now >= next_guest:
            next_guest = now + GUEST_SECONDS
            failed += not _visited(browser, url + next(views))
            tab.append((now, page.evaluate(LIVE_HEAP) / 2**20))
        page.wait_for_timeout(SAMPLE_SECONDS * 1000)
        now, memory = time.monotonic() - start, process.memory_info()
        resident.append((now, memory.rss / 2**20))
        anonymous.append((now, (memory.rss - memory.shared) / 2**20))
        threads.append(process.num_threads())
        held = f"{resident[-1][1]:.1f} MiB, {anonymous[-1][1]:.1f} its own"
        print(f"{now:6.0f} s  {held}; tab {tab[-1][1]:.1f} MiB", flush=True)
    page.close()
    settled = min(RINGS_FULL_SECONDS, seconds / 2)
    return {
        "seconds": round(seconds),
        "settled_after_seconds": round(settled),
        "flat_mib_per_hour": FLAT_MIB_PER_HOUR,
        "guests": len(tab),
        "guests_failed": failed,
        "threads_max": max(threads),
        "process": growth(resident, settled),
        "process_anonymous": growth(anonymous, settled),
        "tab": growth(tab, settled),
    }


def _visited(browser: Any, url: str) -> bool:
    """Another tab, for some seconds. False: it did not load; the next one may."""
    guest = browser.new_page()
    try:
        guest.goto(url, timeout=GUEST_PATIENCE_MS)
        guest.wait_for_timeout(5_000)
        return True
    except Error:
        return False
    finally:
        guest.close()


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=131_072)
    parser.add_argument("--share", type=float, default=0.002, help="of the pages, changed in each message")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--viewers", type=int, nargs="*", default=[1, 10, 30])
    parser.add_argument(
        "--soak", type=float, default=0.0, help="seconds; memory alone, also on a machine that is not quiet"
    )
    settings = parser.parse_args()
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is not installed"
    feed = FeedServer(settings.pages, changed_share=settings.share).start()
    figures: dict[str, Any] = {"pages": settings.pages, "changed_share": settings.share, "hz": 10}
    with running_dashboard(feed.address) as (url, process), sync_playwright() as runtime:
        time.sleep(3)
        browser = runtime.chromium.launch(executable_path=chromium, args=FLAGS)
        if settings.soak:
            figures |= soak(browser, url, process, settings.soak)
        else:
            figures["cores_by_viewers"] = measure_viewers(url, process, settings.viewers, settings.seconds)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            figures["first_map_seconds"] = round(open_map(page, url, settings.pages), 2)
            figures["tab"] = measure_tab(page, process, settings.seconds)
        browser.close()
    feed.stop()
    print(json.dumps(figures, indent=1))
    packages = ("streamlit", "starlette", "uvicorn", "grpcio", "numpy", "playwright")
    name = "dashboard-soak" if settings.soak else "dashboard"
    print(write_result(f"{name}-{settings.pages}", figures, packages))


if __name__ == "__main__":
    main()
