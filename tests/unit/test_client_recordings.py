"""Downloads of recordings: whole, in order, and on from where they broke off."""

import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

from kvatlas.cli.record import state_of
from kvatlas.client.channel import direct_options
from kvatlas.client.errors import Incomplete, KvatlasError, RequestError, Unavailable
from kvatlas.client.recordings import Recorder
from kvatlas.v1 import server_pb2 as pb
from kvatlas.v1 import server_pb2_grpc

DATA = bytes(range(256)) * 40
PIECE = 1000


class Breaking(server_pb2_grpc.AdminServiceServicer):
    """Sends so many pieces of each call, then breaks; `broken` calls break, those after them do not."""

    def __init__(self, pieces: int, broken: int) -> None:
        self.pieces = pieces
        self.broken = broken
        self.first_bytes: list[int] = []

    def GetRecording(
        self, request: pb.GetRecordingRequest, context: Any
    ) -> Iterator[pb.GetRecordingResponse]:
        self.first_bytes.append(request.first_byte)
        left = self.pieces if len(self.first_bytes) <= self.broken else len(DATA)
        info = pb.RecordingInfo(recording_id="r1", byte_count=len(DATA))
        for number, at in enumerate(range(request.first_byte, len(DATA), PIECE)):
            if number == left:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield pb.GetRecordingResponse(
                first_byte=at, data=DATA[at : at + PIECE], recording=None if number else info
            )


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts a server around a servicer; its address."""
    servers: list[grpc.Server] = []

    def start(servicer: Breaking) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        server_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def test_a_download_that_breaks_off_goes_on_where_it_stood(serve: Any, tmp_path: Path) -> None:
    servicer = Breaking(pieces=3, broken=2)
    told: list[tuple[int, int]] = []
    with Recorder(serve(servicer)) as recorder:
        info = recorder.download(
            "", tmp_path / "file", on_progress=lambda done, total: told.append((done, total))
        )
    assert (tmp_path / "file").read_bytes() == DATA
    assert servicer.first_bytes == [0, 3 * PIECE, 6 * PIECE]
    assert info.recording_id == "r1"
    assert told[-1] == (len(DATA), len(DATA))


def test_one_that_never_gets_on_is_given_up(serve: Any, tmp_path: Path) -> None:
    servicer = Breaking(pieces=0, broken=1000)
    with Recorder(serve(servicer)) as recorder, pytest.raises(Unavailable, match="gone"):
        recorder.download("r1", tmp_path / "file")
    assert len(servicer.first_bytes) == 1, "nothing was known of it yet"


class Elsewhere(Breaking):
    """Ends its calls well, but with pieces of its own."""

    def __init__(self, *pieces: pb.GetRecordingResponse) -> None:
        super().__init__(0, 0)
        self.told = pieces

    def GetRecording(
        self, request: pb.GetRecordingRequest, context: Any
    ) -> Iterator[pb.GetRecordingResponse]:
        self.first_bytes.append(request.first_byte)
        assert len(self.first_bytes) < 5, "it is asked for ever"
        yield from self.told


INFO = pb.RecordingInfo(recording_id="r1", byte_count=2)


@pytest.mark.parametrize(
    ("pieces", "calls"),
    [
        ([], 1),
        ([pb.GetRecordingResponse(recording=INFO)], 1),
        ([pb.GetRecordingResponse(recording=INFO, data=b"a")], 2),
        ([pb.GetRecordingResponse(recording=INFO, first_byte=1, data=b"b")], 1),
    ],
)
def test_a_server_that_brings_nothing_or_something_else_is_not_asked_for_ever(
    serve: Any, tmp_path: Path, pieces: list[pb.GetRecordingResponse], calls: int
) -> None:
    """It was asked again and again, without a pause, and what came was written wherever it belonged."""
    servicer = Elsewhere(*pieces)
    with Recorder(serve(servicer)) as recorder, pytest.raises(Incomplete):
        recorder.download("r1", tmp_path / "file")
    assert len(servicer.first_bytes) == calls
    assert not list(tmp_path.iterdir())


def test_an_empty_recording_is_an_empty_file(serve: Any, tmp_path: Path) -> None:
    empty = pb.GetRecordingResponse(recording=pb.RecordingInfo(recording_id="r1"))
    with Recorder(serve(Elsewhere(empty))) as recorder:
        assert recorder.download("r1", tmp_path / "file").recording_id == "r1"
    assert (tmp_path / "file").read_bytes() == b""


def test_what_a_recording_is_asked_to_be_arrives(serve: Any) -> None:
    class Noting(Breaking):
        asked: ClassVar[list[Any]] = []

        def StartRecording(self, request: Any, context: Any) -> pb.StartRecordingResponse:
            self.asked.append(request)
            return pb.StartRecordingResponse(recording=INFO)

        def StopRecording(self, request: Any, context: Any) -> pb.StopRecordingResponse:
            self.asked.append(request)
            return pb.StopRecordingResponse(recording=INFO)

        def ListRecordings(self, request: Any, context: Any) -> pb.ListRecordingsResponse:
            self.asked.append(request)
            return pb.ListRecordingsResponse(recordings=[INFO])

    with Recorder(serve(Noting(0, 0))) as recorder:
        fields = {"include_token_ids": True, "note": "n", "rotate": True, "max_bytes": 7}
        first = recorder.start("w", lookback_seconds=1.5, max_seconds=2.5, **fields)  # type: ignore[arg-type]
        told = [first, recorder.stop("r1", worker_id="w"), *recorder.list("w")]
        with pytest.raises(RequestError, match="max_bytes"):
            recorder.start(max_bytes=-1)
        with pytest.raises(RequestError, match="seconds"):
            recorder.start(lookback_seconds=float("inf"))
    assert [each.recording_id for each in told] == ["r1"] * 3
    start, stop, listing = Noting.asked
    assert start.lookback.ToMilliseconds() == 1500
    assert start.max_duration.ToMilliseconds() == 2500
    assert (start.worker_id, *(getattr(start, name) for name in fields)) == ("w", *fields.values())
    assert (stop.worker_id, stop.recording_id, listing.worker_id) == ("w", "r1", "w")


@pytest.mark.parametrize("old", [b"an earlier one", None])
def test_a_download_that_fails_leaves_what_was_there(serve: Any, tmp_path: Path, old: bytes | None) -> None:
    """The file was emptied before anything was asked for: an earlier recording of that name was lost."""
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with Recorder(serve(Breaking(pieces=0, broken=1))) as recorder:
        with pytest.raises(Unavailable):
            recorder.download("r1", path)
        with pytest.raises(KeyboardInterrupt):
            recorder.download("r1", path, on_progress=interrupt)
        assert [each.read_bytes() for each in tmp_path.iterdir()] == ([] if old is None else [old])
        recorder.download("r1", path)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [DATA]


def test_a_download_into_a_pipe_goes_through_it(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with futures.ThreadPoolExecutor(1) as threads, Recorder(serve(Breaking(0, 0))) as recorder:
        read = threads.submit(path.read_bytes)
        recorder.download("r1", path)
        assert read.result(60) == DATA
    assert path.is_fifo()


def test_a_download_follows_a_link_and_fills_a_device(serve: Any, tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    with Recorder(serve(Breaking(0, 0))) as recorder:
        recorder.download("r1", link)
        recorder.download("r1", Path(os.devnull))
        with pytest.raises(IsADirectoryError):
            recorder.download("r1", tmp_path)
    assert (link.is_symlink(), file.read_bytes()) == (True, DATA)
    assert Path(os.devnull).is_char_device()


def test_a_server_of_this_machine_is_not_looked_for_behind_the_proxy(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with Recorder(serve(Breaking(0, 0))) as recorder:
        recorder.download("r1", tmp_path / "file")
    assert direct_options(["dns:///localhost:1", "[::1]:2"])
    assert not direct_options(["127.0.0.1:1", "10.0.0.1:1"])


def test_a_server_without_admin_service_says_so(serve: Any) -> None:
    with Recorder(serve(Breaking(0, 0))) as recorder, pytest.raises(KvatlasError) as failed:
        recorder.list()
    assert failed.value.code == "UNIMPLEMENTED"


@pytest.mark.parametrize(("cause", "word"), [(0, "running"), (1, "stopped"), (5, "disk"), (7, "lost")])
def test_an_end_is_told_in_a_word(cause: int, word: str) -> None:
    assert state_of(pb.RecordingInfo(end_cause=cause)) == word  # type: ignore[arg-type]
