"""`kvatlas record`: the flight recorder of a worker, from outside."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvatlas.cli.connecting import admin_connection
from kvatlas.cli.counted import counted
from kvatlas.cli.exits import DONE, USAGE, CommandFailed
from kvatlas.cli.tables import print_table
from kvatlas.client.recordings import Recorder
from kvatlas.v1 import cache_pb2, server_pb2

SUFFIX = ".kvrec"


def run(settings: Namespace) -> int:
    """Starts, stops, lists or fetches."""
    verbs: Mapping[str, Callable[[Recorder, Namespace], None]] = {
        "start": _start,
        "stop": _stop,
        "list": _list,
        "get": _get,
    }
    verb = verbs.get(settings.action or "list")
    if verb is None:
        raise CommandFailed(f"record {settings.action}: what to do is one of {', '.join(verbs)}", USAGE)
    if settings.recording and verb in (_start, _list):
        text = f"record {settings.action}: takes no recording, and got {settings.recording!r}"
        raise CommandFailed(text, USAGE)
    with admin_connection(Recorder, settings) as recorder:
        verb(recorder, settings)
    return DONE


def _start(recorder: Recorder, settings: Namespace) -> None:
    info = recorder.start(
        settings.worker_id,
        lookback_seconds=settings.lookback,
        max_seconds=settings.max_seconds,
        max_bytes=settings.max_bytes,
        include_token_ids=settings.token_ids,
        note=settings.note,
        rotate=settings.rotate,
    )
    _tell(info, settings)


def _stop(recorder: Recorder, settings: Namespace) -> None:
    _tell(recorder.stop(settings.recording or "", worker_id=settings.worker_id), settings)


def _tell(info: server_pb2.RecordingInfo, settings: Namespace) -> None:
    print(json.dumps(_as_json(info)) if settings.json else _sentence(info))


def _sentence(info: server_pb2.RecordingInfo) -> str:
    text = (
        f"{info.recording_id}: {state_of(info)}, {_seconds(info):.1f} s,"
        f" {counted(info.event_count, 'page event')}, {counted(info.request_count, 'request')},"
        f" {counted(info.byte_count, 'byte')}"
    )
    if info.dropped_events:
        text += f", {counted(info.dropped_events, 'event')} missing"
    return f"{text} ({info.message})" if info.message else text


def state_of(info: server_pb2.RecordingInfo) -> str:
    """What became of it, in one word."""
    if not info.end_cause:
        return "running"
    name = cache_pb2.RecordingEndCause.Name(info.end_cause)
    return name.removeprefix("RECORDING_END_CAUSE_").lower()


def _seconds(info: server_pb2.RecordingInfo) -> float:
    return float(info.duration.ToTimedelta().total_seconds())


def _as_json(info: server_pb2.RecordingInfo) -> dict[str, Any]:
    facts: dict[str, Any] = MessageToDict(
        info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    facts |= {"end_cause": state_of(info), "duration": _seconds(info)}
    for name in ("byte_count", "event_count", "request_count", "dropped_events"):
        facts[name] = int(facts[name])
    return facts


def _list(recorder: Recorder, settings: Namespace) -> None:
    found = recorder.list(settings.worker_id)
    if settings.json:
        print(json.dumps([_as_json(info) for info in found]))
        return
    counts = ("seconds", "events", "requests", "bytes")
    print_table(("recording", "ended by", "began", *counts, "note"), map(_listed, found), numbers=counts)


def _listed(info: server_pb2.RecordingInfo) -> Sequence[str]:
    began = info.start_time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S")
    counts = [f"{count:,}" for count in (info.event_count, info.request_count, info.byte_count)]
    return [info.recording_id, state_of(info), began, f"{_seconds(info):.0f}", *counts, info.note]


def _get(recorder: Recorder, settings: Namespace) -> None:
    path = Path(settings.output) if settings.output else Path(f"{settings.recording or 'recording'}{SUFFIX}")
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(path.name, total=None)
            info = recorder.download(
                settings.recording or "",
                path,
                worker_id=settings.worker_id,
                timeout_seconds=settings.timeout,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}", USAGE) from None
    print(f"{path}: {info.byte_count:,} bytes of {info.recording_id}", file=sys.stderr)
    print(path)
