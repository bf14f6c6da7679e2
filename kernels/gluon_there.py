"""Whether a kernel written in Gluon can run. Imports it only on a device that has its instructions."""

import logging
from functools import cache
from importlib import import_module

import torch

log = logging.getLogger(__name__)


@cache
def gluon_is_there(module: str, device: torch.device) -> bool:
    """Whether the device has the instructions, and this Triton the names, that `module` is made of."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        import_module(module)
    except (ImportError, AttributeError) as error:
        log.warning("event=kernel_absent module=%s why=%r", module, error)
        return False
    return True
