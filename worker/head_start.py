"""What a start waits for without the interpreter, on threads beside its imports.

Linking torch's libraries, opening the GPU and hashing Triton's compiler take a second or two between them,
and Python has nothing to do with it. Nothing here is needed for anything to be right: who comes to it later
finds it done, or does it and says why it cannot be. Imports nothing heavy itself.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from worker.log import log_phase

_TORCH_LIBRARIES = (  # in torch's own order, each with what it links to
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libtorch.so", os.RTLD_NOW),
)

logger = logging.getLogger("worker.start")


def begin(task: Callable[[], None]) -> Thread:
    """Starts one of the tasks below; it ends by itself within seconds, whatever becomes of it."""
    thread = Thread(target=_run, args=(task,), name=task.__name__)
    thread.start()
    return thread


def link_torch() -> None:
    """Loads torch's libraries, not its module: the loader is called as any C function, so Python goes on."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in _TORCH_LIBRARIES:
        dlopen(os.fsencode(Path(folders[0]) / "lib" / name), flags)


def import_worker() -> None:
    """The worker without torch. Its files and torch's are read at the same time; the interpreter is one."""
    import_module("worker.process")


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
