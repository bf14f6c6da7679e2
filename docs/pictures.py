"""Pictures of the dashboard for these pages: `python -m docs.pictures URL [VIEW ...]`.

URL is a running dashboard, best in front of a server under load. Every view is shown in two sizes and on two
grounds, as a person would leave it: a page picked, a question asked, a prompt sent.
"""

import argparse
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Error, Page, sync_playwright

FOLDER = Path(__file__).with_name("images")
SIZES = {"desk": (1440, 900), "phone": (390, 844)}
GROUNDS = ("dark", "light")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
COLOURS = 256  # of a picture: flat surfaces need no more, and the files are a third of the size
LOAD_MS = 60_000
TRIES = 5


def pick_page(page: Page) -> None:
    """An ACTIVE page of a sequence with several pages; its request may end meanwhile, then another."""
    for _ in range(TRIES):
        _pick_active_page(page)
        if page.get_by_text("used by").count() and page.locator("[data-testid=stDataFrame]").count():
            return


def _pick_active_page(page: Page) -> None:
    node = page.locator(".kvatlas").first
    node.wait_for(timeout=LOAD_MS)
    page.wait_for_function(
        "(node) => node.getRootNode().kvatlasMap.planes?.isWhole", arg=node.element_handle(), timeout=LOAD_MS
    )
    place = node.evaluate(
        """(node) => {
          const map = node.getRootNode().kvatlasMap, { planes, grid } = map;
          const wanted = [...Array(planes.count).keys()].filter((page) => planes.state[page] === 2);
          const page = wanted[Math.floor(Math.random() * wanted.length)] ?? 0;
          const [x, y] = grid.corner(page), half = grid.cell / 2;
          return [(x + half) / devicePixelRatio, (y + half) / devicePixelRatio];
        }"""
    )
    page.locator("canvas.map").click(position={"x": place[0], "y": place[1]})
    page.wait_for_timeout(4000)


def ask_what_if(page: Page) -> None:
    """Today's settings, the last minutes; the answer takes seconds."""
    page.get_by_test_id("stSelectbox").first.locator("input").click()
    page.get_by_role("option", name="5 min", exact=True).click()
    page.wait_for_timeout(1000)
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Twice the memory").wait_for(timeout=120_000)
    page.wait_for_timeout(3000)


def send_prompt(page: Page) -> None:
    """The prompt that stands there, twice: the second time it is found."""
    for _ in range(2):
        page.get_by_role("button", name="Send").click()
        stop = page.get_by_role("button", name="Stop")
        stop.wait_for(timeout=LOAD_MS)
        stop.wait_for(state="detached", timeout=180_000)
        page.get_by_text("Reused pages").wait_for(timeout=LOAD_MS)
        page.wait_for_timeout(2000)


def see(page: Page, *selectors: str) -> None:
    """Waits for what the view is made of, and for what follows it."""
    for selector in selectors:
        page.locator(selector).first.wait_for(timeout=LOAD_MS)
    page.wait_for_timeout(3000)


VIEWS: dict[str, Callable[[Page], None]] = {
    "page_map": pick_page,
    "requests": lambda page: see(page, ".ribbon canvas"),
    "prefix_tree": lambda page: see(page, "[data-nodes]"),
    "what_if": ask_what_if,
    "timeline": lambda page: see(page, "[data-columns]", "[data-testid=stVegaLiteChart]"),
    "integrity": lambda page: see(page, "text=the parent of a sealed page is sealed"),
    "playground": send_prompt,
    "explain": lambda page: see(page, "[data-lane]", "text=Warps."),
}


def take(browser: Any, url: str, view: str, size: str, ground: str) -> Path:
    """One picture."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=ground, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(url + ("" if view == "page_map" else view), timeout=LOAD_MS)
    page.get_by_test_id("stMainBlockContainer").wait_for(timeout=LOAD_MS)
    page.get_by_test_id("stSkeleton").first.wait_for(state="detached", timeout=LOAD_MS)
    page.wait_for_timeout(4000)
    VIEWS[view](page)
    page.mouse.move(0, 0)
    page.evaluate("document.querySelector('[data-testid=stMain]')?.scrollTo(0, 0)")
    page.wait_for_timeout(500)
    path = FOLDER / f"dashboard-{view.replace('_', '-')}-{size}-{ground}.png"
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    context.close()
    return path


def say(line: str) -> None:
    """A line for whoever waits."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """All views, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("views", nargs="*", choices=[[], *VIEWS], metavar="VIEW")
    settings = parser.parse_args()
    chromium = shutil.which("chromium")
    assert chromium, "Chromium is not installed"
    with sync_playwright() as runtime:
        browser = runtime.chromium.launch(executable_path=chromium, args=FLAGS)
        for view in settings.views or VIEWS:
            for size in SIZES:
                for ground in GROUNDS:
                    try:
                        path = take(browser, settings.url, view, size, ground)
                        say(f"{path.name} {path.stat().st_size}")
                    except Error as error:
                        say(f"{view} {size} {ground}: {error.message.splitlines()[0]}")
        browser.close()


if __name__ == "__main__":
    main()
