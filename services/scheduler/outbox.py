"""What a Session has to tell its client: columns that grow until the writer takes them.

A step appends its rows to the frame of its engine. As long as the client keeps up, every step is a
frame; with more than ``MERGE_AFTER_S`` unacknowledged the frames wait and so merge: columns
concatenate, nothing is dropped. At ``CLOSE_AFTER_S`` or ``MAX_UNACKED_TOKENS`` the Session must be
closed. Knows no asyncio; time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from services.common.pb import common_pb2 as common_pb
from services.common.pb import scheduler_pb2 as pb

MERGE_AFTER_S = 1.0
CLOSE_AFTER_S = 10.0
MAX_UNACKED_TOKENS = 262_144


class _Sent(NamedTuple):
    frame: int
    sent_at: float
    num_tokens: int


class StepFrameBuilder:
    """The frame of one engine while it grows.

    Rows gather in lists, which take one in a fraction of the time that a message needs for it; what
    is rarer goes into ``message`` at once.

    Attributes:
        message: The frame, yet without its rows.
    """

    __slots__ = ("_carrier", "_counts", "_handles", "_offsets", "_token_ids", "message")

    def __init__(self, engine_id: int) -> None:
        self._carrier = pb.ServerFrame(step=pb.StepFrame(engine_id=engine_id))
        self.message = self._carrier.step
        self._handles: list[int] = []
        self._offsets: list[int] = []
        self._counts: list[int] = []
        self._token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows so far."""
        return len(self._token_ids)

    def append_row(self, handle: int, *, offset: int, token_ids: Sequence[int]) -> int:
        """Append the new tokens of one handle.

        Args:
            handle: The client's.
            offset: Output tokens of the choice before these.
            token_ids: At least one.

        Returns:
            The index of the first of them in the frame's flat ``token_ids``, for side arrays.
        """
        start = len(self._token_ids)
        self._token_ids += token_ids
        self._handles.append(handle)
        self._offsets.append(offset)
        self._counts.append(len(token_ids))
        return start

    def append_logprobs(self, logprobs: common_pb.Logprobs, *, start: int) -> None:
        """Append side arrays whose positions count from the row's first token.

        Args:
            logprobs: Columns of this row alone.
            start: What ``append_row`` returned.
        """
        columns = self.message.logprobs
        columns.position.extend(start + position for position in logprobs.position)
        columns.logprob.extend(logprobs.logprob)
        columns.rank.extend(logprobs.rank)
        columns.num_top.extend(logprobs.num_top)
        columns.top_ids.extend(logprobs.top_ids)
        columns.top_logprobs.extend(logprobs.top_logprobs)

    def build(self, *, frame: int) -> pb.ServerFrame:
        """The whole message; nothing may be appended after it.

        Args:
            frame: Its number.
        """
        message = self.message
        message.frame = frame
        message.handle.extend(self._handles)
        message.offset.extend(self._offsets)
        message.count.extend(self._counts)
        message.token_ids.extend(self._token_ids)
        return self._carrier


class Outbox:
    """Frames of one Session that are not written yet, and what of the written is unacknowledged."""

    def __init__(self) -> None:
        self._control: deque[pb.ServerFrame] = deque()
        self._queued: dict[int, tuple[int, int]] = {}
        self._steps: dict[int, StepFrameBuilder] = {}
        self._last_words: deque[StepFrameBuilder] = deque()
        self._unacked: deque[_Sent] = deque()
        self._num_unacked_tokens = 0
        self._last_frame = 0

    @property
    def num_unacked_tokens(self) -> int:
        """Tokens that were appended and are not acknowledged."""
        waiting = (*self._last_words, *self._steps.values())
        return self._num_unacked_tokens + sum(builder.num_tokens for builder in waiting)

    def control(self, frame: pb.ServerFrame) -> None:
        """Append a welcome, or that an engine came or went."""
        self._control.append(frame)

    def queued(self, handle: int, *, position: int, eta_ms: int) -> None:
        """Say that a handle waits; a later position replaces one that is not written yet."""
        self._queued[handle] = (position, eta_ms)

    def step_frame(self, engine_id: int, *, step: int) -> StepFrameBuilder:
        """The frame of an engine to append to.

        Args:
            engine_id: 0 = no engine: for handles that end before they had one.
            step: The newest step whose rows the frame holds.
        """
        builder = self._steps.get(engine_id)
        if builder is None:
            builder = self._steps[engine_id] = StepFrameBuilder(engine_id)
        if step > builder.message.step:
            builder.message.step = step
        return builder

    def engine_ended(self, engine_id: int) -> None:
        """What an engine has said goes out before what others will say of its requests."""
        builder = self._steps.pop(engine_id, None)
        if builder is not None:
            self._last_words.append(builder)

    def take(self, now: float) -> pb.ServerFrame | None:
        """The next frame to write, or ``None`` if there is none, or if step frames must wait."""
        if self._control:
            return self._control.popleft()
        if self._queued:
            return self._take_queued()
        if (self._last_words or self._steps) and not self.must_merge(now):
            return self._take_step(now)
        return None

    def acknowledge(self, frame: int) -> None:
        """The client has read everything up to ``frame``."""
        while self._unacked and self._unacked[0].frame <= frame:
            self._num_unacked_tokens -= self._unacked.popleft().num_tokens

    def unacked_s(self, now: float) -> float:
        """Age of the oldest unacknowledged frame, in seconds; 0 with none."""
        return now - self._unacked[0].sent_at if self._unacked else 0.0

    def must_merge(self, now: float) -> bool:
        """Whether the client is so far behind that its frames wait."""
        return self.unacked_s(now) > MERGE_AFTER_S

    def complaint(self, now: float) -> str | None:
        """Why the Session must be closed; ``None`` = it need not."""
        if self.unacked_s(now) > CLOSE_AFTER_S:
            return f"the client has acknowledged nothing for {CLOSE_AFTER_S:g} s"
        if self.num_unacked_tokens > MAX_UNACKED_TOKENS:
            return f"the client has left more than {MAX_UNACKED_TOKENS} tokens unacknowledged"
        return None

    def _take_queued(self) -> pb.ServerFrame:
        columns = pb.QueuedFrame(
            handle=self._queued.keys(),
            position=[position for position, _ in self._queued.values()],
            eta_ms=[eta_ms for _, eta_ms in self._queued.values()],
        )
        self._queued.clear()
        return pb.ServerFrame(queued=columns)

    def _take_step(self, now: float) -> pb.ServerFrame:
        if self._last_words:
            builder = self._last_words.popleft()
        else:
            builder = self._steps.pop(next(iter(self._steps)))
        self._last_frame += 1
        self._unacked.append(_Sent(self._last_frame, now, builder.num_tokens))
        self._num_unacked_tokens += builder.num_tokens
        return builder.build(frame=self._last_frame)
