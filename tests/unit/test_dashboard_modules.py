"""The browser's pure modules, run under Node: planes, layouts, hit-testing, places of the tree, bytes."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests import needs

pytestmark = needs.NODE
ROOT = Path(__file__).parents[2]
COMPONENTS = (ROOT / "dashboard" / "components").as_uri()

PRELUDE = f"""
import {{ Planes }} from "{COMPONENTS}/planes.js";
import {{ Grid, orderOf }} from "{COMPONENTS}/layout.js";
const hello = (count) => ({{ page_count: count, page_size: 16, start_ms: 0 }});
const common = {{ revision: 1, clock: 10_000, isPast: false }};
const header = (kind, count, more = {{}}) => ({{ kind, count, ...common, ...more }});
const whole = (planes, states, idle, owners) => planes.apply({{
  header: header(1, states.length), firstPage: 0, partsLeft: 0,
  idle: Uint32Array.from(idle ?? states.map(() => 0)),
  owners: Uint16Array.from(owners ?? states.map(() => 0)), states: Uint8Array.from(states),
  refs: new Uint8Array(states.length), fill: new Uint8Array(states.length),
}});
const delta = (planes, pages, states) => planes.apply({{
  header: header(2, pages.length, {{ revision: 2, clock: 12_000 }}), pages: Uint32Array.from(pages),
  owners: new Uint16Array(pages.length), states: Uint8Array.from(states),
  refs: new Uint8Array(pages.length), fill: new Uint8Array(pages.length),
}});
const told = {{}};
"""


def node(body: str) -> Any:
    script = PRELUDE + body + "\nconsole.log(JSON.stringify(told));"
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_counts_follow_every_change_and_add_up() -> None:
    told = node("""
const planes = new Planes(hello(6));
told.first = whole(planes, [1, 2, 2, 3, 4, 5]);
told.before = [...planes.counts];
told.next = delta(planes, [0, 1, 3], [2, 3 | 8 | 32, 1]);
told.after = [...planes.counts];
told.sum = told.after.reduce((a, b) => a + b);
told.words = planes.describe(1);
told.idle = [planes.idleMs(1), planes.idleMs(2)];
told.heartbeat = delta(planes, [], []);
""")
    assert (told["first"], told["next"], told["heartbeat"]) == ("all", "some", None)
    assert told["before"] == [0, 1, 2, 1, 1, 1, 0, 0]
    assert told["after"] == [0, 1, 2, 1, 1, 1, 0, 0]
    assert told["sum"] == 6
    assert told["idle"] == [0, 2000], "used since the last frame: now; the other grows older"
    assert told["words"][0] == "page 1 · cached"
    assert "sealed" in told["words"][2]


def test_pages_of_a_worker_that_runs_for_months_are_as_old_as_they_are() -> None:
    told = node("""
const planes = new Planes({ ...hello(4), start_ms: -(100 * 86_400_000) });
whole(planes, [3, 3, 3, 1], [1000, 500_000, 86_400_000, 0]);
told.idle = [0, 1, 2].map((page) => planes.idleMs(page));
delta(planes, [1], [3 | 32]);
told.later = [0, 1, 2].map((page) => planes.idleMs(page));
told.order = [...orderOf("eviction", planes).order.slice(0, 3)];
""")
    assert told["idle"] == [1000, 500_000, 86_400_000]
    assert told["later"] == [3000, 0, 86_402_000]
    assert told["order"] == [1, 0, 2]


def test_a_snapshot_counts_when_its_last_part_is_there() -> None:
    told = node("""
const planes = new Planes(hello(4));
const part = (firstPage, partsLeft, states) => planes.apply({
  header: header(1, states.length), firstPage, partsLeft, idle: new Uint32Array(states.length),
  owners: new Uint16Array(states.length), states: Uint8Array.from(states),
  refs: new Uint8Array(states.length), fill: new Uint8Array(states.length),
});
told.steps = [part(0, 1, [1, 2]), planes.isWhole, part(2, 0, [3, 3]), planes.isWhole, [...planes.state]];
told.torn = [part(2, 0, [1, 1]), [...planes.state]];
told.again = [part(0, 1, [2, 2]), part(0, 1, [5, 5]), part(2, 0, [1, 1]), [...planes.state]];
""")
    assert told["steps"] == [None, False, "all", True, [1, 2, 3, 3]]
    assert told["torn"] == [None, [1, 2, 3, 3]], "a part without its first one changes nothing"
    assert told["again"] == [None, None, "all", [5, 5, 1, 1]]


def test_the_past_stands_still_whatever_comes() -> None:
    told = node("""
const planes = new Planes(hello(2));
planes.apply({
  header: header(1, 2, { isPast: true }), firstPage: 0, partsLeft: 0, idle: new Uint32Array(2),
  owners: new Uint16Array(2), states: Uint8Array.from([2, 2]),
  refs: new Uint8Array(2), fill: new Uint8Array(2),
});
told.news = delta(planes, [0], [1]);
told.state = [...planes.state];
""")
    assert told == {"news": None, "state": [2, 2]}


def test_every_layout_shows_each_page_once() -> None:
    told = node("""
const count = 997, planes = new Planes(hello(count));
const states = Array.from({ length: count }, (_, page) => page === 996 ? 5 : 1 + (page * 7) % 4);
whole(planes, states, states.map((_, page) => (page * 37) % 5000));
planes.apply({
  header: header(3, 2), starts: Uint32Array.from([0, 3, 5]),
  pages: Uint32Array.from([8, 3, 900, 3, 12]), owners: Uint16Array.from([4, 9]),
});
for (const layout of ["request", "eviction", "age"]) {
  const { order, marks } = orderOf(layout, planes);
  told[layout] = { unique: new Set(order).size, first: [...order.slice(0, 4)], marks: marks.slice(0, 3) };
  const grid = new Grid();
  grid.resize(count, 900, 500, 1);
  grid.setOrder({ order, marks });
  told[layout].back = order.every((page, cell) => grid.cellOfPage(page) === cell);
}
const { order, marks } = orderOf("eviction", planes);
const idle = (page) => (page * 37) % 5000;
const evictable = [...order.slice(marks[0], marks[1])];
const isLater = (page, at) => !at || (idle(evictable[at - 1]) >> 2) <= (idle(page) >> 2);
told.evictable = [evictable.every((page) => states[page] === 3), evictable.every(isLater)];
told.physical = orderOf("physical", planes).order;
""")
    for layout in ("request", "eviction", "age"):
        assert told[layout]["unique"] == 997, layout
        assert told[layout]["back"], layout
    assert told["request"]["first"] == [8, 3, 900, 12], "a shared page stands with its first sequence"
    assert told["request"]["marks"] == [3, 4]
    assert told["evictable"] == [True, True], "least recently used last: it goes next"
    assert told["physical"] is None


def test_a_click_hits_the_page_that_is_drawn_there_at_every_zoom() -> None:
    told = node("""
told.faults = [];
const sizes = [
  [1, 300, 200], [255, 900, 500], [4096, 1390, 480], [131072, 1390, 480],
  [1048576, 1390, 480], [1048576, 390, 440],
];
for (const [count, width, height] of sizes) {
  const grid = new Grid();
  grid.resize(count, width, height, 1);
  if (grid.columns * grid.rows < count) told.faults.push([count, "cells"]);
  const [wide, tall] = [grid.columns * grid.cell, grid.rows * grid.cell];
  if (tall > height + 0.5 || wide > width + 0.5) told.faults.push([count, "does not fit", wide, tall]);
  told.outside = [grid.hit(-5, -5), grid.hit(width * 50, 1)];
  for (const zoom of [1, 3, 40]) {
    grid.fit();
    grid.zoomAt(zoom, width / 3, height / 4);
    for (let page = 0; page < count; page += Math.max(1, Math.floor(count / 501))) {
      const [x, y] = grid.corner(page);
      if (grid.hit(x + grid.cell / 2, y + grid.cell / 2) !== page) told.faults.push([count, zoom, page]);
    }
  }
  grid.fit();
  const last = count - 1;
  grid.show(last, 1);
  const [x, y] = grid.corner(last);
  if (x < 0 || y < 0 || x > width || y > height) told.faults.push([count, "not shown", x, y]);
  if (grid.hit(x + grid.cell / 2, y + grid.cell / 2) !== last) told.faults.push([count, "last"]);
}
""")
    assert told["faults"] == []
    assert told["outside"] == [-1, -1]


def test_children_of_the_icicle_lie_under_their_parent() -> None:
    told = node(f"""
const {{ place }} = await import("{COMPONENTS}/icicle.js");
const nodes = [
  {{ id: "a", parent: null, weight: 60 }}, {{ id: "b", parent: null, weight: 40 }},
  {{ id: "c", parent: "a", weight: 30 }}, {{ id: "d", parent: "a", weight: 15 }},
  {{ id: "e", parent: "c", weight: 30 }},
  {{ id: "f", parent: "unknown", weight: 0.001 }},
];
const by = Object.fromEntries(place(nodes, null).map((each) => [each.node.id, each]));
told.depths = Object.fromEntries(Object.entries(by).map(([id, {{ depth }}]) => [id, depth]));
const end = (id) => by[id].x + by[id].width;
told.inside = ["c", "d"].every((id) => by[id].x >= by.a.x && end(id) <= end("a") + 1e-9);
told.apart = by.c.x + by.c.width <= by.d.x + 1e-9;
told.zoomed = place(nodes, "c").map((each) => [each.node.id, each.depth, each.width]);
""")
    assert told["depths"] == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2, "f": 0}
    assert told["inside"]
    assert told["apart"]
    assert told["zoomed"] == [["c", 0, 1], ["e", 1, 1]]


def test_results_of_tokens_stand_in_the_order_of_a_prompt() -> None:
    told = node(f"""
const {{ resultsOf }} = await import("{COMPONENTS}/ruler.js");
told.some = resultsOf(8, {{ hit: 2, miss_evicted: 2, miss_cold: 3, unaligned: 1 }});
told.unknown = resultsOf(3, null);
""")
    assert told["some"] == ["hit"] * 2 + ["miss_evicted"] * 2 + ["miss_cold"] * 3 + ["unaligned"]
    assert told["unknown"] == [None] * 3


def test_the_spectrogram_is_read_as_it_is_written() -> None:
    import struct

    import numpy as np

    bands, count = 3, 2
    raw = struct.pack("<IIII", 7, count, bands, 30)
    raw += np.array([1000.0, 2000.0]).tobytes()
    raw += np.arange(count * 14, dtype="<u4").tobytes()
    raw += bytes([0, 1]) + bytes(range(count * 4 * bands))
    told = node(f"""
const {{ parseSpectrogram }} = await import("{COMPONENTS}/strip.js");
const read = parseSpectrogram(Uint8Array.from(Buffer.from("{raw.hex()}", "hex")).buffer);
for (const [name, value] of Object.entries(read)) told[name] = ArrayBuffer.isView(value) ? [...value] : value;
""")
    assert told == {
        "first": 7,
        "bands": 3,
        "pageCount": 30,
        "times": [1000.0, 2000.0],
        "figures": list(range(28)),
        "cuts": [0, 1],
        "columns": list(range(24)),
    }


def test_columns_of_another_process_or_pool_do_not_follow_those_that_are_there() -> None:
    told = node(f"""
const {{ continues }} = await import("{COMPONENTS}/strip.js");
const reader = {{ next: 500, pageCount: 30 }};
const answers = [[500, 30], [520, 30], [0, 30], [500, 31]];
told.follows = answers.map(([first, pageCount]) => continues({{ first, pageCount }}, reader));
""")
    assert told["follows"] == [True, True, False, False]


def test_columns_stand_at_their_seconds_with_a_hole_where_nothing_was_heard() -> None:
    """They stood side by side: what was called 10 min ago was nineteen where nine had none."""
    told = node(f"""
const {{ placed }} = await import("{COMPONENTS}/strip.js");
const of = (seconds) => placed(seconds.map((second) => ({{ time: 1e12 + second * 1000 }}))).map(
  ({{ column, x, seconds }}) => [Math.round(column.time / 1000 - 1e9), x, seconds]);
told.each = of([0, 1, 2]);
told.late = of([0, 1.2, 2.4, 5.4]);
told.close = of([0, 0.4, 0.8, 1.2]);
told.hole = of([0, 1, 100, 101]);
told.old = of([0, 1, 601, 602]);
told.none = of([]);
""")
    assert told["each"] == [[0, 597, 1], [1, 598, 1], [2, 599, 1]]
    assert [entry[1:] for entry in told["late"]] == [[594, 1], [595, 1], [596, 3], [599, 1]]
    assert [entry[1] for entry in told["close"]] == [596, 597, 598, 599], "none upon another"
    assert told["hole"] == [[0, 498, 1], [1, 499, 1], [100, 598, 1], [101, 599, 1]]
    assert told["old"] == [[601, 598, 1], [602, 599, 1]], "ten minutes and no more"
    assert told["none"] == []


def test_ramps_are_monotonous_in_lightness() -> None:
    told = node(f"""
const {{ ramp }} = await import("{COMPONENTS}/colours.js");
const light = (share) => {{ const [r, g, b] = ramp(share); return r * 0.2126 + g * 0.7152 + b * 0.0722; }};
told.values = Array.from({{ length: 50 }}, (_, at) => light(at / 49));
""")
    assert told["values"] == sorted(told["values"])
    assert told["values"][0] > 60, "the dark quarter is the ground of free pages"
