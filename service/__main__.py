"""`python -m service`: config, objects, serve, drain. No logic."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from kvatlas.models.errors import ModelError
from kvatlas.models.resolve import resolve_model
from kvatlas.models.vocabulary import tokenizer_digest
from service.config import ConfigError, ServiceConfig, from_args, wants_print
from service.server import ListenError, Service
from service.text.tokenizer import Tokenizer

PARENT_WATCH_SECONDS = 0.5


def main(arguments: Sequence[str]) -> int:
    """Runs until a signal; returns the exit code."""
    try:
        config = from_args(arguments)
    except ConfigError as error:
        return _refuse(str(error))
    if wants_print(arguments):
        sys.stdout.write(config.printable() + "\n")
        return 0
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        files = resolve_model(config.model)
        tokenizer, digest = Tokenizer.load(files), tokenizer_digest(files)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, tokenizer, digest))
    except ModelError as error:
        return _refuse(f"model: {error}")
    except ListenError as error:
        return _refuse(str(error))
    return 0


async def _serve(config: ServiceConfig, tokenizer: Tokenizer, digest: str) -> None:
    service = Service(config, tokenizer, digest)
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            service.hurry()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await service.start()
    watch = asyncio.ensure_future(_watch_parent(config.parent_watch, stopping))
    try:
        await stopping.wait()
        await service.drain()
    finally:
        watch.cancel()


async def _watch_parent(pid: int, stopping: asyncio.Event) -> None:
    while pid and os.getppid() == pid:
        await asyncio.sleep(PARENT_WATCH_SECONDS)
    if pid:
        logging.getLogger("service").warning("event=parent_gone pid=%d", pid)
        stopping.set()


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"service: {sentence}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
