"""POST /v1/chat/completions/render: what the model would see, and nothing generated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.tokenizer import MODEL
from tests.unit.gateway.http.conftest import Front

PATH = "/v1/chat/completions/render"
HI = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


async def test_a_chat_is_shown_as_text_and_as_the_ids_that_a_generation_has(front: Front) -> None:
    body = {"messages": HI, "temperature": 0, "max_tokens": 5}
    reply = (await front.http.post(PATH, json=body)).json()
    chat = (await front.chat(messages=HI, return_token_ids=True)).json()
    assert reply == {
        "model": MODEL,
        "prompt": "system: Be brief. user: Hi",
        "token_ids": chat["prompt_token_ids"],
    }
    assert len(front.tokenizer.requests) == 1  # the chat's own


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"suffix": "x"}, "suffix"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
async def test_what_a_chat_refuses_is_refused_here(
    front: Front, fields: dict[str, Any], param: str
) -> None:
    response = await front.http.post(PATH, json={"messages": HI} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_unknown_model_is_a_404(front: Front) -> None:
    response = await front.http.post(PATH, json={"messages": HI, "model": "nope"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
