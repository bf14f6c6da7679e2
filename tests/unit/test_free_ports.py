"""Ports that are chosen in one process for another."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvatlas import free_ports
from kvatlas.free_ports import held_port


def test_ports_that_are_asked_for_together_are_all_different() -> None:
    """One by one, about one in a hundred stacks had a port twice; of so many some are always."""
    assert len(set(free_ports.free_ports(400))) == 400


def test_none_is_of_those_that_the_system_gives_to_connections() -> None:
    """One in some hundred servers found its port taken by a connection that was made before it listened."""
    first, last = map(int, free_ports.SYSTEMS_RANGE.read_text().split())
    chosen = free_ports.free_ports(50)
    assert not [port for port in chosen if first <= port <= last]
    assert all(free_ports.FIRST <= port <= free_ports.LAST for port in chosen)


def test_one_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with held_port("127.0.0.1") as port, socket.create_server(("127.0.0.1", 0)) as taken:
        theirs = taken.getsockname()[1]
        monkeypatch.setattr(free_ports, "_not_the_systems", lambda: range(theirs, theirs + 3))
        assert theirs not in free_ports.free_ports(2)
        with pytest.raises(OSError, match="in use"), held_port("127.0.0.1", theirs):
            pass
    with held_port("127.0.0.1", port) as again:
        assert again == port


def test_processes_that_choose_at_the_same_time_choose_different_ones() -> None:
    root = Path(__file__).resolve().parents[2]
    program = "from kvatlas.free_ports import free_ports; print(*free_ports(4))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(root / "protos")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    chosen = [port for process in running for port in process.communicate(timeout=120)[0].split()]
    assert len(chosen) == len(set(chosen)) == 32


@pytest.mark.parametrize("said", ["", "no numbers", "1024 65535"])
def test_where_the_systems_range_says_nothing_the_system_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    said_in = tmp_path / "range"
    said_in.write_text(said)
    monkeypatch.setattr(free_ports, "SYSTEMS_RANGE", said_in)
    assert len(set(free_ports.free_ports(5))) == 5
