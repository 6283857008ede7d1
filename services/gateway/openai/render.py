"""POST /v1/chat/completions/render: a chat as the model would see it; nothing is generated."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from services.common.errors import InvalidRequest
from services.gateway.generation import ChatPrompt
from services.gateway.openai.chat import plan_chat
from services.gateway.openai.plan import Caller, PlanContext


class RenderReply(BaseModel):
    """Reply of POST /v1/chat/completions/render."""

    model: str
    prompt: str = Field(description="Text that the chat template made of the conversation.")
    token_ids: list[int] = Field(description="The same as the model's tokens.")


def plan_render(raw: dict[str, Any], context: PlanContext) -> tuple[str, ChatPrompt]:
    """Check a chat request as if it were to be answered.

    Args:
        raw: The parsed body, that of a chat.
        context: What planning knows.

    Returns:
        The model, and the conversation to be rendered.

    Raises:
        InvalidRequest: Names the field at fault.
        ModelNotFound: No such model.
    """
    (request,) = plan_chat(raw, Caller(), context, now=0).requests
    if request.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens: a chat is rendered whole", param="truncate_prompt_tokens"
        )
    assert isinstance(request.prompt, ChatPrompt)
    return request.model, request.prompt
