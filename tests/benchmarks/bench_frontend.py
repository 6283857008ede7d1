"""What the gateway and the tokenizer cost: CPU per streamed token, added latency, slow readers.

    python -m tests.benchmarks.bench_frontend [--streams 1 64 512] [--route chat] ...

The real gateway and the real tokenizer, each in its process, before a fake scheduler that gives
every running request one token a step. CPU is user and system time of a whole process, taken while
all streams run; each token must come in a server-sent event of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx
import psutil
import uvloop
from tokenizers import Tokenizer

from services.common.fingerprint import text_fingerprint
from services.common.sampling import SamplingParams
from services.launcher.ports import PortWish, choose_ports
from services.pull import ensure_model
from tests.unit.scheduler.session_client import SessionClient

MODEL_NAME = "bench"
WORD = " word"
ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
PARTS = ("gateway", "tokenizer")
STEPS_PER_S = 50.0
STEPS_PER_S_AT_512 = 5.0
"""25,600 events a second are more than the client, the fake and the parts can do on two cores; what
they cannot do would come merged, several tokens in an event."""
TOKENS_PER_SLOW_STEP = 500
LIMIT_US = {64: 120.0, 512: 80.0}
LIMIT_SHARE_OF_CORE = 0.05
LIMIT_TTFT_MS = 5.0
LIMIT_DELAY_MS = 50.0
START_TIMEOUT_S = 60.0
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Front:
    """A running gateway and tokenizer before a fake scheduler."""

    host: str
    port: int
    scheduler: str
    text_fp: str
    processes: dict[str, psutil.Process]

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU that each has used."""
        times = {name: self.processes[name].cpu_times() for name in PARTS}
        return {name: spent.user + spent.system for name, spent in times.items()}


@contextlib.contextmanager
def running_front(model_dir: Path, *, steps_per_s: float) -> Iterator[Front]:
    """Start the three processes, and end them."""
    text_fp = text_fingerprint(model_dir)
    token_id = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(WORD).ids[0]
    wishes = [PortWish(owner="bench", flag="", host="127.0.0.1", port=0, is_firm=False)] * 4
    ports = choose_ports(wishes, seed=time.time_ns())
    model = [f"--model={model_dir}", f"--served-model-name={MODEL_NAME}"]
    with contextlib.ExitStack() as stack:
        fake = ["--text-fp", text_fp, "--token-id", str(token_id), "--steps-per-s"]
        scheduler = _start(
            stack,
            "tests.benchmarks.paced_scheduler",
            *fake,
            str(steps_per_s),
            stdout=subprocess.PIPE,
        )
        assert scheduler.stdout is not None
        address = scheduler.stdout.readline().decode().strip()
        tokenizer = _start(
            stack,
            "services.tokenizer",
            *model,
            f"--port={ports[0]}",
            f"--http-port={ports[1]}",
            f"--schedulers={address}",
        )
        gateway = _start(
            stack,
            "services.gateway",
            f"--port={ports[2]}",
            f"--http-port={ports[3]}",
            f"--tokenizers=127.0.0.1:{ports[0]}",
        )
        _until_ready(f"http://127.0.0.1:{ports[2]}/health")
        processes = {
            "gateway": psutil.Process(gateway.pid),
            "tokenizer": psutil.Process(tokenizer.pid),
        }
        yield Front("127.0.0.1", ports[2], address, text_fp, processes)


def _start(
    stack: contextlib.ExitStack, module: str, *flags: str, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *flags]
    process = stack.enter_context(subprocess.Popen(command, stdout=stdout))
    stack.callback(process.kill)
    return process


def _until_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        assert time.monotonic() < deadline, "the gateway is not ready"
        time.sleep(0.05)


# ---- the client: as little as counts tokens


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own.

    Attributes:
        num_tokens: Events with text so far.
        gaps_s: From one read with text to the next.
        started: Set at the first text.
        done: Set at the end.
    """

    def __init__(self, request: bytes, mark: bytes) -> None:
        self.num_tokens = 0
        self.gaps_s: list[float] = []
        self.started = asyncio.Event()
        self.done = asyncio.Event()
        self._request = request
        self._mark = mark
        self._tail = b""
        self._last_at: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of its own kind
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        text = self._tail + data
        cut = text.rfind(b"\n\n") + 2 if b"\n\n" in text else 0
        events, self._tail = text[:cut], text[cut:]
        found = events.count(self._mark)
        if found:
            now = time.perf_counter()
            if self._last_at is not None:
                self.gaps_s.append(now - self._last_at)
            self._last_at = now
            self.num_tokens += found
            self.started.set()
        if b"[DONE]" in text:
            self.done.set()
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set()


def request_bytes(front: Front, route: str, *, num_tokens: int, seed: int = 0) -> bytes:
    """A streamed request as it goes over the wire."""
    prompt: dict[str, object] = (
        {"messages": [{"role": "user", "content": "Say a word."}]}
        if route == "chat"
        else {"prompt": "Say a word."}
    )
    body = json.dumps(
        {**prompt, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST {ROUTES[route]} HTTP/1.1\r\nhost: {front.host}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def mark_of(route: str) -> bytes:
    """What an event of one token looks like."""
    field_name = "content" if route == "chat" else "text"
    return f'"{field_name}":"{WORD}"'.encode()


async def open_stream(front: Front, route: str, *, num_tokens: int) -> Stream:
    """Send a request."""
    request = request_bytes(front, route, num_tokens=num_tokens)
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(
        lambda: Stream(request, mark_of(route)), front.host, front.port
    )
    return stream


# ---- the figures


@dataclass
class Cost:
    """What the parts of the front end used while so many streams ran."""

    num_streams: int
    tokens_per_s: float
    us_per_token: dict[str, float]
    share_of_core: dict[str, float]
    failures: list[str] = field(default_factory=list)


async def cpu_cost(front: Front, route: str, *, num_streams: int, num_tokens: int) -> Cost:
    """CPU per token while ``num_streams`` run, each ``num_tokens`` long.

    Raises:
        AssertionError: Tokens came together in one event, or did not come.
    """
    async with asyncio.timeout(TIMEOUT_S):
        opened = (open_stream(front, route, num_tokens=num_tokens) for _ in range(num_streams))
        streams = await asyncio.gather(*opened)
        for stream in streams:
            await stream.started.wait()
        began, before, first = time.perf_counter(), front.cpu_s(), _total(streams)
        wanted = num_streams * num_tokens * 9 // 10
        while _total(streams) < wanted and not any(s.done.is_set() for s in streams):
            await asyncio.sleep(0.05)
        seconds, after = time.perf_counter() - began, front.cpu_s()
        counted = _total(streams) - first
        for stream in streams:
            await stream.done.wait()
    counts = {stream.num_tokens for stream in streams}
    assert counts == {num_tokens}, f"events with one token: {sorted(counts)}, not {num_tokens}"
    used = {name: after[name] - before[name] for name in PARTS}
    cost = Cost(
        num_streams,
        counted / seconds,
        {name: 1e6 * used[name] / counted for name in PARTS},
        {name: used[name] / seconds for name in PARTS},
    )
    limit = LIMIT_US.get(num_streams)
    for name in PARTS:
        if limit is not None and cost.us_per_token[name] >= limit:
            cost.failures.append(f"{name} {cost.us_per_token[name]:.0f} us, wanted under {limit}")
        if num_streams == 1 and cost.share_of_core[name] >= LIMIT_SHARE_OF_CORE:
            cost.failures.append(f"{name} {cost.share_of_core[name]:.1%} of a core, wanted < 5 %")
    return cost


def _total(streams: Sequence[Stream]) -> int:
    return sum(stream.num_tokens for stream in streams)


async def first_token_ms(front: Front, route: str, *, repetitions: int) -> list[float]:
    """From sending a request to its first token, one request at a time."""
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        stream = await open_stream(front, route, num_tokens=1)
        await stream.started.wait()
        found.append(1000 * (time.perf_counter() - began))
        await stream.done.wait()
    return found


async def first_token_of_session_ms(front: Front, *, repetitions: int) -> list[float]:
    """The same without gateway and tokenizer: what is not their doing."""
    found = []
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    async with SessionClient(front.scheduler, text_fp=front.text_fp) as client:
        await client.until_ready()
        for _ in range(repetitions):
            began = time.perf_counter()
            handle = client.add([1] * 16, sampling)[0]
            await client.finished(handle, timeout_s=TIMEOUT_S)
            found.append(1000 * (time.perf_counter() - began))
    return found


async def longest_gap_ms(front: Front, route: str, *, num_streams: int, num_tokens: int) -> float:
    """The longest that any of several streams stood still."""
    opened = (open_stream(front, route, num_tokens=num_tokens) for _ in range(num_streams))
    streams = await asyncio.gather(*opened)
    async with asyncio.timeout(TIMEOUT_S):
        for stream in streams:
            await stream.done.wait()
    assert _total(streams) == num_streams * num_tokens
    return 1000 * max(gap for stream in streams for gap in stream.gaps_s)


async def delay_by_slow_reader_ms(front: Front, route: str) -> tuple[float, float]:
    """The longest gap of 16 streams alone, and beside one that never reads."""
    alone = await longest_gap_ms(front, route, num_streams=16, num_tokens=250)
    with socket.create_connection((front.host, front.port)) as slow:
        # The kernel takes little of what is not read, so that the gateway has to wait soon.
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(request_bytes(front, route, num_tokens=1_000_000, seed=TOKENS_PER_SLOW_STEP))
        beside = await longest_gap_ms(front, route, num_streams=16, num_tokens=250)
    return alone, beside


# ---- putting it together


def p50_p99(values: Sequence[float]) -> tuple[float, float]:
    """Median and the worst but one in a hundred."""
    return statistics.median(values), sorted(values)[int(0.99 * len(values))]


async def measure(args: argparse.Namespace, model_dir: Path) -> list[str]:
    """Print every figure; returns the limits that were not kept."""
    failures: list[str] = []
    for num_streams in args.streams:
        pace = args.steps_per_s if num_streams < 512 else args.steps_per_s_at_512
        with running_front(model_dir, steps_per_s=pace) as front:
            await cpu_cost(front, args.route, num_streams=num_streams, num_tokens=20)
            cost = await cpu_cost(
                front, args.route, num_streams=num_streams, num_tokens=args.output_tokens
            )
        shown = "  ".join(
            f"{name} {cost.us_per_token[name]:6.1f} us ({cost.share_of_core[name]:.1%} of a core)"
            for name in PARTS
        )
        print(f"{num_streams:4} streams  {cost.tokens_per_s:7.0f} tokens/s  {shown}", flush=True)
        failures += cost.failures
    if not args.only_cost:
        failures += await measure_latency(args, model_dir)
    return failures


async def measure_latency(args: argparse.Namespace, model_dir: Path) -> list[str]:
    """The same for what does not need a count of streams."""
    failures = []
    with running_front(model_dir, steps_per_s=0) as front:
        await first_token_ms(front, args.route, repetitions=20)
        through = p50_p99(await first_token_ms(front, args.route, repetitions=200))
        past = p50_p99(await first_token_of_session_ms(front, repetitions=200))
    added = through[0] - past[0]
    print(
        f"first token  p50 {through[0]:.2f} ms, p99 {through[1]:.2f} ms; a Session alone p50 "
        f"{past[0]:.2f} ms, p99 {past[1]:.2f} ms; added p50 {added:.2f} ms",
        flush=True,
    )
    if added >= LIMIT_TTFT_MS:
        failures.append(f"{added:.1f} ms added to the first token, wanted under {LIMIT_TTFT_MS}")
    with running_front(model_dir, steps_per_s=args.steps_per_s) as front:
        alone, beside = await delay_by_slow_reader_ms(front, args.route)
    print(f"longest gap of 16 streams {alone:.1f} ms, beside one that does not read {beside:.1f}")
    if beside - alone >= LIMIT_DELAY_MS:
        failures.append(f"{beside - alone:.0f} ms by a slow reader, wanted < {LIMIT_DELAY_MS}")
    return failures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the gateway and the tokenizer cost.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--route", choices=ROUTES, default="chat")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64, 512])
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--steps-per-s", type=float, default=STEPS_PER_S)
    parser.add_argument("--steps-per-s-at-512", type=float, default=STEPS_PER_S_AT_512)
    parser.add_argument("--only-cost", action="store_true", help="no latencies")
    return parser.parse_args()


def main() -> None:
    """Print the figures; exit code 1 if a limit was not kept."""
    args = parse()
    failures = uvloop.run(measure(args, ensure_model(args.model)))
    for failure in failures:
        print(f"NOT KEPT: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
