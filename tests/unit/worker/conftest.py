"""A tiny model that a whole worker process can serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def served_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in float32, with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("served") / "tiny", tokenizer=True)
