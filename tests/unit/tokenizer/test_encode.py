"""Encoding: long texts hold up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.tokenizer.encode import INLINE_CHARS, Encoder


@pytest.fixture(scope="module")
def encoder(smollm2_dir: Path) -> Iterator[Encoder]:
    encoder = Encoder(smollm2_dir, num_threads=1)
    yield encoder
    encoder.close()


@pytest.mark.parametrize("text", ["Grüße, 世界! 🙂 <|im_start|>user\n", "  many   spaces\t\n\n"])
async def test_a_long_text_has_the_ids_of_its_parts(encoder: Encoder, text: str) -> None:
    assert len(text) <= INLINE_CHARS
    # A special token never merges with what stands beside it.
    repeats = 2 * INLINE_CHARS // len(text)
    part = await encoder.encode(text + "<|im_end|>", add_special_tokens=False, param="prompt")
    whole = await encoder.encode(
        (text + "<|im_end|>") * repeats, add_special_tokens=False, param="prompt"
    )
    assert whole == part * repeats


async def test_the_loop_turns_while_a_long_text_is_encoded(encoder: Encoder) -> None:
    encoding = asyncio.ensure_future(
        encoder.encode("word " * 200_000, add_special_tokens=False, param="prompt")
    )
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await encoding) == 200_001
    assert turns > 20
