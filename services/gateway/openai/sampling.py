"""How tokens are drawn and when they end: the fields of a body as ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.errors import InvalidRequest
from services.common.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_SEED,
    MIN_SEED,
    RepetitionDetection,
    SamplingParams,
)
from services.gateway.openai.schema import GenerationBody

MAX_STOPS = 128
MAX_STOP_CHARS = 1024
MAX_TOKEN_ID = 2**32 - 1

# Fields whose name and meaning are those of SamplingParams.
_DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    drawn_seed: int,
    vocab_size: int,
) -> SamplingParams:
    """Collect and check the sampling parameters of a request.

    Args:
        body: The request.
        max_tokens: Most tokens; ``None`` = the rest of the context.
        logprobs: Alternatives per output token; ``None`` = no log-probabilities.
        prompt_logprobs: The same for the prompt.
        drawn_seed: Seed for a request that has none.
        vocab_size: Of the model; 0 = not known.

    Raises:
        InvalidRequest: Names the field, its value and what is allowed.
    """
    given = {name: value for name in _DIRECT if (value := getattr(body, name)) is not None}
    params = SamplingParams(
        **given,
        max_tokens=max_tokens,
        seed=_seed(body.seed, drawn_seed),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=_tuple_or_none(body.allowed_token_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        repetition_detection=_repetition_detection(body),
    )
    params.validate()
    params.validate_token_ids(vocab_size or MAX_TOKEN_ID)
    return params


def _seed(seed: int | None, drawn: int) -> int:
    if seed is None:
        return drawn
    if not MIN_SEED <= seed <= MAX_SEED:
        raise InvalidRequest(f"seed must be in [{MIN_SEED}, {MAX_SEED}], got {seed}", param="seed")
    return seed


def _logit_bias(biases: Mapping[str, float] | None) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in (biases or {}).items():
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        result[int(key)] = bias
    return result


def _tuple_or_none(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _repetition_detection(body: GenerationBody) -> RepetitionDetection | None:
    rule = body.repetition_detection
    if rule is None or rule.max_pattern_size == 0:
        return None
    shortest = 1 if rule.min_pattern_size is None else rule.min_pattern_size
    return RepetitionDetection(rule.max_pattern_size, shortest, rule.min_count)


def stop_strings(stop: object) -> tuple[str, ...]:
    """The stop strings of a request.

    Raises:
        InvalidRequest: Not text, empty, too many or too long.
    """
    if stop is None:
        return ()
    stops = stop if isinstance(stop, list) else [stop]
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} entries; at most {MAX_STOPS}", param="stop")
    for text in stops:
        if not isinstance(text, str):
            raise InvalidRequest("stop must be text or a list of texts", param="stop")
        if not text:
            raise InvalidRequest("stop must not hold an empty text", param="stop")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop: a text may have at most {MAX_STOP_CHARS} characters", param="stop"
            )
    return tuple(stops)


def bad_words(words: list[str] | None) -> tuple[str, ...]:
    """The banned words of a request.

    Raises:
        InvalidRequest: Empty ones, or too many.
    """
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} entries; at most {MAX_BAD_WORDS}", param="bad_words"
        )
    if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise InvalidRequest(
            f"bad_words must hold words of 1 to {MAX_BAD_WORD_CHARS} characters", param="bad_words"
        )
    return tuple(words)


def check_num_logprobs(name: str, value: int | None) -> None:
    """Refuse a number of alternatives that is not 0..20.

    Raises:
        InvalidRequest: Names the field.
    """
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be in [0, {MAX_LOGPROBS}], got {value}", param=name)
