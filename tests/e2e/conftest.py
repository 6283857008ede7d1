"""Systems that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.system import TINY_FLAGS, System
from tests.tiny_models import make_tiny_model

Serve = Callable[..., System]


@pytest.fixture(scope="session")
def tiny_chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer and a chat template; its context is 4,096 tokens."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(directory, tokenizer=True, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def system(tiny_chat_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Five processes that serve a tiny random model."""
    log_file = tmp_path_factory.mktemp("serve") / "tiny.txt"
    with System(tiny_chat_dir, *TINY_FLAGS, log_file=log_file) as system:
        yield system.until_ready()


@pytest.fixture(scope="session")
def smollm2_system(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Five processes that serve the packaged model in float32."""
    log_file = tmp_path_factory.mktemp("serve") / "smollm2.txt"
    # Prompts as fast as can be: cut to a step-time target, the last would begin when the first
    # outputs have ended, and nothing would show that all run at once.
    target = ("--step-time-target-ms", "0")
    flags = ("--dtype", "float32", "--num-gpu-blocks-override", "2048", *target)
    with System(smollm2_dir, *flags, log_file=log_file) as system:
        yield system.until_ready()


@pytest.fixture
def serve(tiny_chat_dir: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a system of the test's own: ``serve(*flags)``, or of another model directory."""
    started: list[System] = []

    def start(*flags: str, model_dir: Path = tiny_chat_dir) -> System:
        log_file = tmp_path / f"serve-{len(started)}.txt"
        started.append(System(model_dir, *TINY_FLAGS, *flags, log_file=log_file))
        return started[-1]

    yield start
    for system in started:
        system.__exit__(None, None, None)
