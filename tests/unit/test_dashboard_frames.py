"""Frames of the page feed: what Python writes, JavaScript reads, byte for byte."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dashboard import frames
from dashboard.frames import Columns
from tests import needs

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "dashboard_frames.json"
CLOCK = 1_767_261_600_123.5

READ = """
import { readFileSync } from "node:fs";
import { decode } from "%(components)s/decode.js";
const told = JSON.parse(readFileSync(0, "utf8"));
const plain = (value) => ArrayBuffer.isView(value) ? Array.from(value) : value;
const read = {};
for (const [name, hex] of Object.entries(told)) {
  const bytes = Uint8Array.from(Buffer.from(hex, "hex"));
  try {
    const frame = await decode(bytes.buffer);
    read[name] = Object.fromEntries(Object.entries(frame).map(([key, value]) => [key, plain(value)]));
  } catch (error) {
    read[name] = { error: error.message };
  }
}
console.log(JSON.stringify(read));
"""


def columns(count: int, wide: bool = False) -> Columns:
    at = np.arange(count)
    return Columns(
        states=(at % 5 + 1 | (at % 3 == 0) * frames.SEALED_BIT).astype(np.uint8),
        refs=np.minimum(at * 7, 255).astype(np.uint8),
        fill=(at * (40 if wide else 1) % (1000 if wide else 17)).astype(np.uint16),
        owners=(at * 811 % 65536).astype(np.uint16),
    )


def some_frames() -> dict[str, bytes]:
    few = columns(5)
    ids = np.array([0, 3, 7, 70_000, 2**32 - 2], np.uint32)
    idle = (np.arange(9) * 1000).astype(np.uint32)
    (whole,) = frames.snapshot_parts(2**40 + 5, CLOCK, idle, columns(9), is_wide=False)
    (past,) = frames.snapshot_parts(6, CLOCK, idle, columns(9, True), is_wide=True, is_past=True)
    return {
        "delta": frames.delta(9, CLOCK, ids, few, is_wide=False),
        "wide delta": frames.delta(10, CLOCK, ids, columns(5, True), is_wide=True),
        "heartbeat": frames.delta(11, CLOCK, ids[:0], columns(0), is_wide=False),
        "snapshot": whole,
        "past": past,
        "all lists": frames.lists(13, CLOCK, [4], [np.array([7], np.uint32)], is_all=True),
        "lists": frames.lists(12, CLOCK, [3, 9], [np.array([5, 6, 8], np.uint32), np.empty(0, np.uint32)]),
    }


def node(told: dict[str, str]) -> dict[str, dict[str, object]]:
    script = READ % {"components": (ROOT / "dashboard" / "components").as_uri()}
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read: dict[str, dict[str, object]] = json.loads(done.stdout)
    return read


def test_bytes_are_those_that_browsers_out_there_know() -> None:
    """Another layout needs another VERSION, which old scripts answer with "reload the page"."""
    golden = json.loads(GOLDEN.read_text())
    told = {name: frame.hex() for name, frame in some_frames().items() if name not in ("snapshot", "past")}
    assert golden["version"] == frames.VERSION
    assert {name: golden["frames"][name] for name in told} == told
    assert golden["frames"].keys() == some_frames().keys()


@needs.NODE
def test_javascript_reads_golden_bytes() -> None:
    """Deflated parts may differ between releases of zlib: those of the golden file are read, too."""
    golden = json.loads(GOLDEN.read_text())["frames"]
    assert node(golden) == node({name: frame.hex() for name, frame in some_frames().items()})


@needs.NODE
def test_javascript_reads_what_python_wrote() -> None:
    read = node({name: frame.hex() for name, frame in some_frames().items()})
    few = columns(5)
    delta = read["delta"]
    assert delta["pages"] == [0, 3, 7, 70_000, 2**32 - 2]
    for key, values in (
        ("states", few.states),
        ("refs", few.refs),
        ("fill", few.fill),
        ("owners", few.owners),
    ):
        assert delta[key] == values.tolist()
    assert read["wide delta"]["fill"] == columns(5, True).fill.tolist()
    assert read["heartbeat"]["pages"] == []
    whole, past = read["snapshot"], read["past"]
    assert (whole["firstPage"], whole["partsLeft"]) == (0, 0)
    assert whole["idle"] == (np.arange(9) * 1000).tolist()
    assert whole["owners"] == columns(9).owners.tolist()
    header = whole["header"]
    assert isinstance(header, dict)
    assert (header["revision"], header["clock"], header["isPast"]) == (2**40 + 5, CLOCK, False)
    assert isinstance(past["header"], dict)
    assert past["header"]["isPast"] is True
    assert past["fill"] == columns(9, True).fill.tolist()
    assert (read["lists"]["starts"], read["lists"]["pages"]) == ([0, 3, 3], [5, 6, 8])
    assert read["lists"]["owners"] == [3, 9]
    assert [read[name]["header"]["isAll"] for name in ("lists", "all lists")] == [False, True]  # type: ignore[index]


@needs.NODE
def test_javascript_refuses_what_is_cut_short_or_of_another_version() -> None:
    whole = some_frames()["delta"]
    other = bytes([whole[0], frames.VERSION + 1]) + whole[2:]
    read = node({"short": whole[:-1].hex(), "tiny": whole[:10].hex(), "other": other.hex()})
    assert "too short" in str(read["short"]["error"])
    assert "10 bytes" in str(read["tiny"]["error"])
    assert "version" in str(read["other"]["error"])


@pytest.mark.parametrize("count", [1, 65_536, 65_537, 200_000])
def test_a_large_map_comes_in_parts_of_one_revision(count: int) -> None:
    parts = list(frames.snapshot_parts(4, CLOCK, np.zeros(count, np.uint32), columns(count), is_wide=False))
    assert len(parts) == -(-count // 65_536)
    left = [int.from_bytes(part[28:32], "little") for part in parts]
    assert left == list(range(len(parts) - 1, -1, -1))
    sizes = [frames.HEADER.unpack(part[:24])[3] for part in parts]
    assert sum(sizes) == count
    assert {frames.HEADER.unpack(part[:24])[4] for part in parts} == {4}
