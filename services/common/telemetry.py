"""Logs with request ids, and the HTTP door of a process's metrics.

A log line is an event name and fields. Fields bound with ``bind_request`` or ``bind_task`` are on
every line of the task that bound them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import structlog
from prometheus_client import start_http_server


def configure_logging(
    service: str, *, level: str = "info", log_format: Literal["console", "json"] = "console"
) -> None:
    """Set up structlog for this process; standard-library loggers go through it as well.

    Args:
        service: Name on every line.
        level: Least severe level that is written.
        log_format: "json" = one object a line on standard output.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_service(service),
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        # Plain: where rich is installed, the default prints every local variable, prompts included.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    formatting: list[Any] = [structlog.processors.format_exc_info] if log_format == "json" else []
    severity = getattr(logging, level.upper())
    structlog.configure(
        processors=[*shared, *formatting, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *formatting,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(severity, logging.WARNING))


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry the module that wrote them."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger


@contextmanager
def bind_request(**fields: Any) -> Iterator[None]:
    """Put fields (``request_id=...``) on every line logged inside."""
    with structlog.contextvars.bound_contextvars(**fields):
        yield


def bind_task(**fields: Any) -> None:
    """Put fields on every line that this task logs from now on, and those that it starts."""
    structlog.contextvars.bind_contextvars(**fields)


def bound_field(name: str) -> str | None:
    """A field that ``bind_request`` or ``bind_task`` has put on the lines of this task."""
    value = structlog.contextvars.get_contextvars().get(name)
    return None if value is None else str(value)


def start_metrics_server(host: str, port: int) -> int:
    """Serve ``/metrics`` of the default registry over HTTP in a thread of its own.

    Returns:
        The port, also where 0 (any free one) was asked for.
    """
    server, _ = start_http_server(port, addr=host)
    return int(server.server_port)


def _add_service(service: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event["service"] = service
        return event

    return add
