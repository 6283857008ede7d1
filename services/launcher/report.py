"""The texts that ``sluiceway serve`` shows: progress, processes, what to paste. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.launcher.probes import Traffic, WorkerState
from services.launcher.screen import bytes_text

_QUESTION = "What is the capital of France? Answer in one word."
_MESSAGES = f'[{{"role": "user", "content": "{_QUESTION}"}}]'


@dataclass(frozen=True, slots=True)
class Row:
    """A process in the table.

    Attributes:
        name: Of the child.
        pid: Of its present life.
        address: Where it listens.
        worker: What it knows of itself, if it is a worker.
    """

    name: str
    pid: int
    address: str
    worker: WorkerState | None = None


def table(rows: Sequence[Row]) -> list[str]:
    """Process, pid, address and KV capacity, in columns."""
    cells = [("process", "pid", "address", "KV cache")]
    cells += [(row.name, str(row.pid), row.address, _capacity(row.worker)) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _capacity(worker: WorkerState | None) -> str:
    if worker is None:
        return ""
    text = f"{worker.kv_tokens:,} tokens"
    if worker.max_model_len:
        times = worker.kv_tokens / worker.max_model_len
        text += f" ({times:.1f} x {worker.max_model_len:,})"
    return f"{text}  {worker.dtype} on {worker.device}" if worker.device else text


def worker_progress(name: str, state: WorkerState) -> str:
    """ "worker: weights 45 % (120 MB of 270 MB)"."""
    if not state.phase:
        return f"{name}: starting"
    text = f"{name}: {state.phase} {state.fraction:.0%}".replace("%", " %")
    if state.total_bytes:
        text += f" ({bytes_text(state.done_bytes)} of {bytes_text(state.total_bytes)})"
    return text


def progress(states: Mapping[str, WorkerState], pending: Sequence[str], *, seconds: float) -> str:
    """The status line while children are not ready.

    Args:
        states: Workers that are not ready → what they do.
        pending: Names of all children that are not ready.
        seconds: Since the start.
    """
    parts = [worker_progress(name, state) for name, state in states.items()]
    rest = [name for name in pending if name not in states]
    if rest:
        parts.append(f"waiting for {', '.join(rest)}")
    return f"{' · '.join(parts)} ({seconds:.0f} s)"


def milestone(states: Mapping[str, WorkerState], pending: Sequence[str]) -> str:
    """What must change before progress is printed again where lines cannot be redrawn."""
    quarters = [(name, state.phase, int(state.fraction * 4)) for name, state in states.items()]
    return f"{quarters}{sorted(pending)}"


def traffic(before: Traffic, now: Traffic, *, seconds: float) -> str | None:
    """One line about the last seconds, or ``None`` if there was nothing to do.

    Args:
        before: At their beginning.
        now: At their end; counters that have shrunk are those of a new engine.
        seconds: Between the two.
    """
    prompt = max(0, now.prompt_tokens - before.prompt_tokens)
    generated = max(0, now.generated_tokens - before.generated_tokens)
    if not (prompt or generated or now.requests):
        return None
    text = (
        f"{now.running} running, {now.waiting} waiting · prompt {prompt / seconds:,.0f} tok/s, "
        f"output {generated / seconds:,.0f} tok/s"
    )
    if now.blocks_total:
        text += f" · KV cache {100 * now.blocks_used / now.blocks_total:.0f} %"
    queries = now.cache_queries - before.cache_queries
    if queries > 0:
        hits = max(0, now.cache_hits - before.cache_hits)
        text += f" · prefix hits {100 * hits / queries:.0f} %"
    return text


def draining(num_requests: int | None, *, seconds_left: float) -> str:
    """The status line while the children finish their requests."""
    if num_requests is None:
        return f"draining: {seconds_left:.0f} s left (Ctrl-C again ends at once)"
    plural = "" if num_requests == 1 else "s"
    return (
        f"draining: {num_requests} request{plural} left, {seconds_left:.0f} s "
        "(Ctrl-C again ends at once)"
    )


def snippets(url: str, *, model: str, needs_key: bool) -> list[str]:
    """A curl and an openai-python call, ready to be pasted.

    Args:
        url: Of the gateway.
        model: Its served name.
        needs_key: Whether requests need a key; the user knows which.
    """
    header = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    key = "YOUR_KEY" if needs_key else "none"
    return [
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\",
        f'  -d \'{{"model": "{model}", "temperature": 0, "messages": {_MESSAGES}}}\'',
        "",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="{key}")',
        f"messages = {_MESSAGES}",
        "reply = client.chat.completions.create(",
        f'    model="{model}", temperature=0, messages=messages',
        ")",
        "print(reply.choices[0].message.content)",
    ]
