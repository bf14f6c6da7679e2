"""An engine link without an engine, for tests of the link: a test takes commands and gives answers."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from worker.channels import CommandQueue, OutputQueue
from worker.description import ModelDescription, PoolDescription, WorkerDescription, WorkerState
from worker.link.server import EngineLink
from worker.link.testing import WAIT_SECONDS, TestService
from worker.messages import (
    AddAnswer,
    AddRequest,
    EngineCommand,
    LinkMessage,
    ObserverCall,
    StepOutputs,
)
from worker.scheduling.output import FinishCode, OutputColumns, SequenceEnd
from worker.scheduling.request import AddOutcome, AddStatus, RequestSpec
from worker.status import first_board


class LinkBench:
    """A link without an engine."""

    def __init__(self, folder: Path, *, command_limit: int = 64, silence_seconds: float = 600.0) -> None:
        self.address = f"ipc://{folder}/engine"
        self.commands: CommandQueue[EngineCommand] = CommandQueue(command_limit)
        self.outputs: OutputQueue[LinkMessage] = OutputQueue(1000)
        self.calls: list[ObserverCall] = []
        self.failures: list[str] = []
        model = ModelDescription("m", vocab_size=100, max_context_tokens=64, eos_token_ids=(2,))
        pool = PoolDescription(32, 4, 8, 64, "lru")
        description = WorkerDescription(
            "w", 77, model, pool, 9, 64, 8, ("prefix_cache",), "ipc:///pages", b"key"
        )
        self.board = first_board(description, time.monotonic())
        self.board.state = WorkerState.SERVING
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.takes_calls = True
        self.link = EngineLink(
            self.context,
            self.address,
            commands=self.commands,
            outputs=self.outputs,
            status=self.board,
            to_observer=self.take_call,
            on_failure=lambda: self.failures.append("failed"),
            silence_seconds=silence_seconds,
        )
        self.link.start()
        self.services: list[TestService] = []

    def take_call(self, call: ObserverCall) -> bool:
        """As the observer does."""
        self.calls.append(call)
        return self.takes_calls

    def service(self, name: str = "a", epoch: int = 1) -> TestService:
        """A service that is connected; it has not said Hello."""
        service = TestService(self.address, name, epoch)
        self.services.append(service)
        return service

    def command(self, limit: float = WAIT_SECONDS) -> EngineCommand:
        """The next command for the engine."""
        found = self.commands.wait(limit)
        assert found is not None, "no command came"
        return found

    def request(self) -> RequestSpec:
        """The same, which must be a request."""
        command = self.command()
        assert isinstance(command, AddRequest), command
        return command.spec

    def accept(self, spec: RequestSpec) -> None:
        """The engine takes a request."""
        self.outputs.put(
            AddAnswer(spec.source, spec.sequence_id, spec.sample_count, AddOutcome(AddStatus.ACCEPTED))
        )

    def tokens(self, spec: RequestSpec, *tokens: int, end: FinishCode = FinishCode.NONE) -> None:
        """A step of the engine gives tokens."""
        columns = OutputColumns()
        for token in tokens:
            columns.sequence_ids.append(spec.sequence_id)
            columns.token_ids.append(token)
            columns.finish_codes.append(0)
        if end:
            columns.finish_codes[-1] = end
            columns.ends.append(SequenceEnd(spec.sequence_id, end, len(tokens)))
        self.outputs.put(StepOutputs(1, 0.001, {spec.source: columns}))

    def close(self) -> None:
        """Ends everything."""
        for service in self.services:
            service.close()
        self.link.close()
        self.outputs.close()
        self.context.term()


def until(is_done: Callable[[], object], limit: float = WAIT_SECONDS) -> None:
    """Waits for a condition; the limit only ends a test that hangs."""
    end = time.monotonic() + limit
    while not is_done():
        assert time.monotonic() < end, "not so in time"
        threading.Event().wait(0.005)
