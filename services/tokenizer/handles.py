"""The handles of one Session: which choices run, and who hears what of them. Pure.

The life of a handle: ADDED -> QUEUED -> STREAMING -> (ABORTING ->) finished, or lost with the
Session; any step may be skipped on the way to the end. A handle that has ended is forgotten, and as
no number is used twice, whatever still comes for it concerns nobody and is dropped: that is the
fence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

from services.common.errors import SluicewayError
from services.tokenizer.tokens import (
    Finished,
    Logprobs,
    NewChoice,
    PromptLogprobs,
    Queued,
    TokenReceiver,
)


class HandleState(Enum):
    """Where a handle is in its life."""

    ADDED = "added"
    QUEUED = "queued"
    STREAMING = "streaming"
    ABORTING = "aborting"


class OffsetGap(Exception):
    """Tokens of a handle were lost or repeated on the way."""


@dataclass(slots=True)
class Handle:
    """One choice in a Session.

    Attributes:
        num_tokens: Output tokens so far, resumed ones included: the offset of the next.
    """

    receiver: TokenReceiver
    index: int
    num_tokens: int
    state: HandleState = HandleState.ADDED

    @property
    def is_wanted(self) -> bool:
        """Whether its tokens are of interest; if not, only its end is."""
        return self.state is not HandleState.ABORTING


class Handles:
    """Every choice of a Session that has not ended."""

    def __init__(self) -> None:
        self._handles: dict[int, Handle] = {}
        self._next = count(1)

    def __len__(self) -> int:
        return len(self._handles)

    def state(self, number: int) -> HandleState | None:
        """Where a handle is; ``None`` once it has ended."""
        handle = self._handles.get(number)
        return None if handle is None else handle.state

    def add(self, receiver: TokenReceiver, choices: Sequence[NewChoice]) -> list[int]:
        """Make a handle for each choice."""
        numbers = [next(self._next) for _ in choices]
        for number, choice in zip(numbers, choices, strict=True):
            self._handles[number] = Handle(receiver, choice.index, len(choice.resume_ids))
        return numbers

    def queue(self, number: int, queued: Queued) -> None:
        """The scheduler has accepted the handle, or tells its place again."""
        handle = self._handles.get(number)
        if handle is None or not handle.is_wanted:
            return
        if handle.state is HandleState.ADDED:
            handle.state = HandleState.QUEUED
        handle.receiver.on_queued(handle.index, queued)

    def prompt_logprobs(self, number: int, rows: PromptLogprobs) -> None:
        """Further log-probabilities of the handle's prompt."""
        handle = self._handles.get(number)
        if handle is not None and handle.is_wanted:
            handle.receiver.on_prompt_logprobs(rows)

    def step(
        self,
        number: int,
        token_ids: list[int],
        *,
        offset: int | None = None,
        logprobs: Logprobs | None = None,
        finished: Finished | None = None,
    ) -> int | None:
        """The handle goes on, ends, or both.

        Args:
            number: Of the handle.
            token_ids: New output tokens, perhaps none.
            offset: Output tokens before these, as the scheduler counts; ``None`` = it does not say.
            logprobs: Of the new tokens.
            finished: Its end.

        Returns:
            How many output tokens are kept, if the receiver wants no more: the handle is ABORTING
            now, and the scheduler must be told. Else ``None``.

        Raises:
            OffsetGap: ``offset`` is not what has come so far.
        """
        handle = self._handles.get(number)
        if handle is None or (not handle.is_wanted and finished is None):
            return None
        if not handle.is_wanted:
            token_ids, logprobs = [], None
        elif offset is not None and offset != handle.num_tokens:
            raise OffsetGap(f"handle {number} goes on at {offset} after {handle.num_tokens} tokens")
        if finished is not None:
            del self._handles[number]
        elif handle.is_wanted:
            handle.state = HandleState.STREAMING
        handle.num_tokens += len(token_ids)
        kept = handle.receiver.on_tokens(handle.index, token_ids, logprobs, finished)
        if kept is not None:
            handle.state = HandleState.ABORTING
        return kept

    def abort(self, numbers: Iterable[int]) -> dict[int, int]:
        """Give up those that are still wanted; their ends are yet to come.

        Returns:
            Handle → output tokens so far, of those given up now.
        """
        wanted = {
            number: handle
            for number in numbers
            if (handle := self._handles.get(number)) is not None and handle.is_wanted
        }
        for handle in wanted.values():
            handle.state = HandleState.ABORTING
        return {number: handle.num_tokens for number, handle in wanted.items()}

    def lose_all(self, error: SluicewayError) -> None:
        """The Session has broken: this is every handle's end."""
        lost, self._handles = self._handles, {}
        for handle in lost.values():
            handle.receiver.on_lost(handle.index, error)
