"""Live workers of one id share a folder, and none takes another's name."""

import errno
import fcntl
import os
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from worker.channels import OutputQueue
from worker.folder_name import MAX_NAMES, FolderName
from worker.link.operators import KEPT_PROFILES, OperatorDesk
from worker.messages import LinkMessage, Ticket


def test_each_live_worker_has_a_name_of_its_own_and_the_next_life_has_the_first_again(tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = [stack.enter_context(closing(FolderName("worker-0"))) for _ in range(3)]
        other = stack.enter_context(closing(FolderName("worker-1")))
        assert list(tmp_path.iterdir()) == []
        for name in (*names, other, names[0]):
            name.take(tmp_path)
        assert [name.name for name in names] == ["worker-0", "worker-0.2", "worker-0.3"]
        assert other.name == "worker-1"
        names[1].close()
        between = stack.enter_context(closing(FolderName("worker-0")))
        between.take(tmp_path)
        assert between.name == "worker-0.2"
    with closing(FolderName("worker-0")) as again:
        again.take(tmp_path)
        assert again.name == "worker-0"


def test_more_workers_than_names_are_an_error(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_NAMES):
            stack.enter_context(closing(FolderName("w"))).take(tmp_path)
        with pytest.raises(BlockingIOError, match="64 workers of the id w share"):
            FolderName("w").take(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderName("w").take(tmp_path / "none")


def test_a_folder_without_locks_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    name = FolderName("w")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"no file can be locked there \(Function not implemented\)") as raised:
        name.take(tmp_path)
    assert raised.value.errno == errno.ENOSYS
    assert len(os.listdir("/proc/self/fd")) == before
    assert name.name == "w"


class Saved:
    """A profile that is a file of one byte."""

    suffix = ".pstats"

    def save(self, path: Path) -> None:
        path.write_bytes(b"1")


def test_profiles_of_another_live_worker_of_the_id_stay(tmp_path: Path) -> None:
    answers: OutputQueue[LinkMessage] = OutputQueue(100)
    with ExitStack() as stack:
        stack.callback(answers.close)
        one, other = (
            OperatorDesk(tmp_path, "worker-0", uses_torch=False, to_engine=lambda _: None, answers=answers)
            for _ in range(2)
        )
        stack.callback(one.close)
        stack.callback(other.close)
        one._save(Ticket("service#1", 1), Saved(), 3)
        (own,) = tmp_path.glob("*.pstats")
        for number in range(KEPT_PROFILES + 2):
            other._save(Ticket("service#2", number), Saved(), 3)
        assert own.exists()
        assert len(list(tmp_path.glob("worker-0.2-*.pstats"))) == KEPT_PROFILES
