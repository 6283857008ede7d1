"""Compares JSON with the schema that the OpenAPI document gives for it.

Stricter than the schema itself: a field that the schema does not describe is a fault too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults(value: Any, schema: Schema, schemas: dict[str, Schema], *, at: str = "$") -> list[str]:
    """What a value has that its schema does not say, or says otherwise; none = it fits.

    Args:
        value: Parsed JSON.
        schema: Of the value.
        schemas: The document's components.
        at: Where the value is.
    """
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    options = schema.get("anyOf", schema.get("oneOf"))
    if options is not None:
        return min((faults(value, option, schemas, at=at) for option in options), key=len)
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and value not in allowed:
        return [f"{at}: {value!r} is not one of {allowed}"]
    return list(_of_type(value, schema, schemas, at))


def _of_type(value: Any, schema: Schema, schemas: dict[str, Schema], at: str) -> Iterator[str]:
    kind = schema.get("type")
    if kind is None:
        return
    is_bool_for_number = isinstance(value, bool) and kind != "boolean"
    if not isinstance(value, _TYPES[kind]) or is_bool_for_number:
        yield f"{at}: {value!r} is no {kind}"
    elif kind == "array":
        for index, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), schemas, at=f"{at}[{index}]")
    elif kind == "object":
        yield from _of_object(value, schema, schemas, at)


def _of_object(
    value: dict[str, Any], schema: Schema, schemas: dict[str, Schema], at: str
) -> Iterator[str]:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", not properties)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}.{name} is missing"
    for name, item in value.items():
        if name in properties:
            yield from faults(item, properties[name], schemas, at=f"{at}.{name}")
        elif isinstance(others, dict):
            yield from faults(item, others, schemas, at=f"{at}.{name}")
        elif not others:
            yield f"{at}.{name} is not described"
