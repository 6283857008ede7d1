"""``tools`` and ``tool_choice`` as a chat's. Only functions are offered, no hosted tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.openai.responses.schema import FunctionTool

JsonObject = dict[str, Any]


def check_tool_types(tools: object) -> None:
    """Refuse tools that are not offered by the name of their type, before types are checked.

    Raises:
        InvalidRequest: Names the tool.
    """
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise _not_offered(f"tools[{index}]", kind)


def _not_offered(where: str, kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: tools of type {kind[:40]!r} are not offered here, only functions", param=where
    )


def chat_tools(tools: Sequence[FunctionTool]) -> list[JsonObject]:
    """The tools as chat writes them."""
    return [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in tools
    ]


def chat_tool_choice(choice: object) -> object:
    """``tool_choice`` as chat writes it.

    Raises:
        InvalidRequest: It means nothing, or a tool that is not offered.
    """
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return _named(name)
        case {
            "type": "allowed_tools",
            "mode": ("auto" | "required") as mode,
            "tools": [_, *_] as named,
        }:
            allowed = [_allowed(tool, index) for index, tool in enumerate(named)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise _not_offered("tool_choice", kind)
        case _:
            raise InvalidRequest(
                'tool_choice must be none, auto, required, {"type": "function", "name": ...} or '
                '{"type": "allowed_tools", "mode": ..., "tools": [...]}, '
                f"got {repr(choice)[:60]}",
                param="tool_choice",
            )


def _named(name: str) -> JsonObject:
    return {"type": "function", "function": {"name": name}}


def _allowed(tool: object, index: int) -> JsonObject:
    where = f"tool_choice.tools[{index}]"
    match tool:
        case {"type": "function", "name": str(name)}:
            return _named(name)
        case {"type": str(kind)} if kind != "function":
            raise _not_offered(where, kind)
        case _:
            raise InvalidRequest(f"{where} must name a function", param=where)
