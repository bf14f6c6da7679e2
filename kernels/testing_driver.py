"""A GPU that is not there: Triton compiles for it for real; what it would load and launch is only noted.

For tests, in a process of their own: the driver is Triton's for all that follows.
"""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

H200 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 232448  # of a block, as the device tells


class _Loader:
    def __init__(self, loaded: list[str]) -> None:
        self._loaded = loaded

    def load_binary(self, name: str, *arguments: object) -> tuple[object, object, int, int, int]:
        """Module, function, registers, spills, threads at most."""
        self._loaded.append(name)
        return object(), object(), 16, 0, 1024

    def unload_module(self, module: object) -> None:
        """Nothing was loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What a compiled kernel is checked against."""
        return {"max_shared_mem": SHARED_BYTES}


class AbsentGpu:
    """Triton's driver from now on. `loaded` and `launched` are names of kernels, in order."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self._loader = _Loader(self.loaded)
        driver.set_active(self)

    def __getattr__(self, name: str) -> _Loader:
        """Triton asks for what loads kernels by a name that is none of ours."""
        if name == "utils":
            return self._loader
        raise AttributeError(name)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What launches one compiled kernel."""
        return lambda *arguments: self.launched.append(source.name)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return H200

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0
