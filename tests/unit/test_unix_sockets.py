"""Whether a socket file is somebody's: gRPC would replace it either way."""

import socket
from contextlib import ExitStack
from pathlib import Path

from service.unix_sockets import is_served


def test_a_path_without_a_file_and_one_that_a_dead_server_left_are_free(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert not is_served(str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert is_served(str(path))
    assert path.exists()
    assert not is_served(str(path))


def test_a_server_that_has_no_room_for_one_more_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        is_full = False
        while not is_full:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(path)
            except BlockingIOError:
                is_full = True
        assert is_served(path)
