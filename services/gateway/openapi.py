"""The OpenAPI document: bodies are read by hand, so their schemas are put in by hand too."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.openai.chunks import ChatCompletionChunk, CompletionChunk
from services.gateway.openai.examples import EXAMPLES
from services.gateway.openai.replies import ErrorReply
from services.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from services.gateway.openai.tokenize import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/"
_BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
# Nothing in a route refers to these: an event stream is described in words.
_CHUNKS: tuple[type[BaseModel], ...] = (ChatCompletionChunk, CompletionChunk)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes ``model``."""
    content = {"application/json": {"schema": {"$ref": _REF + model.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def path_parameter(name: str, description: str) -> dict[str, Any]:
    """``openapi_extra`` of a route with one parameter in its path."""
    parameter = {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string"},
    }
    return {"parameters": [parameter]}


def replies_of(
    model: type[BaseModel], *, chunk: type[BaseModel] | None = None
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that has a body.

    Args:
        model: The whole reply.
        chunk: Data of the events, where the reply can be streamed.
    """
    done: dict[str, Any] = {"model": model, "description": "The answer."}
    if chunk is not None:
        done["content"] = {"text/event-stream": _events_of(chunk)}
    return {200: done} | errors_of(400, 401, 404, 413, 429, 500, 502, 503)


def _events_of(chunk: type[BaseModel]) -> dict[str, Any]:
    text = (
        f"With stream true. Data of each event: a {chunk.__name__}; of the last: [DONE]. "
        "A stream that fails ends in an event with an error object, and without [DONE]."
    )
    example = f"data: {orjson.dumps(EXAMPLES[chunk]).decode()}\n\ndata: [DONE]\n\n"
    return {"schema": {"type": "string", "description": text}, "example": example}


def errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` for errors."""
    return {status: {"model": ErrorReply, "description": _MEANING[status]} for status in statuses}


_MEANING = {
    400: "The request is wrong; param names the field.",
    401: "No key, or a wrong one.",
    404: "No such route, or no such model.",
    413: "The body is too large.",
    429: "Too many requests; see Retry-After.",
    500: "A bug; the message has a debug id.",
    502: "A worker was lost.",
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
