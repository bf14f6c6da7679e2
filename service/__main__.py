"""`python -m service`: config, objects, serve, drain. No logic."""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

import uvloop

from kvatlas.models.errors import ModelError
from kvatlas.models.resolve import resolve_model
from kvatlas.models.vocabulary import tokenizer_digest
from kvatlas.process_age import process_age
from kvatlas.start_failures import start_reason
from service import log
from service.config import ConfigError, ServiceConfig, from_args, wants_print
from service.request import current_call, trace_id_of
from service.server import ListenError, Service
from service.text.tokenizer import Tokenizer

USAGE_STATUS, START_STATUS = 2, 1
PARENT_WATCH_SECONDS = 0.5
ORPHAN_SECONDS = 10.0  # for what runs; nobody is left who would watch us
SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger("service")


def main(arguments: Sequence[str]) -> int:
    """Runs until a signal; returns the exit status."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    try:
        config = from_args(arguments)
    except ConfigError as error:
        sys.stderr.write(f"python -m service: {error}\n")
        return USAGE_STATUS
    if wants_print(arguments):
        sys.stdout.write(config.printable() + "\n")
        return 0
    log.set_up(config.log_level, _log_context)
    logger.info("event=phase phase=interpreter_and_imports seconds=%.6g", process_age())
    try:
        began = time.monotonic()
        files = resolve_model(config.model)
        tokenizer, digest = Tokenizer.load(files), tokenizer_digest(files)
        logger.info("event=phase phase=tokenizer seconds=%.6g", time.monotonic() - began)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, tokenizer, digest, files.model_id))
    except (ConfigError, ModelError, ListenError, ValueError) as error:
        logger.error("event=start_failed reason=%s why=%r", start_reason(error), str(error))
        return START_STATUS
    return 0


async def _serve(config: ServiceConfig, tokenizer: Tokenizer, digest: str, model_id: str) -> None:
    service = Service(config, tokenizer, digest, model_id)
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            service.hurry()
        service.stop()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    await service.start()
    gc.collect()
    gc.freeze()  # what is there now stays: a full collection then looks at calls only
    gc.set_threshold(20_000, 20, 100)  # 256 streams at 20 ms: token age p99 from 29 to about 21 ms
    watch = asyncio.ensure_future(_watch_parent(config.parent_watch, service))
    try:
        await service.serve()
    finally:
        watch.cancel()


async def _watch_parent(pid: int, service: Service) -> None:
    while pid and os.getppid() == pid:
        await asyncio.sleep(PARENT_WATCH_SECONDS)
    if pid:
        logger.warning("event=parent_gone pid=%d", pid)
        service.stop()
        await asyncio.sleep(ORPHAN_SECONDS)
        service.hurry()


def _log_context() -> str:
    """What a line says of the call that it belongs to: the id under which its trace is found."""
    call = current_call.get(None)
    trace_id = trace_id_of(call.traceparent) if call is not None else ""
    return f" trace={trace_id}" if trace_id else ""


def _leave(number: int, frame: FrameType | None) -> None:
    """Before anything serves a signal simply ends the process."""
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
