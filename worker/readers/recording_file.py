"""The file of a recording: frames with their length before and a checksum in them.

Owns the framing. A frame is a RecordingFrame of cache.proto; its last field is the CRC-32 of what is before
it, so a plain reader of delimited messages may ignore it. A writer that fails leaves whole frames behind.
"""

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from kvatlas.v1 import cache_pb2

FORMAT_VERSION = 1
SUFFIX = ".kvrec"
CHECKSUM_TAG = b"\x7d"  # field 15, fixed32
CHECKSUM_BYTES = 5
MAX_FRAME_BYTES = 16 << 20
MAX_VARINT_BYTES = 5


class DamagedRecording(Exception):
    """A file that is cut short, changed, or no recording; says at which byte."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"byte {offset}: {why}")
        self.offset = offset
        self.why = why


@dataclass(frozen=True, slots=True)
class FrameAt:
    """A frame and where it begins."""

    offset: int
    frame: cache_pb2.RecordingFrame


def encode_frame(frame: cache_pb2.RecordingFrame) -> bytes:
    """Length, frame, checksum."""
    body = frame.SerializeToString()
    assert not frame.checksum, "the checksum is made here"
    return b"".join(
        (
            _varint(len(body) + CHECKSUM_BYTES),
            body,
            CHECKSUM_TAG,
            zlib.crc32(body).to_bytes(CHECKSUM_BYTES - 1, "little"),
        )
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class FrameWriter:
    """Appends frames to a new file. Raises OSError; what was written whole stays readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._file = path.open("xb", buffering=0)

    def write(self, frame: cache_pb2.RecordingFrame) -> None:
        """One frame; on an error the file ends where it ended before."""
        data = encode_frame(frame)
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self.num_bytes)
            raise
        self.num_bytes += len(data)

    def close(self) -> None:
        """Ends the file; idempotent."""
        self._file.close()


def read_frames(path: Path) -> Iterator[FrameAt]:
    """All frames in order. Raises DamagedRecording, OSError."""
    with path.open("rb") as file:
        offset = 0
        while (body := _read_body(file, offset)) is not None:
            yield FrameAt(offset, _checked(body, offset))
            offset = file.tell()


def read_ends(path: Path) -> tuple[cache_pb2.RecordingHeader, cache_pb2.RecordingEnd | None]:
    """Header and end of a file, passing over what is between; None: it has no end. Raises as read_frames."""
    with path.open("rb") as file:
        head = _read_body(file, 0)
        frame = cache_pb2.RecordingFrame() if head is None else _checked(head, 0)
        if frame.WhichOneof("frame") != "header":
            raise DamagedRecording(0, "no header: this is no recording")
        size, offset, last = path.stat().st_size, file.tell(), 0
        while offset < size:
            try:
                length = _read_length(file, offset)
            except DamagedRecording:
                if file.tell() < size:
                    raise
                break  # it ends within a length
            last, offset = offset, file.tell() + (length or 0)
            file.seek(offset)
        return frame.header, _end_at(file, last) if last and offset == size else None


def _end_at(file: BinaryIO, offset: int) -> cache_pb2.RecordingEnd | None:
    file.seek(offset)
    try:
        body = _read_body(file, offset)
        frame = _checked(body or b"", offset)
    except DamagedRecording:
        return None
    return frame.end if frame.WhichOneof("frame") == "end" else None


def _read_body(file: BinaryIO, offset: int) -> bytes | None:
    length = _read_length(file, offset)
    if length is None:
        return None
    body = file.read(length)
    if len(body) < length:
        raise DamagedRecording(
            offset, f"the file ends within a frame: {len(body)} of {length} bytes are there"
        )
    return body


def _read_length(file: BinaryIO, offset: int) -> int | None:
    """Length of the frame that begins here; None: the file ends."""
    length = 0
    for place in range(MAX_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            if not place:
                return None
            raise DamagedRecording(offset, "the file ends within the length of a frame")
        length |= (byte[0] & 127) << 7 * place
        if byte[0] < 128:
            break
    if not CHECKSUM_BYTES <= length <= MAX_FRAME_BYTES:
        raise DamagedRecording(offset, f"a frame of {length} bytes is not possible")
    return length


def _checked(body: bytes, offset: int) -> cache_pb2.RecordingFrame:
    content, tail = body[:-CHECKSUM_BYTES], body[-CHECKSUM_BYTES:]
    if tail[:1] != CHECKSUM_TAG:
        raise DamagedRecording(offset, "a frame without a checksum")
    wanted, found = int.from_bytes(tail[1:], "little"), zlib.crc32(content)
    if wanted != found:
        raise DamagedRecording(offset, f"checksum {found:08x}, the frame says {wanted:08x}")
    try:
        return cache_pb2.RecordingFrame.FromString(content)
    except DecodeError:
        raise DamagedRecording(offset, "a frame that cannot be parsed") from None
