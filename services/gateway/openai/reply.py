"""What chat and completions share in making a reply out of updates.

A reply is either streamed (``events`` per update, then ``last_events``) or whole (``absorb`` per
update, then ``whole``); both go through the same per-choice steps, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import orjson

from services.gateway.generation import (
    ChoiceUpdate,
    Finish,
    PromptLogprobsPart,
    TokenLogprob,
    Update,
)
from services.gateway.openai.usage import UsageTally
from services.gateway.sse import DONE


class StreamUsage(Enum):
    """When a streamed reply tells its usage."""

    NEVER = 0
    AT_END = 1
    ALWAYS = 2


class Reply(Protocol):
    """Makes the reply of one request."""

    needs_prompt_text: bool
    """Whether ``set_prompt`` must be called for each prompt before its first update."""

    tally: UsageTally

    def set_prompt(self, prompt_index: int, *, text: str, first_token_text: str) -> None:
        """Give the text of a prompt, and of its first token alone."""

    def events(self, prompt_index: int, update: Update) -> bytes:
        """Events of one update; b"" if there is nothing to tell yet."""

    def last_events(self) -> bytes:
        """Events that end a stream in which every choice has finished."""

    def absorb(self, prompt_index: int, update: Update) -> None:
        """Keep one update for ``whole``."""

    def whole(self) -> dict[str, Any]:
        """The reply, once every choice has finished."""


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every object of a reply says of it.

    Attributes:
        reply_id: "chatcmpl-..." or "cmpl-...".
        created: Unix seconds.
        model: Served name.
    """

    reply_id: str
    created: int
    model: str

    def as_json(self, kind: str) -> dict[str, Any]:
        """The first fields of an object of this reply."""
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}


class ChunkFrame:
    """The bytes around what changes from chunk to chunk, made once per reply."""

    def __init__(self, head: ReplyHead, *, kind: str, usage: StreamUsage) -> None:
        """
        Args:
            head: Of the reply.
            kind: The chunks' "object".
            usage: When usage is told.
        """
        self._start = b"data: " + orjson.dumps(head.as_json(kind))[:-1] + b',"choices":['
        self._usage = usage

    def chunk(self, choice: bytes, *, tally: UsageTally, extra: bytes = b"") -> bytes:
        """One event.

        Args:
            choice: JSON of the one choice it tells of.
            tally: What is counted so far.
            extra: More top-level fields, each beginning with a comma.
        """
        return b"".join((self._start, choice, b"]", extra, self._usage_so_far(tally), b"}\n\n"))

    def _usage_so_far(self, tally: UsageTally) -> bytes:
        if self._usage is StreamUsage.NEVER:
            return b""
        if self._usage is StreamUsage.AT_END:
            return b',"usage":null'
        return b',"usage":' + orjson.dumps(tally.as_json())

    def end(self, tally: UsageTally) -> bytes:
        """The usage event, if it was asked for, and [DONE]."""
        if self._usage is StreamUsage.NEVER:
            return DONE
        return self._start + b'],"usage":' + orjson.dumps(tally.as_json()) + b"}\n\n" + DONE


class ChoiceText:
    """What a choice of a whole reply has gathered."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.token_ids: list[int] = []
        self.finish: Finish | None = None

    def add(self, update: ChoiceUpdate) -> None:
        """Take an update in."""
        self.parts.append(update.text)
        self.token_ids.extend(update.token_ids)
        self.finish = update.finish or self.finish

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)

    @property
    def ending(self) -> dict[str, Any]:
        """The fields that say how it ended."""
        assert self.finish is not None
        return ending(self.finish)


def ending(finish: Finish) -> dict[str, Any]:
    """The fields of a choice that say how it ended."""
    return {"finish_reason": finish.reason, "stop_reason": finish.stop_reason}


class PromptFacts:
    """What is known of one prompt.

    Attributes:
        ids: Its token ids.
        text: Its text, if the reply needs it.
        first_token_text: Text of its first token alone, likewise.
    """

    def __init__(self) -> None:
        self.ids: Sequence[int] = ()
        self.text = ""
        self.first_token_text = ""
        self._parts: list[PromptLogprobsPart] = []

    def take(self, update: Update) -> None:
        """Take in what an update says of the prompt."""
        if update.prompt_ids is not None:
            self.ids = update.prompt_ids
        if update.prompt_logprobs is not None:
            self._parts.append(update.prompt_logprobs)

    def first_token_bytes(self) -> bytes:
        """Bytes of the first token, also where it holds but a part of a character."""
        raw = self.first_token_text.encode()
        if "\ufffd" not in self.first_token_text:
            return raw
        rest = b"".join([entry.token_bytes for entry in self.logprobs])
        text = self.text.encode()
        if not text.endswith(rest):
            return raw  # the prompt ends, or is broken, inside a character
        return text.removesuffix(rest) or raw

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of its tokens but the first, as far as they have come."""
        # A part may begin with the prompt's first token, which nothing predicts.
        return [
            entry
            for part in self._parts
            for entry in (part.entries[1:] if part.start == 0 else part.entries)
        ]


def is_silent(update: ChoiceUpdate) -> bool:
    """Whether it is of tokens that have no text, or none yet.

    They make a chunk all the same: whoever reads a stream sees that it goes on.
    """
    return len(update.token_ids) > 0 and not update.text and update.finish is None


def count(tally: UsageTally, prompt_index: int, update: Update) -> None:
    """Enter an update's tokens into the tally."""
    if update.prompt_ids is not None:
        tally.admitted(prompt_index, update)
    for choice in update.choices:
        tally.produced(prompt_index, choice.index, choice.num_tokens + len(choice.token_ids))
        if choice.finish is not None:
            tally.finished(prompt_index, choice.index, choice.finish)
