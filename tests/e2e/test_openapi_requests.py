"""Requests made of /openapi.json, right and wrong ones: whatever they ask, it is no 5xx."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.e2e.system import System

NUM_EXAMPLES = 100
MODEL = "tiny"
MAX_TOKENS = 4
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
# How the routes that generate call the most tokens of an answer.
LIMIT_FIELDS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


@pytest.fixture(scope="module")
def http(system: System) -> Iterator[httpx.Client]:
    """A connection to the system."""
    with httpx.Client(base_url=system.url, trust_env=False, timeout=300) as http:
        yield http


def test_no_request_to_any_route_is_a_5xx(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    tried = set()
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        statuses = try_many(http, operation)
        tried.add(operation.path)
        print(operation.method, operation.path, dict(statuses))
        assert statuses[200] >= 1 or "{" in operation.path, (operation.label, statuses)
    assert tried == document["paths"].keys()
    assert http.get("/health").status_code == 200


def try_many(http: httpx.Client, operation: Any) -> Counter[int]:
    """Make up requests to one route; how often each status came back."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in MODES]))
    def try_one(case: Any) -> None:
        is_right = case.meta is None or case.meta.generation.mode is GenerationMode.POSITIVE
        response = send(http, case, is_right=is_right)
        statuses[response.status_code] += 1
        assert response.status_code < 500, (operation.label, response.text)
        if response.is_error:
            assert response.json()["error"]["message"]

    try_one()
    return statuses


def send(http: httpx.Client, case: Any, *, is_right: bool) -> httpx.Response:
    """Send a request that was made up, but for how much is to be generated."""
    try:
        content = json.dumps(
            bounded(mended(case.body) if is_right else case.body, case.path)
        ).encode()
    except TypeError:  # no body, or bytes that are no JSON
        content = case.body if isinstance(case.body, bytes) else None
    headers = {"content-type": "application/json"} if content is not None else {}
    return http.request(case.method, case.formatted_path, content=content, headers=headers)


def mended(body: Any) -> Any:
    """A body of the right types, made right in what the document only says in words."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    body["model"] = MODEL
    for message in body.get("messages") or []:
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "Hi"
    for name in ("prompt", "tokens", "input"):
        if name in body:
            body[name] = of_the_vocabulary(body[name])
    return body


def of_the_vocabulary(ids: Any) -> Any:
    """Token ids that there are."""
    if isinstance(ids, list):
        return [of_the_vocabulary(one) for one in ids]
    return ids % 256 if isinstance(ids, int) else ids


def bounded(body: Any, path: str) -> Any:
    """A body that asks for few tokens, if it asks for any that could be had."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    limits = {LIMIT_FIELDS[path]} if path in LIMIT_FIELDS else set()
    for name in limits | ({"max_completion_tokens"} & body.keys()):
        value = body.get(name)
        if value is None or (isinstance(value, int) and MAX_TOKENS < value <= 4096):
            body[name] = MAX_TOKENS
    if isinstance(body.get("n"), int) and 2 < body["n"] <= 128:
        body["n"] = 2
    return body
