"""The life of a handle: whatever happens in whatever order, its receiver hears one end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import SluicewayError, WorkerLost
from services.tokenizer.handles import Handles, HandleState, OffsetGap
from services.tokenizer.tokens import (
    Finished,
    FinishReason,
    Logprobs,
    NewChoice,
    PromptLogprobs,
    Queued,
)

DONE = Finished(FinishReason.LENGTH)


class Listener:
    """Writes down what it hears, and wants no more of a choice once it has ``enough`` tokens."""

    def __init__(self, enough: int = 10**9) -> None:
        self.enough = enough
        self.tokens: Counter[int] = Counter()
        self.ends: Counter[int] = Counter()
        self.queued: list[int] = []

    def on_queued(self, index: int, queued: Queued) -> None:
        assert not self.ends[index]
        self.queued.append(index)

    def on_tokens(
        self,
        index: int,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finished: Finished | None,
    ) -> int | None:
        assert not self.ends[index]
        self.tokens[index] += len(token_ids)
        if finished is not None:
            self.ends[index] += 1
            return None
        return self.enough if self.tokens[index] >= self.enough else None

    def on_prompt_logprobs(self, logprobs: PromptLogprobs) -> None: ...

    def on_lost(self, index: int, error: SluicewayError) -> None:
        assert not self.ends[index]
        self.ends[index] += 1


events = st.tuples(st.sampled_from(["queue", "step", "end", "abort", "unknown"]), st.integers(0, 5))


@given(st.lists(events, max_size=40), st.integers(1, 5), st.booleans())
def test_every_handle_ends_exactly_once_and_then_hears_nothing(
    history: list[tuple[str, int]], enough: int, is_lost: bool
) -> None:
    handles = Handles()
    listeners = [Listener(enough), Listener(enough)]
    numbers = [
        number
        for listener in listeners
        for number in handles.add(listener, [NewChoice(0), NewChoice(1), NewChoice(2)])
    ]
    for kind, which in history:
        number = numbers[which] + (1000 if kind == "unknown" else 0)
        before = handles.state(number)
        if kind == "queue":
            handles.queue(number, Queued(0, 0))
        elif kind == "step":
            handles.step(number, [1])
        elif kind == "end":
            handles.step(number, [1], finished=DONE)
        elif kind == "abort":
            assert bool(handles.abort([number])) == (before not in (None, HandleState.ABORTING))
        after = handles.state(number)
        assert after in _NEXT[before]
        assert len(handles) == sum(handles.state(n) is not None for n in numbers)
    if is_lost:
        handles.lose_all(WorkerLost("gone"))
    for number in numbers:
        handles.step(number, [], finished=DONE)
        handles.step(number, [], finished=DONE)
    assert len(handles) == 0
    assert all(listener.ends == {0: 1, 1: 1, 2: 1} for listener in listeners)
    assert all(count <= enough + 1 for listener in listeners for count in listener.tokens.values())


# The written state machine; None = ended, or never there.
_NEXT = {
    HandleState.ADDED: {*HandleState, None},
    HandleState.QUEUED: {
        HandleState.QUEUED,
        HandleState.STREAMING,
        HandleState.ABORTING,
        None,
    },
    HandleState.STREAMING: {HandleState.STREAMING, HandleState.ABORTING, None},
    HandleState.ABORTING: {HandleState.ABORTING, None},
    None: {None},
}


def test_numbers_are_never_used_twice() -> None:
    handles = Handles()
    first = handles.add(Listener(), [NewChoice(0)])
    handles.step(first[0], [], finished=DONE)
    assert handles.add(Listener(), [NewChoice(0)]) != first


def test_tokens_of_a_handle_that_was_given_up_are_dropped_and_its_end_is_not() -> None:
    handles = Handles()
    listener = Listener()
    (number,) = handles.add(listener, [NewChoice(0)])
    handles.step(number, [1, 2])
    assert handles.abort([number]) == {number: 2}
    handles.step(number, [3])
    handles.step(number, [4], finished=DONE)
    assert (listener.tokens[0], listener.ends[0]) == (2, 1)


@pytest.mark.parametrize("offset", [0, 3])
def test_a_gap_or_a_repetition_is_seen(offset: int) -> None:
    handles = Handles()
    (number,) = handles.add(Listener(), [NewChoice(0)])
    handles.step(number, [1, 2], offset=0)
    with pytest.raises(OffsetGap):
        handles.step(number, [3], offset=offset)


def test_a_resumed_choice_goes_on_behind_its_resumed_tokens() -> None:
    handles = Handles()
    listener = Listener()
    (number,) = handles.add(listener, [NewChoice(4, [1, 2, 3])])
    handles.step(number, [9], offset=3)
    assert listener.tokens == {4: 1}
