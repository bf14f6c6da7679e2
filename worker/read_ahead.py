"""Reads what torch's libraries are loaded from into the page cache, on several threads beside the import.

A linker meets the pages of a library one after the other, and on a machine that has not read them before each
waits for the disk: some 3 s of a first start for 1 GB of the 4 that torch for a GPU has. Device code is most
of the rest and is read when it is needed. What the page cache has already is not read again, so a later start
does next to nothing here. Imports nothing heavy; nothing of it is needed for anything to be right.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

THREADS = 8
PIECE = 4 << 20
BUFFER = 1 << 20
LIBRARIES = (
    "libcublasLt", "libcublas", "libnvJitLink", "libcusparseLt", "libcusparse", "libcusolver", "libtorch_cpu",
    "libtorch_cuda", "libtorch_python", "libnvrtc",
)  # fmt: skip
"""Of which an import reads 10 MB or more, in the order in which it comes to them."""
DEVICE_CODE = ("fatbin", "cask_resource")  # in names of sections

_HEADER, _SECTION = "<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ"  # Elf64_Ehdr, Elf64_Shdr
_ALLOCATED, _WITHOUT_BYTES = 0x2, 8  # SHF_ALLOC, SHT_NOBITS


class Piece(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    size: int


class ReadAhead:
    """`read_libraries` returns when all is read, or soon after `close`, whichever comes first."""

    def __init__(self, is_cached: Callable[[int, int], bool] | None = None) -> None:
        self._left: SimpleQueue[Piece] = SimpleQueue()
        self._is_cached = is_cached or _is_cached
        self._is_closed = False
        self.num_bytes = 0
        """That had to be read, behind `read_libraries`."""

    def read_libraries(self) -> None:
        """Reads on THREADS threads and waits for them. OSError: a file cannot be read."""
        self.read(library_pieces())

    def read(self, pieces: Iterable[Piece]) -> None:
        """The same of other pieces."""
        with ThreadPoolExecutor(THREADS, thread_name_prefix="read_ahead") as pool:
            for piece in pieces:
                self._left.put(piece)
            self.num_bytes += sum(pool.map(lambda _: self._read_left(), range(THREADS)))

    def close(self) -> None:
        """What no thread has begun is not read."""
        self._is_closed = True

    def _read_left(self) -> int:
        buffer, total = memoryview(bytearray(BUFFER)), 0
        with contextlib.suppress(Empty):
            while not self._is_closed:
                total += self._read_piece(self._left.get_nowait(), buffer)
        return total

    def _read_piece(self, piece: Piece, buffer: memoryview) -> int:
        file = os.open(piece.path, os.O_RDONLY)
        try:
            if self._is_cached(file, piece.offset):
                return 0
            at, end = piece.offset, piece.offset + piece.size
            while at < end and (count := os.preadv(file, [buffer[: end - at]], at)):
                at += count
            return at - piece.offset
        finally:
            os.close(file)


def library_pieces() -> Iterator[Piece]:
    """Of torch's libraries, as far as they are there: all that is loaded but device code."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return
    package = Path(torch.origin).parent
    for name in LIBRARIES:
        paths = [*package.glob(f"lib/{name}.so*"), *package.parent.glob(f"nvidia/*/lib/{name}.so*")]
        for path in paths:
            yield from loaded_pieces(path)


def loaded_pieces(path: Path) -> Iterator[Piece]:
    """Of the sections of a 64-bit ELF file that a process has in memory, but for device code."""
    for name, offset, size in _sections(path):
        if not any(part in name for part in DEVICE_CODE):
            for begin in range(offset, offset + size, PIECE):
                yield Piece(path, begin, min(PIECE, offset + size - begin))


def _sections(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each that is loaded from the file (System V ABI, "Sections")."""
    with path.open("rb") as file:
        header = struct.unpack(_HEADER, file.read(struct.calcsize(_HEADER)))
        table, entry_size, count, names_at = header[6], header[11], header[12], header[13]
        file.seek(table)
        raw = file.read(entry_size * count)
        sections = [struct.unpack_from(_SECTION, raw, number * entry_size) for number in range(count)]
        file.seek(sections[names_at][4])
        names = file.read(sections[names_at][5])
    for name_at, kind, flags, _, offset, size, *_ in sections:
        if flags & _ALLOCATED and kind != _WITHOUT_BYTES and size:
            yield names[name_at : names.index(b"\0", name_at)].decode(errors="replace"), offset, size


def _is_cached(file: int, offset: int) -> bool:
    """Whether the page cache has the byte; False where the file system cannot tell."""
    try:
        return bool(os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT))
    except OSError:
        return False
