"""/docs and /openapi.json show what routes really take and give."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.fakes.tokenizer import MODEL, Script
from tests.unit.gateway.documented import Schema, faults
from tests.unit.gateway.http.conftest import Front, events

WITHOUT_BODY = ("/reset_prefix_cache", "/v1/responses/{response_id}/cancel")


async def document(front: Front) -> dict[str, Any]:
    """The OpenAPI document."""
    response = await front.http.get("/openapi.json")
    assert response.status_code == 200
    return response.json()  # type: ignore[no-any-return]


async def test_every_route_has_its_body_and_its_replies(front: Front) -> None:
    found = await document(front)
    schemas = found["components"]["schemas"]
    for path, methods in found["paths"].items():
        for method, route in methods.items():
            assert route["summary"], path
            assert "200" in route["responses"], path
            parameters = route.get("parameters", [])
            in_path = [one["name"] for one in parameters if one["in"] == "path"]
            assert in_path == re.findall(r"{(\w+)}", path)
            assert all(one["description"] and one["schema"] for one in parameters)
            if method == "post" and path not in WITHOUT_BODY:
                reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert reference.rpartition("/")[2] in schemas
                assert {"400", "429", "503"} <= route["responses"].keys()


async def test_every_field_of_a_body_is_described(front: Front) -> None:
    schemas = (await document(front))["components"]["schemas"]
    names = ("ChatCompletion", "Completion", "Response", "Embedding", "Messages", "CountTokens")
    for name in (f"{one}Request" for one in names):
        assert schemas[name]["examples"]
        for field, schema in schemas[name]["properties"].items():
            assert schema.get("description"), f"{name}.{field}"


async def test_every_reference_leads_somewhere(front: Front) -> None:
    found = await document(front)
    schemas = found["components"]["schemas"]

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                assert reference.rpartition("/")[2] in schemas, reference
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(found)


async def test_docs_are_served_with_all_their_files_and_need_no_other_host(front: Front) -> None:
    response = await front.http.get("/docs")
    assert response.status_code == 200
    assert "//" not in re.sub(r"^\s*//.*$", "", response.text, flags=re.MULTILINE)
    files = re.findall(r"""(?:src|href|url:)\s*=?\s*["']([^"']+)["']""", response.text)
    assert len(files) == 4
    for file in files:
        reply = await front.http.get(urljoin("/docs", file))
        assert reply.status_code == 200, file
        kind = reply.headers["content-type"].partition(";")[0]
        assert kind == DOCS_FILES[file.rpartition(".")[2]]
        assert len(reply.content) > 1000


DOCS_FILES = {
    "js": "text/javascript",
    "css": "text/css",
    "png": "image/png",
    "json": "application/json",
}


async def test_docs_files_that_do_not_exist_are_a_404_in_the_envelope(front: Front) -> None:
    for path in ("/docs/files/nope.js", "/docs/files/..%2f__init__.py", "/docs/"):
        response = await front.http.get(path)
        assert response.status_code == 404, path
        assert response.json()["error"]["message"]


def schema_of(found: dict[str, Any], path: str, method: str, status: str) -> Schema:
    """What the document says of a JSON reply."""
    replies = found["paths"][path][method]["responses"]
    return replies[status]["content"]["application/json"]["schema"]  # type: ignore[no-any-return]


async def test_every_body_has_an_example_that_is_taken_and_fits_its_schema(front: Front) -> None:
    found = await document(front)
    schemas = found["components"]["schemas"]
    bodies = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, methods in found["paths"].items()
        if "requestBody" in methods.get("post", {})
    }
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses"} <= bodies.keys()
    for path, schema in bodies.items():
        for example in schemas[schema["$ref"].rpartition("/")[2]]["examples"]:
            assert faults(example, schema, schemas) == []
            response = await front.http.post(path, json=example | {"model": MODEL})
            assert response.status_code == 200, response.text
            reply = schema_of(found, path, "post", "200")
            assert faults(response.json(), reply, schemas) == [], path


async def test_every_json_reply_has_an_example_that_fits_its_schema(front: Front) -> None:
    found = await document(front)
    schemas = found["components"]["schemas"]
    for path, methods in found["paths"].items():
        for method, route in methods.items():
            for status, reply in route["responses"].items():
                if path == "/metrics":
                    assert "text/plain" in reply["content"]
                    continue
                schema = schema_of(found, path, method, status)
                (example,) = schemas[schema["$ref"].rpartition("/")[2]]["examples"]
                assert faults(example, schema, schemas) == [], (path, status)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{model}"),
        ("GET", "/health"),
        ("GET", "/ping"),
        ("GET", "/live"),
        ("GET", "/load"),
        ("GET", "/version"),
        ("POST", "/reset_prefix_cache"),
    ],
)
async def test_a_real_reply_has_no_field_that_is_not_described(
    front: Front, method: str, path: str
) -> None:
    found = await document(front)
    response = await front.http.request(method, path.replace("{model}", MODEL))
    assert response.status_code == 200
    schema = schema_of(found, path, method.lower(), "200")
    assert faults(response.json(), schema, found["components"]["schemas"]) == []


RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "return_token_ids": True,
    },
    "/v1/completions": {"prompt": "one two", "logprobs": 2, "n": 2, "return_token_ids": True},
}


@pytest.mark.parametrize(("path", "body"), RICH.items(), ids=list(RICH))
async def test_a_reply_with_everything_asked_for_is_as_described(
    front: Front, path: str, body: dict[str, Any]
) -> None:
    found = await document(front)
    response = await front.http.post(path, json=body | {"prompt_logprobs": 2})
    assert response.status_code == 200, response.text
    schema = schema_of(found, path, "post", "200")
    assert faults(response.json(), schema, found["components"]["schemas"]) == []


def chunk_schema(found: dict[str, Any], path: str) -> Schema:
    """What the document says of the data of a stream's events."""
    stream = found["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    (name,) = re.findall(r"a (\w+Chunk);", stream["schema"]["description"])
    return found["components"]["schemas"][name]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("path", "body"), RICH.items(), ids=list(RICH))
async def test_every_chunk_is_as_described(front: Front, path: str, body: dict[str, Any]) -> None:
    found = await document(front)
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = {"stream": True, "stream_options": options}
    *chunks, done = events(await front.http.post(path, json=body | streamed))
    assert done == "[DONE]" and len(chunks) > 5
    schema = chunk_schema(found, path)
    for chunk in [*chunks, *schema["examples"]]:
        assert faults(chunk, schema, found["components"]["schemas"]) == []


async def test_tool_calls_are_as_described(front: Front) -> None:
    found = await document(front)
    schemas = found["components"]["schemas"]
    path = "/v1/chat/completions"
    front.tokenizer.script = Script(tokens=('[{"name": "f", "argu', 'ments": {"a"', ": 1}}]"))
    tool = {"type": "function", "function": {"name": "f"}}
    whole = await front.chat(tools=[tool], tool_choice="required")
    assert whole.json()["choices"][0]["message"]["tool_calls"]
    assert faults(whole.json(), schema_of(found, path, "post", "200"), schemas) == []
    streamed = await front.chat(tools=[tool], tool_choice="required", stream=True)
    *chunks, _done = events(streamed)
    assert any("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks)
    for chunk in chunks:
        assert faults(chunk, chunk_schema(found, path), schemas) == []


async def test_an_error_is_as_described(front: Front) -> None:
    found = await document(front)
    response = await front.chat(temperature=-1)
    schema = schema_of(found, "/v1/chat/completions", "post", "400")
    assert faults(response.json(), schema, found["components"]["schemas"]) == []


async def test_what_is_not_described_is_found() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "required": ["a"],
    }
    assert faults({"a": 1}, schema, {}) == faults({"a": None}, schema, {}) == []
    assert faults({"a": True}, schema, {}) != []
    assert faults({"b": 1}, schema, {}) == ["$.a is missing", "$.b is not described"]
