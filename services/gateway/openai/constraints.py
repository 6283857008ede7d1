"""What the answer must satisfy: ``response_format`` or ``structured_outputs`` as a constraint."""

from __future__ import annotations

from typing import Any

import orjson

from services.common.errors import InvalidRequest
from services.common.sampling import Constraint, ConstraintKind
from services.gateway.openai.schema import ResponseFormat, StructuredOutputs

MAX_CHOICES = 1024

# Options of structured_outputs that are known and not offered, with their harmless values.
REFUSED_OPTIONS: dict[str, tuple[object, ...]] = {
    "structural_tag": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "disable_fallback": (False, True),
}


def constraint_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> Constraint | None:
    """The constraint of a request; ``None`` = free text.

    Raises:
        InvalidRequest: Two constraints, none where one was announced, or one that means nothing.
    """
    formatted = _of_format(response_format) if response_format else None
    if structured is None:
        return formatted
    if formatted is not None:
        raise InvalidRequest(
            "give response_format or structured_outputs, not both", param="structured_outputs"
        )
    return _of_structured(structured)


def _of_format(wanted: ResponseFormat) -> Constraint | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, "")
    if wanted.json_schema is None:
        raise InvalidRequest(
            "response_format of type json_schema needs json_schema: {name, schema}",
            param="response_format.json_schema",
        )
    return json_schema(wanted.json_schema.schema_)


def json_schema(schema: dict[str, Any]) -> Constraint:
    """The answer fits a JSON schema."""
    return Constraint(ConstraintKind.JSON_SCHEMA, orjson.dumps(schema).decode())


def _of_structured(wanted: StructuredOutputs) -> Constraint:
    given = [
        constraint
        for constraint in (
            _json(wanted.json_),
            _text(ConstraintKind.REGEX, wanted.regex),
            _choice(wanted.choice),
            _text(ConstraintKind.GRAMMAR, wanted.grammar),
            Constraint(ConstraintKind.JSON_OBJECT, "") if wanted.json_object else None,
        )
        if constraint is not None
    ]
    if len(given) != 1:
        raise InvalidRequest(
            "structured_outputs needs exactly one of json, regex, choice, grammar, json_object; "
            f"got {len(given)}",
            param="structured_outputs",
        )
    return given[0]


def _json(schema: dict[str, Any] | str | None) -> Constraint | None:
    if schema is None:
        return None
    if isinstance(schema, dict):
        return json_schema(schema)
    try:
        parsed = orjson.loads(schema)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"structured_outputs.json is not valid JSON: {error}", param="structured_outputs.json"
        ) from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(
            "structured_outputs.json must be a JSON schema object", param="structured_outputs.json"
        )
    return json_schema(parsed)


def _text(kind: ConstraintKind, text: str | None) -> Constraint | None:
    if text is None:
        return None
    if not text:
        name = f"structured_outputs.{kind.name.lower()}"
        raise InvalidRequest(f"{name} must not be empty", param=name)
    return Constraint(kind, text)


def _choice(choices: list[str] | None) -> Constraint | None:
    if choices is None:
        return None
    name = "structured_outputs.choice"
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        raise InvalidRequest(
            f"{name} must hold 1 to {MAX_CHOICES} texts, none of them empty", param=name
        )
    return Constraint(ConstraintKind.CHOICE, orjson.dumps(choices).decode())
