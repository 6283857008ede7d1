"""The reply to POST /v1/responses: items, in events or whole, and the response around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest, Overloaded, SluicewayError
from services.gateway.answer import AnswerParser
from services.gateway.generation import ChoiceUpdate, Finish, TokenLogprob, Update
from services.gateway.openai.logprobs import TokenNames, chat_entries
from services.gateway.openai.reply import count
from services.gateway.openai.responses.events import Events
from services.gateway.openai.responses.output import COMPLETED, IN_PROGRESS, INCOMPLETE, Output
from services.gateway.openai.usage import UsageTally

QUEUED = "queued"
FAILED = "failed"
CANCELLED = "cancelled"

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What a response's reply has to show.

    Attributes:
        head: The fields of the response that never change.
        num_top: Alternatives per token; ``None`` = no log-probabilities.
        shows_reasoning: Whether the thought is part of the reply.
        is_background: Whether it is made though nobody waits for it.
    """

    head: JsonObject
    num_top: int | None
    shows_reasoning: bool
    is_background: bool


class ResponseReply:
    """Makes the reply of one request; see ``Reply``.

    queued → in_progress → completed, incomplete, failed or cancelled; only in the background is a
    response queued.

    Attributes:
        response_id: The response's.
        status: See above.
    """

    needs_prompt_text = False

    def __init__(
        self,
        options: ResponseOptions,
        *,
        parser: AnswerParser,
        events: Events,
        clock: Callable[[], float],
        on_end: Callable[[JsonObject], None] | None,
    ) -> None:
        """
        Args:
            options: What is to be shown.
            parser: Of the answer.
            events: Told of what happens.
            clock: Unix seconds.
            on_end: Given the response once it has ended, before the client has it; if anybody.
        """
        self.tally = UsageTally()
        self.response_id: str = options.head["id"]
        self.status = QUEUED if options.is_background else IN_PROGRESS
        self._options = options
        self._parser = parser
        self._events = events
        self._clock = clock
        self._on_end = on_end
        self._output = Output(events)
        self._logprobs = _Logprobs(options.num_top)
        self._has_begun = False
        self._is_running = False
        self._finish: Finish | None = None
        self._error: SluicewayError | None = None
        self._completed_at: int | None = None

    def set_prompt(self, prompt_index: int, *, text: str, first_token_text: str) -> None:
        """Never needed: the prompt is not echoed."""

    def begin(self) -> bytes:
        """Events that tell of the response, if none has."""
        self._begin()
        return self._events.take()

    def events(self, prompt_index: int, update: Update) -> bytes:
        """Events of one update."""
        self._take(prompt_index, update)
        return self._events.take()

    def last_events(self) -> bytes:
        """Events that end a stream in which the choice has finished."""
        self._complete()
        return self._events.take()

    def absorb(self, prompt_index: int, update: Update) -> None:
        """Keep one update."""
        self._take(prompt_index, update)

    def whole(self) -> JsonObject:
        """The response, once the choice has finished."""
        self._complete()
        return self.as_json()

    def fail(self, error: SluicewayError) -> bytes:
        """The response has failed; events that end its stream."""
        if self._completed_at is not None:
            return b""  # it had ended: only its way to the client failed
        self._begin()
        self._error = error
        self._end(FAILED, item_status=INCOMPLETE)
        self._tell("response.failed")
        return self._events.take()

    def cancel(self) -> bytes:
        """The response was cancelled; events that end its stream."""
        if self._completed_at is not None:
            return b""  # too late
        self._end(CANCELLED, item_status=INCOMPLETE)
        self._events.add(
            "error", code="cancelled", message="the response was cancelled", param=None
        )
        return self._events.take()

    def as_json(self) -> JsonObject:
        """The response, as it is by now."""
        is_done = self._completed_at is not None
        return self._options.head | {
            "status": self.status,
            "completed_at": self._completed_at if self.status == COMPLETED else None,
            "error": None if self._error is None else _error_json(self._error),
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self.status == INCOMPLETE else None
            ),
            "output": self._output.as_json(),
            "usage": _usage(self.tally) if is_done else None,
        }

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        self._tell("response.created")
        if self.status == QUEUED:
            self._tell("response.queued")

    def _take(self, prompt_index: int, update: Update) -> None:
        self._begin()
        if not self._is_running:
            self._is_running = True
            self.status = IN_PROGRESS
            self._tell("response.in_progress")
        count(self.tally, prompt_index, update)
        for choice in update.choices:
            self._take_choice(choice)

    def _take_choice(self, update: ChoiceUpdate) -> None:
        delta = self._parser.feed(
            update.text, num_tokens=len(update.token_ids), is_end=update.finish is not None
        )
        self._finish = update.finish
        num_thought = self._parser.num_reasoning_tokens
        self.tally.reasoned(update.index, num_thought)
        self._logprobs.add(
            update.logprobs, num_thought=num_thought, is_end=update.finish is not None
        )
        if delta.reasoning and self._options.shows_reasoning:
            self._output.think(delta.reasoning)
        for part in delta.parts or ((delta.content,) if delta.content else ()):
            if isinstance(part, str):
                self._output.say(part, self._logprobs.take())
            else:
                self._logprobs.take()  # of the call's tokens: it has no place for them
                self._output.call(part)
        if update.finish is not None:
            self._output.finish_text(self._logprobs.take())

    def _complete(self) -> None:
        assert self._finish is not None
        status = INCOMPLETE if self._finish.reason == "length" else COMPLETED
        if status == COMPLETED:
            self._output.require_answer()
        self._end(status, item_status=status)
        self._tell(f"response.{status}")

    def _end(self, status: str, *, item_status: str) -> None:
        self._output.end(item_status)
        self.status = status
        self._completed_at = int(self._clock())
        if self._on_end is not None:
            self._on_end(self.as_json())

    def _tell(self, kind: str) -> None:
        self._events.add(kind, response=self.as_json())


class _Logprobs:
    """Log-probabilities of the answer's tokens, until the text that they belong to is told.

    Those of the thought are dropped: it has no place for them.
    """

    def __init__(self, num_top: int | None) -> None:
        self._num_top = num_top
        self._names = TokenNames(as_token_ids=False)
        self._num_seen = 0
        self._waiting: list[JsonObject] = []

    def add(self, entries: list[TokenLogprob], *, num_thought: int, is_end: bool) -> None:
        """The next tokens; ``num_thought`` of all so far are the thought's."""
        if self._num_top is None:
            return
        self._waiting += chat_entries(entries, self._names, num_top=self._num_top, is_end=is_end)
        self._num_seen += len(entries)
        num_before = self._num_seen - len(self._waiting)
        del self._waiting[: max(num_thought - num_before, 0)]

    def take(self) -> list[JsonObject]:
        """All that wait."""
        taken, self._waiting = self._waiting, []
        return taken


def _usage(tally: UsageTally) -> JsonObject:
    """Usage under the names of this API."""
    usage = tally.as_json()
    return {
        "input_tokens": usage["prompt_tokens"],
        # Nothing is written to a cache because a request asks for it.
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _error_json(error: SluicewayError) -> JsonObject:
    match error:
        case InvalidRequest():
            code = "invalid_prompt"
        case Overloaded():
            code = "rate_limit_exceeded"
        case _:
            code = "server_error"
    return {
        "code": code,
        "message": error.message,
        "param": error.param,
        "type": error.openai_type,
    }
