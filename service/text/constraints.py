"""Whether a constraint can be meant, found out before its request is sent to a worker.

Owns the verdicts so far and the threads that find them; what passes here compiles on every worker of the
model. Knows no call.
"""

import asyncio
import logging
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvatlas.constraints.text import ConstraintError, ConstraintText, can_compile
from kvatlas.constraints.threads import DeepThreads
from kvatlas.models.text_vocabulary import TextVocabulary

if TYPE_CHECKING:  # needs a library that may be missing; then there are no checks
    from kvatlas.constraints.compiler import Compiler

MAX_VERDICTS = 1024
MAX_WAITING = 256

log = logging.getLogger("service.constraints")


class TooManyConstraints(Exception):
    """More wait to be looked at than there is room for."""


class ConstraintChecks:
    """Of one event loop. One check of a constraint at a time, however many requests have it."""

    def __init__(self, compiler: "Compiler", *, num_threads: int = 1, max_waiting: int = MAX_WAITING) -> None:
        self._compiler = compiler
        self._loop = asyncio.get_running_loop()
        self._verdicts: OrderedDict[ConstraintText, str] = OrderedDict()  # "": it can be meant
        self._open: dict[ConstraintText, asyncio.Future[str]] = {}
        self._threads = DeepThreads("constraints", num_threads=num_threads, max_waiting=max_waiting)

    @classmethod
    def of(cls, vocabulary: TextVocabulary, vocab_size: int) -> "ConstraintChecks | None":
        """For a model's vocabulary; None where the library is missing."""
        if not can_compile():
            return None
        from kvatlas.constraints.compiler import Compiler, TokenTable

        def read_table() -> TokenTable:
            return TokenTable.of(vocabulary, vocabulary.eos_ids)

        return cls(Compiler(read_table, vocab_size, max_kept=0))

    async def fault_of(self, constraint: ConstraintText) -> str:
        """What is wrong with it, for the client; empty: nothing. Raises TooManyConstraints."""
        found = self._verdicts.get(constraint)
        if found is not None:
            self._verdicts.move_to_end(constraint)
            return found
        checking = self._open.get(constraint)
        if checking is None:
            checking = self._open[constraint] = self._loop.create_future()
            if not self._threads.submit(lambda: self._check(constraint)):
                del self._open[constraint]
                raise TooManyConstraints
        return await asyncio.shield(checking)  # others may wait for the same verdict

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    def _check(self, constraint: ConstraintText) -> None:
        verdict: Any = ""
        try:
            self._compiler.compile(constraint)
        except ConstraintError as error:
            verdict = str(error)
        except BaseException as error:  # a panic of the library is no Exception; who asked gets an answer
            log.exception("event=constraint_check_failed kind=%s", constraint.kind)
            verdict = error if isinstance(error, Exception) else RuntimeError(repr(error))
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle, constraint, verdict)

    def _settle(self, constraint: ConstraintText, verdict: str | Exception) -> None:
        checking = self._open.pop(constraint)
        if isinstance(verdict, Exception):
            if not checking.done():
                checking.set_exception(verdict)
            return
        self._verdicts[constraint] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        if not checking.done():
            checking.set_result(verdict)
