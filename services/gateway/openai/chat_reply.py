"""The reply to a chat: content, thought and tool calls of each choice, in chunks or whole."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.answer import AnswerDelta, AnswerParser
from services.gateway.generation import ChoiceUpdate, Finish, Update
from services.gateway.openai.logprobs import TokenNames, chat_entries, prompt_logprobs
from services.gateway.openai.reply import (
    ChoiceText,
    ChunkFrame,
    PromptFacts,
    ReplyHead,
    StreamUsage,
    count,
    ending,
    is_silent,
)
from services.gateway.openai.usage import UsageTally
from services.gateway.tool_calls.base import CallPart

_ROLE = b'{"role":"assistant","content":""}'


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat's reply has to show.

    Attributes:
        n: Number of choices.
        usage: When a stream tells usage.
        num_top: Alternatives per token; ``None`` = no log-probabilities.
        num_top_of_prompt: The same for the prompt (``prompt_logprobs``).
        returns_token_ids: Whether choices carry ``token_ids``.
        as_token_ids: Whether log-probabilities name tokens by id.
        parser: Makes one for the text of one choice.
        shows_reasoning: Whether the thought is part of the reply.
        ends_with_calls: Whether a choice that has called ends with "tool_calls".
    """

    n: int
    usage: StreamUsage
    num_top: int | None
    num_top_of_prompt: int | None
    returns_token_ids: bool
    as_token_ids: bool
    parser: Callable[[], AnswerParser]
    shows_reasoning: bool
    ends_with_calls: bool


class ChatReply:
    """Makes the reply of one chat request."""

    needs_prompt_text = False

    def __init__(self, head: ReplyHead, options: ChatOptions) -> None:
        """
        Args:
            head: Id, time and model.
            options: What is to be shown.
        """
        self.tally = UsageTally()
        self._head = head
        self._options = options
        self._frame = ChunkFrame(head, kind="chat.completion.chunk", usage=options.usage)
        self._choices = [_ChatChoice(index, options) for index in range(options.n)]
        self._prompt = PromptFacts()

    def set_prompt(self, prompt_index: int, *, text: str, first_token_text: str) -> None:
        """Never needed: a chat is not echoed."""

    def events(self, prompt_index: int, update: Update) -> bytes:
        """Events of one update."""
        self._prompt.take(update)
        count(self.tally, prompt_index, update)
        return b"".join([self._choice_events(choice) for choice in update.choices])

    def _choice_events(self, update: ChoiceUpdate) -> bytes:
        choice = self._choices[update.index]
        delta = self._parse(choice, update)
        pieces = [self._role_event(choice)] if not choice.has_started else []
        has_ids = self._options.returns_token_ids and len(update.token_ids) > 0
        has_news = bool(delta or update.logprobs or has_ids)
        if has_news or is_silent(update):
            shown = _delta_json(delta) if has_news else {}
            body = choice.delta(shown, update, has_ids=has_ids)
            pieces.append(self._frame.chunk(body, tally=self.tally))
        if update.finish is not None:
            pieces.append(self._frame.chunk(choice.end(update.finish), tally=self.tally))
        return b"".join(pieces)

    def _parse(self, choice: _ChatChoice, update: ChoiceUpdate) -> AnswerDelta:
        delta = choice.parse(update)
        self.tally.reasoned(update.index, choice.num_reasoning_tokens)
        return delta

    def _role_event(self, choice: _ChatChoice) -> bytes:
        choice.has_started = True
        ids = list(self._prompt.ids) if self._options.returns_token_ids else None
        extra = b',"prompt_token_ids":' + orjson.dumps(ids) if ids is not None else b""
        return self._frame.chunk(choice.opening, tally=self.tally, extra=extra)

    def last_events(self) -> bytes:
        """Usage, if asked for, and [DONE]."""
        return self._frame.end(self.tally)

    def absorb(self, prompt_index: int, update: Update) -> None:
        """Keep one update."""
        self._prompt.take(update)
        count(self.tally, prompt_index, update)
        for part in update.choices:
            choice = self._choices[part.index]
            choice.absorb(self._parse(choice, part), part)

    def whole(self) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        reply = self._head.as_json("chat.completion") | {
            "choices": [
                choice.whole(has_ids=self._options.returns_token_ids) for choice in self._choices
            ],
            "usage": self.tally.as_json(),
        }
        if self._options.num_top_of_prompt is not None:
            reply["prompt_logprobs"] = prompt_logprobs(
                self._prompt.logprobs,
                num_top=self._options.num_top_of_prompt,
                as_token_ids=self._options.as_token_ids,
            )
        if self._options.returns_token_ids:
            reply["prompt_token_ids"] = list(self._prompt.ids)
        return reply


class _ChatChoice:
    """One choice: its JSON, chunk by chunk or whole."""

    def __init__(self, index: int, options: ChatOptions) -> None:
        self.has_started = False
        self._index = index
        self._num_top = options.num_top
        self._names = TokenNames(as_token_ids=options.as_token_ids)
        self._parser = options.parser()
        self._shows_reasoning = options.shows_reasoning
        self._ends_with_calls = options.ends_with_calls
        self._has_called = False
        self._entries: list[dict[str, Any]] = []
        self._gathered = ChoiceText()
        self._message = _Message()
        self._start = b'{"index":%d,"delta":' % index
        self.opening = self._start + _ROLE + b',"logprobs":null,"finish_reason":null}'

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of its thought so far."""
        return self._parser.num_reasoning_tokens

    def parse(self, update: ChoiceUpdate) -> AnswerDelta:
        """What an update adds; each update must come here once."""
        delta = self._parser.feed(
            update.text, num_tokens=len(update.token_ids), is_end=update.finish is not None
        )
        self._has_called = self._has_called or bool(delta.calls)
        if not self._shows_reasoning:
            delta.reasoning = ""
        return delta

    def delta(self, shown: dict[str, Any], update: ChoiceUpdate, *, has_ids: bool) -> bytes:
        """The choice of a chunk whose delta is ``shown``."""
        ids = b',"token_ids":' + orjson.dumps(list(update.token_ids)) if has_ids else b""
        return b"".join(
            (
                self._start,
                orjson.dumps(shown),
                b',"logprobs":',
                self._logprobs(update),
                b',"finish_reason":null',
                ids,
                b"}",
            )
        )

    def end(self, finish: Finish) -> bytes:
        """The choice of the chunk that ends it."""
        fields = orjson.dumps(self._ending(finish))[1:]
        return self._start + b'{},"logprobs":null,' + fields

    def _ending(self, finish: Finish) -> dict[str, Any]:
        fields = ending(finish)
        if self._has_called and self._ends_with_calls and finish.reason == "stop":
            fields["finish_reason"] = "tool_calls"
        return fields

    def _logprobs(self, update: ChoiceUpdate) -> bytes:
        if self._num_top is None:
            return b"null"
        return orjson.dumps({"content": self._named(update), "refusal": None})

    def _named(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        return chat_entries(
            update.logprobs,
            self._names,
            num_top=self._num_top or 0,
            is_end=update.finish is not None,
        )

    def absorb(self, delta: AnswerDelta, update: ChoiceUpdate) -> None:
        """Keep an update for ``whole``."""
        self._message.add(delta)
        self._gathered.add(update)
        if self._num_top is not None:
            self._entries += self._named(update)

    def whole(self, *, has_ids: bool) -> dict[str, Any]:
        """The choice of a whole reply."""
        assert self._gathered.finish is not None
        logprobs = None if self._num_top is None else {"content": self._entries, "refusal": None}
        choice: dict[str, Any] = {
            "index": self._index,
            "message": self._message.as_json(),
            "logprobs": logprobs,
        }
        choice |= self._ending(self._gathered.finish)
        if has_ids:
            choice["token_ids"] = self._gathered.token_ids
        return choice


def _delta_json(delta: AnswerDelta) -> dict[str, Any]:
    """A chunk's delta; one that only carries log-probabilities has empty content."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning"] = delta.reasoning
    if delta.content or not delta:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [_call_delta(part) for part in delta.calls]
    return fields


def _call_delta(part: CallPart) -> dict[str, Any]:
    """The first part of a call carries id, type and name; the later ones must not."""
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index} | _call_json(part.name, part.arguments)


def _call_json(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


class _Message:
    """The assistant's message of a whole reply."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []  # name, parts of the arguments

    def add(self, delta: AnswerDelta) -> None:
        """Take in what was added."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for part in delta.calls:
            if part.name:
                self._calls.append((part.name, []))
            self._calls[part.index][1].append(part.arguments)

    def as_json(self) -> dict[str, Any]:
        """As OpenAI writes it; thought and calls only if there are some."""
        content = "".join(self._content)
        reasoning = "".join(self._reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if reasoning:
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                _call_json(name, "".join(parts)) for name, parts in self._calls
            ]
        return message
