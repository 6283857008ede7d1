"""What several services say in the same message: sampling parameters, constraints, errors."""

from __future__ import annotations

from services.common.errors import InvalidRequest, SluicewayError, error_from_name
from services.common.pb import common_pb2 as pb
from services.common.sampling import (
    BadWord,
    Constraint,
    ConstraintKind,
    RepetitionDetection,
    SamplingParams,
)

_OPTIONAL_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
)


def sampling_to_message(params: SamplingParams) -> pb.SamplingParams:
    """Every field is set, also at its default; ``None`` stays absent."""
    message = pb.SamplingParams(stop_token_ids=params.stop_token_ids)
    for name in _OPTIONAL_FIELDS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    message.logit_bias_ids.extend(params.logit_bias.keys())
    message.logit_bias_values.extend(params.logit_bias.values())
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(params.allowed_token_ids)
        message.allowed_token_ids.SetInParent()
    for word in params.bad_words:
        message.bad_words.add(starts=word.starts, token_ids=word.token_ids, ends=word.ends)
    rule = params.repetition_detection
    if rule is not None:
        message.repetition_detection.max_pattern_size = rule.max_pattern_size
        message.repetition_detection.min_pattern_size = rule.min_pattern_size
        message.repetition_detection.min_count = rule.min_count
        message.repetition_detection.SetInParent()
    return message


def sampling_from_message(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields get the dataclass's defaults. Does not validate."""
    present = {field.name: value for field, value in message.ListFields()}
    values = {name: present[name] for name in _OPTIONAL_FIELDS if name in present}
    rule = message.repetition_detection
    return SamplingParams(
        **values,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(zip(message.logit_bias_ids, message.logit_bias_values, strict=True)),
        allowed_token_ids=(
            tuple(message.allowed_token_ids.ids) if message.HasField("allowed_token_ids") else None
        ),
        bad_words=tuple(
            BadWord(tuple(word.starts), tuple(word.token_ids), tuple(word.ends))
            for word in message.bad_words
        ),
        repetition_detection=(
            RepetitionDetection(rule.max_pattern_size, rule.min_pattern_size, rule.min_count)
            if message.HasField("repetition_detection")
            else None
        ),
    )


def constraint_to_message(constraint: Constraint) -> pb.Constraint:
    """The inverse of ``constraint_from_message``."""
    return pb.Constraint(
        kind=pb.ConstraintKind.ValueType(constraint.kind.value), spec=constraint.spec
    )


def constraint_from_message(message: pb.Constraint) -> Constraint:
    """The inverse of ``constraint_to_message``.

    Raises:
        ValueError: A kind this version does not know.
    """
    return Constraint(kind=ConstraintKind(message.kind), spec=message.spec)


def pooling_to_message(pools: bool) -> pb.PoolingKind.ValueType:
    """The inverse of ``pools_from_message``."""
    return pb.POOLING_KIND_MEAN if pools else pb.POOLING_KIND_UNSPECIFIED


def pools_from_message(kind: pb.PoolingKind.ValueType) -> bool:
    """Whether a vector is wanted in place of tokens.

    Raises:
        InvalidRequest: A kind this version does not know.
    """
    if kind not in (pb.POOLING_KIND_UNSPECIFIED, pb.POOLING_KIND_MEAN):
        raise InvalidRequest(f"pooling: the kind {kind} is not known here", param="pooling")
    return kind == pb.POOLING_KIND_MEAN


def error_to_message(error: SluicewayError) -> pb.ErrorDetail:
    """The inverse of ``error_from_message``."""
    return pb.ErrorDetail(
        error_class=type(error).__name__,
        message=error.message,
        param=error.param or "",
        retry_after_ms=int((error.retry_after_s or 0.0) * 1000),
    )


def error_from_message(message: pb.ErrorDetail) -> SluicewayError:
    """The error that a peer names in a frame."""
    return error_from_name(
        message.error_class,
        message.message,
        param=message.param or None,
        retry_after_s=message.retry_after_ms / 1000 if message.retry_after_ms else None,
    )
