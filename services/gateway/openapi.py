"""The OpenAPI document: bodies are read by hand, so their schemas are put in by hand too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.anthropic.examples import EXAMPLES as ANTHROPIC_EXAMPLES
from services.gateway.anthropic.replies import MessageEvent
from services.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from services.gateway.openai.chunks import ChatCompletionChunk, CompletionChunk
from services.gateway.openai.embeddings import EmbeddingRequest
from services.gateway.openai.examples import EXAMPLES as OPENAI_EXAMPLES
from services.gateway.openai.replies import ErrorReply
from services.gateway.openai.responses.replies import ResponseEvent
from services.gateway.openai.responses.schema import ResponseRequest
from services.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from services.gateway.openai.tokenize import DetokenizeRequest, TokenizeRequest

Parameter = dict[str, Any]

EXAMPLES = OPENAI_EXAMPLES | ANTHROPIC_EXAMPLES
_REF = "#/components/schemas/"
_BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ResponseRequest,
    MessagesRequest,
    CountTokensRequest,
)
# Nothing in a route refers to these: an event stream is described in words.
_CHUNKS: tuple[type[BaseModel], ...] = (
    ChatCompletionChunk,
    CompletionChunk,
    ResponseEvent,
    MessageEvent,
)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes ``model``."""
    content = {"application/json": {"schema": {"$ref": _REF + model.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def path_parameter(
    name: str, description: str, *, query: Sequence[Parameter] = ()
) -> dict[str, Any]:
    """``openapi_extra`` of a route with one parameter in its path.

    Args:
        name: Of the parameter.
        description: What it is.
        query: What the query string may have.
    """
    parameter = {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string"},
    }
    return {"parameters": [parameter, *query]}


def query_parameter(name: str, schema: dict[str, Any], description: str) -> Parameter:
    """A parameter of a query string.

    Args:
        name: Of the parameter.
        schema: JSON schema.
        description: What it does.
    """
    return {"name": name, "in": "query", "description": description, "schema": schema}


def replies_of(
    model: type[BaseModel],
    *,
    chunk: type[BaseModel] | None = None,
    error: type[BaseModel] = ErrorReply,
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that has a body.

    Args:
        model: The whole reply.
        chunk: Data of the events, where the reply can be streamed.
        error: What errors look like.
    """
    done: dict[str, Any] = {"model": model, "description": "The answer."}
    if chunk is not None:
        done["content"] = {"text/event-stream": _chunks_of(chunk)}
    return {200: done} | errors_of(400, 401, 404, 413, 429, 500, 502, 503, model=error)


def _chunks_of(chunk: type[BaseModel]) -> dict[str, Any]:
    text = (
        f"With stream true. Data of each event: a {chunk.__name__}; of the last: [DONE]. "
        "A stream that fails ends in an event with an error object, and without [DONE]."
    )
    example = f"data: {orjson.dumps(EXAMPLES[chunk]).decode()}\n\ndata: [DONE]\n\n"
    return {"schema": {"type": "string", "description": text}, "example": example}


def with_events(
    replies: dict[int | str, dict[str, Any]], event: type[BaseModel], *, last: str
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that also streams named events.

    Args:
        replies: Those of the route when it does not.
        event: Data of the events; its ``type`` is the event's name.
        last: Names of the events that end a stream.
    """
    text = (
        f"With stream true. Data of each event: a {event.__name__}, whose type is the event's "
        f"name. {last} is the last."
    )
    data = EXAMPLES[event]
    example = f"event: {data['type']}\ndata: {orjson.dumps(data).decode()}\n\n"
    stream = {"schema": {"type": "string", "description": text}, "example": example}
    return replies | {200: replies[200] | {"content": {"text/event-stream": stream}}}


def errors_of(
    *statuses: int, model: type[BaseModel] = ErrorReply
) -> dict[int | str, dict[str, Any]]:
    """``responses`` for errors."""
    return {status: {"model": model, "description": _MEANING[status]} for status in statuses}


_MEANING = {
    400: "The request is wrong; param names the field.",
    401: "No key, or a wrong one.",
    404: "No such route, model or response.",
    413: "The body is too large.",
    429: "Too many requests; see Retry-After.",
    500: "A bug; the message has a debug id.",
    502: "A worker was lost; see Retry-After.",
    503: "Not ready; see Retry-After.",
}


def install(app: FastAPI) -> None:
    """Have the app's document contain the bodies."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, made = models_json_schema(
        [(model, "validation") for model in _BODIES + _CHUNKS], ref_template=_REF + "{model}"
    )
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in made["$defs"].items():
        schemas.setdefault(name, schema)
    for model, example in EXAMPLES.items():
        schemas[model.__name__]["examples"] = [example]
    return found
