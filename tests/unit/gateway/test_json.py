"""What counts as a JSON body."""

from __future__ import annotations

import json

import pytest

from services.common.errors import InvalidRequest
from services.gateway.body import MAX_DEPTH, parse_object


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "x\\ud83d"}',
        b'{"a": "x\\udc00"}',
        b"{'a': 1}",
        b'{"a": 1} x',
        b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"x":' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_object(raw)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "[1, NaN]"])
def test_numbers_that_json_does_not_have_are_told_as_such(value: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON has no NaN or Infinity"):
        parse_object(b'{"temperature": %s}' % value.encode())


def test_many_brackets_are_not_deep() -> None:
    body = {"x": [[i] for i in range(1000)]}
    assert parse_object(json.dumps(body).encode()) == body


def test_nul_and_pairs_of_surrogates_are_text() -> None:
    assert parse_object(b'{"a": "Hi\\u0000\\ud83c\\udf36"}') == {"a": "Hi\0🌶"}
