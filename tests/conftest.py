"""What all tests share: the packaged model, and how hypothesis runs."""

from __future__ import annotations

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
