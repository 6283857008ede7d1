"""What a Session says, and when it waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.common.pb import common_pb2
from services.common.pb import scheduler_pb2 as pb
from services.scheduler.outbox import (
    CLOSE_AFTER_S,
    MAX_UNACKED_TOKENS,
    MERGE_AFTER_S,
    Outbox,
)


def step(outbox: Outbox, number: int, handle: int, token_ids: list[int], *, offset: int) -> None:
    frame = outbox.step_frame(1, step=number)
    frame.append_row(handle, offset=offset, token_ids=token_ids)


def test_a_client_that_keeps_up_gets_a_frame_per_step() -> None:
    outbox = Outbox()
    for number in range(1, 6):
        step(outbox, number, 7, [number], offset=number - 1)
        frame = outbox.take(now=0.01 * number)
        assert frame is not None
        assert (frame.step.frame, frame.step.step) == (number, number)
        assert outbox.take(now=0.01 * number) is None
        outbox.acknowledge(number)


def test_frames_of_a_client_that_is_behind_merge_and_lose_nothing() -> None:
    outbox = Outbox()
    step(outbox, 1, 7, [100], offset=0)
    assert outbox.take(now=0.0) is not None
    for number in range(2, 12):
        step(outbox, number, 7, [100 + number], offset=number - 1)
        assert outbox.take(now=MERGE_AFTER_S + 0.1) is None
    outbox.acknowledge(1)
    merged = outbox.take(now=MERGE_AFTER_S + 0.2)
    assert merged is not None
    assert list(merged.step.token_ids) == [100 + number for number in range(2, 12)]
    assert list(merged.step.offset) == list(range(1, 11))
    assert merged.step.step == 11


def test_what_an_ended_engine_said_goes_out_before_what_the_next_one_says() -> None:
    outbox = Outbox()
    outbox.step_frame(2, step=1).append_row(8, offset=0, token_ids=[5])  # engine 2 was first
    step(outbox, 1, 7, [1, 2], offset=0)
    outbox.engine_ended(1)
    outbox.step_frame(2, step=2).append_row(7, offset=2, token_ids=[3])
    assert outbox.num_unacked_tokens == 4
    frames = [outbox.take(0.0), outbox.take(0.0), outbox.take(0.0)]
    assert [frame and list(frame.step.token_ids) for frame in frames] == [[1, 2], [5, 3], None]


def test_an_engine_that_said_nothing_ends_without_a_frame() -> None:
    outbox = Outbox()
    outbox.engine_ended(1)
    assert outbox.take(0.0) is None


def test_control_frames_do_not_wait_for_acknowledgements() -> None:
    outbox = Outbox()
    step(outbox, 1, 7, [1], offset=0)
    outbox.take(now=0.0)
    outbox.control(pb.ServerFrame(engine_down=pb.EngineDown(engine_id=1)))
    outbox.queued(8, position=3, eta_ms=10)
    outbox.queued(8, position=2, eta_ms=5)
    late = MERGE_AFTER_S + 1
    first, second = outbox.take(late), outbox.take(late)
    assert first is not None and first.HasField("engine_down")
    assert second is not None and list(second.queued.position) == [2]


def test_a_session_that_acknowledges_nothing_must_be_closed() -> None:
    outbox = Outbox()
    step(outbox, 1, 7, [1], offset=0)
    outbox.take(now=0.0)
    assert outbox.complaint(CLOSE_AFTER_S) is None
    assert "acknowledged nothing" in (outbox.complaint(CLOSE_AFTER_S + 0.1) or "")


def test_a_session_with_too_many_unacknowledged_tokens_must_be_closed() -> None:
    outbox = Outbox()
    step(outbox, 1, 7, [0] * MAX_UNACKED_TOKENS, offset=0)
    outbox.take(now=0.0)
    assert outbox.complaint(0.1) is None
    step(outbox, 2, 7, [0], offset=MAX_UNACKED_TOKENS)
    assert "tokens" in (outbox.complaint(0.1) or "")


def test_logprobs_stay_with_their_tokens_when_frames_merge() -> None:
    outbox = Outbox()
    for number in (1, 2):
        frame = outbox.step_frame(1, step=number)
        frame.append_row(5, offset=number - 1, token_ids=[9])
        start = frame.append_row(7, offset=number - 1, token_ids=[number])
        row = common_pb2.Logprobs(
            position=[0],
            logprob=[-number],
            rank=[1],
            num_top=[1],
            top_ids=[number],
            top_logprobs=[-number],
        )
        frame.append_logprobs(row, start=start)
    taken = outbox.take(0.0)
    assert taken is not None
    described = [taken.step.token_ids[position] for position in taken.step.logprobs.position]
    assert described == [1, 2]
    assert list(taken.step.logprobs.logprob) == [-1.0, -2.0]


@given(st.lists(st.sampled_from(["step", "take", "ack", "wait"]), max_size=60))
def test_whatever_the_order_every_token_is_written_once_and_in_order(events: list[str]) -> None:
    outbox, now, number = Outbox(), 0.0, 0
    written: list[int] = []
    last_frame = 0
    for event in [*events, "ack", "take", "ack"]:
        if event == "step":
            number += 1
            step(outbox, number, 7, [number], offset=number - 1)
        elif event == "wait":
            now += 0.7
        elif event == "ack":
            outbox.acknowledge(last_frame)
        else:
            frame = outbox.take(now)
            if frame is not None:
                assert frame.step.frame == last_frame + 1
                assert frame.step.offset[0] == len(written)
                written += frame.step.token_ids
                last_frame = frame.step.frame
    assert written == list(range(1, number + 1))
    assert outbox.num_unacked_tokens == 0
