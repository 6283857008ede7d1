"""What the split into processes costs: tokens a second of one process and of five, side by side.

    python -m tests.benchmarks.bench_split [--model smollm2] [--requests 16 64] ...

All ways have the same runner, scheduler core, depth, threads and prompts. The ways:
``services.offline.LLM``, the single process; a client on a Session with the scheduler; streams over
HTTP. In each repetition all take four turns, every second time in turned order: where the machine
gets slower or faster meanwhile, it does so for all alike. The runner called in a bare loop goes
through the same work beside the single process, some steps each in turn. Shares are taken within
each repetition; medians over the repetitions count. CPU seconds are those of one repetition; the
client's are this process's own. The last line is the Session client's share of the single
process's speed, the lowest of all sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch

from services.common.fingerprint import text_fingerprint
from services.offline import LLM, LLMOptions
from services.pull import ensure_model
from services.worker.executor import StepTimes
from services.worker.runner.build import build_runner
from services.worker.runner.model_runner import ModelRunner
from tests.benchmarks.bare_loop import STEPS_PER_TURN, share_of_bare_loop
from tests.benchmarks.work import PROMPT_TOKENS, Work, make_work
from tests.e2e.system import CLUSTER_TOKEN, System
from tests.unit.scheduler.session_client import SessionClient

Run = Callable[[Work], int | None]

BLOCK_SIZE = 16
NUM_BLOCKS = 2048
NUM_STEPS = 200
TURNS = 4
TIMEOUT_S = 600.0
TARGETS = {"session": "0.95", "http": "0.90 at 16, 0.85 at 64"}
TARGET_OF_BARE_LOOP = "0.98-1.02"


@dataclass(frozen=True)
class Sample:
    """One turn of one way, or several together.

    Attributes:
        num_chunks: Pieces in which the output came; 0 where it comes in no pieces.
    """

    num_tokens: int
    seconds: float
    cpu_s: dict[str, float]
    num_chunks: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def __add__(self, other: Sample) -> Sample:
        return Sample(
            self.num_tokens + other.num_tokens,
            self.seconds + other.seconds,
            {name: self.cpu_s[name] + other.cpu_s[name] for name in self.cpu_s},
            self.num_chunks + other.num_chunks,
        )


# ---- the ways


def run_single(llm: LLM, work: Work) -> None:
    """The scheduler core and the runner in this process."""
    llm.generate(work.prompts, work.sampling)


async def run_session(system: System, text_fp: str, work: Work) -> None:
    """Tokens in, tokens out, past the gateway and the tokenizer."""
    address = system.address("scheduler")
    async with SessionClient(
        address, text_fp=text_fp, cluster_token=CLUSTER_TOKEN, in_passing=True
    ) as client:
        await client.until_ready()
        handles = [client.add(prompt, work.sampling)[0] for prompt in work.prompts]
        for handle in handles:
            await client.finished(handle, timeout_s=TIMEOUT_S)
            assert len(client.handles[handle].token_ids) == work.num_tokens


async def run_http(system: System, work: Work) -> int:
    """Streams, as a user has them; read with as little effort as can be, for it counts too.

    Returns:
        Chunks of text that came.
    """
    door = urlsplit(system.url)
    assert door.hostname is not None and door.port is not None
    chunks = await asyncio.gather(
        *(_read_stream(door.hostname, door.port, prompt, work) for prompt in work.prompts)
    )
    return sum(chunks)


async def _read_stream(host: str, port: int, prompt: list[int], work: Work) -> int:
    fields = {
        "prompt": prompt,
        "max_tokens": work.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    num_events, tail = 0, b""
    async with asyncio.timeout(TIMEOUT_S):
        while piece := await reader.read(65_536):
            num_events += piece.count(b"data: ")
            tail = (tail + piece)[-64:]
    writer.close()
    await writer.wait_closed()
    assert b"[DONE]" in tail, tail
    return num_events - 2  # without the choice's end and the stream's


# ---- measuring


def measure(run: Run, work: Work, *, system: System) -> Sample:
    """Run some work, in wall-clock and in CPU time."""
    before, began = _cpu_s(system), time.perf_counter()
    num_chunks = run(work) or 0
    seconds, after = time.perf_counter() - began, _cpu_s(system)
    return Sample(
        len(work.prompts) * work.num_tokens,
        seconds,
        {name: after[name] - before[name] for name in after},
        num_chunks,
    )


def _cpu_s(system: System) -> dict[str, float]:
    times = {name: psutil.Process(pid).cpu_times() for name, pid in system.pids().items()}
    used = {name: spent.user + spent.system for name, spent in times.items()}
    return {**used, "client": time.process_time()}


def overhead(times: Sequence[StepTimes], *, num_requests: int) -> float:
    """Share of a decode step that is neither forward nor sampling, median of the last steps."""
    steps = [step for step in times if step.num_tokens == step.num_rows == num_requests]
    assert len(steps) >= NUM_STEPS
    return statistics.median(
        1 - step.device_s / (step.gap_s + step.total_s) for step in steps[-NUM_STEPS:]
    )


def report(num_requests: int, samples: dict[str, list[Sample]]) -> float:
    """Print the medians; gives the Session client's share of the single process."""
    shares = {}
    for way, found in samples.items():
        shares[way] = statistics.median(
            mine.tokens_per_s / single.tokens_per_s
            for mine, single in zip(found, samples["single"], strict=True)
        )
        speed = statistics.median(sample.tokens_per_s for sample in found)
        target = f" (wanted: {TARGETS[way]})" if way in TARGETS else ""
        chunks = [each.num_chunks / each.num_tokens for each in found if each.num_chunks]
        pieces = f"  {statistics.median(chunks):.3f} chunks a token" if chunks else ""
        names = found[0].cpu_s
        cpu = {name: statistics.median(sample.cpu_s[name] for sample in found) for name in names}
        spent = "  ".join(f"{name} {seconds:.2f}" for name, seconds in cpu.items())
        print(
            f"{num_requests:3} requests  {way:8} {speed:8.1f} tokens/s  "
            f"{shares[way]:5.3f} of single{target}{pieces}\n"
            f"              CPU s: {spent}",
            flush=True,
        )
    return shares["session"]


# ---- putting it together


def options_of(args: argparse.Namespace) -> LLMOptions:
    """What every way has."""
    return LLMOptions(
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_num_seqs=max(args.requests),
        pipeline_depth=args.pipeline_depth,
        enable_prefix_caching=False,
        num_threads=args.num_threads,
    )


def flags_of(options: LLMOptions) -> list[str]:
    """The same for ``sluiceway serve``."""
    flags = [
        f"--block-size={options.block_size}",
        f"--num-gpu-blocks-override={options.num_gpu_blocks_override}",
        f"--max-num-seqs={options.max_num_seqs}",
        f"--pipeline-depth={options.pipeline_depth}",
        f"--step-time-target-ms={options.step_time_target_ms}",
        "--no-enable-prefix-caching",
    ]
    return (
        flags if options.num_threads is None else [*flags, f"--num-threads={options.num_threads}"]
    )


def bare_runner(model_dir: Path, options: LLMOptions) -> ModelRunner:
    """A runner of its own, to be called in this thread."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    return build_runner(options.for_runner(model_dir), report=lambda _: None).runner


def print_overhead(llm: LLM, model_dir: Path, options: LLMOptions, sizes: Sequence[int]) -> None:
    """The share of a step that is not the device's, at this depth and at depth 1."""
    with LLM(str(model_dir), options=replace(options, pipeline_depth=1)) as shallow:
        for size in sizes:
            shares = []
            for each in (llm, shallow):
                work = make_work(size, NUM_STEPS + 10, seed=size, vocab_size=llm.facts.vocab_size)
                each.trace.times.clear()
                run_single(each, work)
                shares.append(overhead(each.trace.times, num_requests=size))
            print(
                f"{size:3} requests  not forward or sampling: {shares[0]:.1%} of a step at depth "
                f"{options.pipeline_depth} (wanted: under 3 %), {shares[1]:.1%} at depth 1",
                flush=True,
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the split into processes costs.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--output-tokens", type=int, default=128, help="of one turn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--pipeline-depth", type=int, default=2)
    parser.add_argument("--num-threads", type=int, default=None, help="default: torch's choice")
    args = parser.parse_args()
    most = LLMOptions().max_num_batched_tokens // PROMPT_TOKENS
    if max(args.requests) > most:
        parser.error(f"--requests must be at most {most}: the prompts have to fit into one step")
    if args.output_tokens % STEPS_PER_TURN:
        parser.error(f"--output-tokens must be a multiple of {STEPS_PER_TURN}")
    return args


def main() -> None:
    """Print a paragraph per size, then the ratio."""
    args = parse()
    model_dir, options = ensure_model(args.model), options_of(args)
    text_fp = text_fingerprint(model_dir)
    with (
        tempfile.TemporaryDirectory() as logs,
        LLM(str(model_dir), options=options) as llm,
        System(model_dir, *flags_of(options), log_file=Path(logs) / "serve.txt") as system,
        asyncio.Runner() as loop,  # one for all: gRPC stays with the first that it has seen
    ):
        system.until_ready()
        runner = bare_runner(model_dir, options)
        ways: dict[str, Run] = {
            "single": partial(run_single, llm),
            "session": lambda work: loop.run(run_session(system, text_fp, work)),
            "http": lambda work: loop.run(run_http(system, work)),
        }
        ratios = []
        for size in args.requests:
            samples: dict[str, list[Sample]] = {way: [] for way in ways}
            bare_shares = []
            for repetition in range(args.repetitions + 1):
                work = make_work(
                    size, args.output_tokens, seed=repetition, vocab_size=llm.facts.vocab_size
                )
                if not repetition:  # to warm up
                    for run in ways.values():
                        run(work)
                    continue
                turns: dict[str, list[Sample]] = {way: [] for way in ways}
                for turn in range(TURNS):
                    for way in sorted(ways, reverse=turn % 2 == 1):
                        turns[way].append(measure(ways[way], work, system=system))
                for way, found in turns.items():
                    samples[way].append(reduce(operator.add, found))
                bare_shares.append(share_of_bare_loop(llm, runner, work, block_size=BLOCK_SIZE))
            ratios.append(report(size, samples))
            print(
                f"{size:3} requests  bare loop, in turns of {STEPS_PER_TURN} steps  "
                f"{statistics.median(bare_shares):5.3f} of single (wanted: {TARGET_OF_BARE_LOOP}), "
                f"least {min(bare_shares):.3f}, most {max(bare_shares):.3f}",
                flush=True,
            )
        print_overhead(llm, model_dir, options, args.requests)
    print(f"ratio {min(ratios):.3f}")


if __name__ == "__main__":
    main()
