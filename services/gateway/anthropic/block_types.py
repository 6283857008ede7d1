"""Blocks and tools that are not offered are refused by the name of their type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidRequest

_OFFERED = ("text", "thinking", "tool_use", "tool_result")
_OF_TEXT = ("text",)


def check_types(raw: dict[str, Any]) -> None:
    """Look at the types of all blocks and tools, before anything else is checked.

    Raises:
        InvalidRequest: Names the block or the tool.
    """
    _check_blocks(raw.get("system"), "system", _OF_TEXT)
    for index, message in enumerate(_list(raw.get("messages"))):
        content = message.get("content") if isinstance(message, dict) else None
        _check_blocks(content, f"messages[{index}].content", _OFFERED)
    for index, tool in enumerate(_list(raw.get("tools"))):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            where = f"tools[{index}]"
            raise InvalidRequest(
                f"{where}: tools of type {kind[:40]!r} are not offered here, only the client's own",
                param=where,
            )


def _check_blocks(blocks: object, where: str, offered: Sequence[str]) -> None:
    for index, block in enumerate(_list(blocks)):
        kind = block.get("type") if isinstance(block, dict) else None
        field = f"{where}[{index}]"
        if isinstance(kind, str) and kind not in offered:
            raise InvalidRequest(
                f"{field}: blocks of type {kind[:40]!r} are not supported here, "
                f"only {', '.join(offered)}: this model reads text",
                param=field,
            )
        if kind == "tool_result":
            _check_blocks(block.get("content"), f"{field}.content", _OF_TEXT)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
