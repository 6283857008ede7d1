"""The HTTP application: routes, and what stands in front of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from services import __version__
from services.common.errors import Unavailable
from services.gateway import docs, http_errors, openapi
from services.gateway.admission import Admission
from services.gateway.anthropic.plan import plan_message
from services.gateway.auth import ApiKeys, RequireKey
from services.gateway.cors import Cors
from services.gateway.embeddings_exchange import EmbeddingsExchange
from services.gateway.exchange import ExchangeContext, JsonExchange
from services.gateway.fleet import Fleet, Readiness
from services.gateway.generation_exchange import GenerationExchange
from services.gateway.head_requests import HeadRequests
from services.gateway.message_paths import add_message_routes
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import replies
from services.gateway.openai.chat import plan_chat
from services.gateway.openai.chunks import ChatCompletionChunk, CompletionChunk
from services.gateway.openai.completions import plan_completion
from services.gateway.openai.embeddings import (
    EmbeddingReply,
    EmbeddingRequest,
    plan_embeddings,
)
from services.gateway.openai.models import model_list, one_model
from services.gateway.openai.plan import Caller, PlanContext
from services.gateway.openai.render import RenderReply
from services.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from services.gateway.openai.tokenize import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
)
from services.gateway.request_id import HEADER, RequestIds
from services.gateway.response_paths import add_response_routes
from services.gateway.response_routes import ResponseRoutes
from services.gateway.token_routes import TokenRoutes

DESCRIPTION = (
    "OpenAI-compatible API of Sluiceway. Errors have OpenAI's envelope, but for those of the "
    "routes below /v1/messages: these have Anthropic's."
)
PlanT = TypeVar("PlanT")


class Gateway:
    """What the routes need."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        admission: Admission,
        metrics: GatewayMetrics,
        planning: PlanContext,
        exchange: ExchangeContext,
        responses: ResponseRoutes,
        started_at: int,
    ) -> None:
        """
        Args:
            fleet: What is known of tokenizers and engines.
            admission: The door.
            metrics: What /metrics shows.
            planning: What plans are made with.
            exchange: What exchanges use.
            responses: What is done below /v1/responses.
            started_at: Unix seconds.
        """
        self.fleet = fleet
        self.admission = admission
        self.metrics = metrics
        self.exchange = exchange
        self.started_at = started_at
        self.planning = planning
        self.responses = responses

    def planner(self, plan: Callable[..., PlanT]) -> Callable[[dict[str, Any], Caller], PlanT]:
        """Bind what planning knows to ``plan_chat`` or one of its kind."""

        def make(body: dict[str, Any], caller: Caller) -> PlanT:
            return plan(body, caller, self.planning, now=int(time.time()))

        return make

    def readiness(self) -> Readiness:
        """Whether a request would succeed."""
        if self.admission.is_closed:
            return Readiness(False, "the gateway is stopping", phase="stopping")
        return self.fleet.readiness()


def build_app(gateway: Gateway, *, keys: ApiKeys, allowed_origins: tuple[str, ...] = ()) -> FastAPI:
    """Put the application together.

    Args:
        gateway: What the routes need.
        keys: Who may call.
        allowed_origins: Of browsers; none = no CORS headers.
    """
    app = FastAPI(
        title="Sluiceway",
        version=__version__,
        description=DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    _add_generation_routes(app, gateway)
    add_response_routes(app, gateway.responses)
    add_message_routes(
        app,
        gateway.planner(plan_message),
        planning=gateway.planning,
        exchange=gateway.exchange,
    )
    _add_tokenize_routes(app, gateway)
    _add_model_routes(app, gateway)
    _add_health_routes(app, gateway)
    _add_operation_routes(app, gateway)
    http_errors.install(app)
    openapi.install(app)
    docs.install(app)
    app.add_middleware(HeadRequests)
    if keys:
        app.add_middleware(RequireKey, keys=keys)
    app.add_middleware(http_errors.Bugs)
    if allowed_origins:
        # Outside of the keys: a browser asks for permission (OPTIONS) without one.
        app.add_middleware(
            Cors,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[HEADER, "retry-after"],
        )
    app.add_middleware(RequestIds)
    return app


def _add_generation_routes(app: FastAPI, gateway: Gateway) -> None:
    route = partial(app.post, response_class=Response, tags=["generation"])
    chat = gateway.planner(plan_chat)
    completion = gateway.planner(plan_completion)
    embedding = gateway.planner(plan_embeddings)

    @route(
        "/v1/chat/completions",
        summary="Continue a conversation",
        openapi_extra=openapi.body_of(ChatCompletionRequest),
        responses=openapi.replies_of(replies.ChatCompletion, chunk=ChatCompletionChunk),
    )
    async def chat_completions() -> Response:
        return GenerationExchange(chat, gateway.exchange)

    @route(
        "/v1/completions",
        summary="Continue a text",
        openapi_extra=openapi.body_of(CompletionRequest),
        responses=openapi.replies_of(replies.Completion, chunk=CompletionChunk),
    )
    async def completions() -> Response:
        return GenerationExchange(completion, gateway.exchange)

    @route(
        "/v1/embeddings",
        summary="Vectors of texts",
        openapi_extra=openapi.body_of(EmbeddingRequest),
        responses=openapi.replies_of(EmbeddingReply),
    )
    async def embeddings() -> Response:
        return EmbeddingsExchange(embedding, gateway.exchange)


def _add_tokenize_routes(app: FastAPI, gateway: Gateway) -> None:
    route = partial(app.post, response_class=Response, tags=["tokens"])
    work = TokenRoutes(gateway.exchange.client, gateway.planning)

    @route(
        "/tokenize",
        summary="Text or a chat to token ids",
        openapi_extra=openapi.body_of(TokenizeRequest),
        responses=openapi.replies_of(TokenizeReply),
    )
    async def tokenize() -> Response:
        return JsonExchange(work.tokenize, gateway.exchange)

    @route(
        "/detokenize",
        summary="Token ids to text",
        openapi_extra=openapi.body_of(DetokenizeRequest),
        responses=openapi.replies_of(DetokenizeReply),
    )
    async def detokenize() -> Response:
        return JsonExchange(work.detokenize, gateway.exchange)

    @route(
        "/v1/chat/completions/render",
        summary="A chat as the model would see it",
        openapi_extra=openapi.body_of(ChatCompletionRequest),
        responses=openapi.replies_of(RenderReply),
    )
    async def render() -> Response:
        return JsonExchange(work.render, gateway.exchange)


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    route = partial(app.get, response_class=Response, tags=["models"])

    @route(
        "/v1/models",
        summary="Served models",
        responses=openapi.errors_of(401) | {200: {"model": replies.ModelList}},
    )
    async def models() -> Response:
        return _json(model_list(gateway.fleet, created=gateway.started_at))

    @route(
        "/v1/models/{model:path}",
        summary="One served model",
        openapi_extra=openapi.path_parameter("model", "Served name of the model."),
        responses=openapi.errors_of(401, 404) | {200: {"model": replies.ModelObject}},
    )
    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        return _json(one_model(gateway.fleet, name, created=gateway.started_at))


def _add_health_routes(app: FastAPI, gateway: Gateway) -> None:
    route = partial(app.get, response_class=Response, tags=["operation"])

    @route(
        "/health",
        summary="Readiness: would a request succeed?",
        responses={
            200: {"model": replies.HealthReply},
            503: {"model": replies.NotReadyReply, "description": "Not ready; says what for."},
        },
    )
    async def health() -> Response:
        return _health(gateway.readiness())

    @route(
        "/ping",
        summary="The same as /health, under the name that SageMaker asks for",
        responses=openapi.errors_of(401)
        | {
            200: {"model": replies.HealthReply},
            503: {"model": replies.NotReadyReply, "description": "Not ready; says what for."},
        },
    )
    async def ping() -> Response:
        return _health(gateway.readiness())

    @route(
        "/live",
        summary="Liveness: does this process answer?",
        responses={200: {"model": replies.LiveReply}},
    )
    async def live() -> Response:
        return _json({"status": "alive"})


def _add_operation_routes(app: FastAPI, gateway: Gateway) -> None:
    route = partial(app.get, response_class=Response, tags=["operation"])

    @route("/version", summary="Version", responses={200: {"model": replies.VersionReply}})
    async def version() -> Response:
        return _json({"version": __version__})

    @route(
        "/load",
        summary="Requests that are inside this gateway",
        responses=openapi.errors_of(401) | {200: {"model": replies.LoadReply}},
    )
    async def load() -> Response:
        return _json({"server_load": gateway.admission.num_in_flight})

    @app.post(
        "/reset_prefix_cache",
        response_class=Response,
        tags=["operation"],
        summary="Have the engines that are idle forget their cached prefixes",
        responses=openapi.errors_of(401, 503) | {200: {"model": replies.CacheResetReply}},
    )
    async def reset_prefix_cache() -> Response:
        model = gateway.fleet.resolve_model(None).model
        return _json(await gateway.exchange.client.reset_prefix_cache(model))

    @route(
        "/metrics",
        summary="Metrics for Prometheus",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(gateway.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _health(readiness: Readiness) -> Response:
    if readiness.is_ready:
        return _json({"status": "ok"})
    error = Unavailable(readiness.reason, retry_after_s=1)
    body = orjson.loads(http_errors.envelope(error)) | {
        "status": "not_ready",
        "phase": readiness.phase,
        "percent": readiness.percent,
    }
    return _json(body, status=error.http_status, headers=http_errors.error_headers(error))


def _json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        orjson.dumps(body), status_code=status, headers=headers, media_type="application/json"
    )
