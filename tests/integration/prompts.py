"""Prompts of the parity suite: chat and raw, several languages, code, 1 to 3,500 tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from services.tokenizer.chat_template import Chat, ChatTemplates
from services.tokenizer.encode import Encoder

RAW = [
    "1 2 3 4",
    "Here is the English alphabet: ABC",
    "Once upon a time there was a small",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    '{"name": "Alice", "age": 30, "city":',
    "<html>\n<head>\n<title>",
    "import asyncio\n\nasync def main() -> None:\n    async with",
    "fn main() {\n    let mut total = 0;\n    for i in 0..10 {",
    "La capitale de la France est",
    "Der schnelle braune Fuchs springt über",
    "El sol brilla en el cielo y los niños",
    "日本の首都は",
    "Столица России — это",
    "中国的首都是",
    "한국의 수도는",
    "عاصمة مصر هي",
    "भारत की राजधानी",
    "🌶🌶🌶 👍🏽 emoji test:",
    "x",
    "To be, or not to be, that is",
    "Water boils at 100 degrees Celsius, which is the same as",
]

CHAT = [
    "Hi",
    "What is the capital of France? Answer in one word.",
    "Write a haiku about the sea.",
    "Explain recursion to a child.",
    "Translate 'good morning' to Spanish.",
    "List three prime numbers.",
    "Who wrote Hamlet?",
    "What is 12 times 12?",
    "Give me a recipe for pancakes in two sentences.",
    "Summarise: The cat sat on the mat and looked at the moon.",
    "Wie heißt du?",
    "Quelle heure est-il ?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
]

WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"]
LONG = [(1, 0), (130, 1), (500, 2), (1500, 3), (3500, 4)]
"""(number of tokens, seed)"""


def parity_prompts(model_dir: Path) -> list[list[int]]:
    """Token ids of all prompts: raw, then chat, then long."""
    encoder = Encoder(model_dir, num_threads=1)
    template = ChatTemplates.load(model_dir).choose(with_tools=False)

    def encode(text: str) -> list[int]:
        return encoder.encode_now(text, add_special_tokens=False, param="prompt")

    chats = [template.render(Chat([{"role": "user", "content": text}])) for text in CHAT]
    found = [encode(text) for text in [*RAW, *chats]]
    found += [long_prompt(size, seed, encode) for size, seed in LONG]
    encoder.close()
    assert len(found) >= 40
    assert {len(ids) for ids in found} >= {1, 3500}
    return found


def long_prompt(num_tokens: int, seed: int, encode: Callable[[str], list[int]]) -> list[int]:
    """A prompt of exactly so many tokens, made of common words."""
    draw = random.Random(seed)
    text = " ".join(draw.choice(WORDS) for _ in range(num_tokens + 5))
    return encode(text)[:num_tokens]
