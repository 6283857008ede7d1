"""What all tests share: the packaged model, and how hypothesis runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from services.pull import ensure_model

# No deadline and no complaint about slow examples: a test machine's cores are often shared.
settings.register_profile(
    "sluiceway", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("sluiceway")


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The packaged chat model as a Hugging Face directory; downloaded and converted once."""
    return ensure_model("smollm2")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--deadline``: how a run on a machine that is starved of CPU still ends in time."""
    parser.addoption(
        "--deadline",
        type=float,
        default=None,
        help="Unix time after which tests that have not begun are skipped, each with that reason.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins after the deadline."""
    deadline: float | None = item.config.getoption("--deadline")
    if deadline is not None and time.time() > deadline:
        pytest.skip("not run: the time for the whole run was used up before this test began")
