"""A copy of one worker's page map, kept current by WatchPageMap in STATE mode.

Owns the reader's rules of that call: a snapshot counts when all its parts are there, a delta only if
it continues the number held, anything else is a bug and raises Incomplete. Knows no channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from kvatlas.client.errors import Incomplete
from kvatlas.v1 import cache_pb2 as pb

Part = TypeVar("Part", bound=Message)

PLANES: Mapping[str, np.dtype[np.generic]] = {
    "states": np.dtype("u1"),
    "flags": np.dtype("u1"),
    "ref_counts": np.dtype("<u2"),
    "filled_slots": np.dtype("<u2"),
    "owners": np.dtype("<u2"),
    "hit_counts": np.dtype("<u2"),
    "parent_page_ids": np.dtype("<u4"),
    "born_ms": np.dtype("<u4"),
    "used_ms": np.dtype("<u4"),
    "fingerprints": np.dtype("<u8"),
}
"""Planes of PageMap: one entry per page, little endian."""

STATE_NAMES: Mapping[int, str] = {
    pb.PAGE_STATE_FREE: "free",
    pb.PAGE_STATE_ACTIVE: "active",
    pb.PAGE_STATE_CACHED: "cached",
    pb.PAGE_STATE_PINNED: "pinned",
    pb.PAGE_STATE_RESERVED: "reserved",
}


@dataclass(frozen=True, slots=True)
class SequencePages:
    """A sequence: one that holds pages, or one that waits (owner 0, no pages)."""

    owner: int
    request_id: str
    choice_index: int
    state: str  # waiting, prefill, decode, preempted
    page_ids: NDArray[np.uint32]  # in token order
    token_count: int
    prompt_tokens: int
    hit_tokens: int  # of the prompt, found in the prefix cache
    row: int | None = None  # of the page table; None: not running
    wait_reason: str = ""  # pages, rows, step_tokens, priority; "": it runs, or nobody asked yet
    needed_pages: int = 0  # that it waits for
    priority: int = 0
    preemptions: int = 0
    receive_ms: int = 0  # since 1970, of the service's clock
    tenant: str = ""  # these two only with the `admin` scope
    labels: Mapping[str, str] = field(default_factory=dict)


class PageMap:
    """All pages as of one revision. `apply` takes the messages of a watch in order.

    A new snapshot (start, worker restart, lag) replaces everything once its last part is there; until
    then the old map stays, and `is_stale` is true.
    """

    def __init__(self) -> None:
        self.geometry = pb.PoolGeometry()
        self.stats = pb.PoolStats()
        self.revision = pb.Revision()
        self.planes: dict[str, NDArray[np.generic]] = {}  # by name, [page_count]
        self.sequences: dict[int, SequencePages] = {}  # by owner
        self.waiting: dict[tuple[str, int], SequencePages] = {}  # by request id and choice index
        self.is_stale = True
        self._parts: list[pb.SnapshotChunk] = []

    def __getitem__(self, plane: str) -> NDArray[np.generic]:
        return self.planes[plane]

    @property
    def page_count(self) -> int:
        """Pages, the dummy page included."""
        return self.geometry.page_count

    def counts(self) -> dict[str, int]:
        """Pages by state, counted in the planes; they add up to `page_count`."""
        by_number = np.bincount(self.planes["states"].astype(np.int64), minlength=max(STATE_NAMES) + 1)
        return {name: int(by_number[number]) for number, name in STATE_NAMES.items()}

    def begin(self) -> pb.Revision | None:
        """A new connection: drops parts of an unfinished snapshot. The revision to go on after, if any."""
        self._parts = []
        return None if self.is_stale else self.revision

    def apply(self, message: pb.WatchPageMapResponse) -> bool:
        """Takes one message. True: the map is whole, as of `revision`. False: parts are to come."""
        kind = message.WhichOneof("event")
        if kind == "snapshot":
            if not self._take_part(message):
                return False
        elif kind in ("delta", "heartbeat"):
            self._check_base(message)
            if kind == "delta":
                self._apply_delta(message.delta)
        else:
            return False  # a kind that this version does not know
        self.revision = _copied(message.revision)
        if message.HasField("stats"):
            self.stats.CopyFrom(message.stats)
        return True

    def take_window(self, window: pb.GetPageMapResponse, geometry: pb.PoolGeometry) -> None:
        """Starts from one answer of GetPageMap that covers the whole pool; without sequences."""
        self.geometry, self.stats = _copied(geometry), _copied(window.stats)
        self.revision = _copied(window.revision)
        self.planes = {name: plane.copy() for name, plane in _views(window.pages).items()}
        self.is_stale = False

    def _take_part(self, message: pb.WatchPageMapResponse) -> bool:
        self.is_stale = True
        self._parts.append(message.snapshot)
        if message.snapshot.chunks_left:
            return False
        parts, self._parts = self._parts, []
        geometry = next((part.geometry for part in parts if part.HasField("geometry")), self.geometry)
        pieces = _joined([_views(part.pages) for part in parts if part.page_count], geometry.page_count)
        self.geometry = _copied(geometry)
        self.planes = {name: self._filled(name, each) for name, each in pieces.items()}
        self.sequences, self.waiting = {}, {}
        for part in parts:
            for info in part.sequences:
                self._take_sequence(info)
        self.is_stale = False
        return True

    def _filled(self, name: str, pieces: list[NDArray[np.generic]]) -> NDArray[np.generic]:
        """The plane, in the memory of the old one if it fits: who reads for days sees many snapshots."""
        plane = self.planes.get(name)
        if plane is None or len(plane) != self.page_count:
            plane = np.empty(self.page_count, PLANES[name])
        return np.concatenate(pieces, out=plane)

    def _check_base(self, message: pb.WatchPageMapResponse) -> None:
        if self.is_stale or message.revision.epoch != self.revision.epoch:
            raise Incomplete(f"a delta of epoch {message.revision.epoch} came before its snapshot")
        if message.base_number != self.revision.number:
            raise Incomplete(f"a delta continues {message.base_number}, the map is at {self.revision.number}")

    def _apply_delta(self, delta: pb.PageDelta) -> None:
        page_ids = np.frombuffer(delta.page_ids, "<u4")
        for name, values in _views(delta.pages).items():
            if name in self.planes:
                self.planes[name][page_ids] = values
        # An owner that ended may have been given again within one merged delta: ends come first.
        for owner in np.frombuffer(delta.ended_owners, "<u2").tolist():
            self.sequences.pop(owner, None)
        for info in delta.sequences:
            self._take_sequence(info)
        owners = np.frombuffer(delta.progress.owners, "<u2")
        token_counts = np.frombuffer(delta.progress.token_counts, "<u4")
        for owner, tokens in zip(owners.tolist(), token_counts.tolist(), strict=True):
            if owner in self.sequences:
                self.sequences[owner] = replace(self.sequences[owner], token_count=tokens)

    def _take_sequence(self, info: pb.SequenceInfo) -> None:
        """`first_page_index` pages of the one held are kept, the rest is replaced."""
        name = (info.request_id, info.choice_index)
        self.waiting.pop(name, None)
        if info.owner == 0:
            if info.state != pb.SEQUENCE_STATE_UNSPECIFIED:  # that one has ended
                self.waiting[name] = _read_sequence(info, np.empty(0, np.uint32))
            return
        pages = np.frombuffer(info.page_ids, "<u4")
        held = self.sequences.get(info.owner)
        if info.first_page_index:
            kept = held.page_ids[: info.first_page_index] if held is not None else pages[:0]
            if len(kept) < info.first_page_index:
                raise Incomplete(
                    f"owner {info.owner}: {info.first_page_index} pages are to be kept, {len(kept)} known"
                )
            pages = np.concatenate([kept, pages])
        self.sequences[info.owner] = _read_sequence(info, pages)


def state_name(state: int) -> str:
    """`decode` for SEQUENCE_STATE_DECODE; a number this version does not know stays a number."""
    try:
        return pb.SequenceState.Name(state).removeprefix("SEQUENCE_STATE_").lower()
    except ValueError:
        return f"state_{state}"


def _read_sequence(info: pb.SequenceInfo, pages: NDArray[np.uint32]) -> SequencePages:
    return SequencePages(
        owner=info.owner,
        request_id=info.request_id,
        choice_index=info.choice_index,
        state=state_name(info.state),
        page_ids=pages,
        token_count=info.token_count,
        prompt_tokens=info.prompt_tokens,
        hit_tokens=info.prefix.hit_tokens,
        row=info.row if info.HasField("row") else None,
        wait_reason=_wait_reason(info.wait_reason),
        needed_pages=info.needed_pages,
        priority=info.priority,
        preemptions=info.preemptions,
        receive_ms=info.receive_time.ToMilliseconds(),
        tenant=info.tenant,
        labels=dict(info.labels),
    )


def _wait_reason(reason: int) -> str:
    """`pages` for WAIT_REASON_PAGES; a number this version does not know stays a number."""
    if reason == pb.WAIT_REASON_UNSPECIFIED:
        return ""
    try:
        return pb.WaitReason.Name(reason).removeprefix("WAIT_REASON_").lower()
    except ValueError:
        return f"reason_{reason}"


def _copied(part: Part) -> Part:
    """A part of a message holds the memory of all of it, planes and lists; a copy does not."""
    copied = type(part)()
    copied.CopyFrom(part)
    return copied


def _views(pages: pb.PageMap) -> dict[str, NDArray[np.generic]]:
    """The planes that are there, in the message's memory."""
    return {
        name: np.frombuffer(raw, dtype) for name, dtype in PLANES.items() if (raw := getattr(pages, name))
    }


def _joined(
    parts: list[dict[str, NDArray[np.generic]]], page_count: int
) -> dict[str, list[NDArray[np.generic]]]:
    """The pieces of each plane, in order. Incomplete: they are not as many as there are pages."""
    names = parts[0].keys() if parts else ()
    pieces = {name: [part[name] for part in parts if name in part] for name in names}
    for name, each in pieces.items():
        length = sum(map(len, each))
        if length != page_count:
            raise Incomplete(f"plane {name} has {length} entries for {page_count} pages")
    return pieces
