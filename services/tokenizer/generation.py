"""One request between its scheduler and its client: tokens come in, merged text deltas go out.

Tokens are turned into text the moment they come, whether or not the client reads, so that a stop
string is seen and told to the scheduler at once. What the client has not taken yet is merged into
one delta: the first token never waits, later ones join, and memory is bounded by the output itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.common.errors import DeadlineExceeded, InvalidRequest, SluicewayError
from services.tokenizer.text_output import Released, TextOutput
from services.tokenizer.tokens import (
    Finished,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Queued,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice as the client sees it."""

    scheduler: Finished
    stop_string: str | None = None


@dataclass(slots=True)
class ChoiceDelta:
    """What one choice has gained since its last delta.

    Attributes:
        num_tokens: Output tokens of the choice before this delta.
        num_chars: Characters (Unicode code points) of the choice before this delta.
    """

    index: int
    num_tokens: int
    num_chars: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish: Finish | None = None


@dataclass(slots=True)
class Delta:
    """What a request has gained since its last delta.

    Attributes:
        prompt_ids: Set in the first delta, which is the sign of admission; else ``None``.
    """

    prompt_ids: Sequence[int] | None = None
    choices: list[ChoiceDelta] = field(default_factory=list)
    queued: Queued | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Generation:
    """The ``TokenReceiver`` of one request; its client calls ``next`` until that gives ``None``."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        outputs: Mapping[int, TextOutput],
        *,
        eos_token_ids: frozenset[int],
        include_stop: bool = False,
    ) -> None:
        """
        Args:
            prompt_ids: Token ids of the prompt.
            outputs: Index of each choice → its text.
            eos_token_ids: Tokens that end a sequence.
            include_stop: Whether the text of the token that the engine stopped on is shown.
        """
        self._prompt_ids = prompt_ids
        self._choices = {index: _Choice(index, output) for index, output in outputs.items()}
        self._eos_token_ids = eos_token_ids
        self._include_stop = include_stop
        self._num_open = len(self._choices)
        self._pending: dict[int, ChoiceDelta] = {}
        self._queued: Queued | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._refusal: SluicewayError | None = None
        self._is_admitted = False
        self._is_announced = False
        self._is_expired = False
        self._news = asyncio.Event()
        self._listener: Callable[[], None] | None = None

    def resume(self, index: int, token_ids: Sequence[int], *, num_chars: int) -> bool:
        """Take over what an earlier attempt has given of a choice. Call before submitting.

        Args:
            index: Of the choice.
            token_ids: Its output so far.
            num_chars: Characters that the client has; the rest of their text is sent to it.

        Returns:
            Whether the choice goes on; if not, a stop string has ended it already.

        Raises:
            InvalidRequest: The client claims more text than the tokens give.
        """
        choice = self._choices[index]
        released = choice.output.feed(token_ids)
        if num_chars > len(released.text):
            raise InvalidRequest(
                f"resume: choice {index} has {len(released.text)} characters, not {num_chars}",
                param="resume",
            )
        choice.num_tokens = len(token_ids)
        choice.num_chars = num_chars
        choice.stop = released.stop
        if len(released.text) > num_chars:
            self._delta_of(choice).text = released.text[num_chars:]
            choice.num_chars = len(released.text)
        if released.stop is not None:
            self._end(choice, Finished(FinishReason.STOP, usage=self._usage_so_far(choice)))
        return released.stop is None

    def admit_finished(self) -> None:
        """Nothing had to be submitted: what ``resume`` found is all there is."""
        self._admit()

    async def next(self) -> Delta | None:
        """Wait for news and take all there is.

        Returns:
            ``None`` once every choice has ended and its end has been taken.

        Raises:
            SluicewayError: The request was refused, or lost before it was admitted.
        """
        while not self._news.is_set():
            if self._num_open == 0:
                return None
            await self._news.wait()
        if self._refusal is not None:
            raise self._refusal
        return self.take()

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended and its end has been taken."""
        return self._num_open == 0 and not self._news.is_set()

    def listen(self, listener: Callable[[], None]) -> None:
        """From now on be told of news, which ``take`` gives; for an admitted generation."""
        self._listener = listener
        if self._news.is_set():
            listener()

    def take(self) -> Delta:
        """All news there are."""
        self._news.clear()
        delta = Delta(
            prompt_ids=None if self._is_announced else self._prompt_ids,
            choices=list(self._pending.values()),
            queued=self._queued,
            prompt_logprobs=self._prompt_logprobs,
        )
        self._is_announced = True
        self._pending.clear()
        self._queued = None
        self._prompt_logprobs = None
        return delta

    def expire(self) -> None:
        """The deadline has passed: an abort that follows is the deadline's doing."""
        self._is_expired = True

    def on_queued(self, index: int, queued: Queued) -> None:
        """See ``TokenReceiver``. The client is told the place of the first choice."""
        if self._queued is None or index == min(self._choices):
            self._queued = queued
        self._admit()

    def on_tokens(
        self,
        index: int,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finished: Finished | None,
    ) -> int | None:
        """See ``TokenReceiver``."""
        if finished is not None and finished.error is not None and not self._is_admitted:
            self._refuse(finished.error)
            return None
        self._admit()
        choice = self._choices[index]
        wants_no_more = False
        if choice.stop is None:
            wants_no_more = self._append(choice, token_ids, logprobs, finished)
        if finished is not None:
            self._end(choice, finished)
            return None
        return choice.num_tokens if wants_no_more else None

    def on_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """See ``TokenReceiver``."""
        if self._prompt_logprobs is None:
            self._prompt_logprobs = logprobs
        else:
            self._prompt_logprobs.extend(logprobs)
        self._admit()

    def on_lost(self, index: int, error: SluicewayError) -> None:
        """See ``TokenReceiver``. A choice whose stop string was found is complete: it ends well."""
        if not self._is_admitted:
            self._refuse(error)
            return
        choice = self._choices[index]
        usage = self._usage_so_far(choice)
        self._end(choice, Finished(FinishReason.ERROR, error=error, usage=usage))

    def _admit(self) -> None:
        self._is_admitted = True
        self._notify()

    def _usage_so_far(self, choice: _Choice) -> Usage:
        """Counts for an end that no scheduler has told us of."""
        return Usage(prompt_tokens=len(self._prompt_ids), output_tokens=choice.num_tokens)

    def _append(
        self,
        choice: _Choice,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finished: Finished | None,
    ) -> bool:
        """Add tokens and what they made certain; returns whether a stop string was found."""
        if not token_ids:
            return False
        delta = self._delta_of(choice)
        released = self._release(choice, token_ids, finished)
        if released.num_tokens < len(
            token_ids
        ):  # a stop string ended the text before the last token
            token_ids = token_ids[: released.num_tokens]
            logprobs = logprobs.first(released.num_tokens) if logprobs is not None else None
        if logprobs is not None:
            delta.logprobs = delta.logprobs or Logprobs()
            delta.logprobs.extend(logprobs, shift=len(delta.token_ids))
        delta.token_ids += token_ids
        delta.text += released.text
        choice.num_tokens += len(token_ids)
        choice.num_chars += len(released.text)
        choice.stop = released.stop
        return released.stop is not None

    def _release(
        self, choice: _Choice, token_ids: list[int], finished: Finished | None
    ) -> Released:
        """Feed the text; the token that the engine stopped on counts but is not part of it."""
        if finished is None or not self._is_hidden(token_ids[-1], finished):
            return choice.output.feed(token_ids)
        released = choice.output.feed(token_ids[:-1])
        if released.stop is not None:
            return released
        return Released(released.text, len(token_ids))

    def _is_hidden(self, token_id: int, finished: Finished) -> bool:
        if finished.reason is not FinishReason.STOP or self._include_stop:
            return False
        return token_id in self._eos_token_ids or token_id == finished.stop_token_id

    def _end(self, choice: _Choice, finished: Finished) -> None:
        delta = self._delta_of(choice)
        if choice.stop is not None:
            finished = _stopped_by_string(finished, num_kept=choice.num_tokens)
        else:
            rest = choice.output.finish()
            delta.text += rest
            choice.num_chars += len(rest)
            finished = self._without_silent_abort(finished)
        delta.finish = Finish(finished, choice.stop)
        self._num_open -= 1

    def _without_silent_abort(self, finished: Finished) -> Finished:
        if finished.reason is not FinishReason.ABORT or not self._is_expired:
            return finished
        error = DeadlineExceeded("the request's deadline has passed")
        return replace(finished, reason=FinishReason.ERROR, error=error)

    def _refuse(self, error: SluicewayError) -> None:
        self._refusal = error
        self._num_open -= 1
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        if self._listener is not None:
            self._listener()

    def _delta_of(self, choice: _Choice) -> ChoiceDelta:
        """The delta that the client has not taken yet, or a new one."""
        delta = self._pending.get(choice.index)
        if delta is None:
            delta = ChoiceDelta(choice.index, choice.num_tokens, choice.num_chars)
            self._pending[choice.index] = delta
        if self._is_admitted:
            self._notify()
        return delta


class _Choice:
    """Where one choice stands.

    Attributes:
        num_tokens: Output tokens so far, delivered or pending.
        num_chars: Characters so far.
        stop: The stop string that ended its text; what comes after is not looked at.
    """

    __slots__ = ("index", "num_chars", "num_tokens", "output", "stop")

    def __init__(self, index: int, output: TextOutput) -> None:
        self.index = index
        self.output = output
        self.num_tokens = 0
        self.num_chars = 0
        self.stop: str | None = None


def _stopped_by_string(finished: Finished, *, num_kept: int) -> Finished:
    """The end of a choice whose text a stop string has ended, however the engine saw it end.

    The engine may have gone on for some tokens, or ended for its own reasons, before it heard of
    it.
    """
    usage = finished.usage
    num_extra = max(usage.output_tokens - num_kept, 0)
    return Finished(
        FinishReason.STOP,
        usage=replace(
            usage,
            output_tokens=usage.output_tokens - num_extra,
            wasted_tokens=usage.wasted_tokens + num_extra,
        ),
        life=finished.life,
    )
