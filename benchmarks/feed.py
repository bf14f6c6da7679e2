"""What the page feed costs the service: `python -m benchmarks.feed`.

One worker's feed of changed pages and sequences, as bytes, into the mirror and out to one watcher, as
bytes again: microseconds a frame for each part, at 0.2 % of the pages changed a frame and 256 running
sequences of which a sixth got a page. Snapshots by part. No sockets, no gRPC: their cost a message is in
`benchmarks.streaming`.
"""

import argparse
import gc
from array import array
from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np

from benchmarks.record import percentile, write_result
from kvatlas.v1 import cache_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service.fleet import page_codec
from service.fleet.feed import PLANES
from service.fleet.page_mirror import FrozenMap, PageMirror
from service.fleet.page_watch import PageWatch
from service.handlers import cache_messages
from service.handlers.cache_messages import Viewer

PAGES_PER_PART = 65_536
ADMIN = Viewer(is_admin=True)


class Feed:
    """A worker's side as bytes, made before anything is timed."""

    def __init__(self, page_count: int, num_sequences: int, changed_share: float, frames: int) -> None:
        self.random = np.random.default_rng(1)
        self.page_count = page_count
        self.planes = {
            name: self.random.integers(0, 100, page_count).astype(kind) for name, kind in PLANES.items()
        }
        self.page_lists = [self._pages(64) for _ in range(num_sequences)]
        self.snapshot = self._snapshot()
        count = max(1, int(page_count * changed_share))
        self.frames = [self._frame(number, count) for number in range(frames)]

    def _pages(self, count: int) -> bytes:
        return self.random.integers(0, self.page_count, count).astype(np.uint32).tobytes()

    def _info(self, owner: int, pages: bytes, first: int = 0) -> pb.SequenceInfo:
        info = pb.SequenceInfo(
            request_id=f"request-{owner:08d}", owner=owner, row=owner, state="SEQUENCE_STATE_DECODE"
        )
        info.page_ids, info.first_page_index, info.token_count = pages, first, 1024
        info.receive_time.FromSeconds(1_700_000_000 + owner)
        return info

    def _snapshot(self) -> list[worker_pb2.SnapshotReply]:
        starts = list(range(0, self.page_count, PAGES_PER_PART))
        replies = []
        for place, start in enumerate(starts):
            chunk = pb.SnapshotChunk(first_page_id=start, chunks_left=len(starts) - place)
            chunk.page_count = min(PAGES_PER_PART, self.page_count - start)
            for name, plane in self.planes.items():
                setattr(chunk.pages, name, plane[start : start + PAGES_PER_PART].tobytes())
            replies.append(worker_pb2.SnapshotReply(revision=pb.Revision(epoch=1), chunk=chunk))
        last = pb.SnapshotChunk(sequences=[self._info(i + 1, p) for i, p in enumerate(self.page_lists)])
        replies.append(
            worker_pb2.SnapshotReply(revision=pb.Revision(epoch=1), chunk=last, stats=pb.PoolStats())
        )
        return replies

    def _frame(self, number: int, count: int) -> bytes:
        pages = np.unique(self.random.integers(0, self.page_count, count)).astype(np.uint32)
        feed = worker_pb2.PageFeed(revision=pb.Revision(epoch=1, number=(number + 1) * count, step=number))
        feed.base_number = number * count
        feed.delta.page_ids = pages.tobytes()
        for name, plane in self.planes.items():
            setattr(feed.delta.pages, name, plane[pages].tobytes())
        owners = range(1, len(self.page_lists) + 1)
        grown = owners[number % 6 :: 6]
        feed.delta.sequences.extend(self._info(owner, self._pages(1), first=63) for owner in grown)
        rest = [owner for owner in owners if owner not in grown]
        feed.delta.progress.owners = array("H", rest).tobytes()
        feed.delta.progress.token_counts = array("I", [1000 + number] * len(rest)).tobytes()
        return feed.SerializeToString()


def fill(mirror: PageMirror, feed: Feed) -> list[float]:
    """Microseconds of each part of a snapshot."""
    mirror.begin_life(1, feed.page_count)
    mirror.begin_snapshot()
    return [timed(partial(_add_part, mirror, reply)) for reply in feed.snapshot]


def _add_part(mirror: PageMirror, reply: worker_pb2.SnapshotReply) -> None:
    mirror.add_part(page_codec.decode_part(reply))


def encode_part(frozen: FrozenMap) -> bytes:
    """The next part of a snapshot as bytes."""
    return cache_messages.page_map(frozen.take(PAGES_PER_PART, list(PLANES))).SerializeToString()


def timed(work: Callable[[], object]) -> float:
    """Microseconds."""
    start = perf_counter()
    work()
    return (perf_counter() - start) * 1e6


def run(page_count: int, num_sequences: int, frames: int) -> dict[str, float]:
    """One line of the table."""
    feed = Feed(page_count, num_sequences, 0.002, frames)
    mirror = PageMirror("w0")
    parts = fill(mirror, feed)
    watch = PageWatch(mirror, list(PLANES), lambda: None)
    times: dict[str, list[float]] = {name: [] for name in ("decode", "apply", "take", "encode")}
    snapshot: list[float] = []
    frozen = watch.begin()
    while frozen.pages_left:
        snapshot.append(timed(lambda: encode_part(frozen)))
    mirror.thaw(frozen)
    gc.collect()
    size = 0
    for payload in feed.frames:
        start = perf_counter()
        delta = page_codec.decode_delta(payload)
        decoded = perf_counter()
        mirror.apply(delta)
        applied = perf_counter()
        change = watch.take()
        taken = perf_counter()
        message = cache_messages.delta(
            change, ADMIN, with_sequences=True, merged_events=1
        ).SerializeToString()
        encoded = perf_counter()
        size = len(message)
        for name, seconds in zip(
            times, (decoded - start, applied - decoded, taken - applied, encoded - taken), strict=True
        ):
            times[name].append(seconds * 1e6)
    result = {f"{name}_us": percentile(values, 0.5) for name, values in times.items()}
    total = [sum(values) for values in zip(*times.values(), strict=True)]
    return {
        "pages": page_count,
        "sequences": num_sequences,
        **result,
        "total_us": percentile(total, 0.5),
        "total_p99_us": percentile(total, 0.99),
        "message_bytes": size,
        "snapshot_in_us": percentile(parts[:-1], 0.5),
        "snapshot_out_us": percentile(snapshot, 0.5),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--pages", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--keep", action="store_true", help="write a file into benchmarks/results")
    parser.add_argument("--sequences", type=int, nargs="*", default=[256])
    arguments = parser.parse_args()
    rows = [run(pages, count, arguments.frames) for pages in arguments.pages for count in arguments.sequences]
    names = list(rows[0])
    print(" ".join(f"{name:>15}" for name in names))
    for row in rows:
        print(" ".join(f"{row[name]:>15,.0f}" for name in names))
    if arguments.keep:
        write_result("feed", {"rows": rows}, ["numpy", "protobuf"])


if __name__ == "__main__":
    main()
