"""The tokenizer's own metrics; what the engines count is told by the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

from services.common.errors import SluicewayError

REQUESTS = Counter(
    "sluiceway_tokenizer_requests",
    "Generate calls by how they ended: finished, refused, cancelled.",
    ["outcome"],
)
RUNNING = Gauge("sluiceway_tokenizer_requests_running", "Generate calls that have not ended.")
PROMPT_TOKENS = Counter("sluiceway_tokenizer_prompt_tokens", "Tokens of submitted prompts.")
OUTPUT_TOKENS = Counter(
    "sluiceway_tokenizer_output_tokens", "Output tokens of choices that have ended."
)
ENCODE_SECONDS = Histogram(
    "sluiceway_tokenizer_encode_seconds",
    "Time to render and encode a prompt, in seconds.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0),
)
STOP_STRINGS = Counter("sluiceway_tokenizer_stop_strings", "Choices that a stop string has ended.")
SESSIONS = Gauge("sluiceway_tokenizer_sessions", "Sessions with schedulers that stand.")
MATCHES = Counter(
    "sluiceway_tokenizer_index_lookups",
    "Questions to the KV index by outcome: answered, late, failed.",
    ["outcome"],
)


@contextmanager
def counted_request() -> Iterator[None]:
    """Count a Generate call while it runs and by how it ends."""
    RUNNING.inc()
    outcome = "cancelled"
    try:
        yield
        outcome = "finished"
    except SluicewayError:
        outcome = "refused"
        raise
    finally:
        RUNNING.dec()
        REQUESTS.labels(outcome).inc()
