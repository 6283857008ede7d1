"""Sampling parameters: what they are, their defaults and when they are valid.

The wire's ``SamplingParams`` message has presence for every field; the dataclass here has the
defaults. Draws are keyed by (seed, choice, position, stream), see ``draw_key``; nothing about the
batch enters.
"""

from __future__ import annotations

import math
import operator
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from services.common.errors import InvalidRequest

GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 0.01
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_IDS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)


class ConstraintKind(Enum):
    """What the output must satisfy."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    CHOICE = 4
    GRAMMAR = 5


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for the output; ``spec`` is a JSON schema, regex, JSON list or lark, by kind."""

    kind: ConstraintKind
    spec: str


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Stop once the output's tail is ``min_count`` copies of a pattern of min..max tokens."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class BadWord:
    """All token sequences that spell one word, as a graph of places in it; columns side by side.

    Place 0 is the word's beginning, the highest its end; every path from one to the other is a
    spelling.

    Attributes:
        starts: Edge i leads from place ``starts[i]`` ...
        token_ids: ... by this token ...
        ends: ... to place ``ends[i]``, which is higher.
    """

    starts: tuple[int, ...]
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of_tokens(cls, *token_ids: int) -> BadWord:
        """The one spelling that is these tokens."""
        places = range(len(token_ids) + 1)
        return cls(tuple(places[:-1]), token_ids, tuple(places[1:]))

    @property
    def is_sound(self) -> bool:
        """Whether the columns fit together and every edge leads forward."""
        return 0 < len(self.token_ids) == len(self.starts) == len(self.ends) and all(
            start < end for start, end in zip(self.starts, self.ends, strict=True)
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when they end.

    Attributes:
        temperature: 0 = greedy; values in (0, 0.01) act as 0.01.
        top_k: 0 or -1 = off.
        seed: The same seed gives the same output; ``None`` = the gateway or ``LLM``, whichever
            takes the request, draws one.
        max_tokens: ``None`` = the rest of the context.
        min_tokens: Nothing stops the output before this many tokens.
        logprobs: Top-k alternatives per output token; ``None`` = no log-probabilities, -1 = all.
        bad_words: A token that would complete one of them in the output is banned.
        allowed_token_ids: ``None`` = all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[BadWord, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionDetection | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is taken instead of a draw."""
        return self.temperature < GREEDY_EPSILON

    def validate(self) -> None:
        """Refuse values that mean nothing.

        Raises:
            InvalidRequest: Names the field, its value and what is allowed.
        """
        _require_number("temperature", self.temperature, low=0.0, high=100.0)
        _require_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _require_number("min_p", self.min_p, low=0.0, high=1.0)
        _require_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _require_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _require_number(
            "repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, low_open=True
        )
        _require_int("top_k", self.top_k, low=-1, high=2**31 - 1)
        _require_int("min_tokens", self.min_tokens, low=0, high=2**31 - 1)
        if self.seed is not None:
            _require_int("seed", self.seed, low=MIN_SEED, high=MAX_SEED)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, low=1, high=2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
                    param="min_tokens",
                )
        self._validate_lists()
        self._validate_logprobs()
        self._validate_repetition_detection()

    def _validate_lists(self) -> None:
        _require_len("stop_token_ids", len(self.stop_token_ids), high=MAX_STOP_TOKEN_IDS)
        _require_len("logit_bias", len(self.logit_bias), high=MAX_LOGIT_BIAS)
        self._validate_bad_words()
        for token_id, bias in self.logit_bias.items():
            _require_number(f"logit_bias[{token_id}]", bias, low=-100.0, high=100.0)
        if self.allowed_token_ids is not None:
            _require_len("allowed_token_ids", len(self.allowed_token_ids), high=MAX_ALLOWED_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids must not be empty", param="allowed_token_ids"
                )

    def _validate_bad_words(self) -> None:
        # A spelling with and one without a space before it, and the tokenizer's own if it differs.
        _require_len("bad_words", len(self.bad_words), high=4 * MAX_BAD_WORDS)
        for word in self.bad_words:
            if not word.is_sound:
                raise InvalidRequest(f"bad_words: {word} is no word", param="bad_words")

    def _validate_logprobs(self) -> None:
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _require_int(name, value, low=-1, high=MAX_LOGPROBS)

    def _validate_repetition_detection(self) -> None:
        rule = self.repetition_detection
        if rule is None:
            return
        for name, value, low, high in (
            ("max_pattern_size", rule.max_pattern_size, 1, 2**31 - 1),
            ("min_pattern_size", rule.min_pattern_size, 1, rule.max_pattern_size),
            ("min_count", rule.min_count, 2, 2**31 - 1),
        ):
            _require_int(f"repetition_detection.{name}", value, low=low, high=high)

    def validate_token_ids(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            InvalidRequest: Names the field and the id.
        """
        columns = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": tuple(token_id for word in self.bad_words for token_id in word.token_ids),
        }
        for name, ids in columns.items():
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token_id} is not in 0..{vocab_size - 1}", param=name
                    )


def _require_number(
    name: str, value: float, *, low: float, high: float, low_open: bool = False
) -> None:
    param = name.split("[")[0]
    try:
        is_finite = math.isfinite(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be a number, got {value!r}", param=param) from None
    if not (is_finite and (low < value if low_open else low <= value) and value <= high):
        bracket = "(" if low_open else "["
        raise InvalidRequest(
            f"{name} must be in {bracket}{low:g}, {high:g}], got {value}", param=param
        )


def _require_int(name: str, value: int, *, low: int, high: int) -> None:
    param = name.split(".")[0]
    try:
        inside = low <= operator.index(value) <= high
    except TypeError:
        raise InvalidRequest(f"{name} must be a whole number, got {value!r}", param=param) from None
    if not inside:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value}", param=param)


def _require_len(name: str, length: int, *, high: int) -> None:
    if length > high:
        raise InvalidRequest(f"{name} has {length} entries; at most {high} are allowed", param=name)


def draw_seed() -> int:
    """The seed of a request that brings none; kept, so that a resumed request draws the same."""
    return secrets.randbits(63)


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def draw_key(seed: int, *, choice: int, position: int, stream: int = 0) -> int:
    """64-bit key of one draw; the worker's generator expands it over the vocabulary.

    A chain of splitmix64 finalisers (Steele et al. 2014) over the four values, so that neighbours
    in any of them give unrelated keys.

    Args:
        seed: The request's seed; any 64-bit integer.
        choice: Index of the choice in the request.
        position: Index in the sequence (prompt included) of the token to be drawn.
        stream: 0 = target draws; other streams are for draft tokens.
    """
    state = seed & _MASK
    for value in (choice, position, stream):
        state = mix64(state ^ ((value * _GOLDEN + _GOLDEN) & _MASK))
    return state


def mix64(value: int) -> int:
    """The finaliser of splitmix64: a bijection on 64-bit integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
