"""The fake scheduler as a process: so many steps a second, a token of each request in each.

    python -m tests.benchmarks.paced_scheduler --port 0 --text-fp FP --token-id 1 --steps-per-s 50

Prints its address. A request gets ``max_tokens`` tokens, all the same one; one whose ``seed`` is
above 0 gets that many of them at a time.
"""

from __future__ import annotations

import argparse
import asyncio

import uvloop

from services.common.pb import scheduler_pb2
from tests.fakes.scheduler import Answer, FakeScheduler, engine_state

MAX_MODEL_LEN = 1 << 20


async def serve(args: argparse.Namespace) -> None:
    """Serve until killed."""

    def answer(add: scheduler_pb2.Add, index: int) -> Answer:
        tokens = [args.token_id] * add.sampling.max_tokens
        return Answer(token_ids=tokens, tokens_per_step=add.sampling.seed or 1)

    engines = [engine_state(text_fp=args.text_fp, max_model_len=MAX_MODEL_LEN)]
    fake = FakeScheduler(answer, engines, step_s=1 / args.steps_per_s if args.steps_per_s else 0)
    async with fake.serving(port=args.port) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The fake scheduler, paced.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--text-fp", required=True)
    parser.add_argument("--token-id", type=int, required=True)
    parser.add_argument("--steps-per-s", type=float, default=50.0, help="0 = at once")
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(serve(parse()))
