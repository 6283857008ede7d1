"""Every way to spell a banned word in tokens is found, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from services.common.errors import InvalidRequest
from services.common.sampling import BadWord
from services.tokenizer.bad_words import BadWordSpeller
from services.tokenizer.encode import Encoder
from tests.tiny_models import make_tiny_model


def paths(word: BadWord) -> set[tuple[int, ...]]:
    """Every token sequence from the beginning of a word to its end."""
    end = max(word.ends)

    def from_place(place: int) -> Iterator[tuple[int, ...]]:
        if place == end:
            yield ()
        for start, token_id, stop in zip(word.starts, word.token_ids, word.ends, strict=True):
            if start == place:
                yield from ((token_id, *rest) for rest in from_place(stop))

    return set(from_place(0))


def spellings(raw: bytes, encoder: Encoder) -> set[tuple[int, ...]]:
    """The same by trying every token at every place."""
    if not raw:
        return {()}
    return {
        (token_id, *rest)
        for token_id, piece in enumerate(encoder.token_bytes.shown)
        if piece and raw.startswith(piece)
        for rest in spellings(raw[len(piece) :], encoder)
    }


@pytest.mark.parametrize("word", ["stop", "the", "a", "naïve", "👍", "<|im_end|>"])
def test_every_spelling_of_a_bad_word_is_found_with_and_without_a_space_before_it(
    encoder: Encoder, word: str
) -> None:
    bare, spaced = BadWordSpeller(encoder).spell([word])
    assert paths(bare) == spellings(word.encode(), encoder)
    assert paths(spaced) == spellings(b" " + word.encode(), encoder)
    for text, graph in ((word, bare), (" " + word, spaced)):
        own = encoder.encode_now(text, add_special_tokens=False, param="text")
        assert tuple(own) in paths(graph)


def test_a_word_is_spelled_once_however_often_it_is_named(encoder: Encoder) -> None:
    speller = BadWordSpeller(encoder)
    assert speller.spell([" stop", "stop", "stop"]) == speller.spell(["stop"])


def test_a_packaged_vocabulary_spells_a_long_word_in_many_ways(smollm2_dir: Path) -> None:
    encoder = Encoder(smollm2_dir, num_threads=1)
    bare, spaced = BadWordSpeller(encoder).spell(["unbelievable"])
    encoder.close()
    shown = encoder.token_bytes.shown
    for graph, text in ((bare, b"unbelievable"), (spaced, b" unbelievable")):
        found = paths(graph)
        assert len(found) > 100
        assert all(b"".join(shown[token_id] for token_id in ids) == text for ids in found)


def test_a_tokenizer_that_cannot_be_taken_apart_gives_its_own_two_spellings(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny", tokenizer=True)
    vocabulary = {"[UNK]": 0, "stop": 1, "go": 2}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model_dir / "tokenizer.json"))
    encoder = Encoder(model_dir, num_threads=1)
    assert not encoder.token_bytes.is_exact
    assert BadWordSpeller(encoder).spell(["stop"]) == (BadWord.of_tokens(1),)
    with pytest.raises(InvalidRequest, match="has no tokens"):
        BadWordSpeller(encoder).spell([" "])
    encoder.close()
