"""A generation as the gateway sees it: what is asked of a tokenizer and what comes back.

Plain values. Knows neither HTTP nor protobuf: ``convert.py`` makes messages of these, and these of
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import SluicewayError
from services.common.sampling import Constraint, SamplingParams


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt to be encoded as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """A prompt that is encoded already."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered by the model's chat template.

    Attributes:
        messages_json: The messages as OpenAI clients send them.
        tools_json: "" = none.
        template_kwargs_json: Variables for the template; "" = none.
        add_generation_prompt: Whether the template opens the assistant's turn.
        continue_final_message: Whether the last message is left open, to be continued.
        chat_template: "" = the model's own.
    """

    messages_json: str
    tools_json: str = ""
    template_kwargs_json: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str = ""


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Trace:
    """W3C trace context of the client."""

    traceparent: str
    tracestate: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it; ``sampling.seed`` is always set.

    Attributes:
        request_id: Ours, unique.
        cache_namespace: Requests of different namespaces never share KV blocks.
        tenant: Who asks, as a label; "" = nobody in particular.
        bad_words: Words that must not come out.
        truncate_prompt_tokens: Keep that many last tokens of the prompt; -1 = what fits.
        pools: Not tokens are wanted but one vector of the prompt.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    add_special_tokens: bool = True
    constraint: Constraint | None = None
    priority: int = 0
    cache_namespace: str = ""
    tenant: str = ""
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    trace: Trace | None = None
    pools: bool = False


# The values below are made once per token: not frozen, because a frozen dataclass costs
# several times as much to construct. Nobody writes to them after construction.


@dataclass(slots=True)
class TopToken:
    """One likely token at a position."""

    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of the token at a position, and the likeliest ones there, best first."""

    token_id: int
    logprob: float
    rank: int
    token_bytes: bytes
    top: list[TopToken]


@dataclass(slots=True)
class PromptLogprobsPart:
    """Log-probabilities of the prompt tokens from index ``start`` on."""

    start: int
    entries: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice, as its scheduler counted them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Unix nanoseconds of one choice's phases; 0 = did not happen."""

    arrival: int = 0
    scheduled: int = 0
    first_token: int = 0
    last_token: int = 0
    num_preemptions: int = 0
    engine_id: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended.

    Attributes:
        reason: "stop" or "length".
        stop_reason: The stop string or stop token id that ended it, or what else did; ``None`` for
            EOS and length.
        error: Why it failed; then ``reason`` is "error" or "abort".
        pooled: The vector of a request that pools: float32, little-endian.
    """

    reason: str
    stop_reason: str | int | None = None
    error: SluicewayError | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    pooled: bytes = b""


@dataclass(slots=True)
class ChoiceUpdate:
    """What a choice has gained since its last update.

    Attributes:
        index: Which choice of the request.
        text: New text; "" also while characters or stop strings are incomplete.
        token_ids: New output tokens.
        num_tokens: Output tokens before these.
        logprobs: One entry per new token, if they were asked for.
        finish: Set on the last update of the choice.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    num_tokens: int
    logprobs: list[TokenLogprob]
    finish: Finish | None


@dataclass(slots=True)
class Update:
    """One message of a generation."""

    prompt_ids: Sequence[int] | None
    choices: list[ChoiceUpdate]
    prompt_logprobs: PromptLogprobsPart | None
