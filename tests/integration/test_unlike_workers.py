"""Workers of one fleet with other settings, as while they are restarted one by one with new ones."""

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest

from service.testing import Refusal
from service.testing_fleet import Fleet, running_fleet, spec_of, tokens_of, wait_for

FAKE = ("--runner", "fake", "--watermark", "0")
SLOW = ("--fake-step-ms", "5")
SMALL = ("--page-size", "8", "--num-pages", "31", "--max-context", "200", "--max-running", "2")
LARGE = ("--page-size", "16", "--num-pages", "63", "--max-context", "600", "--max-running", "16")


def fleet_of(folder: Path, **flags: tuple[str, ...]) -> AbstractContextManager[Fleet]:
    """One worker for each name, in that order for the service."""
    return running_fleet(folder, *FAKE, more_flags=flags, resume_seconds=60.0)


@pytest.mark.parametrize("order", [("small", "large"), ("large", "small")])
def test_what_one_worker_has_room_for_is_done_whoever_comes_first(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    given = {"small": SMALL, "large": LARGE}
    with fleet_of(tmp_path, **{name: given[name] for name in order}) as fleet:
        for number in range(4):  # other prefixes: of some the small worker would be the first choice
            text = chr(65 + number) * 100
            long = tokens_of(list(fleet.stream(spec_of(text, 300))))
            assert len(long) == 300
            unlimited = spec_of(text)
            unlimited.stop.ClearField("max_tokens")
            assert len(tokens_of(list(fleet.stream(unlimited)))) == 600 - 100, "the whole context"
            samples = spec_of(text, 20)
            samples.sampling.n = 9
            messages = list(fleet.stream(samples))
            assert messages[-1].summary.usage.completion_tokens == 9 * 20


def test_a_prompt_that_nobody_has_room_for_is_told_the_largest_limit(tmp_path: Path) -> None:
    with fleet_of(tmp_path, small=SMALL, large=LARGE) as fleet:
        with pytest.raises(grpc.RpcError) as refused:
            list(fleet.stream(spec_of("a" * 700)))
        assert Refusal.of(refused.value).metadata["max_prompt_tokens"] == "599"


def test_a_stream_too_long_for_those_that_are_left_waits_for_a_larger_worker(tmp_path: Path) -> None:
    with fleet_of(tmp_path, small=SMALL, large=(*LARGE, *SLOW)) as fleet:
        call = fleet.stream(spec_of("a" * 100, 400))
        messages = [next(call), next(call)]
        small, large = fleet.workers
        large.kill()
        wait_for(lambda: fleet.usable == ["small"], "the loss", fleet.workers)
        large.start()
        messages += list(call)
        assert len(tokens_of(messages)) == 400
        assert messages[-1].summary.usage.resumes == 1
        assert small.process is not None
        assert small.process.poll() is None


def test_a_worker_with_another_model_waits_until_those_with_the_first_are_gone(
    tmp_path: Path,
) -> None:
    with fleet_of(tmp_path, old=(*LARGE, *SLOW), alike=(*LARGE, *SLOW)) as fleet:
        old, alike = fleet.workers
        alike.kill()
        alike.start("--model", "random:smollm2-135m")
        pool = fleet.running.service.backstage.pool
        wait_for(lambda: any(link.is_up and link not in pool.known for link in pool.links), "it", [alike])
        assert fleet.usable == ["old"]
        call = fleet.stream(spec_of("a" * 100, 400))
        assert next(call).started.model == "random:tiny"
        old.signal(signal.SIGKILL)
        wait_for(lambda: fleet.usable == ["alike"], "the change of the model", fleet.workers)
        answer = next(fleet.stream(spec_of("b", 3)))
        assert answer.started.model == "random:smollm2-135m"
        old.wait()
        alike.kill()
        old.start()
        messages = list(call)
        assert messages[-1].summary.usage.resumes == 1, "not by the other model, though it was there"


def test_workers_with_the_services_own_model_go_before_another_that_came_first(tmp_path: Path) -> None:
    with fleet_of(tmp_path, wrong=LARGE, right=LARGE) as fleet:
        wrong, right = fleet.workers
        for worker in fleet.workers:
            worker.kill()
        wait_for(lambda: not fleet.usable, "the loss", fleet.workers)
        wrong.start("--model", "random:smollm2-135m")
        wait_for(lambda: fleet.usable == ["wrong"], "the wrong one", fleet.workers)
        right.start()
        wait_for(lambda: fleet.usable == ["right"], "the right one", fleet.workers)
        assert next(fleet.stream(spec_of("b", 3))).started.model == "random:tiny"
