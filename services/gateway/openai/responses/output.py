"""What a response gives, item after item: thoughts, messages and calls, as events and as JSON.

One item is open at a time: it is added, gets its pieces, and is done.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

from services.gateway.openai.responses.events import Events
from services.gateway.openai.responses.items import Item, new_item_id
from services.gateway.tool_calls.base import CallPart, parse_json

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"

Logprobs = list[dict[str, Any]]


class OutputItem:
    """One item: ``open``, then pieces, then ``close``.

    Attributes:
        status: in_progress, completed or incomplete.
    """

    def __init__(self, item_id: str, index: int, events: Events) -> None:
        """
        Args:
            item_id: Unique.
            index: Among the response's items.
            events: Told of what happens.
        """
        self.status = IN_PROGRESS
        self._id = item_id
        self._events = events
        self._place = {"item_id": item_id, "output_index": index}

    @abstractmethod
    def as_json(self) -> Item:
        """What it is by now."""

    def open(self) -> None:
        """The item comes into being."""
        self._tell_whole("response.output_item.added")

    def close(self, status: str) -> None:
        """Nothing more will come."""
        self.status = status
        self._tell_whole("response.output_item.done")

    def _tell_whole(self, kind: str) -> None:
        index = self._place["output_index"]
        self._events.add(kind, output_index=index, item=self.as_json())


class TextItem(OutputItem):
    """An item whose content is one part of text."""

    _text_kind: str
    """Begins the names of the events of its text."""

    def __init__(self, item_id: str, index: int, events: Events) -> None:
        """See ``OutputItem``."""
        super().__init__(item_id, index, events)
        self._pieces: list[str] = []
        self._has_part = False
        self._place["content_index"] = 0

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._pieces)

    @property
    def parts(self) -> list[Item]:
        """Its content so far."""
        return [self._part()] if self._has_part else []

    @abstractmethod
    def _part(self) -> Item:
        """The part so far."""

    def open(self) -> None:
        """See ``OutputItem``; the part is there at once."""
        super().open()
        self._has_part = True
        self._events.add("response.content_part.added", **self._place, part=self._part())

    def close(self, status: str) -> None:
        """See ``OutputItem``."""
        self._events.add(f"{self._text_kind}.done", **self._place, **self._text_fields())
        self._events.add("response.content_part.done", **self._place, part=self._part())
        super().close(status)

    def _text_fields(self) -> Item:
        return {"text": self.text}


class Thought(TextItem):
    """What is thought before the answer."""

    _text_kind = "response.reasoning_text"

    def __init__(self, index: int, events: Events) -> None:
        """See ``OutputItem``."""
        super().__init__(new_item_id("rs"), index, events)

    def add(self, text: str) -> None:
        """More of it."""
        self._pieces.append(text)
        self._events.add("response.reasoning_text.delta", **self._place, delta=text)

    def _part(self) -> Item:
        return {"type": "reasoning_text", "text": self.text}

    def as_json(self) -> Item:
        """See ``OutputItem``."""
        return {
            "id": self._id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": self.parts,
            "encrypted_content": None,
        }


class Message(TextItem):
    """Text for the reader."""

    _text_kind = "response.output_text"

    def __init__(self, index: int, events: Events) -> None:
        """See ``OutputItem``."""
        super().__init__(new_item_id("msg"), index, events)
        self._logprobs: Logprobs = []

    def add(self, text: str, logprobs: Logprobs) -> None:
        """More of it, and the log-probabilities of its tokens, if they were asked for."""
        self._pieces.append(text)
        self._logprobs += logprobs
        self._events.add("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def _text_fields(self) -> Item:
        return {"text": self.text, "logprobs": self._logprobs}

    def _part(self) -> Item:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def as_json(self) -> Item:
        """See ``OutputItem``."""
        return {
            "id": self._id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": self.parts,
        }


class Call(OutputItem):
    """A call of a function."""

    def __init__(self, name: str, index: int, events: Events) -> None:
        """
        Args:
            name: Of the function.
            index: Among the response's items.
            events: Told of what happens.
        """
        super().__init__(new_item_id("fc"), index, events)
        self._call_id = new_item_id("call")
        self._name = name
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """JSON text so far."""
        return "".join(self._pieces)

    def add(self, arguments: str) -> None:
        """More of its arguments."""
        if arguments:
            self._pieces.append(arguments)
            self._events.add(
                "response.function_call_arguments.delta", **self._place, delta=arguments
            )

    def close(self, status: str) -> None:
        """See ``OutputItem``; a call whose arguments are all there is complete."""
        self._events.add(
            "response.function_call_arguments.done", **self._place, arguments=self.arguments
        )
        is_whole = isinstance(parse_json(self.arguments), dict)
        super().close(COMPLETED if is_whole else status)

    def as_json(self) -> Item:
        """See ``OutputItem``."""
        return {
            "id": self._id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.arguments,
        }


T = TypeVar("T", bound=OutputItem)


class Output:
    """The items of a response, in the order in which they come."""

    def __init__(self, events: Events) -> None:
        """
        Args:
            events: Told of what happens.
        """
        self._events = events
        self._items: list[OutputItem] = []

    def as_json(self) -> list[Item]:
        """Every item, as it is by now."""
        return [item.as_json() for item in self._items]

    def think(self, text: str) -> None:
        """More of a thought."""
        last = self._open_item()
        if not isinstance(last, Thought):
            last = self._begin(Thought(len(self._items), self._events))
        last.add(text)

    def say(self, text: str, logprobs: Logprobs) -> None:
        """More of a message."""
        last = self._open_item()
        if not isinstance(last, Message):
            last = self._begin(Message(len(self._items), self._events))
        last.add(text, logprobs)

    def call(self, part: CallPart) -> None:
        """More of a call."""
        last = self._open_item()
        if part.name or not isinstance(last, Call):
            last = self._begin(Call(part.name, len(self._items), self._events))
        last.add(part.arguments)

    def finish_text(self, logprobs: Logprobs) -> None:
        """Log-probabilities of the last tokens, which have no text, if a message is open."""
        last = self._open_item()
        if logprobs and isinstance(last, Message):
            last.add("", logprobs)

    def require_answer(self) -> None:
        """Thoughts alone are no answer: then it is an empty message."""
        if all(isinstance(item, Thought) for item in self._items):
            self._begin(Message(len(self._items), self._events))

    def end(self, status: str) -> None:
        """Nothing more will come.

        Args:
            status: Of the item that is still open.
        """
        last = self._open_item()
        if last is not None:
            last.close(status)

    def _open_item(self) -> OutputItem | None:
        """The last item, unless it is closed."""
        last = self._items[-1] if self._items else None
        return last if last is not None and last.status == IN_PROGRESS else None

    def _begin(self, item: T) -> T:
        """Close the item that is open and open the next."""
        last = self._open_item()
        if last is not None:
            last.close(COMPLETED)
        self._items.append(item)
        item.open()
        return item
