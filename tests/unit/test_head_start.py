"""What a start does beside its imports: it is done, ends by itself, and its failures are nobody's."""

import logging
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from kvatlas.process_age import process_age
from worker.head_start import begin, first_product, open_device


def run_in_a_new_process(code: str) -> str:
    """What it prints; this process has imported everything already."""
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", path + textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_can_be_prepared_without_torch() -> None:
    """Names and imports that worker.head_start relies on; building the driver's part needs a driver."""
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    printed = run_in_a_new_process(
        """
        from importlib import import_module
        driver = import_module("triton.backends.nvidia.driver")
        key = import_module("triton.runtime.cache").triton_key
        print(hasattr(key, "cache_info"), callable(driver.CudaUtils), "torch" in sys.modules)
        """
    )
    assert printed.split() == ["True", "True", "False"]


def test_what_fails_is_logged_and_left_to_whoever_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    def open_nothing() -> None:
        raise OSError("no such library")

    with caplog.at_level(logging.DEBUG, "worker.start"):
        thread = begin(open_nothing)
        thread.join(10)
    assert not thread.is_alive()
    assert "head_start_failed task=open_nothing" in caplog.text
    assert "no such library" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_its_tasks_fail_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The worker then says what is wrong where it asks for the device."""
    with caplog.at_level(logging.DEBUG, "worker.start"):
        for task in (open_device, first_product):
            begin(task).join(30)
    assert "task=first_product" in caplog.text


def test_the_age_of_a_process_counts_from_its_start() -> None:
    before = time.time()
    printed = run_in_a_new_process(
        """
        import time
        from kvatlas.process_age import process_age
        print(time.time() - process_age())
        """
    )
    began = float(printed)
    assert before - 0.05 <= began <= time.time()
    assert process_age() > 0
