"""Rehearsals of the link: behind an end and beside nothing, and services hear nothing of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from worker.link import rehearsal, server
from worker.link.testing import TestService
from worker.link.testing_bench import LinkBench, until
from worker.scheduling.output import FinishCode
from worker.scheduling.request import RequestSpec

EVER = 600.0


class Plays:
    """Counts what the link reads of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._inner = rehearsal.play
        monkeypatch.setattr(rehearsal, "play", self._play)

    def _play(self, data: bytes) -> None:
        self._inner(data)
        self.count += 1


@contextmanager
def link_bench(folder: Path, *, rehearses: bool = True) -> Iterator[LinkBench]:
    bench = LinkBench(folder, rehearses=rehearses)
    try:
        yield bench
    finally:
        bench.close()
    assert not bench.failures


def begin(bench: LinkBench, service: TestService) -> RequestSpec:
    """A request that the engine has taken, of which the link knows."""
    number = service.add([1, 2, 3])
    spec = bench.request()
    bench.accept(spec)
    service.wait(lambda: number in service.results)
    return spec


def end(bench: LinkBench, service: TestService, spec: RequestSpec, number: int) -> None:
    bench.tokens(spec, 7, end=FinishCode.MAX_TOKENS)
    assert service.finish(number)[0].tokens == [7]


def test_the_example_is_a_request_as_it_would_be_taken() -> None:
    rehearsal.play(rehearsal.example())


def test_it_begins_behind_an_end_stops_beside_a_sequence_and_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays = Plays(monkeypatch)
    monkeypatch.setattr(server, "LASTING_SECONDS", EVER)
    with link_bench(tmp_path) as bench:
        service = bench.service()
        service.hello()
        first = begin(bench, service)
        assert plays.count == 0, "nothing has ended yet"
        end(bench, service, first, 1)
        until(lambda: plays.count >= 3)
        second = begin(bench, service)
        before = plays.count
        third = begin(bench, service)
        assert plays.count == before
        end(bench, service, second, 2)
        end(bench, service, third, 3)
        until(lambda: plays.count > before)
        assert bench.commands.is_empty


@pytest.mark.parametrize(("rehearses", "lasting"), [(False, EVER), (True, 0.0)])
def test_without_enough_processors_and_once_it_is_over_nothing_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearses: bool, lasting: float
) -> None:
    plays = Plays(monkeypatch)
    monkeypatch.setattr(server, "LASTING_SECONDS", lasting)
    with link_bench(tmp_path, rehearses=rehearses) as bench:
        service = bench.service()
        service.hello()
        end(bench, service, begin(bench, service), 1)
        end(bench, service, begin(bench, service), 2)  # the link has waited meanwhile
        assert plays.count == 0
