"""Which workers have room for a request at all: they need not be alike, as while a fleet is restarted with
other settings. Pure; how busy they are is router.py's.
"""

from collections.abc import Sequence

from service.fleet.codec import WorkerFacts
from service.fleet.link import WorkerLink
from service.request import Request


def size_of(facts: WorkerFacts) -> tuple[int, int, int]:
    """The larger, the more requests it can have; the first of equal ones speaks for all."""
    return facts.max_context_tokens, facts.page_count * facts.page_size, facts.max_running_sequences


def with_room(links: Sequence[WorkerLink], request: Request) -> list[WorkerLink]:
    """Those of its model that could run it to its end if they were idle, and would not end it sooner.

    A worker's context is never more than its pool; what is pinned there it counts itself.
    """
    return [link for link in links if link.facts is not None and _has_room(link.facts, request)]


def _has_room(facts: WorkerFacts, request: Request) -> bool:
    wanted = len(request.prompt_ids) + request.stops.max_tokens
    return (
        facts.model_id == (request.model_id or facts.model_id)
        and min(wanted, request.context_tokens) <= facts.max_context_tokens
        and request.num_samples <= facts.max_running_sequences
    )
