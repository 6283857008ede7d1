"""Calls that a grammar enforces, so that any model makes them and their arguments fit.

A call of one named function is its arguments and nothing else. Where the model chooses among
functions, the text is a JSON list: ``[{"name": "f", "arguments": {"x": 1}}]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from services.common.errors import InvalidRequest
from services.common.sampling import Constraint, ConstraintKind
from services.gateway.lark import json_rule, quoted, rule_of
from services.gateway.text_reader import Steps, TextReader
from services.gateway.tool_calls.base import (
    CallFrame,
    Findings,
    JsonObject,
    ReadCalls,
    parse_json,
)

_NAME = '{"name": '
_ARGUMENTS = ', "arguments": '
_BETWEEN = ", "
# Beside these, a list of properties does not say all that an object may hold.
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")


def arguments_schema(parameters: JsonObject | None, where: str) -> JsonObject:
    """The schema that the arguments of a function must fit.

    Args:
        parameters: As the request has them; ``None`` = the function takes none.
        where: Their path in the request.

    Returns:
        An object without properties but those that are declared, unless it says otherwise.

    Raises:
        InvalidRequest: They do not describe an object.
    """
    schema: JsonObject = {"type": "object"} | (parameters or {})
    if schema["type"] != "object":
        raise InvalidRequest(
            f'{where} must be a JSON schema of type "object", got {str(schema["type"])[:40]!r}',
            param=where,
        )
    if any(name in schema for name in _COMBINED):
        return schema
    return schema | {"additionalProperties": False}


def constrain_to_one(schema: JsonObject) -> Constraint:
    """The answer is the arguments of one call."""
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def constrain_to_calls(tools: Mapping[str, JsonObject], *, is_parallel: bool) -> Constraint:
    """The answer is a list of calls.

    Args:
        tools: Functions to choose from; at least one.
        is_parallel: Whether there may be several.
    """
    more = f" ({quoted(_BETWEEN)} call)*" if is_parallel else ""
    rules = [f'start: "[" call{more} "]"', *_call_rules(tools)]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules))


def constrain_to_calls_or(
    answer: Constraint, tools: Mapping[str, JsonObject], frame: CallFrame, *, is_parallel: bool
) -> Constraint:
    """The answer satisfies a constraint, or is calls as the model writes them.

    Args:
        answer: What an answer without calls must satisfy.
        tools: Functions to choose from; at least one.
        frame: What the model writes around a call.
        is_parallel: Whether there may be several.
    """
    more = f" ({quoted(frame.between)} framed)*" if is_parallel else ""
    rules = [
        "start: answer | calls",
        f"answer: {rule_of(answer)}",
        f"calls: framed{more}",
        f"framed: {quoted(frame.before)} call {quoted(frame.after)}",
        *_call_rules(tools),
    ]
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules))


def _call_rules(tools: Mapping[str, JsonObject]) -> list[str]:
    """``call``: a JSON object with the name of one of the functions and fitting arguments."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, (name, schema) in enumerate(tools.items()):
        head = quoted(_NAME + json.dumps(name, ensure_ascii=False) + _ARGUMENTS)
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {json_rule(schema)}")
    return rules


def reads_arguments_of(name: str) -> ReadCalls:
    """Reads the arguments of one call of a function."""

    def read(reader: TextReader, found: Findings) -> Steps[None]:
        yield from reader.skip_space()
        if (yield from reader.peek()):
            found.begin_call(name)
        yield from reader.bracketed(found.arguments)

    return read


def read_calls(reader: TextReader, found: Findings) -> Steps[None]:
    """Reads a list of calls; of one that is cut, as much as there is."""
    yield from reader.accept("[")
    while (yield from reader.accept(_NAME)):
        name: list[str] = []
        if not (yield from reader.until(_ARGUMENTS, name.append)):
            return
        yield from reader.accept(_ARGUMENTS)
        found.begin_call(str(parse_json("".join(name))))
        yield from reader.skip_space()
        yield from reader.bracketed(found.arguments)
        yield from reader.accept("}")
        yield from reader.accept(_BETWEEN)
