"""The reply to POST /v1/messages: blocks, in events or whole, and the message around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.answer import AnswerParser
from services.gateway.anthropic.blocks import Blocks
from services.gateway.generation import ChoiceUpdate, Finish, Update
from services.gateway.openai.reply import count
from services.gateway.openai.usage import UsageTally
from services.gateway.sse import named_event

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """What a message has to show.

    Attributes:
        message_id: "msg_...".
        model: Served name.
        shows_thoughts: Whether thoughts are part of it.
    """

    message_id: str
    model: str
    shows_thoughts: bool


class MessageReply:
    """Makes the reply of one request; see ``Reply``."""

    needs_prompt_text = False

    def __init__(self, options: MessageOptions, *, parser: AnswerParser) -> None:
        """
        Args:
            options: What is to be shown.
            parser: Of the answer.
        """
        self.tally = UsageTally()
        self._options = options
        self._parser = parser
        self._blocks = Blocks()
        self._has_begun = False
        self._finish: Finish | None = None

    def set_prompt(self, prompt_index: int, *, text: str, first_token_text: str) -> None:
        """Never needed: the prompt is not echoed."""

    def events(self, prompt_index: int, update: Update) -> bytes:
        """Events of one update."""
        self._take(prompt_index, update)
        return self._begin() + self._blocks.take_events()

    def last_events(self) -> bytes:
        """Events that end a stream in which the choice has finished."""
        self._blocks.close()
        end = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        return self._blocks.take_events() + named_event(end) + named_event({"type": "message_stop"})

    def absorb(self, prompt_index: int, update: Update) -> None:
        """Keep one update."""
        self._take(prompt_index, update)
        self._blocks.take_events()

    def whole(self) -> JsonObject:
        """The message, once the choice has finished."""
        self._blocks.close()
        return self._message(self._blocks.as_json(), self._ending())

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        return named_event({"type": "message_start", "message": message}) + named_event(
            {"type": "ping"}
        )

    def _take(self, prompt_index: int, update: Update) -> None:
        count(self.tally, prompt_index, update)
        for choice in update.choices:
            self._take_choice(choice)

    def _take_choice(self, update: ChoiceUpdate) -> None:
        delta = self._parser.feed(
            update.text, num_tokens=len(update.token_ids), is_end=update.finish is not None
        )
        self._finish = update.finish
        self.tally.reasoned(update.index, self._parser.num_reasoning_tokens)
        if delta.reasoning and self._options.shows_thoughts:
            self._blocks.think(delta.reasoning)
        for part in delta.parts or ((delta.content,) if delta.content else ()):
            if isinstance(part, str):
                self._blocks.say(part)
            else:
                self._blocks.call(part)

    def _message(self, content: list[JsonObject], ending: JsonObject) -> JsonObject:
        return {
            "id": self._options.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": content,
            **ending,
            "usage": self._usage(),
        }

    def _ending(self) -> JsonObject:
        """Why it ended, and the text that ended it."""
        assert self._finish is not None
        stop = self._finish.stop_reason
        if self._finish.reason == "length":
            reason = "max_tokens"
        elif self._blocks.has_called:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        return {
            "stop_reason": reason,
            "stop_sequence": stop if reason == "stop_sequence" else None,
        }

    def _usage(self) -> JsonObject:
        """Tokens so far; what the prefix cache had is not part of the input tokens."""
        usage = self.tally.as_json()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,  # nothing is written because a request asks for it
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": thought},
        }
