"""Incremental detokenization: joined pieces are the decoder's own text, whatever the chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.tokenizer.detokenize import (
    REPLACEMENT,
    ByteDetokenizer,
    WindowDetokenizer,
    new_detokenizer,
)
from services.tokenizer.token_bytes import TokenBytes, token_bytes

SAMPLES = [
    "Hello world! It's 3.14159.",
    "日本語のテキストと漢字",
    "한국어 문장입니다",
    "नमस्ते दुनिया, ক্ষ, ଓଡ଼ିଆ",
    "שלום עולם، مرحبا بالعالم",
    "Ελληνικά и кириллица",
    "🌶👍🏽👩‍👩‍👧‍👦🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301 n\u0303 Z\u0351\u036b\u0343a\u0328 zalgo",
    "\U0001d54c\U0001d55f 𐍈 🀄",
    "\x00\x01\t\r\n\u2028\ufeff",
    "<|im_end|><think>\n</think> tags",
]
scripts = st.lists(
    st.one_of(st.sampled_from(SAMPLES), st.text(max_size=12)), min_size=1, max_size=4
).map("".join)


_tables: dict[int, TokenBytes] = {}


def table_of(tokenizer: Tokenizer) -> TokenBytes:
    """The byte table, made once per tokenizer."""
    if id(tokenizer) not in _tables:
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        _tables[id(tokenizer)] = token_bytes(tokenizer, vocab_size=size + 8)
    return _tables[id(tokenizer)]


def pieces(
    tokenizer: Tokenizer, ids: Sequence[int], *, prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    detokenizer = new_detokenizer(
        tokenizer, table_of(tokenizer), prompt_ids=prompt, skip_special_tokens=skip
    )
    return [*map(detokenizer.step, ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def byte_level(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    """Like Llama 2: words with ▁, and a token for each byte."""
    words = ["▁hello", "▁world", "▁", "h", "e", "l", "o", "日", "!", "▁!"]
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@pytest.fixture(scope="module")
def word_piece() -> Tokenizer:
    """Its decoder puts spaces between words, so looks at neighbours."""
    words = ["[UNK]", "hello", "world", "##ly", "##s", "!", "日"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@given(text=scripts, skip=st.booleans())
def test_every_script_comes_out_whole_and_equal_to_the_whole_decode(
    byte_level: Tokenizer, text: str, skip: bool
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False).ids
    found = pieces(byte_level, ids, skip=skip)
    assert "".join(found) == byte_level.decode(ids, skip_special_tokens=skip)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in found)


@given(ids=st.lists(st.integers(0, 10_000), max_size=40), skip=st.booleans())
def test_any_bytes_give_the_same_text_token_by_token_as_at_once(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    ids = [token_id % len(table_of(byte_level).shown) for token_id in ids]
    whole = byte_level.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(byte_level, ids, skip=skip)) == whole


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), text=scripts)
def test_the_packaged_model_gives_the_same_text_token_by_token_as_at_once(
    smollm2: Tokenizer, ids: list[int], text: str
) -> None:
    for sequence in (ids, smollm2.encode(text, add_special_tokens=False).ids):
        assert "".join(pieces(smollm2, sequence)) == smollm2.decode(sequence)


@given(words=st.lists(st.sampled_from(range(258, 268)), max_size=12), text=st.text(max_size=8))
def test_sentence_piece_output_keeps_its_first_space(
    sentence_piece: Tokenizer, words: list[int], text: str
) -> None:
    ids = words + [2 + byte for byte in text.encode()]
    # The decoder strips one space at the start of a text, but output never is at the start.
    whole = sentence_piece.decode([sentence_piece.token_to_id("h"), *ids])
    assert "h" + "".join(pieces(sentence_piece, ids)) == whole
    assert "".join(pieces(sentence_piece, [258])) == " hello"


@given(ids=st.lists(st.integers(1, 6), min_size=1, max_size=12), cut=st.integers(0, 100))
def test_a_decoder_that_looks_at_neighbours_gives_the_same_text(
    word_piece: Tokenizer, ids: list[int], cut: int
) -> None:
    prompt, output = ids[: cut % len(ids)], ids[cut % len(ids) :]
    found = "".join(pieces(word_piece, output, prompt=prompt))
    assert word_piece.decode(prompt) + found == word_piece.decode(ids)


def test_a_character_is_not_shown_before_its_last_byte(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🌶x", add_special_tokens=False).ids
    assert pieces(byte_level, ids) == ["", "", "", "🌶", "x", ""]


def test_a_cut_character_is_one_replacement_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🌶", add_special_tokens=False).ids[:-1]
    assert pieces(byte_level, ids) == ["a", "", "", "", REPLACEMENT]


def test_genuine_rubbish_is_shown_at_once_not_held_for_ever(byte_level: Tokenizer) -> None:
    start = byte_level.encode("🌶", add_special_tokens=False).ids[0]
    assert pieces(byte_level, [start] * 3) == ["", REPLACEMENT, REPLACEMENT, REPLACEMENT]


def test_the_output_completes_a_character_that_the_prompt_began(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("see 🌶!", add_special_tokens=False).ids
    assert "".join(pieces(byte_level, ids[-4:], prompt=ids[:-4])) == "🌶!"


def test_a_character_that_the_prompt_began_and_the_output_drops_is_not_shown(
    byte_level: Tokenizer,
) -> None:
    begun = byte_level.encode("🌶", add_special_tokens=False).ids[:2]
    other = byte_level.encode("👍 x", add_special_tokens=False).ids
    assert "".join(pieces(byte_level, other, prompt=begun)) == "👍 x"


@given(prompt=scripts, output=scripts)
def test_nothing_of_the_prompt_is_in_the_output(
    byte_level: Tokenizer, prompt: str, output: str
) -> None:
    prompt_ids = byte_level.encode(prompt, add_special_tokens=False).ids
    ids = byte_level.encode(output, add_special_tokens=False).ids
    assert "".join(pieces(byte_level, ids, prompt=prompt_ids)) == byte_level.decode(ids)


def test_special_tokens_are_hidden_or_shown_without_spaces(byte_level: Tokenizer) -> None:
    assert "".join(pieces(byte_level, [2, 2, 2], skip=True)) == ""
    assert "".join(pieces(byte_level, [2, 2, 2], skip=False)) == "<|im_end|>" * 3


def test_added_tokens_that_are_not_special_are_always_shown(byte_level: Tokenizer) -> None:
    think = byte_level.token_to_id("<think>")
    assert "".join(pieces(byte_level, [think], skip=True)) == "<think>"


def test_the_seam_takes_the_byte_table_where_it_is_exact(
    byte_level: Tokenizer, sentence_piece: Tokenizer, word_piece: Tokenizer
) -> None:
    kinds = []
    for tokenizer in (byte_level, sentence_piece, word_piece):
        made = new_detokenizer(
            tokenizer, table_of(tokenizer), prompt_ids=[], skip_special_tokens=True
        )
        kinds.append(type(made))
    assert kinds == [ByteDetokenizer, ByteDetokenizer, WindowDetokenizer]


def test_ids_beyond_the_tokenizer_have_no_text(byte_level: Tokenizer) -> None:
    size = byte_level.get_vocab_size(with_added_tokens=True)
    detokenizer = ByteDetokenizer(table_of(byte_level).shown, prompt_ids=[])
    assert [detokenizer.step(size), detokenizer.step(size + 7), detokenizer.flush()] == ["", "", ""]


def test_a_token_of_part_of_a_character_has_its_own_bytes(smollm2: Tokenizer) -> None:
    assert table_of(smollm2).shown[10813] == bytes([240, 159])
