"""POST /v1/embeddings: one vector per input."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.config import JsonDict

from services.common.errors import InvalidRequest, RequestFailed
from services.common.sampling import SamplingParams
from services.gateway.auth import cache_namespace
from services.gateway.generation import Finish, GenerationRequest
from services.gateway.openai.parse import validate
from services.gateway.openai.plan import Caller, PlanContext, check_queueing
from services.gateway.openai.prompts import parse_prompts
from services.gateway.openai.schema import AS_WRITTEN, PROMPT_SCHEMA, Integer, StrictModel
from services.gateway.request_id import new_request_id

MAX_INPUTS = 2048
"""As OpenAI's."""

# Field → values that mean the same as not giving it.
_REFUSED: dict[str, tuple[object, ...]] = {
    "messages": (),
    "normalize": (True,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
_EXAMPLE: JsonDict = {"model": "smollm2", "input": ["the sea", "a mountain"], "dimensions": 3}


class EmbeddingRequest(StrictModel):
    """Body of POST /v1/embeddings."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, json_schema_extra={"examples": [_EXAMPLE]}
    )

    model: str | None = Field(
        None, description="Served name of the model; not given = the one that is served."
    )
    input: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description=f"Text, token ids, or a list of either, of at most {MAX_INPUTS} entries."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float (default): numbers; base64: float32, little-endian."
    )
    dimensions: Annotated[int, Field(ge=1), AS_WRITTEN] | None = Field(
        None,
        description="Keep only that many first elements and scale the vector to length 1 again.",
    )
    user: str | None = Field(None, description="Accepted without effect.")
    truncate_prompt_tokens: Integer | None = Field(
        None,
        description="Keep only that many last tokens of an input; -1 = what fits.",
        json_schema_extra={"minimum": -1},
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to a text; default true."
    )
    priority: Integer | None = Field(
        None,
        description="Lower runs first; default 0.",
        json_schema_extra={"minimum": -2147483648, "maximum": 2147483647},
    )
    cache_salt: str | None = Field(
        None,
        description="Only requests with the same salt share cached prompts.",
        json_schema_extra={"minLength": 1},
    )
    request_id: str | None = Field(
        None,
        description="Accepted without effect: ids are ours. X-Request-Id is echoed and logged.",
    )


class EmbeddingObject(BaseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int = Field(description="Of the input.")
    embedding: list[float] | str = Field(
        description="Mean of the last states of the input's tokens, scaled to length 1."
    )


class EmbeddingUsage(BaseModel):
    """Token counts over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(BaseModel):
    """Reply of POST /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """A checked request.

    Attributes:
        requests: One per input.
        names: What the body calls each input.
        dimensions: Elements that are kept; ``None`` = all.
    """

    requests: tuple[GenerationRequest, ...]
    names: tuple[str, ...]
    dimensions: int | None
    is_base64: bool

    def reply(self, finishes: Sequence[Finish]) -> dict[str, Any]:
        """The reply.

        Args:
            finishes: Of each request, in order.

        Raises:
            InvalidRequest: More dimensions are asked for than there are.
        """
        num_tokens = sum(finish.usage.prompt_tokens for finish in finishes)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._embedding(finish)}
                for index, finish in enumerate(finishes)
            ],
            "model": self.requests[0].model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _embedding(self, finish: Finish) -> list[float] | str:
        vector = finish.pooled
        if not vector:
            raise RequestFailed("the tokenizer returned no vector")
        if self.dimensions is not None:
            vector = _truncated(vector, self.dimensions)
        return base64.b64encode(vector).decode() if self.is_base64 else _floats(vector)


def _floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def _truncated(vector: bytes, dimensions: int) -> bytes:
    """The first elements, scaled so that their squares add up to 1 (if any of them is not 0)."""
    elements = _floats(vector)
    if dimensions > len(elements):
        raise InvalidRequest(
            f"dimensions: this model's vectors have {len(elements)} elements, got {dimensions}",
            param="dimensions",
        )
    kept = elements[:dimensions]
    length = math.hypot(*kept) or 1.0
    return struct.pack(f"<{dimensions}f", *(element / length for element in kept))


def plan_embeddings(
    raw: dict[str, Any], caller: Caller, context: PlanContext, *, now: int
) -> EmbeddingPlan:
    """Check an embeddings request and say what is to be done for it.

    Args:
        raw: The parsed body.
        caller: Who sends it.
        context: What planning knows.
        now: Unix seconds; the reply does not tell them.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    body = validate(raw, EmbeddingRequest)
    info = context.fleet.resolve_model(body.model)
    context.unknown_fields.check(body.model_extra, also_refused=_REFUSED)
    check_queueing(body)
    prompts = parse_prompts(
        body.input, vocab_size=info.vocab_size, max_prompts=MAX_INPUTS, name="input"
    )
    namespace = cache_namespace(
        context.namespace_secret, tenant=caller.tenant, cache_salt=body.cache_salt or ""
    )
    make = partial(
        GenerationRequest,
        model=info.model,
        sampling=SamplingParams(),
        add_special_tokens=body.add_special_tokens is not False,
        priority=body.priority or 0,
        cache_namespace=namespace,
        tenant=caller.tenant,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        trace=caller.trace,
        pools=True,
    )
    request_id = new_request_id("embd")
    requests = [make(f"{request_id}-{i}", prompt=prompt) for i, prompt in enumerate(prompts)]
    return EmbeddingPlan(
        requests=tuple(requests),
        names=_names(body.input, len(prompts)),
        dimensions=body.dimensions,
        is_base64=body.encoding_format == "base64",
    )


def _names(given: object, count: int) -> tuple[str, ...]:
    is_list_of_inputs = isinstance(given, list) and not isinstance(given[0], int)
    return tuple(f"input[{i}]" for i in range(count)) if is_list_of_inputs else ("input",)
