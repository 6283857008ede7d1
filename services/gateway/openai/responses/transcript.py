"""Items of a conversation as the messages of a chat.

What the model said between two turns of the others, thought, text and calls, is one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.openai.responses.items import Item

Message = dict[str, Any]


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[Message]:
    """The chat that a conversation is.

    Args:
        instructions: Go in front of it.
        items: In the shape in which they are stored; no references.
    """
    transcript = _Transcript()
    if instructions is not None:
        transcript.say({"role": "system", "content": instructions})
    for item in items:
        transcript.add(item)
    return transcript.messages


def check_calls(history: Sequence[Item], given: Sequence[Item]) -> None:
    """Every output must be that of a call before it.

    Args:
        history: What the conversation was.
        given: Items of the request that goes on with it.

    Raises:
        InvalidRequest: Names the output without a call.
    """
    called = {item["call_id"] for item in history if item["type"] == "function_call"}
    for index, item in enumerate(given):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            field = f"input[{index}].call_id"
            raise InvalidRequest(
                f"{field}: no function_call before it has the call_id {item['call_id'][:60]!r}",
                param=field,
            )


class _Transcript:
    """Messages, and the model's turn that is still being put together."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None

    def say(self, message: Message) -> None:
        """A message of someone else, or one that stands for itself."""
        self._turn = None
        self.messages.append(message)

    def add(self, item: Item) -> None:
        """The next item."""
        match item["type"]:
            case "reasoning":
                self._think("\n".join(part["text"] for part in item["content"]))
            case "function_call":
                self._call(item)
            case "function_call_output":
                content = _content(item["output"])
                call_id = item["call_id"]
                self.say({"role": "tool", "tool_call_id": call_id, "content": content})
            case _ if item["role"] == "assistant":
                self._answer(_content(item["content"]))
            case _:
                self.say({"role": item["role"], "content": _content(item["content"])})

    def _think(self, text: str) -> None:
        if text:
            self._open_turn(ended_by=("reasoning", "content", "tool_calls"))["reasoning"] = text

    def _answer(self, content: Any) -> None:
        self._open_turn(ended_by=("content", "tool_calls"))["content"] = content

    def _call(self, item: Item) -> None:
        if item["status"] != "completed":
            return  # cut off: half of a call is none
        turn = self._open_turn(ended_by=())
        turn.setdefault("tool_calls", []).append(
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
        )

    def _open_turn(self, *, ended_by: tuple[str, ...]) -> Message:
        """The model's message; a new one if it has any of these already."""
        turn = self._turn
        if turn is None or any(turn.get(name) is not None for name in ended_by):
            turn = {"role": "assistant", "content": None}
            self.messages.append(turn)
            self._turn = turn
        return turn


def _content(content: str | Sequence[Item]) -> Any:
    """Content of a chat's message; one text is written as such."""
    if isinstance(content, str):
        return content
    parts = [
        {"type": "refusal", "refusal": part["refusal"]}
        if part["type"] == "refusal"
        else {"type": "text", "text": part["text"]}
        for part in content
    ]
    is_one_text = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if is_one_text else parts
