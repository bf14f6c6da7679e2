"""A worker that ends while constraints are compiled: who waits for one is told so, as others are."""

import threading
from pathlib import Path

from kvatlas.constraints.text import ConstraintError, ConstraintText
from kvatlas.worker.v1 import worker_pb2
from worker.config import WorkerConfig
from worker.description import WorkerState
from worker.devices import FakeDevice
from worker.engine import EXIT_OK
from worker.link.testing import WAIT_SECONDS, TestService
from worker.link.testing_bench import until
from worker.process import WorkerProcess
from worker.scheduling.request import AddStatus


def test_a_request_whose_constraint_is_being_compiled_is_answered_by_a_drain(tmp_path: Path) -> None:
    """It saw the connection close, as of a worker that was lost."""
    config = WorkerConfig(
        runner="fake",
        model="random:tiny",
        metrics_port=-1,
        num_pages=64,
        engine_address=f"ipc://{tmp_path}/e",
        pages_address=f"ipc://{tmp_path}/p",
    )
    asked, gate, ends = threading.Event(), threading.Event(), list[int]()
    with WorkerProcess(config, FakeDevice()) as worker:
        desk = worker._constraints
        assert desk is not None

        def compile_slowly(constraint: ConstraintText) -> None:
            asked.set()
            gate.wait(WAIT_SECONDS)
            raise ConstraintError("nobody waits for it")

        desk._compiler.compile = compile_slowly  # type: ignore[method-assign, assignment]
        engine = threading.Thread(target=lambda: ends.append(worker.run()))
        engine.start()
        until(lambda: worker.board.state is WorkerState.SERVING)
        service = TestService(worker.link.address)
        service.hello()
        params = worker_pb2.SequenceParams(top_p=1.0, repetition_penalty=1.0, max_tokens=2, regex="a+")
        number = service.add([1, 2, 3], params=params)
        assert asked.wait(WAIT_SECONDS)
        worker.stop()
        service.wait(lambda: number in service.results)
        assert service.results[number].status == AddStatus.DRAINING
        engine.join(WAIT_SECONDS)
        service.close()
        gate.set()
    assert ends == [EXIT_OK]
