"""Which constraints can be enforced; a broken one says what is wrong with it."""

from __future__ import annotations

import json

import pytest

from services.common.errors import InvalidRequest
from services.common.grammar import MAX_SPEC_CHARS, check, grammar_of
from services.common.sampling import Constraint, ConstraintKind

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


@pytest.mark.parametrize(
    "constraint",
    [
        schema(PERSON),
        schema({}),
        Constraint(ConstraintKind.JSON_OBJECT, ""),
        Constraint(ConstraintKind.REGEX, r"\d{3}-[a-z]+"),
        Constraint(ConstraintKind.CHOICE, json.dumps(["yes", 'n"o', "é\n", "\u0007"])),
        Constraint(ConstraintKind.GRAMMAR, 'start: "a" "b"+'),
        Constraint(ConstraintKind.GRAMMAR, '?start: "::="'),
    ],
    ids=lambda constraint: constraint.kind.name.lower(),
)
def test_a_constraint_of_each_kind_is_accepted(constraint: Constraint) -> None:
    check(constraint)


def test_a_grammar_may_be_written_in_gbnf() -> None:
    gbnf = Constraint(ConstraintKind.GRAMMAR, 'root ::= "a" digit+\ndigit ::= [0-9]')
    check(gbnf)
    assert "DIGIT: /[0-9]/" in grammar_of(gbnf)


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "strin"}), "strin"),
        (schema({"$ref": "#/$defs/x"}), "/$defs/x"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "json schema"),
        (Constraint(ConstraintKind.REGEX, r"(\d{3"), "regex parse error"),
        (Constraint(ConstraintKind.REGEX, r"(?=a)b"), "look-around"),
        (Constraint(ConstraintKind.GRAMMAR, "start: foo"), "foo"),
        (Constraint(ConstraintKind.GRAMMAR, "\n" * 200_000), "Empty grammar"),
        (Constraint(ConstraintKind.GRAMMAR, "root ::= ("), "as GBNF"),
        (Constraint(ConstraintKind.GRAMMAR, "root ::= foo"), "foo"),
        (Constraint(ConstraintKind.GRAMMAR, "root ::= " + "(" * 2_000), "as GBNF"),
        (Constraint(ConstraintKind.GRAMMAR, "root ::= " + '"a" ' * 10_000), "write it in Lark"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(constraint: Constraint, named: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced") as caught:
        check(constraint)
    assert named in caught.value.message
    assert caught.value.param == "constraint"


def definitions(**refs: str) -> dict[str, object]:
    return {name: {"$ref": f"#/$defs/{target}"} for name, target in refs.items()}


@pytest.mark.parametrize(
    "broken",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": definitions(a="a")},
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": definitions(a="b", b="a")},
        {"properties": {"x/y": {"$ref": "#/properties/x~1y"}}},
        {"anyOf": [{"$ref": "#/anyOf/0"}, {"type": "string"}]},
    ],
)
def test_a_reference_that_leads_only_to_itself_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"its \$ref '#.*' leads only back to itself"):
        check(schema(broken))


@pytest.mark.parametrize(
    "sound",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"$ref": "#/$defs/a", "$defs": {**definitions(a="b"), "b": {"type": "integer"}}},
        {"const": {"$ref": 7}},
    ],
)
def test_a_reference_that_leads_on_is_accepted(sound: dict[str, object]) -> None:
    check(schema(sound))


@pytest.mark.parametrize("items", [False, True])
def test_a_long_way_through_references_is_refused_before_it_ends_the_process(items: bool) -> None:
    def chain(length: int) -> Constraint:
        links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
        links = {name: {"items": link} if items else link for name, link in links.items()}
        ends = {f"a{length}": {"type": "integer"}}
        return schema({"$ref": "#/$defs/a0", "$defs": {**links, **ends}})

    check(chain(200))
    with pytest.raises(InvalidRequest, match=r"levels deep together, more than 1000"):
        check(chain(4_000))


def test_overlapping_alternatives_are_refused_with_what_to_write_instead() -> None:
    alternatives = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    with pytest.raises(InvalidRequest, match=r"oneOf .* write anyOf instead"):
        check(schema(alternatives))


def test_a_constraint_is_bounded_in_size() -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_SPEC_CHARS}"):
        check(Constraint(ConstraintKind.REGEX, "a" * (MAX_SPEC_CHARS + 1)))


def test_equal_constraints_make_equal_grammars() -> None:
    assert grammar_of(schema(PERSON)) == grammar_of(schema(PERSON))
