"""/docs and /openapi.json show what routes really take and give."""

from __future__ import annotations

import re
from typing import Any

from tests.unit.gateway.http.conftest import Front


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
            named = [parameter["name"] for parameter in route.get("parameters", [])]
            assert named == re.findall(r"{(\w+)}", path)
            if method == "post" and path != "/reset_prefix_cache":
                reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert reference.rpartition("/")[2] in schemas
                assert {"400", "429", "503"} <= route["responses"].keys()


async def test_every_field_of_a_body_is_described(front: Front) -> None:
    schemas = (await document(front))["components"]["schemas"]
    for name in ("ChatCompletionRequest", "CompletionRequest"):
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


async def test_docs_are_served(front: Front) -> None:
    response = await front.http.get("/docs")
    assert response.status_code == 200
    assert "swagger" in response.text.lower()


async def test_the_examples_of_the_docs_work(front: Front) -> None:
    schemas = (await document(front))["components"]["schemas"]
    for name, path in {
        "ChatCompletionRequest": "/v1/chat/completions",
        "CompletionRequest": "/v1/completions",
    }.items():
        for example in schemas[name]["examples"]:
            response = await front.http.post(path, json=example | {"model": "fake"})
            assert response.status_code == 200, response.text
