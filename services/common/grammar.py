"""Constraints as llguidance grammars: the tokenizer checks them, the worker compiles them.

The library refuses what it cannot enforce, by name, and bounds its own work: grammars of at most
500,000 items, a fixed amount of lexer work at the start and in each step.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.common.errors import InvalidRequest
from services.common.sampling import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only its stub has it

MAX_SPEC_CHARS = 262_144
MAX_GBNF_CHARS = 32_768  # which takes a twentieth of a second to translate
MAX_REFERENCE_DEPTH = 1_000
_MOST_DIGITS = len(str(MAX_SPEC_CHARS)) + 1

_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
"""White space between JSON's tokens is bounded: no model can go on with it for ever."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

_ANY_OBJECT = '{"type": "object"}'

_LIBRARY_ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_OUR_ADVICE = "write anyOf instead"


def grammar_of(constraint: Constraint) -> str:
    """A constraint in llguidance's own notation; whether it is a valid one, ``check`` tells.

    Raises:
        InvalidRequest: The schema is not a JSON object, or the grammar no GBNF that can be read.
    """
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(constraint.spec)
        case ConstraintKind.JSON_OBJECT:
            return _of_schema(_ANY_OBJECT)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.spec)
        case ConstraintKind.CHOICE:
            return _of_choices(json.loads(constraint.spec))
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark_of(constraint))


def check(constraint: Constraint) -> None:
    """Refuse a constraint that cannot be enforced, as far as that shows without the vocabulary.

    Raises:
        InvalidRequest: Says what is wrong with it; ``param`` is "constraint".
    """
    if len(constraint.spec) > MAX_SPEC_CHARS:
        raise refusal(
            constraint, f"it has {len(constraint.spec)} characters, more than {MAX_SPEC_CHARS}"
        )
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(constraint))
    if is_error:
        raise refusal(constraint, "; ".join(messages))


def _of_schema(schema: str) -> str:
    try:
        _require_sound_references(json.loads(schema))
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise refusal(Constraint(ConstraintKind.JSON_SCHEMA, schema), str(error)) from None


def _require_sound_references(schema: object) -> None:
    """Refuse references that lead round with nothing on the way, and too long a way through them.

    The library follows references by recursion, and its stack ends before the longest way does that
    fits into a schema; no way is longer than all that is referred to together.

    Raises:
        ValueError: Says which.
    """
    nodes, refs = [schema], set[str]()
    for node in nodes:  # which grows: parents stand before their children
        if isinstance(node, dict):
            nodes.extend(node.values())
            if isinstance(ref := node.get("$ref"), str):
                refs.add(ref)
        elif isinstance(node, list):
            nodes.extend(node)
    depths: dict[int, int] = {}
    for node in reversed(nodes):
        if isinstance(node, dict | list):
            children = node.values() if isinstance(node, dict) else node
            depths[id(node)] = 1 + max((depths.get(id(child), 0) for child in children), default=0)
    targets = {ref: _resolve(schema, ref) for ref in refs}
    depth = depths.get(id(schema), 0) + sum(depths.get(id(node), 1) for node in targets.values())
    if refs and depth > MAX_REFERENCE_DEPTH:
        raise ValueError(
            f"what its references lead to is {depth} levels deep together, "
            f"more than {MAX_REFERENCE_DEPTH}"
        )
    for ref in refs:
        way: set[str] = set()
        while ref not in way:
            way.add(ref)
            target = targets[ref]
            following = target.get("$ref") if isinstance(target, dict) else None
            if not isinstance(following, str) or following not in targets:
                break
            ref = following
        else:
            raise ValueError(f"its $ref {ref!r} leads only back to itself")


def _resolve(schema: Any, ref: str) -> object:
    """What a JSON pointer into the schema itself points at; ``None`` if nothing, or elsewhere."""
    if not ref.startswith("#"):
        return None
    node = schema
    for part in unquote(ref[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and len(key) < _MOST_DIGITS:
            node = node[int(key)] if int(key) < len(node) else None
        else:
            return None
    return node


def _lark_of(constraint: Constraint) -> str:
    """A grammar in Lark's notation; llama.cpp's users have theirs in GBNF."""
    if not _GBNF_RULE.search(constraint.spec):
        return constraint.spec
    if len(constraint.spec) > MAX_GBNF_CHARS:
        raise refusal(
            constraint, f"it has more than {MAX_GBNF_CHARS} characters of GBNF; write it in Lark"
        )
    try:
        return gbnf_to_lark(constraint.spec)
    except Exception as error:  # the library raises plain Exception, and RecursionError
        raise refusal(constraint, f"as GBNF: {error or type(error).__name__}") from None


def _of_choices(choices: list[str]) -> str:
    # A string of lark is written as one of JSON.
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


def refusal(constraint: Constraint, why: str) -> InvalidRequest:
    """What a request is told whose constraint cannot be enforced."""
    name = constraint.kind.name.lower().replace("_", " ")
    why = why.strip().replace(_LIBRARY_ADVICE, _OUR_ADVICE)
    return InvalidRequest(f"this {name} cannot be enforced: {why}", param="constraint")
