"""One tiny model for all of the runner's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.loader.load_model import LoadedModel, load_model
from tests.tiny_models import make_tiny_model
from tests.unit.worker.runner.driver import CPU


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in float32, with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", tokenizer=True)


@pytest.fixture(scope="session")
def loaded(tiny_dir: Path) -> LoadedModel:
    """The tiny model, loaded for blocks of 4 tokens."""
    return load_model(
        tiny_dir,
        dtype="float32",
        device=CPU,
        attention_backend="torch_sdpa",
        block_size=4,
        report=lambda done, total: None,
    )
