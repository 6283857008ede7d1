"""A load client for any OpenAI-compatible server: the same streams to each, and what was seen.

All requests are greedy, ``ignore_eos``, streamed with usage, to ``/v1/completions``. Prompts are
made of common words out of a seed: no server answers from an earlier run's prefix cache as long as
no seed comes twice. A stream that ends in an error, or short, fails the run.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

_COMMON = """
apple bird blue boat bread bridge bright cat chair clean clock cloud coat cold cook corn cup
dance dark deep desk dog door dream drink dry early earth east egg empty farm fast field fire
fish flat floor flower fly food foot forest free fresh fruit garden glass gold grass gray
green happy hard heavy high hill horse hot ice island jump key kind king lake large late leaf
light long loud low map meat milk moon morning mountain music narrow near new north ocean old
open orange paint paper park path pen plant plate poor quick quiet rain red rich river road
rock roof round salt sand sea sharp ship shirt shoe short silver sky sleep slow small snow
soft song south spring star stone store storm street strong summer sun sweet table tall tea
thick thin train tree warm water wave weather west wet white wide wind window winter wood
"""
TIMEOUT_S = 900.0


class LoadError(Exception):
    """A server did not do what was asked of it."""


def words(number: int, *, seed: str) -> str:
    """So many words, each about one token."""
    return " ".join(random.Random(seed).choices(_COMMON.split(), k=number))


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed answer as its client saw it, in seconds.

    Attributes:
        ttft_s: From sending the request to the first text.
        tpot_s: Per token after the first.
        gaps_s: Between chunks with text.
        num_prompt_tokens: As the server counts.
        num_tokens: Output tokens, as the server counts.
    """

    ttft_s: float
    tpot_s: float
    gaps_s: Sequence[float]
    num_prompt_tokens: int
    num_tokens: int

    @property
    def num_chunks(self) -> int:
        """Chunks that had text."""
        return len(self.gaps_s) + 1


class LoadClient:
    """Sends requests to one server; use as ``async with``."""

    def __init__(self, url: str, *, model: str) -> None:
        """
        Args:
            url: "http://host:port".
            model: The name that requests use.
        """
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._model = model

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def stream(self, prompt: str, num_tokens: int) -> Stream:
        """Have a prompt continued by exactly ``num_tokens`` tokens.

        Raises:
            LoadError: It was not.
        """
        began = time.perf_counter()
        seen, usage = await self._read(_body(self._model, prompt, num_tokens))
        if not seen or usage.get("completion_tokens") != num_tokens:
            raise LoadError(f"{usage.get('completion_tokens')} of {num_tokens} tokens")
        return Stream(
            ttft_s=seen[0] - began,
            tpot_s=(seen[-1] - seen[0]) / max(num_tokens - 1, 1),
            gaps_s=[later - sooner for sooner, later in itertools.pairwise(seen)],
            num_prompt_tokens=usage["prompt_tokens"],
            num_tokens=num_tokens,
        )

    async def _read(self, body: dict[str, Any]) -> tuple[list[float], dict[str, int]]:
        """When text came, and the usage."""
        seen: list[float] = []
        usage: dict[str, int] = {}
        async with self._http.post(self._url, json=body) as response:
            if response.status != 200:
                raise LoadError(f"{response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return seen, usage
                chunk = orjson.loads(data)
                if chunk.get("error"):
                    raise LoadError(f"the stream ended in {chunk['error']}")
                usage = chunk.get("usage") or usage
                if any(choice.get("text") for choice in chunk["choices"]):
                    seen.append(time.perf_counter())
        raise LoadError("the stream ended without [DONE]")

    async def streams(
        self, prompts: Sequence[str], num_tokens: int, *, at_once: int
    ) -> list[Stream]:
        """Several, at most ``at_once`` at one time."""
        places = asyncio.Semaphore(at_once)

        async def one(prompt: str) -> Stream:
            async with places:
                return await self.stream(prompt, num_tokens)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _body(model: str, prompt: str, num_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
