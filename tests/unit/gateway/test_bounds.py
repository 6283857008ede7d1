"""Nothing in a body may be endless: one entry more than allowed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.gateway.openai.constraints import MAX_CHOICES
from services.gateway.openai.messages import MAX_PARTS
from services.gateway.openai.prompts import MAX_IDS
from services.gateway.openai.schema import MAX_MESSAGES, MAX_TOOLS
from tests.unit.gateway.desk import Desk

USER = {"role": "user", "content": "Hi"}
PART = {"type": "text", "text": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

CHAT = {
    "messages": {"messages": [USER] * (MAX_MESSAGES + 1)},
    "messages[0].content": {"messages": [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}]},
    "messages[0].tool_calls": {
        "messages": [{"role": "assistant", "tool_calls": [CALL] * (MAX_TOOLS + 1)}]
    },
    "tools": {"tools": [TOOL] * (MAX_TOOLS + 1)},
    "structured_outputs.choice": {
        "structured_outputs": {"choice": [str(i) for i in range(MAX_CHOICES + 1)]}
    },
    "allowed_token_ids": {"allowed_token_ids": [1] * 1025},
    "logit_bias": {"logit_bias": {str(i): 1 for i in range(1025)}},
    "stop": {"stop": ["s"] * 129},
    "n": {"n": 9},
}
COMPLETIONS: dict[str, Any] = {
    "a list of texts": ["x"] * 17,
    "a list of lists": [[1]] * 17,
    "token ids": [1] * (MAX_IDS + 1),
}


@pytest.mark.parametrize(("param", "fields"), CHAT.items(), ids=list(CHAT))
def test_a_list_of_a_chat_that_is_too_long_is_refused_by_name(
    desk: Desk, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        desk.chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", COMPLETIONS.values(), ids=list(COMPLETIONS))
def test_a_prompt_that_is_too_long_a_list_is_refused_by_name(desk: Desk, prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="at most") as caught:
        desk.complete(prompt)
    assert caught.value.param == "prompt"


def test_as_many_entries_as_allowed_are_taken(desk: Desk) -> None:
    desk.chat(messages=[{"role": "user", "content": [PART] * MAX_PARTS}], stop=["s"] * 128, n=8)
    assert len(desk.complete(["x"] * 16)["choices"]) == 16
