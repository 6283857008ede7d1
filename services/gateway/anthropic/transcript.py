"""A conversation of turns and blocks as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.gateway.anthropic.schema import (
    Block,
    ConversationBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    TurnMessage,
)

JsonObject = dict[str, Any]
PlacedBlock = tuple[str, Block]
"""The field that a block is in, and the block."""


def chat_messages(body: ConversationBody) -> list[JsonObject]:
    """The messages of the chat that says the same.

    Raises:
        InvalidRequest: A block stands where it cannot be, a result answers no call, or the last
            turn cannot be continued.
    """
    calls: set[str] = set()
    messages = _system(body.system)
    for role, blocks in _turns(body.messages):
        match role:
            case "assistant":
                messages.append(_assistant(blocks, calls))
            case "user":
                messages += _user(blocks, calls)
            case _:
                messages.append({"role": "system", "content": _content(_texts(role, blocks))})
    if ends_with_assistant(body):
        _check_continued(messages[-1], f"messages[{len(body.messages) - 1}]")
    return messages


def ends_with_assistant(body: ConversationBody) -> bool:
    """Whether the answer goes on with the last message."""
    return body.messages[-1].role == "assistant"


def _system(system: str | Sequence[TextBlock] | None) -> list[JsonObject]:
    if not system:
        return []
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return [{"role": "system", "content": _content(texts)}]


def _turns(messages: Sequence[TurnMessage]) -> list[tuple[str, list[PlacedBlock]]]:
    """Messages of one role in a row are one turn."""
    turns: list[tuple[str, list[PlacedBlock]]] = []
    for index, message in enumerate(messages):
        blocks = list(_blocks(message, f"messages[{index}].content"))
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return turns


def _blocks(message: TurnMessage, where: str) -> Iterator[PlacedBlock]:
    if isinstance(message.content, str):
        yield where, TextBlock(type="text", text=message.content)
        return
    if not message.content:
        raise InvalidRequest(f"{where} must not be empty", param=where)
    for index, block in enumerate(message.content):
        yield f"{where}[{index}]", block


def _assistant(blocks: Sequence[PlacedBlock], calls: set[str]) -> JsonObject:
    texts: list[str] = []
    thoughts: list[str] = []
    made: list[JsonObject] = []
    for where, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.add(block.id)
                made.append(_call(block))
            case _:
                raise _misplaced(where, block, "assistant")
    message: JsonObject = {"role": "assistant", "content": _content(texts) if texts else None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if made:
        message["tool_calls"] = made
    return message


def _call(block: ToolUseBlock) -> JsonObject:
    arguments = orjson.dumps(block.input).decode()
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _user(blocks: Sequence[PlacedBlock], calls: set[str]) -> list[JsonObject]:
    messages: list[JsonObject] = []
    texts: list[str] = []

    def say() -> None:
        if texts:
            messages.append({"role": "user", "content": _content(texts)})
            texts.clear()

    for where, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                say()
                messages.append(_result(where, block, calls))
            case _:
                raise _misplaced(where, block, "user")
    say()
    return messages


def _result(where: str, block: ToolResultBlock, calls: set[str]) -> JsonObject:
    if block.tool_use_id not in calls:
        field = f"{where}.tool_use_id"
        raise InvalidRequest(
            f"{field}: no tool_use block before it has the id {block.tool_use_id[:60]!r}",
            param=field,
        )
    given = block.content or ""
    texts = [given] if isinstance(given, str) else [part.text for part in given]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(texts)}


def _texts(role: str, blocks: Sequence[PlacedBlock]) -> list[str]:
    texts = []
    for where, block in blocks:
        if not isinstance(block, TextBlock):
            raise _misplaced(where, block, role)
        texts.append(block.text)
    return texts


def _misplaced(where: str, block: Block, role: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: the {role}'s turn has no {block.type} blocks", param=where)


def _content(texts: Sequence[str]) -> str | list[JsonObject]:
    """One text as it is, several as parts: their template knows how they stand together."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _check_continued(message: JsonObject, where: str) -> None:
    if message.get("tool_calls") or not message["content"]:
        raise InvalidRequest(
            f"{where}: only a last turn that is text can be continued; "
            "after tool_use there must be the user's tool_result",
            param=where,
        )
