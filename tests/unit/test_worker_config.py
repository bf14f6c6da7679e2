"""Settings of the worker: precedence, and refusals that name the setting."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from worker.config import ConfigError, WorkerConfig, from_args

ROOT = Path(__file__).parents[2]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("page_size = 1\nmax_running = 2\nmax_queued = 3\nwatermark = 0\n")
    environment = {"KVATLAS_WORKER_CONFIG": str(file), "KVATLAS_WORKER_PAGE_SIZE": "4", "PATH": "/bin"}
    environment["KVATLAS_WORKER_MAX_RUNNING"] = "5"
    config = from_args(["--page-size", "6"], environment)
    assert (config.page_size, config.max_running, config.max_queued) == (6, 5, 3)
    assert config.watermark == 0.0
    assert config.worker_id == WorkerConfig().worker_id


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"KVATLAS_WORKER_PAGESIZE": "4"}, "KVATLAS_WORKER_PAGESIZE"),
        ({"KVATLAS_WORKER_PAGE_SIZE": "many"}, "KVATLAS_WORKER_PAGE_SIZE"),
        ({"KVATLAS_WORKER_OVERLAP": "perhaps"}, "KVATLAS_WORKER_OVERLAP"),
        ({"KVATLAS_WORKER_PAGE_SIZE": "0"}, "page_size"),
        ({"KVATLAS_WORKER_CONFIG": "/nowhere/worker.toml"}, "/nowhere/worker.toml"),
    ],
)
def test_a_bad_environment_is_refused_by_name(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_args([], environment)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("page_sizes = 4", "page_sizes"),
        ("page_size = '4'", "page_size"),
        ("page_size = true", "page_size"),
        ("page_size = ", "worker.toml"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        from_args(["--config", str(file)], {})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--device", "tpu"], "device"),
        (["--max-running", "0"], "max_running"),
        (["--max-batch-tokens", "64", "--max-running", "64"], "max_batch_tokens"),
        (["--engine-address", "inproc://x"], "engine_address"),
        (["--engine-address", "ipc://"], "engine_address"),
        (["--pages-address", "tcp://host"], "pages_address"),
        (["--pages-address", "tcp://127.0.0.1:²"], "pages_address"),
        (["--pages-address", "ipc:///" + "x" * 120], "pages_address"),
        (["--worker-id", "a/b"], "worker_id"),
        (["--watermark", "nan"], "watermark"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises((ConfigError, SystemExit)) as caught:
        from_args(flags, {})
    if isinstance(caught.value, ConfigError):
        assert named in str(caught.value)


def test_all_faults_are_named_together() -> None:
    with pytest.raises(ConfigError, match=r"page_size.*max_running"):
        from_args(["--page-size", "0", "--max-running", "0"], {})


def test_unknown_flags_end_the_program() -> None:
    with pytest.raises(SystemExit):
        from_args(["--page-sizes", "4"], {})


def test_print_config_is_a_file_that_gives_the_same_config(tmp_path: Path) -> None:
    config = from_args(["--page-size", "4", "--overlap", "--worker-id", 'a"b\\'], {})
    file = tmp_path / "worker.toml"
    file.write_text(config.printable())
    assert from_args(["--config", str(file)], {}) == config
    assert "dtype" in tomllib.loads(config.printable())


def test_nothing_is_automatic_once_it_is_resolved() -> None:
    config = WorkerConfig(page_size=16).resolved(model_context=1000, automatic_pages=32)
    assert config.num_pages == 32
    assert config.max_context == 512, "S1-03: a row never addresses more tokens than the pool has"
    assert config.overlap is False
    assert config.max_batch_tokens > config.max_running
    assert config.engine_address.startswith("ipc://")
    assert config.pages_address != config.engine_address


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="made for 1000"):
        WorkerConfig(max_context=1001).resolved(model_context=1000, automatic_pages=1000)


def test_a_pool_too_small_for_any_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_pages"):
        WorkerConfig(page_size=1, num_pages=1).resolved(model_context=100, automatic_pages=1)


@pytest.mark.slow
def test_the_command_prints_its_config_and_names_what_it_refuses() -> None:
    command = [sys.executable, "-m", "worker", "--print-config", "--page-size"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}

    def run(size: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, size], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    good, bad = run("4"), run("0")
    assert good.returncode == 0, good.stderr
    assert tomllib.loads(good.stdout)["page_size"] == 4
    assert bad.returncode == 2
    assert "page_size" in bad.stderr
