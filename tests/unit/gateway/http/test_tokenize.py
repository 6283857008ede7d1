"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.tokenizer import MAX_MODEL_LEN
from tests.unit.gateway.http.conftest import Front

HI = [{"role": "user", "content": "Hi"}]


async def test_a_text_becomes_ids_and_back(front: Front) -> None:
    reply = (await front.http.post("/tokenize", json={"prompt": "one two"})).json()
    assert reply["count"] == len(reply["tokens"]) == 2
    assert reply["max_model_len"] == MAX_MODEL_LEN
    assert reply["token_strs"] is None
    back = await front.http.post("/detokenize", json={"tokens": reply["tokens"]})
    assert back.json() == {"prompt": "one two"}


@pytest.mark.parametrize("body", [{"prompt": "one two"}, {"messages": HI}])
async def test_the_text_of_each_token_comes_if_asked_for(
    front: Front, body: dict[str, Any]
) -> None:
    body = body | {"return_token_strs": True}
    reply = (await front.http.post("/tokenize", json=body)).json()
    assert len(reply["token_strs"]) == reply["count"]


async def test_a_chat_has_the_ids_that_a_generation_would_have(front: Front) -> None:
    reply = (await front.http.post("/tokenize", json={"messages": HI})).json()
    usage = (await front.chat(messages=HI)).json()["usage"]
    assert reply["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1000]}, "tokens[0]"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
    ],
)
async def test_bad_input_is_refused_by_name(
    front: Front, path: str, body: dict[str, Any], param: str
) -> None:
    response = await front.http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(("path", "field"), [("/tokenize", "prompt"), ("/detokenize", "tokens")])
async def test_an_unknown_model_is_a_404(front: Front, path: str, field: str) -> None:
    value = "x" if field == "prompt" else [1]
    response = await front.http.post(path, json={field: value, "model": "nope"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
