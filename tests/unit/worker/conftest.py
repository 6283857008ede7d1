"""A tiny model that a whole worker process can serve, and a process that is left as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def served_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in float32, with a tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("served") / "tiny", tokenizer=True)


@pytest.fixture(autouse=True, scope="module")
def process_settings() -> Iterator[None]:
    """Workers set these for their whole process; the tests that follow shall not run on them."""
    num_threads, switch_interval_s = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(num_threads)
    sys.setswitchinterval(switch_interval_s)
