"""Pins of prefixes: text becomes ids here, each worker keeps its pages; those of the configuration come back.

Owns which life of which worker has the configured pins. What a pin is, the worker knows.
"""

import asyncio
import logging
import tomllib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from kvatlas.v1 import server_pb2 as pb
from kvatlas.worker.v1 import worker_pb2
from service import errors
from service.config import ConfigError
from service.errors import Failure, Violation
from service.fleet.codec import SERVING
from service.fleet.mirrors import KeptMirror, PageMirrors
from service.fleet.workers import WorkerPool
from service.handlers import admin_checks as checks
from service.handlers.asking import ask, reachable_workers
from service.handlers.backstage import Backstage
from service.handlers.convert import milliseconds

MAX_FILE_BYTES = 4 << 20
MAX_CONFIGURED = 256
SET_SECONDS = 60.0
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0
_FINAL = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "CANCELLED")
"""Statuses of a pin that is not set again: it cannot be, or an operator wants another under its name."""

log = logging.getLogger("service.pins")


class Pinner:
    """Sets pins on workers."""

    def __init__(self, backstage: Backstage, mirrors: PageMirrors) -> None:
        self._backstage = backstage
        self._mirrors = mirrors

    async def set(self, request: pb.SetPinnedPrefixRequest, timeout: float) -> list[pb.PinnedPrefix]:
        """The pin on each worker that is meant. Raises Failure; then other workers may have it."""
        facts = self._backstage.facts_of(request.model if not request.remove else "")
        checks.check_pin(request, facts.vocab_size)
        if "pinning" not in facts.features:
            raise errors.feature_disabled("pinning")
        kept = reachable_workers(self._mirrors, request.worker_id)
        pin = await self._pin(request, facts.page_size)
        return await self.set_on(kept, pin, timeout)

    async def set_on(
        self, kept: Sequence[KeptMirror], pin: worker_pb2.PinPrefix, timeout: float
    ) -> list[pb.PinnedPrefix]:
        """The same with its ids, on these workers."""
        command = worker_pb2.Command(pin=pin)
        asked = (ask(each, command, timeout, errors.deadline_passed) for each in kept)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        done = [reply for reply in replies if not isinstance(reply, BaseException)]
        return [reply.pin for reply in done if reply.HasField("pin")]

    async def list(self, worker_id: str, timeout: float) -> list[pb.PinnedPrefix]:
        """Pins by name and worker."""
        kept = reachable_workers(self._mirrors, worker_id)
        command = worker_pb2.Command(list_pins=pb.ListPinnedPrefixesRequest())
        replies = await asyncio.gather(*(ask(each, command, timeout) for each in kept))
        pins = [pin for reply in replies for pin in reply.pins.pins]
        return sorted(pins, key=lambda pin: (pin.name, pin.worker_id))

    async def _pin(self, request: pb.SetPinnedPrefixRequest, page_size: int) -> worker_pb2.PinPrefix:
        if request.remove:
            return worker_pb2.PinPrefix(name=request.name)
        spec = checks.spec_of_pin(request)
        if spec.WhichOneof("prompt") == "chat":
            self._backstage.prompts.check_chat(spec.chat)
        ids = await self._backstage.prompts.ids_of(spec)
        if len(ids) < page_size:
            text = f"has {len(ids)} tokens, less than a page of {page_size}"
            raise errors.invalid_fields([Violation(request.WhichOneof("prefix") or "prefix", text)])
        return worker_pb2.PinPrefix(
            name=request.name,
            token_ids=array("I", ids).tobytes(),
            cache_salt=request.tenant.encode() + b"\0" + request.salt.encode(),
            ttl_ms=milliseconds(request.ttl if request.HasField("ttl") else None),
        )


class PinKeeper:
    """Sets the configured pins in each life of each worker, once it serves."""

    def __init__(
        self,
        pinner: Pinner,
        pool: WorkerPool,
        mirrors: PageMirrors,
        pins: Sequence[pb.SetPinnedPrefixRequest],
    ) -> None:
        self._pinner = pinner
        self._pool = pool
        self._mirrors = mirrors
        self._pins = pins
        self._lives: dict[str, int] = {}  # by address: epoch that was dealt with
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by address: one at most

    def look(self) -> None:
        """Something about a worker has changed."""
        there = {link.address for link in self._pool.links}
        for address in self._lives.keys() - there:
            del self._lives[address]
            self._stop(address)
        for link in self._pool.known if self._pins else ():
            if link.facts is None or self._pool.state_of(link) != SERVING:
                continue
            if self._lives.get(link.address) != link.facts.epoch:
                self._lives[link.address] = link.facts.epoch
                self._stop(link.address)
                work = self._set_all(link.address, link.facts.epoch)
                self._tasks[link.address] = asyncio.get_running_loop().create_task(work)

    def close(self) -> None:
        """Sets nothing any more."""
        for address in list(self._tasks):
            self._stop(address)

    def _stop(self, address: str) -> None:
        if (task := self._tasks.pop(address, None)) is not None:
            task.cancel()

    async def _set_all(self, address: str, epoch: int) -> None:
        for pin in self._pins:
            await self._set_one(pin, address, epoch)

    async def _set_one(self, pin: pb.SetPinnedPrefixRequest, address: str, epoch: int) -> None:
        """Again and again while that life lasts, unless the answer can only be the same."""
        pause = MIN_RETRY_SECONDS
        while self._lives.get(address) == epoch:
            kept = next((each for each in self._mirrors.kept if each.link.address == address), None)
            if kept is None or not kept.link.is_up:
                self._lives.pop(address)  # begun anew once it is there again, in this life or the next
                return
            asked = pb.SetPinnedPrefixRequest()
            asked.CopyFrom(pin)
            asked.worker_id = kept.mirror.worker_id
            try:
                (done,) = await self._pinner.set(asked, SET_SECONDS)
            except Failure as failure:
                log.error("event=pin_failed pin=%s worker=%s why=%r", pin.name, asked.worker_id, str(failure))
                if failure.status.name in _FINAL:
                    return
            except Exception:  # a bug of ours or the worker's: the pin is wanted all the same
                log.exception("event=pin_failed pin=%s worker=%s", pin.name, asked.worker_id)
            else:
                log.info(
                    "event=pinned pin=%s worker=%s pages=%d", pin.name, done.worker_id, done.pinned_pages
                )
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)


def read_pins(path: Path) -> list[pb.SetPinnedPrefixRequest]:
    """The [[pin]] entries of a TOML file, fields as in SetPinnedPrefixRequest. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"pins: {path} is larger than {MAX_FILE_BYTES} bytes")
        table = tomllib.loads(text.decode())
    except (OSError, ValueError, RecursionError) as error:  # TOML's and UTF-8's are ValueErrors
        raise ConfigError(f"pins: {path}: {error}") from None
    entries = table.get("pin")
    if set(table) != {"pin"} or not isinstance(entries, list) or len(entries) > MAX_CONFIGURED:
        raise ConfigError(f"pins: {path} has something else than up to {MAX_CONFIGURED} [[pin]]")
    pins = [_configured(number, entry) for number, entry in enumerate(entries, 1)]
    if len({pin.name for pin in pins}) != len(pins):
        raise ConfigError(f"pins: {path}: two pins have one name")
    return pins


def _configured(number: int, entry: Any) -> pb.SetPinnedPrefixRequest:
    if not isinstance(entry, dict):
        raise ConfigError(f"pins: pin {number}: is no table")
    try:
        pin = ParseDict(entry, pb.SetPinnedPrefixRequest())
    except ParseError as error:
        raise ConfigError(f"pins: pin {number}: {error}") from None
    if pin.remove or pin.worker_id:
        raise ConfigError(f"pins: pin {number}: has worker_id or remove")
    try:
        checks.check_pin(pin, 1 << 32)
    except Failure as failure:
        raise ConfigError(f"pins: pin {number}: {failure.message}") from None
    return pin
