"""Which worker gets a request: a pure function of who is usable and how busy each is.

Owns nothing. Prefix affinity comes with several workers; until then the least loaded one is right.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take a request now."""

    address: str
    live_sequences: int  # of this service
    waiting_requests: int  # over all services, at the last heartbeat


def choose(candidates: Sequence[Candidate], avoid: Collection[str] = ()) -> Candidate | None:
    """The candidate with the least to do; one in `avoid` only if there is no other. None: nobody is there."""
    if not candidates:
        return None
    preferred = [candidate for candidate in candidates if candidate.address not in avoid] or candidates
    return min(preferred, key=lambda one: (one.waiting_requests, one.live_sequences, one.address))
