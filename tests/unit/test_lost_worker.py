"""benchmarks.observed loses a worker under load until a stream was seen to be resumed, and not for ever."""

import pytest

from benchmarks import observed
from benchmarks.mixed_load import Account
from benchmarks.observed import MOST_KILLS, lose_worker


class Prometheus:
    """Idle at once; tells of a resumed stream after so many kills."""

    def __init__(self, needed: int) -> None:
        self.kills = 0
        self._needed = needed

    def kill(self) -> None:
        self.kills += 1

    def query(self, expression: str) -> list[int]:
        """A sample, or none."""
        is_asked = "kvatlas_resume_gap_seconds_count" in expression
        return [1] if not is_asked or self.kills >= self._needed else []


class Load:
    """Streams that are there, and what was asked of the clients."""

    def __init__(self, streaming: int) -> None:
        self.account = Account(streaming=streaming)
        self.asked: list[str] = []

    def resume(self) -> None:
        self.asked.append("resume")

    def pause(self) -> None:
        self.asked.append("pause")


@pytest.mark.parametrize(("needed", "kills"), [(1, 1), (3, 3), (99, MOST_KILLS)])
def test_a_worker_is_killed_until_a_stream_was_resumed(needed: int, kills: int) -> None:
    """At the moment of one kill the streams that were seen may be over."""
    prometheus, load = Prometheus(needed), Load(2)
    lose_worker(prometheus, load, prometheus.kill)  # type: ignore[arg-type]
    assert prometheus.kills == kills
    assert load.asked == ["resume", "pause"] * kills


def test_it_waits_for_streams_before_it_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    prometheus, load = Prometheus(1), Load(0)

    def one_more(seconds: float) -> None:
        load.account.streaming += 1

    def kill() -> None:
        assert load.account.streaming == 2
        prometheus.kill()

    monkeypatch.setattr(observed.time, "sleep", one_more)
    lose_worker(prometheus, load, kill)  # type: ignore[arg-type]
    assert prometheus.kills == 1
