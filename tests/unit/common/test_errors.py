"""The error tree and its table."""

import grpc
import pytest

from services.common import errors
from services.common.errors import SluicewayError, error_from_name

TABLE = {
    "InvalidRequest": ("INVALID_ARGUMENT", 400),
    "TooLarge": ("INVALID_ARGUMENT", 413),
    "ContextLengthExceeded": ("OUT_OF_RANGE", 400),
    "Unauthenticated": ("UNAUTHENTICATED", 401),
    "NotFound": ("NOT_FOUND", 404),
    "ModelNotFound": ("NOT_FOUND", 404),
    "Overloaded": ("RESOURCE_EXHAUSTED", 429),
    "Unavailable": ("UNAVAILABLE", 503),
    "WorkerLost": ("UNAVAILABLE", 502),
    "DeadlineExceeded": ("DEADLINE_EXCEEDED", 504),
    "Cancelled": ("CANCELLED", 499),
    "InvariantError": ("INTERNAL", 500),
}


@pytest.mark.parametrize(("name", "statuses"), TABLE.items())
def test_each_error_has_its_grpc_and_http_status(name: str, statuses: tuple[str, int]) -> None:
    cls = getattr(errors, name)
    assert (cls.grpc_status, cls.http_status) == statuses
    assert hasattr(grpc.StatusCode, cls.grpc_status)


def test_an_error_survives_the_trip_by_its_class_name() -> None:
    error = error_from_name("Overloaded", "full", param="n", retry_after_s=2.5)
    assert type(error) is errors.Overloaded
    assert (error.message, error.param, error.retry_after_s) == ("full", "n", 2.5)


def test_an_unknown_class_name_becomes_an_internal_error() -> None:
    assert type(error_from_name("FromTheFuture", "x")) is SluicewayError
    assert SluicewayError.http_status == 500
