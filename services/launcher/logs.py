"""The merged log: one line per event of any child, behind the child's name.

Children log JSON objects on standard output; whatever else they print (a traceback) passes as is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import SERVICE_FAILED, ConfigError

NAME_WIDTH = 10
_COLORS = {"warning": "\033[33m", "error": "\033[31m", "critical": "\033[31m"}
_DIM, _RESET = "\033[2m", "\033[0m"
_NOT_FIELDS = frozenset({"event", "level", "timestamp", "service", "module", "exception"})


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event that a child logged.

    Attributes:
        event: Its name.
        level: "info", "warning", ...
        time: "HH:MM:SS" in UTC; "" if the child gave none.
        fields: Everything else that was logged with it.
        traceback: "" = none.
    """

    event: str
    level: str
    time: str
    fields: Mapping[str, Any]
    traceback: str


def parse_event(line: str) -> LogEvent | None:
    """The event that a line of a child's output holds, or ``None`` for any other text."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(found, dict) or "event" not in found:
        return None
    return LogEvent(
        event=str(found["event"]),
        level=str(found.get("level", "info")),
        time=str(found.get("timestamp", ""))[11:19],
        fields={key: value for key, value in found.items() if key not in _NOT_FIELDS},
        traceback=str(found.get("exception", "")),
    )


def reported_error(line: str) -> str:
    """What a child said that it failed of; "" if a line of its output says no such thing."""
    event = parse_event(line)
    if event is None or event.event != SERVICE_FAILED:
        return ""
    return str(event.fields.get("error", "")).removeprefix(f"{ConfigError.__name__}: ")


def format_event(child: str, event: LogEvent, *, color: bool) -> str:
    """One event as a line for people, its traceback below it."""
    fields = " ".join(f"{key}={_short(value)}" for key, value in event.fields.items())
    level = "" if event.level in ("info", "debug") else f"{event.level.upper()} "
    head = f"{event.time} {child:<{NAME_WIDTH}} "
    body = f"{level}{event.event}"
    if color:
        head = f"{_DIM}{head}{_RESET}"
        body = f"{_COLORS.get(event.level, '')}{body}{_RESET}"
        fields = f"{_DIM}{fields}{_RESET}" if fields else ""
    line = f"{head}{body} {fields}".rstrip()
    return f"{line}\n{event.traceback}" if event.traceback else line


def format_text(child: str, line: str) -> str:
    """Output of a child that is no event."""
    return f"{'':8} {child:<{NAME_WIDTH}} {line}"


def format_json(child: str, line: str) -> str:
    """Any output of a child as one JSON object that names the child."""
    event = parse_event(line)
    fields = json.loads(line) if event is not None else {"event": "output", "text": line}
    return json.dumps({"child": child, **fields}, ensure_ascii=False)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value if value and " " not in value else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False, default=str)
