"""The pool at any revision of a recording, with every event checked: `python -m worker.trace.replay FILE`.

Two folds run side by side: the ledger, which all readers use, and page_rules.py, which applies the table of
docs/page-events.md one event at a time. Where the rules are broken the first bad event is named; where the
two differ that is a bug of ours and named too.
"""

import argparse
import json
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvatlas.v1 import cache_pb2
from worker.pages.events import EventColumns, PageEventKind, PageState
from worker.readers.ledger import Ledger
from worker.readers.recording_file import DamagedRecording
from worker.readers.recording_frames import state_digest
from worker.readers.recording_store import EndCause
from worker.trace.page_rules import BadEvent, PagePlanes, PageRules
from worker.trace.recording import MapAt, Recording, snapshot_of

CHECK_EVENTS = 65_536  # between two comparisons of the whole map


class NotRecorded(Exception):
    """The recording does not have that revision."""


class FoldsDiffer(Exception):
    """The ledger and the rules disagree about a page: one of them is wrong."""


@dataclass(slots=True)
class Report:
    """What a replay found."""

    num_events: int = 0
    num_requests: int = 0
    num_sequences: int = 0
    num_steps: int = 0
    num_checks: int = 0  # comparisons of the whole map
    lost_events: int = 0
    lost_records: int = 0
    gaps: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)  # that the live audit had found
    kinds: Counter[str] = field(default_factory=Counter)
    end: str = "missing: the worker died, or the file is cut"


class Replay:
    """Folds a recording from its beginning. `run_to` and `run` go forwards only."""

    def __init__(self, recording: Recording, *, is_checked: bool = True) -> None:
        self.header = recording.header
        self.report = Report()
        self.ledger = Ledger(self.header.num_pages, self.header.page_size)
        self.time_us = self.header.start_us
        self._recording = recording
        self._items = recording.items()
        self._is_checked = is_checked
        self._rules: PageRules | None = None
        self._rest: EventColumns | None = None  # events that were read and not applied yet
        self._revision_after_gap = self.header.first_number
        self._unchecked = 0

    def run(self) -> Report:
        """To the end. Raises BadEvent, FoldsDiffer, DamagedRecording."""
        while self._advance(None):
            pass
        self._compare()
        return self.report

    def run_to(self, number: int) -> Ledger:
        """The pool as of a revision. Raises NotRecorded, and as run."""
        if number < self.ledger.revision or number < self.header.first_number:
            first = max(self.ledger.revision, self.header.first_number)
            raise NotRecorded(f"revision {number}: the recording has {first} and later ones")
        while self._rules is None or self.ledger.revision < number:
            if not self._advance(number):
                raise NotRecorded(f"revision {number}: the recording ends at {self.ledger.revision}")
        if self.ledger.revision > number:
            raise NotRecorded(f"revision {number} lies in a gap of the recording")
        self._compare()
        return self.ledger

    def _advance(self, number: int | None) -> bool:
        """The next item, events up to ``number``; False: there is none."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._apply(rest, number)
            return True
        item = next(self._items, None)
        match item:
            case None:
                return False
            case MapAt():
                self._begin(item)
            case EventColumns():
                self._apply(item, number)
            case cache_pb2.RecordingGap():
                self._note_gap(item)
            case cache_pb2.RecordingEnd():
                self._check_end(item)
            case cache_pb2.IntegrityViolation():
                self.report.violations.append(str(item).strip())
            case _:
                self._count(item)
        return True

    def _begin(self, found: MapAt) -> None:
        number = self._revision_after_gap
        if self._rules is not None and self.ledger.revision == number:
            self._compare()  # a map without a loss before it must be the one that we have
        step = self._rules.step if self._rules is not None else self.header.first_step
        self.ledger.restore(snapshot_of(found, number, step, self.header.page_size))
        self.ledger.sharers = {page: list(owners) for page, owners in found.sharers.items()}
        planes = PagePlanes(
            states=found.planes.states,
            flags=found.planes.flags,
            refs=array("H", found.planes.ref_counts),
            owners=array("H", found.planes.owners),
            parents=array("I", found.planes.parent_page_ids),
        )
        self._rules = PageRules(planes, found.sharers, number, step)

    def _apply(self, events: EventColumns, number: int | None) -> None:
        if self._rules is None:
            raise DamagedRecording(self._recording.offset, "page events before a map")
        if events.first_number != self.ledger.revision + 1:
            text = f"events from {events.first_number} on follow event {self.ledger.revision}"
            raise DamagedRecording(self._recording.offset, text)
        if number is not None and events.last_number > number:
            kept = number - self.ledger.revision
            events, self._rest = _cut(events, 0, kept), _cut(events, kept, len(events))
        if not len(events):
            return
        if self._is_checked:
            self._rules.apply(events)
        self.ledger.fold(events)
        self.time_us = events.times_us[-1]
        self.report.num_events += len(events)
        self.report.kinds.update(PageEventKind(kind).name for kind in events.kinds)
        self._unchecked += len(events)
        if self._unchecked >= CHECK_EVENTS:
            self._compare()

    def _compare(self) -> None:
        """Both folds against each other, over all pages."""
        rules, ledger = self._rules, self.ledger
        if rules is None or not self._is_checked:
            return
        self._unchecked = 0
        self.report.num_checks += 1
        pairs = (
            ("state", list(map(int, rules.states)), ledger.states),
            ("flags", rules.flags, ledger.flags),
            ("references", rules.refs, ledger.refs),
            ("parent", rules.parents, ledger.parents),
        )
        due = rules.due
        for name, wanted, found in pairs:
            for page, (one, other) in enumerate(zip(wanted, found.tolist(), strict=True)):
                if one != other and not (name == "state" and page in due):
                    text = (
                        f"after event {ledger.revision}: {name} of page {page}: {one} by the rules, {other}"
                    )
                    raise FoldsDiffer(f"{text} by the fold")

    def _note_gap(self, gap: cache_pb2.RecordingGap) -> None:
        report = self.report
        report.lost_records += gap.lost_records
        report.lost_events += gap.lost_events
        if gap.lost_events:
            self._revision_after_gap = gap.after_number + gap.lost_events
            report.gaps.append(f"{gap.lost_events} events after {gap.after_number}")
        if gap.lost_records:
            report.gaps.append(f"{gap.lost_records} requests, ends or steps")

    def _check_end(self, end: cache_pb2.RecordingEnd) -> None:
        self.report.end = EndCause(end.cause).name
        ledger = self.ledger
        if end.revision.number != ledger.revision:
            text = f"it ends at revision {end.revision.number}, its events at {ledger.revision}"
            raise DamagedRecording(self._recording.offset, text)
        found = state_digest(ledger.states.tobytes(), ledger.flags.tobytes(), ledger.refs.tobytes())
        if end.state_digest != found:
            text = f"the map at its end is {end.state_digest.hex()}, its events lead to {found.hex()}"
            raise DamagedRecording(self._recording.offset, text)

    def _count(self, item: object) -> None:
        match item:
            case cache_pb2.RequestRecord():
                self.report.num_requests += 1
            case cache_pb2.SequenceRecord():
                self.report.num_sequences += 1
            case cache_pb2.StepBatch():
                self.report.num_steps += len(item.steps) // 8


def _cut(events: EventColumns, first: int, end: int) -> EventColumns:
    return EventColumns(
        first_number=events.first_number + first,
        kinds=events.kinds[first:end],
        pages=events.pages[first:end],
        owners=events.owners[first:end],
        refs=events.refs[first:end],
        others=events.others[first:end],
        tags=events.tags[first:end],
        steps=events.steps[first:end],
        times_us=events.times_us[first:end],
        tokens=(),
    )


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kvatlas replay", description=__doc__.partition(":")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--at", type=int, metavar="REVISION", help="the pool as of this page event")
    parser.add_argument("--no-check", action="store_true", help="fold only, four times as fast")
    parser.add_argument("--json", action="store_true", help="print JSON")
    settings = parser.parse_args(arguments)
    try:
        replay = Replay(Recording(settings.file), is_checked=not settings.no_check)
        if settings.at is not None:
            answer = _state(replay, settings.at)
        else:
            replay.run()
            answer = _summary(replay)
    except (BadEvent, FoldsDiffer, DamagedRecording, NotRecorded, OSError) as error:
        kinds = {BadEvent: "bad event: ", DamagedRecording: "damaged: "}
        why = error.strerror if isinstance(error, OSError) else str(error)
        print(f"kvatlas: {settings.file}: {kinds.get(type(error), '')}{why}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(answer) if settings.json else _as_text(answer))  # noqa: T201
    return 0


def _state(replay: Replay, number: int) -> dict[str, object]:
    ledger = replay.run_to(number)
    return {
        "recording": replay.header.recording_id,
        "revision": ledger.revision,
        "step": ledger.step,
        "seconds": round((replay.time_us - replay.header.start_us) / 1e6, 6),
        **{state.name.lower(): int(ledger.state_counts[state]) for state in PageState},
        "references": ledger.references,
        "shared": ledger.shared_pages,
        "sealed": int(ledger.sealed.sum()),
        "digest": state_digest(ledger.states.tobytes(), ledger.flags.tobytes(), ledger.refs.tobytes()).hex(),
        "checked": replay.report.num_events,
    }


def _summary(replay: Replay) -> dict[str, object]:
    report, header = replay.report, replay.header
    return {
        "recording": header.recording_id,
        "worker": header.worker_id,
        "model": header.model,
        "note": header.note,
        "pages": header.num_pages,
        "page_size": header.page_size,
        "revisions": f"{header.first_number} .. {replay.ledger.revision}",
        "seconds": round((replay.time_us - header.start_us) / 1e6, 3),
        "events": report.num_events,
        "requests": report.num_requests,
        "sequences": report.num_sequences,
        "steps": report.num_steps,
        "map_checks": report.num_checks,
        "lost_events": report.lost_events,
        "lost_records": report.lost_records,
        "gaps": report.gaps,
        "violations": report.violations,
        "kinds": dict(sorted(report.kinds.items())),
        "end": report.end,
    }


def _as_text(answer: dict[str, object]) -> str:
    lines = []
    for name, value in answer.items():
        if isinstance(value, dict):
            value = ", ".join(f"{count:,} {kind.lower()}" for kind, count in value.items())
        elif isinstance(value, list):
            value = "; ".join(map(str, value)) or "none"
        elif isinstance(value, int):
            value = f"{value:,}"
        lines.append(f"{name.replace('_', ' '):>12}  {value}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
