"""What becomes of a field, found out by trying: works, accepted, refused or ignored."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from services.common.errors import InvalidRequest
from services.gateway.openai.chat import plan_chat
from services.gateway.openai.completions import plan_completion
from services.gateway.openai.fields import REFUSED
from services.gateway.openai.plan import Caller
from services.gateway.openai.schema import ChatCompletionRequest, CompletionRequest, GenerationBody
from tests.fakes.tokenizer import MODEL
from tests.unit.gateway.desk import planning

NONSENSE = "no value that any field could mean anything by"
PLANS: dict[type[GenerationBody], tuple[Any, dict[str, Any]]] = {
    ChatCompletionRequest: (plan_chat, {"messages": [{"role": "user", "content": "Hi"}]}),
    CompletionRequest: (plan_completion, {"prompt": "Hi"}),
}
OPENAI: dict[type[GenerationBody], frozenset[str]] = {
    ChatCompletionRequest: frozenset(
        chat_params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
    ),
    CompletionRequest: frozenset(
        completion_params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
    ),
}


class Status(Enum):
    """What becomes of a field."""

    WORKS = "works"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    IGNORED = "–"  # noqa: RUF001


def status(route: type[GenerationBody], name: str) -> Status:
    """What becomes of one field of a route's body."""
    if name in route.model_fields:
        description = route.model_fields[name].description or ""
        return Status.ACCEPTED if description.startswith("Accepted") else Status.WORKS
    plan, body = PLANS[route]
    try:
        plan({"model": MODEL, **body, name: NONSENSE}, Caller(), planning(), now=0)
    except InvalidRequest as error:
        assert error.param == name and f"{name} is not supported here" in error.message
        return Status.REFUSED
    return Status.IGNORED


def known_fields() -> frozenset[str]:
    """Every name that this API, OpenAI's or an earlier vLLM has a meaning for."""
    ours: Iterable[type[GenerationBody]] = PLANS
    names = {name for route in ours for name in route.model_fields}
    return frozenset(names).union(REFUSED, *OPENAI.values())
