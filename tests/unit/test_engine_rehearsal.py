"""Rehearsals of the engine: each is like the one before, they leave nothing behind, and they end."""

import pytest

from kvatlas.rehearsal import EVERY_SECONDS, LASTING_SECONDS, PROMPT_TOKENS
from worker.pages.page_cache import CacheConfig
from worker.rehearsal import FIRST_SECONDS, Rehearsal
from worker.scheduling.settings import SchedulerConfig


def config_of(page_size: int = 4, max_step_tokens: int = 64) -> SchedulerConfig:
    cache = CacheConfig(64, page_size)
    return SchedulerConfig(cache, max_running=8, max_step_tokens=max_step_tokens, max_context_tokens=128)


@pytest.mark.parametrize(("page_size", "max_step_tokens"), [(1, 2048), (16, 2048), (16, 100), (1024, 2048)])
def test_each_play_is_the_same_and_leaves_nothing(page_size: int, max_step_tokens: int) -> None:
    rehearsal = Rehearsal(config_of(page_size, max_step_tokens))
    scheduler = rehearsal._scheduler
    changes = []
    for number in range(20):
        before = scheduler.cache.events.number
        rehearsal.play(now=number * EVERY_SECONDS)
        changes.append(scheduler.cache.events.number - before)
        assert scheduler.num_live == 0
        assert scheduler.take_outputs() == {}
        assert scheduler.check() == []
    assert len(set(changes)) == 1, changes
    assert changes[0] > 0


def test_it_is_over_a_moment_after_the_last_step() -> None:
    launched: list[int] = []
    rehearsal = Rehearsal(config_of(), launched.append)
    assert rehearsal.next_time(0.0) is None
    rehearsal.stepped(1.0)
    assert rehearsal.next_time(1.0) == 1.0 + FIRST_SECONDS
    rehearsal.play(1.0)
    assert rehearsal.next_time(1.0) == 1.0 + EVERY_SECONDS
    assert launched == [PROMPT_TOKENS]
    rehearsal.stepped(1.0)
    assert rehearsal.next_time(1.0) == 1.0 + FIRST_SECONDS
    assert rehearsal.next_time(1.0 + LASTING_SECONDS) is None
