"""Where a list of sequences goes on: its order, and the cursor that a client sends back.

Everybody can read a cursor, so it names no request: the last one of a part may be another tenant's. Pure.
"""

import base64
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from service.fleet.feed import SequenceRecord

VALID_SECONDS = 60.0

Place = tuple[int, int, int]
"""Receive time, sample, and how many of exactly these were told: above 1 where two came in one nanosecond."""

START: Place = (0, 0, 0)


def sort(records: list[SequenceRecord], place: Place) -> int:
    """Puts the oldest first; the index at which the list goes on."""
    records.sort(key=lambda each: (*_age(each), each.request_id))
    age, told = place[:2], place[2]
    first, end = (bisect(records, age, key=_age) for bisect in (bisect_left, bisect_right))
    return min(max(first, first + told), end)


def write(worker_id: str, now: float, told: Sequence[SequenceRecord]) -> str:
    """Goes on behind the last of `told`, the list from its beginning; `now`: seconds of a clock of all."""
    age = _age(told[-1])
    same = len(told) - bisect_left(told, age, key=_age)
    fields = [worker_id, now + VALID_SECONDS, *age, same]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()


def read(cursor: str, worker_id: str, now: float) -> Place | None:
    """Its place; an empty one begins. None: not of this worker's list, too old, or no cursor at all."""
    if not cursor:
        return START
    try:
        whose, until, received, choice, told = json.loads(base64.urlsafe_b64decode(cursor))
        place = int(received), int(choice), int(told)
        is_valid = whose == worker_id and now <= float(until)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return place if is_valid else None


def _age(record: SequenceRecord) -> tuple[int, int]:
    return record.receive_time_ns, record.choice_index
