"""Greedy output over HTTP, through the five processes, equals transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from services.tokenizer.encode import Encoder
from tests.e2e.system import System
from tests.integration.prompts import LONG, RAW, long_prompt
from tests.integration.reference import Reference

pytestmark = pytest.mark.slow
NUM_NEW = 32
MAX_NEAR_TIES = 2


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    encoder = Encoder(smollm2_dir, num_threads=1)

    def encode(text: str) -> list[int]:
        return encoder.encode_now(text, add_special_tokens=False, param="prompt")

    # 40 and more: every raw text twice, the second time continued.
    found = [encode(text) for text in RAW] + [encode(f"{text} and") for text in RAW]
    found += [long_prompt(size, seed + 100, encode) for size, seed in LONG if size > 1]
    encoder.close()
    return found


async def _complete(client: httpx.AsyncClient, prompt_ids: Sequence[int]) -> list[int]:
    body = {
        "model": "smollm2",
        "prompt": list(prompt_ids),
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


async def _ask(url: str, prompts: list[list[int]], *, at_once: bool) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        if at_once:
            return await asyncio.gather(*(_complete(client, ids) for ids in prompts))
        return [await _complete(client, ids) for ids in prompts]


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "all_at_once"])
async def test_greedy_over_http_equals_the_reference(
    smollm2_system: System, smollm2_dir: Path, prompts: list[list[int]], at_once: bool
) -> None:
    reference = Reference(smollm2_dir)
    outputs = await _ask(smollm2_system.url, prompts, at_once=at_once)
    num_near_ties = 0
    for prompt_ids, output_ids in zip(prompts, outputs, strict=True):
        assert len(output_ids) == NUM_NEW
        verdict = reference.judge(prompt_ids, output_ids)
        assert verdict.is_equal, f"prompt {prompt_ids[:8]}...: {verdict.detail}"
        num_near_ties += verdict.near_tie_at is not None
    assert num_near_ties <= MAX_NEAR_TIES
