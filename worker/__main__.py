"""`python -m worker`: config → worker → run → exit status. No logic.

Imports little before the config is known: what a start waits for begins first, then the rest is imported.
"""

import gc
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING

from kernels.compile_processes import begin_if_cold
from kvatlas.models.errors import ModelError
from kvatlas.process_age import process_age
from kvatlas.start_failures import start_reason
from worker import head_start, log
from worker.config import ConfigError, WorkerConfig, from_args, wants_print
from worker.link.addresses import AddressError
from worker.read_ahead import ReadAhead

if TYPE_CHECKING:
    from worker.process import WorkerProcess

USAGE_STATUS = 2
START_STATUS = 1
KERNEL_MODULES = ("worker.execution.cuda_runner", "kernels.triton_backend")
"""What they import has the kernels of a start."""
SWITCH_SECONDS = 0.001  # a thread that holds the interpreter gives it up after 1 ms instead of 5 when asked

logger = logging.getLogger("worker")


def main(arguments: Sequence[str]) -> int:
    """Runs a worker until a signal; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `Signals`: an import that breaks off is no news
    try:
        config = from_args(arguments)
    except ConfigError as error:
        print(f"python -m worker: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_STATUS
    if wants_print(arguments):
        print(config.printable())  # noqa: T201
        return 0
    log.set_up(config.log_level)
    log.log_event(logger, logging.INFO, "phase", phase="interpreter", seconds=process_age())
    sys.setswitchinterval(SWITCH_SECONDS)
    _import_all(config)
    try:
        return _run(config)
    finally:
        gc.unfreeze()  # else Triton's library tells on stderr of each object that is never freed


def _import_all(config: WorkerConfig) -> None:
    """All modules, without the collector: none of them goes again, and it would walk them dozens of times."""
    gc.disable()
    threads = []
    with closing(ReadAhead()) as read_ahead:
        if config.runner == "torch":
            uses_cuda = config.device == "cuda"
            if uses_cuda:
                begin_compilers(config)
                tasks = (read_ahead.read_libraries, head_start.open_device, head_start.prepare_triton)
                threads = [head_start.begin(task) for task in tasks]
            with log.log_phase(logger, "import_torch"):
                import_module("torch")
            if uses_cuda:
                threads.append(head_start.begin(head_start.first_product))
            with log.log_phase(logger, "import_device"):
                import_module("worker.torch_device")
        with log.log_phase(logger, "import_rest"):
            import_module("worker.process")
    for thread in threads:
        thread.join()
    gc.freeze()
    gc.enable()


def begin_compilers(config: WorkerConfig) -> None:
    """Where the kernels of this start may be ours, and were not compiled yet.

    That FlashInfer is installed says nothing: until its own kernels are compiled `auto` takes ours. Which it
    is, is known when it is imported, too late to begin.
    """
    if config.attention_backend in ("triton", "auto"):
        has_other = config.attention_backend == "auto" and find_spec("flashinfer") is not None
        shape = (config.model, config.dtype, config.weight_dtype, config.kv_dtype, config.deterministic)
        limits = (config.page_size, config.max_running, config.max_batch_tokens, config.max_context)
        begin_if_cold(KERNEL_MODULES, repr((shape, limits, has_other)))


def _run(config: WorkerConfig) -> int:
    from worker.devices import choose_device
    from worker.process import WorkerProcess

    signals = Signals()
    try:
        with WorkerProcess(config, choose_device(config)) as worker:
            signals.worker = worker
            return 0 if signals.came else worker.run()
    except (ConfigError, ModelError, AddressError, OSError) as error:
        log.log_event(logger, logging.ERROR, "start_failed", reason=start_reason(error), why=error)
        return START_STATUS


class Signals:
    """SIGTERM and SIGINT drain the worker, the second at once; while it loads they break that off.

    While sockets and threads are made a signal only waits: an exception in the middle of that would leave
    something behind that nobody knows of, and it takes a moment. Before there is one, they end the process.
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
