"""`kvatlas admin`: what an operator asks of a service and its workers."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from google.protobuf.json_format import MessageToDict

from kvatlas.cli.connecting import admin_connection
from kvatlas.cli.counted import counted
from kvatlas.cli.exits import DONE, USAGE, CommandFailed
from kvatlas.cli.tables import print_table
from kvatlas.client.admin import Admin, LogLevel
from kvatlas.v1 import server_pb2


def run(settings: Namespace) -> int:
    """One action."""
    action = _ACTIONS.get(settings.action or "")
    if action is None:
        what = f"admin {settings.action}: " if settings.action else ""
        raise CommandFailed(f"{what}what to do is one of {', '.join(_ACTIONS)}", USAGE)
    _check_scope(settings)
    with admin_connection(Admin, settings) as admin:
        facts, sentence = action(admin, settings)
    if settings.json:
        print(json.dumps(facts))
    elif sentence:
        print(sentence)
    return DONE


Answer = tuple[Any, str]
"""As plain values for --json, and as a sentence."""


def _drain(admin: Admin, settings: Namespace) -> Answer:
    running = admin.start_drain(settings.grace)
    return {"running_requests": running}, f"draining: still running: {counted(running, 'request')}"


def _undrain(admin: Admin, settings: Namespace) -> Answer:
    admin.stop_drain()
    return {}, "serving again"


def _flush(admin: Admin, settings: Namespace) -> Answer:
    answer = admin.flush_prefix_cache(
        settings.worker_id,
        tenant=settings.tenant,
        salt=settings.salt,
        include_active=settings.include_active,
        include_pinned=settings.include_pinned,
    )
    sentence = f"{counted(answer.freed_pages, 'page')} freed"
    if answer.unindexed_pages:
        sentence += f", {answer.unindexed_pages} in use taken out of the index"
    return _plain(answer), sentence


def _pins(admin: Admin, settings: Namespace) -> Answer:
    pins = admin.pinned_prefixes(settings.worker_id)
    if not settings.json:
        _print_pins(pins)
    return [_plain(pin) for pin in pins], ""


def _pin(admin: Admin, settings: Namespace) -> Answer:
    text = sys.stdin.read() if settings.text == "-" else settings.text
    if not text:
        raise CommandFailed("admin pin: --text says which prefix", USAGE)
    pins = admin.pin_prefix(
        _subject(settings, "the name of the pin"),
        text,
        worker_id=settings.worker_id,
        tenant=settings.tenant,
        salt=settings.salt or "",
        ttl_seconds=settings.ttl,
    )
    places = [
        f"{pin.worker_id}: {counted(pin.pinned_pages, 'page')},"
        f" {counted(pin.computed_tokens, 'token')} computed"
        for pin in pins
    ]
    return [_plain(pin) for pin in pins], "\n".join(places)


def _unpin(admin: Admin, settings: Namespace) -> Answer:
    name = _subject(settings, "the name of the pin")
    was_there = any(pin.name == name for pin in admin.pinned_prefixes(settings.worker_id))
    admin.unpin_prefix(name, worker_id=settings.worker_id)
    return {"was_there": was_there}, f"{name}: {'let go' if was_there else 'there was no such pin'}"


def _cancel(admin: Admin, settings: Namespace) -> Answer:
    labels = _labels(settings.label or ())
    if not (settings.subject or settings.principal or labels):
        raise CommandFailed("admin cancel: an id, --principal or --label says which requests", USAGE)
    ids = admin.cancel_requests(
        [settings.subject] if settings.subject else (),
        principal=settings.principal,
        labels=labels,
        reason=settings.reason,
    )
    return {"cancelled_ids": list(ids)}, "\n".join(ids) or "no such request is live here"


def _log_level(admin: Admin, settings: Namespace) -> Answer:
    levels: tuple[LogLevel, ...] = get_args(LogLevel)
    given = _subject(settings, "the level")
    level = next((each for each in levels if each == given), None)
    if level is None:
        raise CommandFailed(f"admin log-level: {given!r} is none of {', '.join(levels)}", USAGE)
    admin.set_log_level(level, logger=settings.logger, worker_id=settings.worker_id, seconds=settings.seconds)
    return {}, f"{settings.worker_id or 'service'}: {level}"


def _profile(admin: Admin, settings: Namespace) -> Answer:
    profile = admin.capture_profile(settings.steps, worker_id=settings.worker_id)
    path = Path(settings.output or Path(profile.file_name).name)
    try:
        admin.download_profile(profile.file_name, path, worker_id=settings.worker_id)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}", USAGE) from None
    return {"file": str(path), "steps": profile.steps}, f"{path}: {counted(profile.steps, 'step')}"


_ACTIONS: Mapping[str, Callable[[Admin, Namespace], Answer]] = {
    "drain": _drain,
    "undrain": _undrain,
    "flush": _flush,
    "pins": _pins,
    "pin": _pin,
    "unpin": _unpin,
    "cancel": _cancel,
    "log-level": _log_level,
    "profile": _profile,
}


_WITH_SUBJECT = ("pin", "unpin", "cancel", "log-level")
_OF_ONE_WORKER = ("flush", "pins", "pin", "unpin", "log-level", "profile")


def _check_scope(settings: Namespace) -> None:
    """Who names a worker does not mean all of them. Raises CommandFailed."""
    action = settings.action
    if settings.subject and action not in _WITH_SUBJECT:
        raise CommandFailed(f"admin {action}: takes no subject, and got {settings.subject!r}", USAGE)
    if settings.worker_id and action not in _OF_ONE_WORKER:
        raise CommandFailed(f"admin {action}: acts on the service, --worker-id is not for it", USAGE)


def _subject(settings: Namespace, what: str) -> str:
    if not settings.subject:
        raise CommandFailed(f"admin {settings.action}: {what} is missing", USAGE)
    return str(settings.subject)


def _labels(pairs: Sequence[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, is_pair, value = pair.partition("=")
        if not is_pair or not key:
            raise CommandFailed(f"--label {pair!r} is not KEY=VALUE", USAGE)
        labels[key] = value
    return labels


def _plain(message: Any) -> dict[str, Any]:
    facts: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return facts


def _print_pins(pins: Sequence[server_pb2.PinnedPrefix]) -> None:
    counts = ("pages", "tokens", "hits")
    print_table(("pin", "worker", "tenant", *counts, "ends"), map(_pin_cells, pins), numbers=counts)


def _pin_cells(pin: server_pb2.PinnedPrefix) -> Sequence[str]:
    ends = f"{pin.expire_time.ToDatetime():%Y-%m-%d %H:%M:%S}" if pin.HasField("expire_time") else ""
    counts = [f"{count:,}" for count in (pin.pinned_pages, pin.pinned_tokens, pin.hit_tokens)]
    return [pin.name, pin.worker_id, pin.tenant, *counts, ends]
