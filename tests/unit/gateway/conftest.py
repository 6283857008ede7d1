"""A desk of its own for every test."""

from __future__ import annotations

import pytest

from tests.unit.gateway.desk import Desk


@pytest.fixture
def desk() -> Desk:
    """A request's way without HTTP and gRPC."""
    return Desk()
