"""The workloads, and the figures that count of each."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.load import LoadClient, Stream, words

Figures = dict[str, float]
Run = Callable[[LoadClient, str], Awaitable[Figures]]

MIN_CHUNKS_PER_TOKEN = 0.98
"""A server that sends several tokens in one chunk would look better than it is."""

_NUM_DECODES = 12
_NUM_LONG_PROMPTS = 3


@dataclass(frozen=True, slots=True)
class Goal:
    """How a figure shall compare to the same figure of the peer.

    Attributes:
        ratio: Ours by theirs.
        is_ceiling: Whether less is better.
    """

    ratio: float
    is_ceiling: bool

    def is_met(self, ratio: float) -> bool:
        """Whether a measured ratio is good enough."""
        return ratio <= self.ratio if self.is_ceiling else ratio >= self.ratio

    def __str__(self) -> str:
        return f"{'<=' if self.is_ceiling else '>='} {self.ratio:.2f}"


GOALS: Mapping[str, Goal] = {
    "single.tpot_ms": Goal(0.60, is_ceiling=True),
    "batch.output_tok_s": Goal(1.5, is_ceiling=False),
    "wide.output_tok_s": Goal(1.5, is_ceiling=False),
    "long.ttft_ms": Goal(0.50, is_ceiling=True),
    "shared.ttft_ms": Goal(0.50, is_ceiling=True),
    "mixed.decode_itl_p99_ms": Goal(0.25, is_ceiling=True),
    "mixed.total_tok_s": Goal(1.2, is_ceiling=False),
    "mixed.long_ttft_ms": Goal(1.0, is_ceiling=True),
}


async def warm_up(client: LoadClient, seed: str) -> None:
    """A short request that does not count."""
    await client.stream(words(20, seed=f"{seed} warm-up"), 8)


async def single(client: LoadClient, seed: str) -> Figures:
    """One stream: 64 tokens in, 128 out."""
    streams = await client.streams(_prompts(1, 60, seed), 128, at_once=1)
    return {
        "tpot_ms": _median_ms(stream.tpot_s for stream in streams),
        "ttft_ms": _median_ms(stream.ttft_s for stream in streams),
        **_chunks(streams),
    }


async def batch(client: LoadClient, seed: str) -> Figures:
    """16 streams: 128 tokens in, 128 out."""
    return await _at_once(client, _prompts(16, 125, seed), 128)


async def wide(client: LoadClient, seed: str) -> Figures:
    """64 streams: 64 tokens in, 64 out."""
    return await _at_once(client, _prompts(64, 60, seed), 64)


async def long(client: LoadClient, seed: str) -> Figures:
    """Three prompts of 3,400 tokens, one after the other; 8 out."""
    streams = await client.streams(_prompts(3, 3400, seed), 8, at_once=1)
    return {"ttft_ms": _median_ms(stream.ttft_s for stream in streams), **_chunks(streams)}


async def shared(client: LoadClient, seed: str) -> Figures:
    """32 prompts, 8 at a time, that begin with the same 1,450 tokens, already seen; 16 out."""
    prefix = words(1450, seed=f"{seed} prefix")
    await client.stream(prefix, 1)
    began = time.perf_counter()
    prompts = [f"{prefix} {prompt}" for prompt in _prompts(32, 30, seed)]
    streams = await client.streams(prompts, 16, at_once=8)
    seconds = time.perf_counter() - began
    return {
        "ttft_ms": _median_ms(stream.ttft_s for stream in streams),
        "output_tok_s": _output_tokens(streams) / seconds,
        **_chunks(streams),
    }


async def mixed(client: LoadClient, seed: str) -> Figures:
    """12 streams that decode while a prompt of 3,400 tokens arrives every second."""

    async def arrive(number: int, prompt: str) -> Stream:
        await asyncio.sleep(1 + number)
        return await client.stream(prompt, 8)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        decodes = [
            group.create_task(client.stream(prompt, 128))
            for prompt in _prompts(_NUM_DECODES, 60, seed)
        ]
        arrivals = [
            group.create_task(arrive(number, prompt))
            for number, prompt in enumerate(_prompts(_NUM_LONG_PROMPTS, 3400, f"{seed} long"))
        ]
    seconds = time.perf_counter() - began
    decoded, prefilled = [t.result() for t in decodes], [t.result() for t in arrivals]
    everything = [*decoded, *prefilled]
    num_tokens = sum(s.num_tokens + s.num_prompt_tokens for s in everything)
    return {
        "decode_itl_p99_ms": 1000 * _quantile([g for s in decoded for g in s.gaps_s], 0.99),
        "total_tok_s": num_tokens / seconds,
        "long_ttft_ms": _median_ms(stream.ttft_s for stream in prefilled),
        **_chunks(everything),
    }


WORKLOADS: Mapping[str, Run] = {
    "single": single,
    "batch": batch,
    "wide": wide,
    "long": long,
    "shared": shared,
    "mixed": mixed,
}


async def measure(name: str, client: LoadClient, seed: str, *, may_merge: bool = False) -> Figures:
    """Run one workload.

    Args:
        name: Of the workload.
        client: Of the server.
        seed: Of the prompts; never use one twice.
        may_merge: Whether several tokens may come in one chunk; figures between tokens are then of
            little use.

    Returns:
        "<workload>.<figure>" → value.

    Raises:
        LoadError: A request failed.
        AssertionError: The server put several tokens into one chunk.
    """
    figures = await WORKLOADS[name](client, seed)
    chunks_per_token = figures["chunks_per_token"]
    is_merged = chunks_per_token < MIN_CHUNKS_PER_TOKEN
    assert may_merge or not is_merged, f"{name}: {chunks_per_token:.3f} chunks/token"
    return {f"{name}.{figure}": value for figure, value in figures.items()}


def medians(repetitions: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    return {name: statistics.median(r[name] for r in repetitions) for name in repetitions[0]}


def workload_names(text: str) -> list[str]:
    """The workloads of a comma-separated list."""
    names = text.split(",")
    unknown = set(names) - set(WORKLOADS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown} unknown; there are {', '.join(WORKLOADS)}")
    return names


async def _at_once(client: LoadClient, prompts: Sequence[str], num_tokens: int) -> Figures:
    began = time.perf_counter()
    streams = await client.streams(prompts, num_tokens, at_once=len(prompts))
    seconds = time.perf_counter() - began
    return {
        "output_tok_s": _output_tokens(streams) / seconds,
        "ttft_ms": _median_ms(stream.ttft_s for stream in streams),
        "tpot_ms": _median_ms(stream.tpot_s for stream in streams),
        **_chunks(streams),
    }


def _prompts(number: int, num_words: int, seed: str) -> list[str]:
    return [words(num_words, seed=f"{seed} {i}") for i in range(number)]


def _output_tokens(streams: Sequence[Stream]) -> int:
    return sum(stream.num_tokens for stream in streams)


def _chunks(streams: Sequence[Stream]) -> Figures:
    num_chunks = sum(stream.num_chunks for stream in streams)
    return {"chunks_per_token": num_chunks / _output_tokens(streams)}


def _median_ms(seconds: object) -> float:
    return 1000 * statistics.median(seconds)  # type: ignore[call-overload]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
