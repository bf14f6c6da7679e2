"""A channel to the admin listener: calls with a deadline, and downloads that go on where they broke off.

The admin listener is another address than that of the other services.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import grpc

from kvatlas.client.channel import DEFAULT_ADMIN_ADDRESS, SHORT_TIMEOUT_SECONDS, Target
from kvatlas.client.credentials import Credentials
from kvatlas.client.errors import Incomplete, from_rpc_error
from kvatlas.client.resume import is_transport_loss
from kvatlas.v1 import server_pb2_grpc

MAX_RETRIES = 5  # of a download that broke off without a byte

Progress = Callable[[int, int], None]
"""Called with bytes so far, and in all."""


class AdminChannel:
    """What speaks to AdminService has one. Thread-safe."""

    def __init__(
        self, address: str = DEFAULT_ADMIN_ADDRESS, *, credentials: Credentials | None = None
    ) -> None:
        self._target = Target(address, credentials)
        self.address = str(self._target)
        self._channel = self._target.open(grpc, {})
        self._stub: Any = server_pb2_grpc.AdminServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(
        self, method: Callable[..., Any], request: Any, timeout_seconds: float = SHORT_TIMEOUT_SECONDS
    ) -> Any:
        try:
            return method(request, timeout=timeout_seconds, metadata=self._target.metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address) from None

    def _download(
        self,
        method: Callable[..., Any],
        request: Any,
        path: Path,
        size_of: Callable[[Any], int],
        *,
        timeout_seconds: float,
        on_progress: Progress,
    ) -> None:
        """Pieces of a file into `path`; `size_of` the first piece of a call is that of the whole file.

        Raises Incomplete for a call that goes on elsewhere or brings nothing, though it ends well.
        """
        size: int | None = None
        failures = 0
        with _whole(path) as file:
            while size is None or request.first_byte < size:
                before, is_first = request.first_byte, True
                call = method(request, timeout=timeout_seconds, metadata=self._target.metadata())
                try:
                    for piece in call:
                        if piece.first_byte != request.first_byte:
                            raise Incomplete(f"byte {piece.first_byte} came, not {request.first_byte}")
                        size, is_first = size_of(piece) if is_first else size, False
                        file.write(piece.data)
                        request.first_byte = piece.first_byte + len(piece.data)
                        on_progress(request.first_byte, size or 0)
                except grpc.RpcError as error:
                    failure = from_rpc_error(error, self.address)
                    failures = 0 if request.first_byte > before else failures + 1
                    if size is None or not is_transport_loss(failure) or failures > MAX_RETRIES:
                        raise failure from None
                else:
                    if is_first or before == request.first_byte < (size or 0):  # else it is asked for ever
                        raise Incomplete(f"nothing came behind byte {before} of {size or 'a file'}")
                finally:
                    call.cancel()


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there once it is whole: until then what was there stays, and half a file is none.

    What is there and no file, a pipe or a device, is written to as it comes.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
        return
    target = path.resolve()
    aside = target.with_name(target.name + ".part")
    try:
        with aside.open("wb") as file:
            yield file
        aside.replace(target)
    except BaseException:  # an interrupt as well
        aside.unlink(missing_ok=True)
        raise
