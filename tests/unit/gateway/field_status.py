"""What becomes of a field, found out by trying: works, accepted, refused or ignored."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from services.common.errors import InvalidRequest
from services.gateway.openai.chat import plan_chat
from services.gateway.openai.completions import plan_completion
from services.gateway.openai.fields import REFUSED
from services.gateway.openai.plan import Caller, Plan
from services.gateway.openai.responses.fields import REFUSED as REFUSED_OF_RESPONSES
from services.gateway.openai.responses.plan import plan_response
from services.gateway.openai.responses.schema import ResponseRequest
from services.gateway.openai.schema import ChatCompletionRequest, CommonBody, CompletionRequest
from tests.fakes.tokenizer import MODEL
from tests.unit.gateway.desk import planning, response_store

NONSENSE = "no value that any field could mean anything by"
BODIES: dict[type[CommonBody], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "Hi"}]},
    CompletionRequest: {"prompt": "Hi"},
    ResponseRequest: {"input": "Hi"},
}
OPENAI: dict[type[CommonBody], frozenset[str]] = {
    ChatCompletionRequest: frozenset(
        chat_params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
    ),
    CompletionRequest: frozenset(
        completion_params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
    ),
    ResponseRequest: frozenset(
        response_params.ResponseCreateParamsBase.__annotations__.keys() | {"stream"}
    ),
}


class Status(Enum):
    """What becomes of a field."""

    WORKS = "works"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    IGNORED = "–"  # noqa: RUF001


def plan_of(route: type[CommonBody], **fields: Any) -> Plan:
    """The plan of a request of a route that is as short as it may be, but for these fields."""
    body = {"model": MODEL, **BODIES[route], **fields}
    if route is ResponseRequest:
        store = response_store()
        return plan_response(body, Caller(), planning(), store=store, clock=lambda: 0.0).plan
    plan = plan_chat if route is ChatCompletionRequest else plan_completion
    return plan(body, Caller(), planning(), now=0)


def status(route: type[CommonBody], name: str) -> Status:
    """What becomes of one field of a route's body."""
    if name in route.model_fields:
        description = route.model_fields[name].description or ""
        return Status.ACCEPTED if description.startswith("Accepted") else Status.WORKS
    try:
        plan_of(route, **{name: NONSENSE})
    except InvalidRequest as error:
        assert error.param == name and f"{name} is not supported here" in error.message
        return Status.REFUSED
    return Status.IGNORED


def known_fields() -> frozenset[str]:
    """Every name that this API, OpenAI's or an earlier vLLM has a meaning for."""
    ours: Iterable[type[CommonBody]] = BODIES
    names = {name for route in ours for name in route.model_fields}
    return frozenset(names).union(REFUSED, REFUSED_OF_RESPONSES, *OPENAI.values())
