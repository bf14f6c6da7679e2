"""A device tensor's copy to the host that nobody has to wait for until its values are needed.

Owns the pinned buffer and the event behind the copy. A copy to pageable memory would hold up the host until
the device has done all that was queued before it.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class OnTheWay:
    """Starts to copy at once, in stream order; on a CPU the values are copied right there.

    Several tensors [num_entries] come as one. No kernel and no memory of the device is needed for it.
    """

    def __init__(self, tensor: Tensor, *more: Tensor) -> None:
        is_cuda = tensor.device.type == "cuda"
        parts = (tensor, *more)
        shape = (sum(map(len, parts)),) if more else tensor.shape
        self._host = torch.empty(shape, dtype=tensor.dtype, pin_memory=is_cuda)
        places = self._host.split_with_sizes([len(part) for part in parts]) if more else (self._host,)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_ready(self) -> bool:
        """Whether `arrived` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def arrived(self) -> NDArray[Any]:
        """Waits for the copy; the values."""
        if self._event is not None:
            self._event.synchronize()
        array: NDArray[Any] = self._host.numpy()
        return array


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on the device, without waiting for what is queued there."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
