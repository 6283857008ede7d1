"""The one error tree: what can go wrong, and how it looks over gRPC and over HTTP.

Each class carries its gRPC status name and HTTP status. A class travels by its *name* (in
``google.rpc.ErrorInfo.reason``, or in ``ErrorDetail.error_class`` of a finish), because several
classes share a gRPC status. Knows neither grpc nor HTTP libraries: ``common/rpc.py`` and the
gateway translate.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_KILLED = 130
"""Exit codes of every process: 2 = a setting cannot be used, 130 = nobody waited for a drain."""
SERVICE_FAILED = "service_failed"
"""The event that says why a process ends before its time, in its field ``error``."""


class SluicewayError(Exception):
    """Base of every error that may cross a service's edge.

    Args:
        message: What is wrong and how to mend it; shown to the user.
        param: The request field at fault, in the user's spelling.
        retry_after_s: When trying again may help, in seconds.
        code: OpenAI's ``error.code`` where it differs from the class's own.
    """

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "internal_error"
    openai_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.code = code if code is not None else self.openai_code


class InvalidRequest(SluicewayError):
    """A bad parameter, schema or constraint, or a body that cannot be read."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    openai_type = "invalid_request_error"


class TooLarge(InvalidRequest):
    """The request body is larger than allowed."""

    http_status = 413


class MethodNotAllowed(InvalidRequest):
    """The route exists but not with this method."""

    http_status = 405


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output do not fit the model's context or the KV pool."""

    grpc_status = "OUT_OF_RANGE"
    openai_code = "context_length_exceeded"


class Unauthenticated(SluicewayError):
    """No key, or a wrong one."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"
    openai_code = "invalid_api_key"


class NotFound(SluicewayError):
    """An unknown route, model, adapter or object."""

    grpc_status = "NOT_FOUND"
    http_status = 404
    openai_type = "not_found_error"


class ModelNotFound(NotFound):
    """The model named in the request is not served here."""

    openai_code = "model_not_found"


class Overloaded(SluicewayError):
    """A queue is full, a tenant is over its limit, or a deadline cannot be met."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"
    openai_code = "overloaded"


class Unavailable(SluicewayError):
    """No worker yet, starting, or draining: another copy may serve it."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    openai_type = "service_unavailable_error"
    openai_code = "unavailable"


class WorkerLost(SluicewayError):
    """A worker, scheduler or tokenizer died while it held the request."""

    grpc_status = "UNAVAILABLE"
    http_status = 502
    openai_type = "upstream_error"
    openai_code = "worker_lost"


class DeadlineExceeded(SluicewayError):
    """The request's own deadline has passed."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    openai_type = "timeout_error"
    openai_code = "deadline_exceeded"


class Cancelled(SluicewayError):
    """The client has gone; nobody reads the answer."""

    grpc_status = "CANCELLED"
    http_status = 499
    openai_type = "cancelled"


class RequestFailed(SluicewayError):
    """This request alone failed inside the engine (NaN logits, a grammar that broke)."""

    openai_code = "request_failed"


class InvariantError(SluicewayError):
    """Something that we own is broken. A bug."""


class ConfigError(SluicewayError):
    """A setting is unknown or has a value that cannot be used."""

    grpc_status = "FAILED_PRECONDITION"


def _tree(root: type[SluicewayError]) -> dict[str, type[SluicewayError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_NAME = _tree(SluicewayError)


def error_from_name(
    name: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> SluicewayError:
    """Build the error that another process named.

    Args:
        name: A class name of this tree; an unknown one (a newer peer's) becomes the base class.
        message: Its message.
        param: The field at fault, if any.
        retry_after_s: Seconds, if any.
    """
    return _BY_NAME.get(name, SluicewayError)(message, param=param, retry_after_s=retry_after_s)
