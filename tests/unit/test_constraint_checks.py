"""The service's look at a constraint before its request waits: beside the loop, once, bounded."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from kvatlas.constraints.compiler import Compiled, Compiler, TokenTable
from kvatlas.constraints.text import ConstraintError, ConstraintText
from kvatlas.models.text_vocabulary import toy_vocabulary
from service.text.constraints import ConstraintChecks, TooManyConstraints

DIGITS, BAD = ConstraintText("regex", r"\d+"), ConstraintText("regex", "(")


class CountingCompiler(Compiler):
    """Holds every constraint until it is let go, and counts them."""

    def __init__(self) -> None:
        super().__init__(lambda: TokenTable.of(toy_vocabulary(512), {257}), 512, max_kept=0)
        self.gate = threading.Event()
        self.gate.set()
        self.compiled: list[ConstraintText] = []
        self.breaks_on: ConstraintText | None = None

    def compile(self, constraint: ConstraintText) -> Compiled:
        assert self.gate.wait(60)
        self.compiled.append(constraint)
        if constraint == self.breaks_on:
            raise KeyError("bug")
        return super().compile(constraint)


def run(work: Callable[[ConstraintChecks, CountingCompiler], Awaitable[None]], max_waiting: int = 8) -> None:
    async def main() -> None:
        compiler = CountingCompiler()
        checks = ConstraintChecks(compiler, max_waiting=max_waiting)
        try:
            await work(checks, compiler)
        finally:
            compiler.gate.set()
            checks.close()

    asyncio.run(main())


def test_a_verdict_is_found_once_however_many_ask() -> None:
    async def work(checks: ConstraintChecks, compiler: CountingCompiler) -> None:
        compiler.gate.clear()
        asking = [asyncio.ensure_future(checks.fault_of(DIGITS)) for _ in range(5)]
        await asyncio.sleep(0)
        compiler.gate.set()
        assert await asyncio.gather(*asking) == [""] * 5
        assert await checks.fault_of(DIGITS) == ""
        assert compiler.compiled == [DIGITS]
        assert "unclosed group" in await checks.fault_of(BAD)
        assert await checks.fault_of(BAD) == await checks.fault_of(BAD)
        assert compiler.compiled == [DIGITS, BAD]

    run(work)


def test_one_that_leaves_takes_nothing_from_those_who_wait() -> None:
    async def work(checks: ConstraintChecks, compiler: CountingCompiler) -> None:
        compiler.gate.clear()
        leaving, staying = (asyncio.ensure_future(checks.fault_of(DIGITS)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        compiler.gate.set()
        assert await staying == ""

    run(work)


def test_more_than_may_wait_are_refused_at_once() -> None:
    async def work(checks: ConstraintChecks, compiler: CountingCompiler) -> None:
        compiler.gate.clear()
        several = [ConstraintText("regex", "a" * (number + 1)) for number in range(6)]
        found = [asyncio.ensure_future(checks.fault_of(each)) for each in several]
        await asyncio.sleep(0)
        refused = [each for each in found if each.done() and isinstance(each.exception(), TooManyConstraints)]
        assert len(refused) >= 3  # one runs perhaps, two wait
        compiler.gate.set()
        rest = [each for each in found if each not in refused]
        assert await asyncio.gather(*rest) == [""] * len(rest)
        assert await checks.fault_of(several[-1]) == ""

    run(work, max_waiting=2)


def test_a_bug_is_raised_and_not_taken_for_a_verdict() -> None:
    async def work(checks: ConstraintChecks, compiler: CountingCompiler) -> None:
        compiler.breaks_on = DIGITS
        with pytest.raises(KeyError):
            await checks.fault_of(DIGITS)
        compiler.breaks_on = None
        assert await checks.fault_of(DIGITS) == ""

    run(work)


def test_what_the_checks_let_through_the_workers_compiler_takes() -> None:
    """Both are made of the same table and limits."""

    async def work(checks: ConstraintChecks, compiler: CountingCompiler) -> None:
        worker = Compiler(lambda: TokenTable.of(toy_vocabulary(512), {257}), 512)
        for constraint in (DIGITS, BAD, ConstraintText("json_schema", '{"not": {}}')):
            fault = await checks.fault_of(constraint)
            if not fault:
                worker.compile(constraint)
                continue
            with pytest.raises(ConstraintError) as caught:
                worker.compile(constraint)
            assert str(caught.value) == fault

    run(work)
