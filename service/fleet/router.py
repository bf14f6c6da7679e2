"""Which worker gets a request: a pure function of its prompt's first pages and of how busy each worker is.

Rendezvous hashing with bounded load: every service ranks the workers of a prefix alike without talking to
the others, a lost worker moves only its own prefixes, and a crowd on one prefix spills over to the next in
its rank instead of waiting. Owns nothing.

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); Mirrokni, Thorup
and Zadimoghaddam, "Consistent hashing with bounded loads" (2018), where the factor and the + 1 come from.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

LOAD_FACTOR = 1.5  # of the mean: a worker with more than this is passed over
HELD_SHARE = 0.95  # of its pages: a worker with no less is passed over


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could take a request now."""

    worker_id: str  # the name by which all services know it
    address: str
    load: int = 0  # sequences and requests that it has, waiting ones included
    held_share: float = 0.0  # of its pages: those that a new sequence cannot get


def choose(
    candidates: Sequence[Candidate], prefix: bytes = b"", avoid: Collection[str] = ()
) -> Candidate | None:
    """The owner of a prefix, or the next in its rank while it has too much to do. None: nobody is there.

    An empty `prefix` has no owner: whoever has the least to do. One whose address is in `avoid` is taken only
    if there is no other.
    """
    if not candidates:
        return None
    preferred = [one for one in candidates if one.address not in avoid] or list(candidates)
    if not prefix:
        return min(preferred, key=lambda one: (one.load, one.held_share, one.worker_id, one.address))
    limit = math.ceil(LOAD_FACTOR * (sum(one.load for one in preferred) + 1) / len(preferred))
    rank = sorted(preferred, key=lambda one: (weight(prefix, one.worker_id), one.address), reverse=True)
    bearable = [one for one in rank if one.load < limit]  # never empty: not all are above their mean
    return next((one for one in bearable if one.held_share < HELD_SHARE), bearable[0])


def weight(prefix: bytes, worker_id: str) -> int:
    """How much a worker is a prefix's: the largest owns it. Knows no other worker."""
    return int.from_bytes(blake2b(worker_id.encode(), key=prefix, digest_size=8).digest(), "big")
