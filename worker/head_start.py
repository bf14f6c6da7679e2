"""What a start on a GPU waits for without the interpreter, on threads beside its imports.

Opening the device and hashing Triton's compiler take most of a second between them, and Python has nothing to
do with it. Nothing here is needed for anything to be right: who comes to it later finds it done, or does it
and says why it cannot be. Imports nothing heavy itself. What is the interpreter's own work gains nothing on a
thread: neither other imports, nor the linking of torch's libraries, for which every import of an extension
waits, interpreter in hand.
"""

import ctypes
import logging
from collections.abc import Callable
from importlib import import_module
from threading import Thread

from worker.log import log_phase

logger = logging.getLogger("worker.start")


def begin(task: Callable[[], None]) -> Thread:
    """Starts one of the tasks below; it ends by itself within seconds, whatever becomes of it."""
    thread = Thread(target=_run, args=(task,), name=task.__name__)
    thread.start()
    return thread


def open_device() -> None:
    """Device 0 by the driver, with the context that torch will use."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def first_product() -> None:
    """A product on the device, once torch is there: the library behind it is loaded. Keeps no memory."""
    torch = import_module("torch")
    rows = torch.zeros(16, 64, dtype=torch.bfloat16, device="cuda")
    torch.nn.functional.linear(rows, rows)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def prepare_triton() -> None:
    """The key of Triton's cache, for which it reads all of its library, and its part for the driver, built
    with the C compiler where the cache is empty.
    """
    import_module("triton.runtime.cache").triton_key()
    import_module("triton.backends.nvidia.driver").CudaUtils()


def _run(task: Callable[[], None]) -> None:
    name = task.__name__
    try:
        with log_phase(logger, name):
            task()
    except Exception as error:
        logger.debug("event=head_start_failed task=%s why=%r", name, error)
