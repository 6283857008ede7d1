"""Input items: checked beyond their types, and in the shape in which they are stored and listed.

An item in that shape (``Item``) has an id and a status; content is a list of parts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.openai.messages import MAX_PARTS
from services.gateway.openai.responses.schema import (
    ITEM_TYPES,
    CallItem,
    CallOutputItem,
    InputPart,
    ItemReference,
    MessageItem,
    ReasoningItem,
    item_type,
)
from services.gateway.tool_calls.base import parse_json

Item = dict[str, Any]
ParsedItem = MessageItem | CallItem | CallOutputItem | ReasoningItem | ItemReference

TEXT_PARTS = ("input_text", "output_text")


def new_item_id(prefix: str) -> str:
    """A unique id: ``prefix`` ("msg", "rs", "fc", "fco") and 96 random bits."""
    return f"{prefix}_{secrets.token_hex(12)}"


def check_item_types(given: object) -> None:
    """Refuse items that are not offered by the name of their type, before types are checked.

    Raises:
        InvalidRequest: Names the item.
    """
    if not isinstance(given, list):
        return
    for index, item in enumerate(given):
        kind = item_type(item)
        if isinstance(item, dict) and kind not in ITEM_TYPES:
            where = f"input[{index}]"
            raise InvalidRequest(
                f"{where}: items of type {str(kind)[:40]!r} are not supported here, only "
                + ", ".join(ITEM_TYPES),
                param=where,
            )


def items_of(given: str | Sequence[ParsedItem]) -> list[Item]:
    """The input of a request as items; references stay what they are.

    Args:
        given: Types checked.

    Raises:
        InvalidRequest: Names the item that says nothing, or what a text model cannot read.
    """
    if isinstance(given, str):
        return [_message_of_user(given)]
    if not given:
        raise InvalidRequest("input must hold at least one item", param="input")
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def resolved(items: Sequence[Item], find: Callable[[str], Item | None]) -> list[Item]:
    """Items, with those in the place of references that they refer to.

    Args:
        items: Of ``items_of``.
        find: Gives the item of an id.

    Raises:
        InvalidRequest: Names the reference that leads nowhere.
    """
    return [_resolved(item, find, f"input[{index}]") for index, item in enumerate(items)]


def _resolved(item: Item, find: Callable[[str], Item | None], where: str) -> Item:
    if item["type"] != "item_reference":
        return item
    found = find(item["id"])
    if found is None:
        field = f"{where}.id"
        raise InvalidRequest(
            f"{field}: no stored response has an item with the id {item['id'][:60]!r}", param=field
        )
    return found


def _message_of_user(text: str) -> Item:
    return _message(None, "user", [{"type": "input_text", "text": text}])


def _message(item_id: str | None, role: str, content: list[Item]) -> Item:
    return {
        "id": item_id or new_item_id("msg"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": content,
    }


def _item(item: ParsedItem, where: str) -> Item:
    match item:
        case MessageItem():
            is_answer = item.role == "assistant"
            kind = "output_text" if is_answer else "input_text"
            return _message(item.id, item.role, _parts(item.content, kind, f"{where}.content"))
        case CallItem():
            return _call(item, where)
        case CallOutputItem():
            return _call_output(item, where)
        case ReasoningItem():
            return _reasoning(item)
        case ItemReference():
            return {"type": "item_reference", "id": item.id}


def _parts(content: str | Sequence[InputPart], kind: str, where: str) -> list[Item]:
    if isinstance(content, str):
        return [_text_part(kind, content)]
    if not content:
        raise InvalidRequest(f"{where} must not be an empty list", param=where)
    if len(content) > MAX_PARTS:
        raise InvalidRequest(f"{where} has {len(content)} parts; at most {MAX_PARTS}", param=where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: InputPart, where: str) -> Item:
    if part.type not in (*TEXT_PARTS, "refusal"):
        raise InvalidRequest(
            f"{where}: this model reads text only, got a part of type {part.type[:40]!r}",
            param=where,
        )
    name = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"{where}.{name} is required", param=f"{where}.{name}")
    return _text_part(part.type, text)


def _text_part(kind: str, text: str) -> Item:
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    part = {"type": kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "output_text" else part


def _call(item: CallItem, where: str) -> Item:
    if not isinstance(parse_json(item.arguments or "{}"), dict):
        field = f"{where}.arguments"
        raise InvalidRequest(f"{field} must be the JSON text of an object", param=field)
    return {
        "id": item.id or new_item_id("fc"),
        "type": "function_call",
        "call_id": item.call_id,
        "name": item.name,
        "arguments": item.arguments,
        "status": "completed",
    }


def _call_output(item: CallOutputItem, where: str) -> Item:
    output: str | list[Item] = item.output if isinstance(item.output, str) else []
    if not isinstance(item.output, str):
        output = _parts(item.output, "input_text", f"{where}.output")
    return {
        "id": item.id or new_item_id("fco"),
        "type": "function_call_output",
        "call_id": item.call_id,
        "output": output,
        "status": "completed",
    }


def _reasoning(item: ReasoningItem) -> Item:
    return {
        "id": item.id or new_item_id("rs"),
        "type": "reasoning",
        "summary": item.summary or [],
        "content": [{"type": "reasoning_text", "text": part.text} for part in item.content or ()],
        "encrypted_content": item.encrypted_content,
        "status": "completed",
    }
