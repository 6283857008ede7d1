"""Protobuf messages of the tokenizer's service and the gateway's own values, one into the other."""

from __future__ import annotations

from services.common.convert import (
    constraint_to_message,
    error_from_message,
    pooling_to_message,
    sampling_to_message,
)
from services.common.errors import RequestFailed, SluicewayError
from services.common.pb import common_pb2, tokenizer_pb2
from services.gateway.fleet import Engine, EngineLoad, Phase, TokenizerInfo
from services.gateway.generation import (
    ChatPrompt,
    ChoiceUpdate,
    Finish,
    GenerationRequest,
    IdsPrompt,
    PromptLogprobsPart,
    TextPrompt,
    Timings,
    TokenLogprob,
    TopToken,
    Update,
    Usage,
)

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
    common_pb2.FINISH_REASON_ERROR: "error",
}
_PHASES = {
    common_pb2.ENGINE_PHASE_LOADING: Phase.LOADING,
    common_pb2.ENGINE_PHASE_READY: Phase.READY,
    common_pb2.ENGINE_PHASE_STALLED: Phase.STALLED,
    common_pb2.ENGINE_PHASE_DRAINING: Phase.DRAINING,
    common_pb2.ENGINE_PHASE_GONE: Phase.GONE,
}


def request_to_message(
    request: GenerationRequest, *, attempt: int
) -> tokenizer_pb2.GenerateRequest:
    """The message that asks a tokenizer for a generation.

    Args:
        request: What is wanted.
        attempt: 0 for the first submission of this request, one more for each further one.
    """
    message = tokenizer_pb2.GenerateRequest(
        key=common_pb2.RequestKey(request_id=request.request_id, attempt=attempt),
        model=request.model,
        sampling=sampling_to_message(request.sampling),
        n=request.n,
        stop=request.stop,
        include_stop=request.include_stop,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        add_special_tokens=request.add_special_tokens,
        priority=request.priority,
        cache_namespace=request.cache_namespace,
        tenant=request.tenant,
        bad_words=request.bad_words,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        pooling=pooling_to_message(request.pools),
    )
    if request.constraint is not None:
        message.constraint.CopyFrom(constraint_to_message(request.constraint))
    if request.trace is not None:
        message.trace.traceparent = request.trace.traceparent
        message.trace.tracestate = request.trace.tracestate
    _set_prompt(message, request)
    return message


def _set_prompt(message: tokenizer_pb2.GenerateRequest, request: GenerationRequest) -> None:
    prompt = request.prompt
    match prompt:
        case TextPrompt():
            message.text = prompt.text
        case IdsPrompt():
            message.ids.ids.extend(prompt.ids)
        case ChatPrompt():
            message.chat.CopyFrom(chat_to_message(prompt))


def chat_to_message(prompt: ChatPrompt) -> tokenizer_pb2.ChatPrompt:
    """A conversation as a message."""
    return tokenizer_pb2.ChatPrompt(
        messages_json=prompt.messages_json,
        tools_json=prompt.tools_json,
        template_kwargs_json=prompt.template_kwargs_json,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        chat_template=prompt.chat_template,
    )


def update_from_message(message: tokenizer_pb2.TextDelta) -> Update:
    """One delta of a generation."""
    return Update(
        prompt_ids=message.prompt_ids if message.has_prompt else None,
        choices=[_choice(choice) for choice in message.choices],
        prompt_logprobs=_prompt_logprobs(message) if message.HasField("prompt_logprobs") else None,
    )


def _choice(message: tokenizer_pb2.ChoiceDelta) -> ChoiceUpdate:
    return ChoiceUpdate(
        index=message.index,
        text=message.text,
        token_ids=message.token_ids,
        num_tokens=message.num_tokens,
        logprobs=_logprobs(message) if message.HasField("logprobs") else [],
        finish=finish_from_message(message.finish) if message.HasField("finish") else None,
    )


def _logprobs(message: tokenizer_pb2.ChoiceDelta) -> list[TokenLogprob]:
    columns = message.logprobs
    ids = [message.token_ids[position] for position in columns.position]
    return _entries(
        ids, columns, token_bytes=message.logprob_token_bytes, top_bytes=message.top_token_bytes
    )


def _prompt_logprobs(message: tokenizer_pb2.TextDelta) -> PromptLogprobsPart:
    columns = message.prompt_logprobs
    entries = _entries(
        columns.token_ids,
        columns,
        token_bytes=message.prompt_token_bytes,
        top_bytes=message.prompt_top_token_bytes,
    )
    return PromptLogprobsPart(columns.start, entries)


def _entries(
    token_ids: list[int] | object,
    columns: common_pb2.Logprobs | common_pb2.PromptLogprobs,
    *,
    token_bytes: object,
    top_bytes: object,
) -> list[TokenLogprob]:
    """Rows out of columns; the ``top_*`` columns are consumed row by row."""
    tops = [
        TopToken(*row)
        for row in zip(columns.top_ids, columns.top_logprobs, top_bytes, strict=True)  # type: ignore[call-overload]
    ]
    entries = []
    start = 0
    rows = zip(  # type: ignore[call-overload]
        token_ids, columns.logprob, columns.rank, token_bytes, columns.num_top, strict=True
    )
    for token_id, logprob, rank, raw, num_top in rows:
        top = tops[start : start + num_top]
        entries.append(TokenLogprob(token_id, logprob, rank, raw, top))
        start += num_top
    return entries


def finish_from_message(message: tokenizer_pb2.Finish) -> Finish:
    """How a choice ended."""
    reason = _REASONS.get(message.reason, "error")
    return Finish(
        reason=reason,
        stop_reason=_stop_reason(message),
        error=_finish_error(message) if reason in ("error", "abort") else None,
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            cached_tokens=message.usage.cached_tokens,
            computed_tokens=message.usage.computed_tokens,
            output_tokens=message.usage.output_tokens,
        ),
        timings=_timings(message.life),
        pooled=message.pooled,
    )


def _stop_reason(message: tokenizer_pb2.Finish) -> str | int | None:
    if message.HasField("stop_string"):
        return message.stop_string
    if message.HasField("stop_token_id"):
        return message.stop_token_id
    return message.stop_detail or None


def _finish_error(message: tokenizer_pb2.Finish) -> SluicewayError:
    detail = message.error
    if not detail.error_class:
        return RequestFailed(f"the request ended early ({_REASONS.get(message.reason, 'error')})")
    return error_from_message(detail)


def _timings(life: common_pb2.Life) -> Timings:
    return Timings(
        arrival=life.arrival_unix_ns,
        scheduled=life.scheduled_unix_ns,
        first_token=life.first_token_unix_ns,
        last_token=life.last_token_unix_ns,
        num_preemptions=life.num_preemptions,
        engine_id=life.decision.chosen_engine_id,
    )


def info_from_message(message: tokenizer_pb2.ServiceInfo) -> TokenizerInfo:
    """The state of a tokenizer and of what it can reach."""
    return TokenizerInfo(
        model=message.model,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        is_ready=message.ready,
        not_ready_reason=message.not_ready_reason,
        engines=tuple(_engine(engine) for engine in message.engines),
    )


def _engine(message: common_pb2.EngineState) -> Engine:
    groups = message.info.kv_groups
    return Engine(
        engine_id=message.engine_id,
        worker_id=message.worker_id,
        phase=_PHASES.get(message.phase, Phase.GONE),
        loading_phase=message.loading.phase,
        loading_fraction=message.loading.fraction,
        num_blocks=message.info.num_blocks,
        block_size=groups[0].block_size if groups else 0,
        load=_load(message.load),
    )


def _load(message: common_pb2.Load) -> EngineLoad:
    return EngineLoad(**{name: getattr(message, name) for name in EngineLoad.__dataclass_fields__})
