"""The routes below /v1/responses: their paths and what the documentation says of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from services.gateway import openapi
from services.gateway.openai.responses.listing import DEFAULT_LIMIT, MAX_LIMIT
from services.gateway.openai.responses.replies import (
    DeletedResponse,
    InputItemList,
    ResponseEvent,
    ResponseObject,
)
from services.gateway.openai.responses.schema import ResponseRequest
from services.gateway.response_routes import ResponseRoutes

PAGE_PARAMETERS = (
    openapi.query_parameter(
        "limit",
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        "Most items of the page.",
    ),
    openapi.query_parameter(
        "order", {"enum": ["asc", "desc"], "default": "desc"}, "asc: the first item first."
    ),
    openapi.query_parameter("after", {"type": "string"}, "Id of the item before the page."),
)
STREAM_PARAMETERS = (
    openapi.query_parameter(
        "stream",
        {"type": "boolean", "default": False},
        "Send the events again, and those to come; of a response made with background and stream.",
    ),
    openapi.query_parameter(
        "starting_after",
        {"type": "integer", "minimum": 0},
        "Number of the event before the first that is sent.",
    ),
)
LAST_EVENTS = "response.completed, response.incomplete, response.failed or error"


def add_response_routes(app: FastAPI, work: ResponseRoutes) -> None:
    """Add the routes.

    Args:
        app: The application.
        work: What they do.
    """
    tag: dict[str, Any] = {"response_class": Response, "tags": ["responses"]}
    name = "Id of a response that this gateway keeps."

    @app.post(
        "/v1/responses",
        **tag,
        summary="Answer with items, which can be retrieved and continued",
        openapi_extra=openapi.body_of(ResponseRequest),
        responses=openapi.with_events(
            openapi.replies_of(ResponseObject), ResponseEvent, last=LAST_EVENTS
        ),
    )
    async def create() -> Response:
        return work.create()

    @app.get(
        "/v1/responses/{response_id}",
        **tag,
        summary="A response that is kept",
        openapi_extra=openapi.path_parameter("response_id", name, query=STREAM_PARAMETERS),
        responses=openapi.with_events(
            openapi.errors_of(400, 401, 404) | {200: {"model": ResponseObject}},
            ResponseEvent,
            last=LAST_EVENTS,
        ),
    )
    async def retrieve(request: Request) -> Response:
        return work.retrieve(_tenant(request), _id(request), request.query_params)

    @app.post(
        "/v1/responses/{response_id}/cancel",
        **tag,
        summary="End a response that is made in the background",
        openapi_extra=openapi.path_parameter("response_id", name),
        responses=openapi.errors_of(400, 401, 404) | {200: {"model": ResponseObject}},
    )
    async def cancel(request: Request) -> Response:
        return await work.cancel(_tenant(request), _id(request))

    @app.delete(
        "/v1/responses/{response_id}",
        **tag,
        summary="Forget a response",
        openapi_extra=openapi.path_parameter("response_id", name),
        responses=openapi.errors_of(401, 404) | {200: {"model": DeletedResponse}},
    )
    async def delete(request: Request) -> Response:
        return await work.delete(_tenant(request), _id(request))

    @app.get(
        "/v1/responses/{response_id}/input_items",
        **tag,
        summary="The items that a response was given",
        openapi_extra=openapi.path_parameter("response_id", name, query=PAGE_PARAMETERS),
        responses=openapi.errors_of(400, 401, 404) | {200: {"model": InputItemList}},
    )
    async def input_items(request: Request) -> Response:
        return work.input_items(_tenant(request), _id(request), request.query_params)


def _tenant(request: Request) -> str:
    """Whose key the request was sent with; "" = nobody's in particular."""
    tenant: str = request.scope.get("tenant", "")
    return tenant


def _id(request: Request) -> str:
    response_id: str = request.path_params["response_id"]
    return response_id
