"""Requests with a constraint wait here until it is compiled, beside the I/O thread and the engine's.

Owns the requests that wait. What is asked of one meanwhile is passed on behind it, so that each ends once.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvatlas.constraints.text import ConstraintError, ConstraintText
from kvatlas.constraints.threads import DeepThreads
from worker.ids import SequenceId
from worker.messages import Abort, AddAnswer, AddRequest
from worker.scheduling.request import AbortReason, AddOutcome, AddStatus, RequestSpec
from worker.scheduling.sampling import Constraint

if TYPE_CHECKING:  # needs a library that may be missing; then nobody makes a desk
    from kvatlas.constraints.compiler import Compiler

MAX_WAITING = 256
THREADS = 2

logger = logging.getLogger("worker.constraints")


@dataclass(slots=True, eq=False)  # a service may send one request twice
class _Waiting:
    spec: RequestSpec
    aborted: dict[SequenceId, AbortReason] = field(default_factory=dict)  # the first abort of each counts


class ConstraintDesk:
    """`take`, `abort` and `drop` are called by the I/O thread; answers come from the desk's own threads."""

    def __init__(
        self,
        compiler: "Compiler",
        *,
        to_engine: Callable[[AddRequest | Abort], None],
        answer: Callable[[AddAnswer], None],
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._compiler = compiler
        self._to_engine = to_engine
        self._answer = answer
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []  # who takes one out has answered it, or nobody asks any more
        self._threads = DeepThreads("kvatlas-constraints", num_threads=THREADS, max_waiting=max_waiting + 1)
        self._max_waiting = max_waiting

    @property
    def is_busy(self) -> bool:
        """Whether requests wait here."""
        return bool(self._waiting)

    def take(self, spec: RequestSpec, constraint: ConstraintText) -> None:
        """Passes a request on with its constraint compiled, at once if it is known; or answers why not."""
        compiled = self._compiler.known(constraint)
        if compiled is not None:
            self._to_engine(AddRequest(_constrained(spec, compiled)))
            return
        entry = _Waiting(spec)
        with self._lock:
            has_room = len(self._waiting) < self._max_waiting
            if has_room:
                self._waiting.append(entry)
        why = "too many constraints wait to be compiled"
        if not has_room:
            self._tell(spec, AddStatus.QUEUE_FULL, why)
        elif not self._threads.submit(lambda: self._compile(entry, constraint)):
            self._refuse(entry, AddStatus.QUEUE_FULL, why)

    def abort(self, sequence_ids: Sequence[SequenceId], reason: AbortReason) -> None:
        """Stops sequences, also those of requests that wait here."""
        ids = set(sequence_ids)
        with self._lock:
            for entry in self._waiting:
                first = entry.spec.sequence_id
                for sequence_id in ids.intersection(range(first, first + entry.spec.sample_count)):
                    entry.aborted.setdefault(sequence_id, reason)
            self._to_engine(Abort(sequence_ids, reason))

    def drop(self, source: str) -> None:
        """A service is gone: nothing of it is passed on any more, nor compiled if that has not begun."""
        with self._lock:
            self._waiting = [entry for entry in self._waiting if entry.spec.source != source]

    def refuse_waiting(self) -> None:
        """The engine has ended: who waits here is answered, as who waits there was."""
        for entry in list(self._waiting):
            self._refuse(entry, AddStatus.DRAINING, "the worker ends")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    def begin_preparing(self) -> None:
        """Makes what every constraint needs on one of the threads; before that the first one makes it."""
        self._threads.submit(self._prepare)

    def _prepare(self) -> None:
        try:
            self._compiler.prepare()
        except Exception:  # the first request with a constraint is told
            logger.exception("event=constraints_unprepared")

    def _compile(self, entry: _Waiting, constraint: ConstraintText) -> None:
        if entry not in self._waiting:  # the compiler's time is for those behind it
            return
        try:
            spec = _constrained(entry.spec, self._compiler.compile(constraint))
        except ConstraintError as error:
            self._refuse(entry, AddStatus.INVALID, f"{constraint.kind}: {error}")
        except BaseException:  # whatever it was, the request is answered
            logger.exception("event=constraint_failed request=%s", entry.spec.request_id)
            self._refuse(entry, AddStatus.INVALID, "internal error")
        else:
            self._pass_on(entry, spec)

    def _pass_on(self, entry: _Waiting, spec: RequestSpec) -> None:
        with self._lock:
            if entry not in self._waiting:
                return
            self._waiting.remove(entry)
            self._to_engine(AddRequest(spec))
            for reason in sorted(set(entry.aborted.values())):
                ids = [sequence_id for sequence_id, why in entry.aborted.items() if why is reason]
                self._to_engine(Abort(ids, reason))

    def _refuse(self, entry: _Waiting, status: AddStatus, why: str) -> None:
        with self._lock:
            if entry not in self._waiting:
                return
            self._waiting.remove(entry)
        self._tell(entry.spec, status, why)

    def _tell(self, spec: RequestSpec, status: AddStatus, why: str) -> None:
        outcome = AddOutcome(status, message=why)
        self._answer(AddAnswer(spec.source, spec.sequence_id, spec.sample_count, outcome))


def _constrained(spec: RequestSpec, compiled: Constraint) -> RequestSpec:
    return replace(spec, params=replace(spec.params, constraint=compiled))
