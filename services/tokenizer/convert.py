"""Protobuf messages of both sides and the service's own values, one into the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.common.convert import (
    constraint_from_message,
    constraint_to_message,
    error_from_message,
    error_to_message,
    pooling_to_message,
    pools_from_message,
    sampling_from_message,
    sampling_to_message,
)
from services.common.errors import InvalidRequest, InvariantError
from services.common.pb import common_pb2, scheduler_pb2, tokenizer_pb2
from services.common.placement import Place
from services.common.sampling import Constraint
from services.tokenizer.generation import ChoiceDelta, Delta, Finish
from services.tokenizer.prompt import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from services.tokenizer.request import GenerateRequest, Resume, ResumedChoice
from services.tokenizer.routing import Engine
from services.tokenizer.tokens import (
    AbortReason,
    Finished,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Submission,
    Trace,
    Usage,
)


def submission_to_message(
    submission: Submission, *, handles: Sequence[int]
) -> scheduler_pb2.ClientFrame:
    """The frame that adds a request.

    Args:
        submission: What is asked for.
        handles: One per choice, in order.
    """
    add = scheduler_pb2.Add(
        key=common_pb2.RequestKey(request_id=submission.request_id, attempt=submission.attempt),
        model=submission.model,
        prompt_ids=submission.prompt_ids,
        sampling=sampling_to_message(submission.sampling),
        prompt_logprobs_done=submission.prompt_logprobs_done,
        priority=submission.priority,
        tenant=submission.tenant,
        cache_namespace=submission.cache_namespace,
        pooling=pooling_to_message(submission.pools),
    )
    for choice, handle in zip(submission.choices, handles, strict=True):
        add.choices.add(handle=handle, index=choice.index, resume_ids=choice.resume_ids)
    _set_optional(add, submission)
    return scheduler_pb2.ClientFrame(add=add)


def _set_optional(add: scheduler_pb2.Add, submission: Submission) -> None:
    if submission.trace is not None:
        add.trace.traceparent = submission.trace.traceparent
        add.trace.tracestate = submission.trace.tracestate
    if submission.constraint is not None:
        add.constraint.CopyFrom(constraint_to_message(submission.constraint))
    if submission.deadline_s is not None:
        add.deadline_ms = max(int(submission.deadline_s * 1000), 0)
    if submission.prediction is not None:
        add.prediction.engine_id = submission.prediction.engine_id
        add.prediction.cached_tokens = submission.prediction.cached_tokens
        add.prediction.wait_s = submission.prediction.wait_s


def abort_to_message(
    handles: Sequence[int], reason: AbortReason, *, kept_tokens: Sequence[int]
) -> scheduler_pb2.ClientFrame:
    """The frame that gives up some handles."""
    abort = scheduler_pb2.Abort(
        handle=handles,
        reason=scheduler_pb2.AbortReason.ValueType(reason.value),
        kept_tokens=kept_tokens,
    )
    return scheduler_pb2.ClientFrame(abort=abort)


def finished_from_message(message: scheduler_pb2.FinishedHandle) -> Finished:
    """The end of a handle."""
    try:
        reason = FinishReason(message.reason)
    except ValueError:
        error = InvariantError(f"unknown finish reason {message.reason}")
        return Finished(FinishReason.ERROR, error=error)
    return Finished(
        reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        stop_detail=message.stop_detail,
        error=error_from_message(message.error) if reason is FinishReason.ERROR else None,
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            cached_tokens=message.usage.cached_tokens,
            computed_tokens=message.usage.computed_tokens,
            output_tokens=message.usage.output_tokens,
            wasted_tokens=message.usage.wasted_tokens,
        ),
        life=message.life.SerializeToString(),
        pooled=message.pooled,
    )


class LogprobReader:
    """Takes the rows of a frame's logprob columns, handle by handle, in the order of the tokens."""

    def __init__(self, columns: common_pb2.Logprobs) -> None:
        """
        Args:
            columns: ``position`` must not fall.
        """
        self._columns = columns
        self._row = 0
        self._top = 0

    def take(self, start: int, end: int) -> Logprobs | None:
        """The rows of tokens ``start`` to ``end`` of the frame; ``None`` if there are none."""
        columns, first = self._columns, self._row
        while self._row < len(columns.position) and columns.position[self._row] < end:
            self._row += 1
        if self._row == first:
            return None
        rows = slice(first, self._row)
        num_top = list(columns.num_top[rows])
        tops = slice(self._top, self._top + sum(num_top))
        self._top = tops.stop
        return Logprobs(
            [position - start for position in columns.position[rows]],
            list(columns.logprob[rows]),
            list(columns.rank[rows]),
            num_top,
            list(columns.top_ids[tops]),
            list(columns.top_logprobs[tops]),
        )


def prompt_logprobs_from_message(message: common_pb2.PromptLogprobs) -> PromptLogprobs:
    """Rows of a prompt's log-probabilities."""
    return PromptLogprobs(
        message.start,
        list(message.token_ids),
        list(message.logprob),
        list(message.rank),
        list(message.num_top),
        list(message.top_ids),
        list(message.top_logprobs),
    )


def delta_to_message(
    delta: Delta, message: tokenizer_pb2.TextDelta, token_bytes: Sequence[bytes]
) -> tokenizer_pb2.TextDelta:
    """What the client is told.

    Args:
        delta: What is new.
        message: Empty; it is filled and given back.
        token_bytes: Bytes of each token id, for log-probabilities.
    """
    if delta.prompt_ids is not None:
        message.has_prompt = True
        message.prompt_ids.extend(delta.prompt_ids)
    for choice in delta.choices:
        _add_choice(message.choices.add(), choice, token_bytes)
    if delta.queued is not None:
        message.queued.position = delta.queued.position
        message.queued.eta_ms = delta.queued.eta_ms
        message.queued.SetInParent()
    if delta.prompt_logprobs is not None:
        _set_prompt_logprobs(message, delta.prompt_logprobs, token_bytes)
    return message


def _add_choice(
    message: tokenizer_pb2.ChoiceDelta, choice: ChoiceDelta, token_bytes: Sequence[bytes]
) -> None:
    message.index = choice.index
    message.text = choice.text
    message.token_ids.extend(choice.token_ids)
    message.num_tokens = choice.num_tokens
    message.num_chars = choice.num_chars
    rows = choice.logprobs
    if rows is not None:
        columns = message.logprobs
        columns.position.extend(rows.positions)
        columns.logprob.extend(rows.logprobs)
        columns.rank.extend(rows.ranks)
        columns.num_top.extend(rows.num_top)
        columns.top_ids.extend(rows.top_ids)
        columns.top_logprobs.extend(rows.top_logprobs)
        sampled = (choice.token_ids[position] for position in rows.positions)
        message.logprob_token_bytes.extend(_bytes_of(sampled, token_bytes))
        message.top_token_bytes.extend(_bytes_of(rows.top_ids, token_bytes))
    if choice.finish is not None:
        _set_finish(message.finish, choice.finish)


def _set_finish(message: tokenizer_pb2.Finish, finish: Finish) -> None:
    finished = finish.scheduler
    message.reason = common_pb2.FinishReason.ValueType(finished.reason.value)
    if finish.stop_string is not None:
        message.stop_string = finish.stop_string
    if finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id
    message.stop_detail = finished.stop_detail
    if finished.error is not None:
        message.error.CopyFrom(error_to_message(finished.error))
    usage = finished.usage
    message.usage.prompt_tokens = usage.prompt_tokens
    message.usage.cached_tokens = usage.cached_tokens
    message.usage.computed_tokens = usage.computed_tokens
    message.usage.output_tokens = usage.output_tokens
    message.usage.wasted_tokens = usage.wasted_tokens
    message.life.MergeFromString(finished.life)
    message.pooled = finished.pooled


def _set_prompt_logprobs(
    message: tokenizer_pb2.TextDelta, rows: PromptLogprobs, token_bytes: Sequence[bytes]
) -> None:
    columns = message.prompt_logprobs
    columns.start = rows.start
    columns.token_ids.extend(rows.token_ids)
    columns.logprob.extend(rows.logprobs)
    columns.rank.extend(rows.ranks)
    columns.num_top.extend(rows.num_top)
    columns.top_ids.extend(rows.top_ids)
    columns.top_logprobs.extend(rows.top_logprobs)
    columns.SetInParent()
    message.prompt_token_bytes.extend(_bytes_of(rows.token_ids, token_bytes))
    message.prompt_top_token_bytes.extend(_bytes_of(rows.top_ids, token_bytes))


def _bytes_of(token_ids: Iterable[int], token_bytes: Sequence[bytes]) -> list[bytes]:
    return [token_bytes[token_id] for token_id in token_ids]


def request_from_message(message: tokenizer_pb2.GenerateRequest) -> GenerateRequest:
    """A client's request with the wire's defaults filled in.

    Raises:
        InvalidRequest: There is no prompt, or a kind of constraint or pooling is not known here.
    """
    return GenerateRequest(
        request_id=message.key.request_id,
        attempt=message.key.attempt,
        model=message.model,
        prompt=_prompt_from_message(message),
        sampling=sampling_from_message(message.sampling),
        n=message.n if message.HasField("n") else 1,
        stop=tuple(message.stop),
        include_stop=message.include_stop,
        skip_special_tokens=_or_true(message, "skip_special_tokens"),
        constraint=_constraint_from_message(message),
        priority=message.priority,
        tenant=message.tenant,
        cache_namespace=message.cache_namespace,
        deadline_s=message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
        trace=_trace_from_message(message),
        bad_words=tuple(message.bad_words),
        truncate_prompt_tokens=(
            message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None
        ),
        resume=_resume_from_message(message.resume) if message.HasField("resume") else None,
        pools=pools_from_message(message.pooling),
    )


def _resume_from_message(message: tokenizer_pb2.Resume) -> Resume:
    return Resume(
        prompt_ids=list(message.prompt_ids),
        choices=[
            ResumedChoice(
                index=choice.index,
                token_ids=list(choice.token_ids),
                num_chars=choice.num_chars,
                is_finished=choice.finished,
            )
            for choice in message.choices
        ],
        prompt_logprobs_done=message.prompt_logprobs_done,
    )


def _prompt_from_message(message: tokenizer_pb2.GenerateRequest) -> Prompt:
    if message.HasField("resume"):
        return IdsPrompt(list(message.resume.prompt_ids))
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(message.text, _or_true(message, "add_special_tokens"))
    if kind == "ids":
        return IdsPrompt(list(message.ids.ids))
    if kind == "chat":
        return chat_from_message(message.chat)
    raise InvalidRequest("there is no prompt: give text, ids or chat", param="prompt")


def chat_from_message(message: tokenizer_pb2.ChatPrompt) -> ChatPrompt:
    """A conversation."""
    return ChatPrompt(
        messages_json=message.messages_json,
        tools_json=message.tools_json,
        template_kwargs_json=message.template_kwargs_json,
        add_generation_prompt=(
            message.add_generation_prompt if message.HasField("add_generation_prompt") else None
        ),
        continue_final_message=message.continue_final_message,
        chat_template=message.chat_template,
    )


def _constraint_from_message(message: tokenizer_pb2.GenerateRequest) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    try:
        return constraint_from_message(message.constraint)
    except ValueError as error:
        raise InvalidRequest(f"unknown kind of constraint: {error}", param="constraint") from None


def _trace_from_message(message: tokenizer_pb2.GenerateRequest) -> Trace | None:
    if not message.trace.traceparent:
        return None
    return Trace(message.trace.traceparent, message.trace.tracestate)


def _or_true(message: tokenizer_pb2.GenerateRequest, name: str) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else True  # type: ignore[arg-type]


def engine_from_message(state: common_pb2.EngineState, *, scheduler: str) -> Engine:
    """What routing must know of an engine.

    Args:
        state: As its scheduler shows it.
        scheduler: Address under which we reach that scheduler.
    """
    load, info = state.load, state.info
    return Engine(
        scheduler=scheduler,
        text_fp=state.text_fp,
        is_ready=state.phase == common_pb2.ENGINE_PHASE_READY,
        max_model_len=info.max_model_len,
        revision=info.revision,
        block_size=info.kv_groups[0].block_size if info.kv_groups else 0,
        place=Place(
            place_id=state.engine_id,
            waiting_uncached_tokens=load.waiting_uncached_tokens,
            num_running=load.running,
            num_waiting=load.waiting,
            prefill_tok_s=load.prefill_tok_s,
            decode_tok_s=load.decode_tok_s,
            max_running=info.max_num_seqs,
        ),
    )
