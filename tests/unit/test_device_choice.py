"""Which attention backend a worker uses: named, checked and told; and the order in which a worker ends."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from worker.config import ConfigError, WorkerConfig
from worker.devices import FakeDevice
from worker.execution.runner import Runner
from worker.link.server import EngineLink
from worker.process import WorkerProcess
from worker.torch_device import TorchDevice, _compute_capability

TINY = WorkerConfig(model="random:tiny", num_pages=8, page_size=4, metrics_port=-1)


def test_the_backend_is_chosen_by_name_or_by_the_device_and_told() -> None:
    """M-30: the choice is among the facts that services, metrics and the log get."""
    device = TorchDevice()
    assert device.facts(replace(TINY, attention_backend="reference")).attention_backend == "reference"
    facts = device.facts(replace(TINY, attention_backend="auto"))
    assert (facts.attention_backend, facts.attention_backend_reason) == ("cpu", "a processor")


def test_an_unknown_backend_is_refused_by_name() -> None:
    """M-30, M-29: nothing else is taken in its place."""
    config = replace(TINY, attention_backend="fastest").resolved(model_context=64, automatic_pages=8)
    with pytest.raises(ConfigError, match="fastest"):
        TorchDevice().build(config)


def test_a_gpu_is_told_with_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert _compute_capability(torch.device("cuda:0")) == "sm_90"
    assert _compute_capability(torch.device("cpu")) == ""


def test_the_choice_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """M-30: one line at the start names model, dtypes and backend, and why it is that one."""
    config = replace(TINY, attention_backend="reference").resolved(model_context=64, automatic_pages=8)
    with caplog.at_level(logging.INFO):
        runner = TorchDevice().build(config)
    runner.close()
    line = next(line for line in caplog.messages if "model_loaded" in line)
    assert 'backend=reference because="asked for"' in line
    assert "weight_dtype=auto kv_dtype=fp32" in line


class WatchedRunner:
    """A Runner that says when it is closed."""

    def __init__(self, runner: Runner, order: list[str]) -> None:
        self.launch = runner.launch
        self.read_rows = runner.read_rows
        self._close = runner.close
        self._order = order

    def close(self) -> None:
        self._order.append("device")
        self._close()


class WatchedDevice(FakeDevice):
    """Builds a runner that is watched."""

    def __init__(self, order: list[str]) -> None:
        self._order = order
        self.when_built: Callable[[], object] = list  # what to call then; nothing at first

    def build(self, config: WorkerConfig) -> Runner:
        runner = WatchedRunner(super().build(config), self._order)
        self.when_built()
        return runner


def test_the_device_is_let_go_before_the_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M-26: what runs on the device ends first, communication last, each once."""
    order: list[str] = []
    close = EngineLink.close

    def watched_close(link: EngineLink) -> None:
        order.append("sockets")
        close(link)

    monkeypatch.setattr(EngineLink, "close", watched_close)
    config = replace(
        TINY,
        runner="fake",
        engine_address=f"ipc://{tmp_path}/engine",
        pages_address=f"ipc://{tmp_path}/pages",
    )
    device = WatchedDevice(order)
    with WorkerProcess(config, device) as process:
        device.when_built = process.stop  # a signal while the model is loaded
        assert process.run() == 0
    assert order == ["device", "sockets"]
