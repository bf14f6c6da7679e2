"""`python -m worker`: config → worker → run → exit status. No logic."""

import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from kvatlas.models.errors import ModelError
from worker import log
from worker.config import ConfigError, from_args, wants_print
from worker.devices import choose_device
from worker.link.addresses import AddressError
from worker.process import WorkerProcess

USAGE_STATUS = 2
START_STATUS = 1

logger = logging.getLogger("worker")


def main(arguments: Sequence[str]) -> int:
    """Runs a worker until a signal; returns the exit status."""
    try:
        config = from_args(arguments)
    except ConfigError as error:
        print(f"python -m worker: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_STATUS
    if wants_print(arguments):
        print(config.printable())  # noqa: T201
        return 0
    log.set_up(config.log_level)
    signals = Signals()
    try:
        with WorkerProcess(config, choose_device(config)) as worker:
            signals.worker = worker
            return 0 if signals.came else worker.run()
    except (ConfigError, ModelError, AddressError, OSError) as error:
        log.log_event(logger, logging.ERROR, "start_failed", why=error)
        return START_STATUS


class Signals:
    """SIGTERM and SIGINT drain the worker, the second at once; while it loads they break that off.

    While sockets and threads are made a signal only waits: an exception in the middle of that would leave
    something behind that nobody knows of, and it takes a moment.
    """

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None
        self.came = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if self.worker is not None:
            if self.worker.is_loading:
                raise SystemExit(0)
            self.worker.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
