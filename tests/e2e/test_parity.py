"""Greedy output over HTTP, through the five processes, equals transformers in float32.

The prompts are those of the engine's own parity tests, so that the reference has mostly judged the
outputs already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.e2e.system import System
from tests.integration.prompts import parity_prompts
from tests.integration.reference import NUM_NEW, Reference, reference_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Reference:
    return reference_of(smollm2_dir)


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    return parity_prompts(smollm2_dir)


def client_of(system: System) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=system.url, timeout=600, trust_env=False)


async def complete(client: httpx.AsyncClient, prompt_ids: Sequence[int]) -> list[int]:
    """The output tokens of one prompt."""
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


async def most_running_until(asking: asyncio.Future[list[list[int]]], system: System) -> int:
    """How many requests ran at once at most, asked ten times a second."""
    most = 0
    while not asking.done():
        stats = await asyncio.to_thread(system.stats)
        most = max(most, sum(engine.load.running for engine in stats.engines))
        await asyncio.wait([asking], timeout=0.1)
    return most


async def test_each_alone_equals_the_reference(
    smollm2_system: System, prompts: list[list[int]], reference: Reference
) -> None:
    async with client_of(smollm2_system) as client:
        outputs = [await complete(client, ids) for ids in prompts]
    for prompt_ids, output_ids in zip(prompts, outputs, strict=True):
        reference.require_parity(prompt_ids, output_ids)


async def test_all_at_once_equal_the_reference(
    smollm2_system: System, prompts: list[list[int]], reference: Reference
) -> None:
    async with client_of(smollm2_system) as client:
        asking = asyncio.gather(*(complete(client, ids) for ids in prompts))
        most_running = await most_running_until(asking, smollm2_system)
        outputs = await asking
    assert most_running >= 40
    for prompt_ids, output_ids in zip(prompts, outputs, strict=True):
        reference.require_parity(prompt_ids, output_ids)
