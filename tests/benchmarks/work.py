"""What the benchmarks of the engine have it do."""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.common.sampling import SamplingParams

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Work:
    """Requests that run at once; each gets exactly ``num_tokens`` tokens."""

    prompts: list[list[int]]
    num_tokens: int

    @property
    def sampling(self) -> SamplingParams:
        """Of all of them."""
        return SamplingParams(temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True)


def make_work(num_requests: int, num_tokens: int, *, seed: int, vocab_size: int) -> Work:
    """Prompts that nobody has seen before."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(100, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)
    ]
    return Work(prompts, num_tokens)
