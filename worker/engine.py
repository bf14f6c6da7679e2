"""The loop: commands → schedule → launch → commit the step before → publish.

One thread, the main one, owns every mutable thing behind it: scheduler, pages, runner. While steps run it
waits for no socket, encodes nothing and logs nothing per token; while none does it serves the link
(lent_link.py). With overlap a step is decided and launched before the one before it is committed; without,
each step is committed at once.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker import first_tokens
from worker.channels import CommandQueue, Handover, OutputQueue
from worker.description import WorkerState
from worker.execution.runner import BrokenHandle, Runner, StepHandle
from worker.isolation import is_out_of_memory, run_span_by_span
from worker.lent_link import LentLink, Link
from worker.log import log_event
from worker.messages import EngineCommand, LinkMessage, StepOutputs
from worker.obey import Obedience
from worker.pages.events import PageEventKind
from worker.pinning import PIN_SOURCE
from worker.readers.observation import Observation
from worker.scheduling.output import FailureReason, OutputColumns
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.step import Step, StepResult
from worker.status import StatusBoard, StepMark
from worker.traffic import TimedStep, TrafficQueue
from worker.watch import Watch

ROOM_SECONDS = 0.05
COMMANDS_PER_TURN = 64  # so that a burst of requests does not hold up those that run
EXIT_OK, EXIT_BUG, EXIT_OUT_OF_MEMORY = 0, 70, 75

FREED = int(PageEventKind.FREED)

logger = logging.getLogger("worker.engine")


class DeviceFull(Exception):
    """The device has no memory left: nothing on it can be trusted to run."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the loop runs."""

    overlap: bool = False
    drain_grace: float = 60.0
    audit_interval: float = 1.0
    debug: bool = False


@dataclass(frozen=True, slots=True)
class _Launched:
    step: Step
    handle: StepHandle
    began: float


class Engine:
    """`run` on the main thread; `stop`, `fail` and `ask_for_snapshot` from anywhere, signal handlers too."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        settings: EngineSettings,
        *,
        commands: CommandQueue[EngineCommand],
        outputs: OutputQueue[LinkMessage],
        observations: Handover[Observation],
        board: StatusBoard,
        on_state: Callable[[], None],
        link: Link | None = None,
        wake_observer: Callable[[], None] = lambda: None,
        traffic: TrafficQueue | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._settings = settings
        self._commands = commands
        self._outputs = outputs
        self._link = LentLink(link, commands, outputs, clock)
        self._board = board
        self._on_state = on_state
        self._clock = clock
        self._in_flight: deque[_Launched] = deque()
        self._num_stops = 0
        self._has_failed = False
        self._drain_end: float | None = None
        self._ring = scheduler.cache.events
        self._watch = Watch(
            scheduler,
            runner,
            observations,
            audit_interval=settings.audit_interval,
            debug=settings.debug,
            wake_observer=wake_observer,
            clock=clock,
        )
        self._obedience = Obedience(
            scheduler, runner, outputs, board.description.pool, self._watch.audit, clock
        )
        self._traffic = traffic
        self._last_end: float | None = None  # of the step before; None: the engine was idle since
        if traffic is not None:
            scheduler.tell_traffic(traffic.put)
        self._was_idle = True
        self._poison: Callable[[Sequence[int]], None] | None = None
        self._poisoned = 0  # page event up to which freed pages were filled with NaN

    def set_poison(self, poison: Callable[[Sequence[int]], None]) -> None:
        """Debugging, before `run`: freed pages are filled with what must never be read."""
        self._poison = poison

    # From other threads.

    def stop(self) -> None:
        """Begins to drain; the second call ends what is left at once."""
        self._num_stops += 1
        self._commands.wake()

    def fail(self) -> None:
        """Another thread is dead: there is nothing to drain for."""
        self._has_failed = True
        self._commands.wake()

    def ask_for_snapshot(self) -> None:
        """The next observation carries everything."""
        self._watch.wants_snapshot = True
        self._commands.wake()

    # The loop.

    def run(self) -> int:
        """Serves until a drain is over; returns the exit status of the process."""
        self._set_state(WorkerState.SERVING)
        status = EXIT_OK
        try:
            while not self._is_over():
                self._turn()
            status = EXIT_BUG if self._has_failed else EXIT_OK
        except DeviceFull as error:
            log_event(logger, logging.ERROR, "device_out_of_memory", why=error.__cause__)
            self._end_all(FailureReason.DEVICE_OUT_OF_MEMORY, "the device is out of memory")
            status = EXIT_OUT_OF_MEMORY
        except Exception:
            logger.exception("event=engine_failed")
            self._end_all(FailureReason.INTERNAL, "the engine failed")
            status = EXIT_BUG
        finally:
            self._link.give_back()
        return status

    def _turn(self) -> None:
        if self._in_flight:
            self._link.look()
        now = self._clock()
        for command in self._commands.drain(COMMANDS_PER_TURN):
            self._obedience.obey(command, now)
            self._watch.has_news = True
        if not self._settings.overlap:  # a launch is the whole step: answers to requests go out before it
            self._link.wake()
            if self._scheduler.has_work(now):
                self._link.give_back()
        has_committed = self._commit_first_tokens()
        step = self._launch(self._clock())
        self._link.wake()  # not before: their sender would want the interpreter during the launch
        if step is not None and self._link.is_held and not self._is_first_token_close():
            self._link.give_back()
        is_busy = bool(self._in_flight)
        keep = 1 if self._settings.overlap and step is not None and not self._is_launch_broken() else 0
        while len(self._in_flight) > keep:
            self._commit_oldest()
            has_committed = True
        self._publish()
        now = self._clock()
        if has_committed or not self._in_flight:  # not between a first launch and its result
            self._watch.look(now)
        if not is_busy and not self._scheduler.has_work(now):
            self._sleep(now)

    def _is_launch_broken(self) -> bool:
        """Whether the newest step was not queued, or not all of it. Nothing may be launched behind it: rows
        would lack its pages, and K and V go where their entries pointed before.
        """
        return isinstance(self._in_flight[-1].handle, BrokenHandle)

    def _is_first_token_close(self) -> bool:
        return first_tokens.are_close([launched.step for launched in self._in_flight])

    def _launch(self, now: float) -> Step | None:
        """Decides the next step and starts it, where there is one and somebody takes its outputs."""
        if self._outputs.is_full:
            self._link.give_back()
            if not self._in_flight:
                self._outputs.wait_for_room(ROOM_SECONDS)
            return None
        if not self._scheduler.has_work(now):
            return None
        step = self._scheduler.schedule(now)
        if step is not None:
            if self._was_idle:  # its last step is long ago for want of work, not because it is stuck
                self._board.step = StepMark(self._board.step.number, now)
                self._was_idle = False
            self._poison_freed()
            if first_tokens.is_long(step):
                self._link.give_back()
            self._in_flight.append(_Launched(step, self._start(step), now))
        return step

    def _start(self, step: Step) -> StepHandle:
        try:
            return self._runner.launch(step)
        except Exception as error:
            return BrokenHandle(error)  # dealt with where results are: one place for every failure

    def _poison_freed(self) -> None:
        """Debugging: what was freed holds NaN before anything new is written, so a stale read shows."""
        poison = self._poison
        if poison is None:
            return
        freed: set[int] = set()
        while self._poisoned < self._ring.number:
            events = self._ring.read(self._poisoned)
            assert events is not None, "more page events in one step than the ring holds"
            self._poisoned = events.last_number
            freed.update(page for kind, page in zip(events.kinds, events.pages, strict=True) if kind == FREED)
        if freed:
            poison(sorted(freed))

    def _sleep(self, now: float) -> None:
        """Nothing to run: until a command, a deadline, or the next observation."""
        due = (self._scheduler.next_deadline(now), self._drain_end, self._obedience.next_time)
        limits = [self._watch.next_time(now), *(time for time in due if time is not None)]
        command = self._link.wait(max(0.0, min(limits) - now))
        woken = self._clock()
        self._was_idle, self._last_end = True, None
        self._watch.idled(woken - now)
        if command is not None:
            self._obedience.obey(command, woken)

    # Steps.

    def _commit_first_tokens(self) -> bool:
        """First tokens go out before the next step is decided, if the device has them."""
        if len(self._in_flight) != 1:
            return False
        launched = self._in_flight[0]
        if not first_tokens.are_there(launched.step, launched.handle):
            return False
        self._commit_oldest()
        self._publish()
        return True

    def _commit_oldest(self) -> None:
        launched = self._in_flight[0]
        try:
            result = launched.handle.result()
        except Exception as error:
            self._isolate(error)
            return
        self._in_flight.popleft()
        self._commit(launched, result)

    def _commit(self, launched: _Launched, result: StepResult) -> None:
        step, now = launched.step, self._clock()
        self._board.step = StepMark(step.number, now)
        # A sequence that has ended since the launch may break this step as it likes.
        alive = [span for span in result.failed if self._scheduler.is_live(step.sequence_ids[span])]
        self._scheduler.commit(step, result, now, self._send_first_tokens)
        self._tell_step(launched, now)
        self._watch.stepped(step, now - launched.began, is_replayed=launched.handle.is_replayed)
        for span in alive:
            log_event(
                logger,
                logging.INFO if span in result.dead_ends else logging.ERROR,  # those are the client's
                "sequence_failed",
                sequence=step.sequence_ids[span],
                step=step.number,
                why=result.failed[span],
            )

    def _send_first_tokens(self) -> None:
        """Within a commit: they go out before the rest of the books is written. What is our own can wait."""
        self._put_out(self._scheduler.take_outputs(leaving=PIN_SOURCE))
        if self._in_flight:
            first_tokens.let_them_go(lambda: not len(self._outputs))

    def _tell_step(self, launched: _Launched, now: float) -> None:
        began, self._last_end = self._last_end or launched.began, now
        if self._traffic is not None:
            step, time_us = launched.step, self._ring.time_us
            self._traffic.put(
                TimedStep(step.number, time_us, now - began, step.num_decode, step.starts, step.ends)
            )

    def _isolate(self, error: Exception) -> None:
        """A step raised: all steps in flight run again span by span, and only who breaks one ends.

        Steps behind the broken one are void, too: they read tokens that it did not write. Raises when the
        device answers nothing any more: that is no sequence's fault.
        """
        log_event(logger, logging.ERROR, "step_failed", step=self._in_flight[0].step.number, why=repr(error))
        if is_out_of_memory(error):
            raise DeviceFull from error
        for behind in list(self._in_flight)[1:]:
            try:
                behind.handle.result()
            except Exception as later:
                log_event(logger, logging.ERROR, "step_failed", step=behind.step.number, why=repr(later))
        # Errors of CUDA may stay: then this raises, as every step to come would, and the worker ends.
        self._runner.read_rows([0], [1])
        while self._in_flight:
            launched = self._in_flight[0]
            try:
                result = run_span_by_span(
                    self._runner, launched.step, self._scheduler.row_start, self._log_broken_span
                )
            except Exception as worse:
                if is_out_of_memory(worse):
                    raise DeviceFull from worse
                raise
            self._in_flight.popleft()
            self._commit(launched, result)

    @staticmethod
    def _log_broken_span(step: Step, span: int, error: BaseException) -> None:
        text = "event=span_failed sequence=%d step=%d"
        logger.error(text, step.sequence_ids[span], step.number, exc_info=error)

    def _publish(self) -> None:
        by_source = self._scheduler.take_outputs()
        self._obedience.take_own(by_source, self._clock())
        self._put_out(by_source)

    def _put_out(self, by_source: dict[str, OutputColumns]) -> None:
        if by_source:
            seconds = self._watch.last_step_seconds
            self._outputs.put(StepOutputs(self._board.step.number, seconds, by_source), wakes=False)
        self._link.wake()

    # Ends.

    def _is_over(self) -> bool:
        """Whether to leave the loop; begins and ends the drain."""
        if self._has_failed:
            self._end_all(FailureReason.INTERNAL, "the worker failed")
            return True
        if not self._num_stops:
            return False
        now = self._clock()
        if self._drain_end is None:
            self._drain_end = now + self._settings.drain_grace
            self._scheduler.set_draining(True)
            self._set_state(WorkerState.DRAINING)
            log_event(logger, logging.INFO, "drain_began", live=self._scheduler.num_live)
        if self._scheduler.num_live and now < self._drain_end and self._num_stops == 1:
            return False
        self._finish_drain(now)
        return True

    def _finish_drain(self, now: float) -> None:
        handed_over = self._scheduler.drain_rest(now)
        while self._in_flight:
            self._commit_oldest()
        for command in self._commands.drain():  # what came meanwhile is answered: draining
            self._obedience.obey(command, now)
        self._publish()
        self._obedience.close()
        log_event(logger, logging.INFO, "drain_ended", handed_over=handed_over)
        self._watch.observe(self._clock())

    def _end_all(self, reason: FailureReason, message: str) -> None:
        """Every sequence ends, as far as the books still allow; the process ends after this."""
        now = self._clock()
        try:
            while self._in_flight:
                self._scheduler.abandon(self._in_flight.popleft().step, reason, message, now)
            ids = [view.sequence_id for view in self._scheduler.sequence_views()]
            self._scheduler.fail(ids, reason, message, now)
            self._scheduler.set_draining(True)
            for command in self._commands.drain():
                self._obedience.obey(command, now)
            self._publish()
            self._obedience.close()
        except Exception:
            logger.exception("event=ends_lost")  # services see the connection close

    def _set_state(self, state: WorkerState) -> None:
        self._board.state = state
        self._on_state()
