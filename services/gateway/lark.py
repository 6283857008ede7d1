"""Grammars in the notation of lark, as llguidance reads it."""

from __future__ import annotations

import json
import re
from typing import Any

from services.common.sampling import Constraint, ConstraintKind

# White space between JSON's tokens is bounded: no model can go on with it for ever.
_GUIDANCE = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
_ESCAPED_OR_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def rule_of(constraint: Constraint) -> str:
    """What stands for a constraint in a rule."""
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return json_rule(json.loads(constraint.spec))
        case ConstraintKind.JSON_OBJECT:
            return json_rule({"type": "object"})
        case ConstraintKind.REGEX:
            return f"/{_ESCAPED_OR_SLASH.sub(_escaped, constraint.spec)}/"
        case ConstraintKind.CHOICE:
            return " | ".join(map(quoted, json.loads(constraint.spec)))
        case ConstraintKind.GRAMMAR:
            return f"%lark {{\n{constraint.spec}\n}}"


def json_rule(schema: dict[str, Any]) -> str:
    """What stands for a JSON schema in a rule."""
    return "%json " + json.dumps(schema | {"x-guidance": _GUIDANCE}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A text as it is written in a rule: as one of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(match: re.Match[str]) -> str:
    return match[1] or r"\/"
