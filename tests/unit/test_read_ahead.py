"""What a start reads before the linker asks for it: what is loaded of a library, once, and no device code."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from worker import read_ahead
from worker.head_start import begin
from worker.read_ahead import PIECE, Piece, ReadAhead, library_pieces, loaded_pieces

SOURCE = """
int counted[3] = {1, 2, 3};
int empty[4096];
__attribute__((section(".nv_fatbin"))) const char device[65536] = {1};
int main(void) { return counted[0] + empty[7] + device[9]; }
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """With code, data, zeros that are in no file, and device code, which is loaded as well."""
    source, path = tmp_path / "some.c", tmp_path / "libsome.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-g", "-shared", "-fPIC", "-o", path, source], check=True, timeout=60)
    return path


def sections_of(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and size of each, as binutils tell."""
    said = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True, timeout=60)
    found = {}
    for line in said.stdout.splitlines():
        words = line.replace("[ ", "[").split()
        if len(words) > 5 and words[0].startswith("[") and words[1].startswith("."):
            found[words[1]] = (int(words[4], 16), int(words[5], 16))
    return found


def test_what_a_process_loads_is_read_but_for_device_code(library: Path) -> None:
    sections = sections_of(library)
    pieces = {(piece.offset, piece.size) for piece in loaded_pieces(library)}
    assert {sections[name] for name in (".text", ".dynsym", ".data")} <= pieces
    for name in (".nv_fatbin", ".bss", ".symtab", ".debug_info"):
        assert sections[name] not in pieces
    assert all(piece.path == library for piece in loaded_pieces(library))


def test_the_libraries_of_torch_are_found_in_pieces_of_bounded_size() -> None:
    pieces = list(library_pieces())
    cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    assert cpu in {piece.path for piece in pieces}
    assert max(piece.size for piece in pieces) <= PIECE
    read = sum(piece.size for piece in pieces if piece.path == cpu)
    assert cpu.stat().st_size // 2 < read < cpu.stat().st_size


@pytest.mark.parametrize("is_cached", [True, False])
def test_what_the_page_cache_has_is_not_read_again(tmp_path: Path, is_cached: bool) -> None:
    file = tmp_path / "some"
    file.write_bytes(bytes(3 * PIECE + 5))
    pieces = [Piece(file, at, min(PIECE, 3 * PIECE + 5 - at)) for at in range(0, 3 * PIECE + 5, PIECE)]
    reader = ReadAhead(lambda _, offset: is_cached and offset > 0)
    reader.read(pieces)
    assert reader.num_bytes == (PIECE if is_cached else 3 * PIECE + 5)


def test_what_was_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "some"
    file.write_bytes(b"some")
    reader = ReadAhead()
    reader.read([Piece(file, 0, 4)])
    assert reader.num_bytes == 0


def test_a_file_that_ends_early_ends_its_piece(tmp_path: Path) -> None:
    file = tmp_path / "some"
    file.write_bytes(b"some")
    reader = ReadAhead(lambda *_: False)
    reader.read([Piece(file, 0, PIECE), Piece(file, PIECE, PIECE)])
    assert reader.num_bytes == 4


def test_nothing_more_is_begun_once_it_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "some"
    file.write_bytes(bytes(100))

    def close_at_first(*_: int) -> bool:
        reader.close()
        return False

    reader = ReadAhead(close_at_first)
    reader.read(Piece(file, 0, 1) for _ in range(1000))
    assert 1 <= reader.num_bytes <= read_ahead.THREADS


def test_a_library_that_cannot_be_read_is_nobodys_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(read_ahead, "library_pieces", lambda: loaded_pieces(broken))
    task: Callable[[], None] = ReadAhead().read_libraries
    with caplog.at_level("DEBUG", "worker.start"):
        thread = begin(task)
        thread.join(10)
    assert not thread.is_alive()
    assert "head_start_failed task=read_libraries" in caplog.text
