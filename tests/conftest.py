"""What all tests share: the packaged model, and how hypothesis runs."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from services.pull import ensure_model
from tests.machine import cpu_share

# No deadline and no complaint about slow examples: a test machine's cores are often shared.
settings.register_profile(
    "sluiceway", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("sluiceway")

MIN_CPU_SHARE = 0.5
TIMED = (
    "tests/e2e/",
    "tests/integration/",
    "tests/packaging/",
    "tests/unit/gateway/http/",
    "tests/unit/kvstore/test_process.py",
    "tests/unit/kvstore/test_servicer.py",
    "tests/unit/scheduler/test_",
    "tests/unit/test_cli.py",
    "tests/unit/test_launcher_probes.py",
    "tests/unit/test_launcher_supervisor.py",
    "tests/unit/tokenizer/test_routing.py",
    "tests/unit/tokenizer/test_service.py",
    "tests/unit/tokenizer/test_session.py",
    "tests/unit/worker/test_",
)
"""Tests with heartbeats, time-outs or whole processes: they mean something only where the machine
really gives a core to who is busy; see ``machine.cpu_share``."""


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
        help="Unix time after which tests that have not begun fail at once: not run is not passed.",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Too late, test files are not even read: then nothing was tested, which is a failure too."""
    return True if collection_path.suffix == ".py" and _is_late(config) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what would begin too late; skip what means nothing on a machine not in health."""
    if _is_late(item.config):
        pytest.fail("the time for the whole run was used up before this test began", pytrace=False)
    if _is_timed(item):
        share = _share_of(item.path)
        if share < MIN_CPU_SHARE:
            pytest.skip(f"not run: the machine gives a busy loop {share:.0%} of a core only")


def _is_late(config: pytest.Config) -> bool:
    deadline: float | None = config.getoption("--deadline")
    return deadline is not None and time.time() > deadline


def _is_timed(item: pytest.Item) -> bool:
    path = item.path.relative_to(item.config.rootpath).as_posix()
    return path.startswith(TIMED)


@cache
def _share_of(_module: Path) -> float:
    return cpu_share()
