"""Rows that follow a grammar: what comes out is valid and ends, whoever else is in the batch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from services.common.errors import InvalidRequest, InvariantError
from services.common.sampling import Constraint, ConstraintKind
from services.worker.sampling.grammar_compiler import GrammarCompiler
from services.worker.sampling.row_grammars import RowGrammars
from tests.tiny_models import EOS_TOKEN_ID, write_tokenizer

VOCAB = 320
MAX_TOKENS = 400
CPU = torch.device("cpu")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(PERSON))
CHOICE = Constraint(ConstraintKind.CHOICE, '["yes", "no", "né\\n"]')
REGEX = Constraint(ConstraintKind.REGEX, r"[0-9]{3}-(x|yy)")


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory / "tokenizer.json"


@pytest.fixture(scope="module")
def vocabulary(tokenizer_file: Path) -> LLTokenizer:
    return LLTokenizer(str(tokenizer_file), n_vocab=VOCAB, eos_token=[EOS_TOKEN_ID])


@pytest.fixture
def compiler(tokenizer_file: Path) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_file, vocab_size=VOCAB, eos_token_ids=(EOS_TOKEN_ID,))


@pytest.fixture
def grammars(compiler: GrammarCompiler) -> RowGrammars:
    made = RowGrammars(vocab_size=VOCAB, eos_token_ids=(EOS_TOKEN_ID,), device=CPU)
    for ref, constraint in enumerate((SCHEMA, CHOICE, REGEX), start=1):
        made.install(ref, compiler.compile(constraint))
    return made


def allowed(grammars: RowGrammars, row: int) -> list[int]:
    mask = grammars.mask(np.array([row]))
    assert mask is not None
    bits = np.unpackbits(mask.bitmask.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def walk(grammars: RowGrammars, row: int, rng: np.random.Generator) -> list[int]:
    """Sample at random what is allowed, to the end; the end is not returned."""
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        token = int(rng.choice(allowed(grammars, row)))
        if grammars.advance(row, token):
            return tokens
        assert grammars.failure_of(row) is None
        tokens.append(token)
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_gives_valid_json_that_ends(
    grammars: RowGrammars, vocabulary: LLTokenizer, seed: int
) -> None:
    grammars.add(3, 1, [])
    text = vocabulary.decode_str(walk(grammars, 3, np.random.default_rng(seed)))
    person = json.loads(text)
    assert set(person) == {"name", "tags", "age"}
    assert re.fullmatch("[a-z]{1,6}", person["name"])
    assert 1 <= len(person["tags"]) <= 2 and set(person["tags"]) <= {"a", "b"}
    assert 0 <= person["age"] <= 120
    assert max(len(run) for run in re.findall(r"[ \n\r\t]*", text)) <= 20


def test_rows_follow_grammars_of_their_own(grammars: RowGrammars, vocabulary: LLTokenizer) -> None:
    rng = np.random.default_rng(0)
    for row, ref in ((0, 2), (1, 3), (2, 2)):
        grammars.add(row, ref, [])
    texts = [vocabulary.decode_str(walk(grammars, row, rng)) for row in (0, 1, 2)]
    assert {texts[0], texts[2]} <= {"yes", "no", "né\n"}
    assert re.fullmatch(r"[0-9]{3}-(x|yy)", texts[1])


def test_only_lines_with_a_grammar_are_masked(grammars: RowGrammars) -> None:
    assert grammars.mask(np.array([0, 1])) is None
    grammars.add(1, 2, [])
    mask = grammars.mask(np.array([0, 1, 2]))
    assert mask is not None and mask.lines.tolist() == [1]
    grammars.remove(1)
    assert grammars.mask(np.array([0, 1, 2])) is None


def test_a_row_that_comes_back_goes_on_where_it_was(grammars: RowGrammars) -> None:
    rng = np.random.default_rng(1)
    grammars.add(0, 1, [])
    tokens = []
    for _ in range(12):
        tokens.append(int(rng.choice(allowed(grammars, 0))))
        grammars.advance(0, tokens[-1])
    expected = allowed(grammars, 0)
    grammars.remove(0)
    grammars.add(5, 1, tokens)
    assert allowed(grammars, 5) == expected


def test_a_line_whose_text_is_complete_may_only_end(
    grammars: RowGrammars, vocabulary: LLTokenizer
) -> None:
    grammars.add(0, 2, vocabulary.tokenize_str("yes"))
    grammars.add(1, 2, vocabulary.tokenize_str("ye"))
    mask = grammars.mask(np.array([0, 1]))
    assert mask is not None and mask.ending_lines.tolist() == [0]
    assert allowed(grammars, 0) == [EOS_TOKEN_ID]
    assert grammars.advance(0, EOS_TOKEN_ID)


def test_a_token_that_the_grammar_does_not_take_fails_that_row_alone(
    grammars: RowGrammars, vocabulary: LLTokenizer
) -> None:
    grammars.add(0, 2, vocabulary.tokenize_str("xx"))
    grammars.add(1, 2, [])
    assert allowed(grammars, 0) == []
    failure = grammars.failure_of(0)
    assert failure is not None and "the constraint cannot be followed" in failure.message
    assert "<state>" not in failure.message
    assert grammars.failure_of(1) is None and allowed(grammars, 1)


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [
        (ConstraintKind.REGEX, "a{1000000}", "too many"),
        (ConstraintKind.REGEX, "((a{100}){100}){100}", "too many"),
        (ConstraintKind.GRAMMAR, 'start: "x" big\nbig: /(c{11000}){1000}/', "too many"),
        (ConstraintKind.REGEX, r"[^\s\S]", "no text matches it"),
        (ConstraintKind.GRAMMAR, 'start: start "a"', "no text matches it"),
    ],
)
def test_what_is_too_large_or_matched_by_no_text_is_refused_each_time(
    compiler: GrammarCompiler, kind: ConstraintKind, spec: str, why: str
) -> None:
    for _ in range(3):
        with pytest.raises(InvalidRequest, match=f"cannot be enforced: .*{why}"):
            compiler.compile(Constraint(kind, spec))


def test_a_grammar_that_fails_on_the_way_ends_nothing_as_if_it_were_complete_and_is_made_anew(
    compiler: GrammarCompiler, grammars: RowGrammars
) -> None:
    late = Constraint(ConstraintKind.GRAMMAR, 'start: "x" big?\nbig: "y" /(c{11000}){1000}/')
    grammars.install(9, compiler.compile(late))
    grammars.add(0, 9, [])
    grammars.add(1, 1, [])
    for _ in range(10):
        tokens = [token for token in allowed(grammars, 0) if token != EOS_TOKEN_ID]
        if not tokens:
            break
        grammars.advance(0, tokens[0])
    assert allowed(grammars, 0) == []
    failure = grammars.failure_of(0)
    assert failure is not None and "too many expressions" in failure.message
    assert grammars.failure_of(1) is None and allowed(grammars, 1)
    grammars.install(10, compiler.compile(late))
    grammars.add(2, 10, [])
    assert allowed(grammars, 2) and grammars.failure_of(2) is None


def test_a_dropped_grammar_serves_the_rows_that_have_it_and_no_new_ones(
    grammars: RowGrammars,
) -> None:
    grammars.add(0, 2, [])
    grammars.drop([2, 77])
    assert allowed(grammars, 0)
    with pytest.raises(InvariantError, match="grammar 2 is not prepared"):
        grammars.add(1, 2, [])
    grammars.reset()
    with pytest.raises(InvariantError, match="grammar 1 is not prepared"):
        grammars.add(1, 1, [])


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiler.compile(SCHEMA) is compiler.compile(SCHEMA)
    assert compiler.compile(SCHEMA) is not compiler.compile(CHOICE)


def test_what_cannot_be_compiled_is_an_error_of_the_request(compiler: GrammarCompiler) -> None:
    broken = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}')
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiler.compile(broken)
