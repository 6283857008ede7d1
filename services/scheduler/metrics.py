"""Instruments of the scheduler (``sluiceway_*``), scraped over HTTP."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_FINE_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1)

ENGINES = Gauge(
    "sluiceway_scheduler_engines", "Engines that are attached, by where they stand.", ["state"]
)
SESSIONS = Gauge("sluiceway_scheduler_sessions", "Tokenizers that have a Session.")
REQUESTS = Counter("sluiceway_scheduler_requests", "Choices added.")
FINISHED = Counter("sluiceway_scheduler_finished", "Choices that ended, by reason.", ["reason"])
TOKENS = Counter("sluiceway_scheduler_tokens", "Output tokens given to clients.")
SCHEDULED_TOKENS = Counter(
    "sluiceway_scheduler_scheduled_tokens", "Tokens that steps were sent to compute."
)
FAILED_STEPS = Counter("sluiceway_scheduler_failed_steps", "Steps that failed as a whole.")
LOST_ENGINES = Counter("sluiceway_scheduler_lost_engines", "Engines that ended without a drain.")
MOVED_REQUESTS = Counter(
    "sluiceway_scheduler_moved_requests", "Choices moved to another engine, by cause.", ["cause"]
)
STEP_SECONDS = Histogram(
    "sluiceway_scheduler_step_seconds",
    "Time of a step as the scheduler sees it, in seconds.",
    buckets=_STEP_BUCKETS,
)
STEP_GAP_SECONDS = Histogram(
    "sluiceway_scheduler_step_gap_seconds",
    "Time that a worker waited between two steps, in seconds.",
    buckets=_FINE_BUCKETS,
)
PLANNING_SECONDS = Histogram(
    "sluiceway_scheduler_planning_seconds",
    "Time to plan and serialise a step, in seconds.",
    buckets=_FINE_BUCKETS,
)
SESSIONS_CLOSED = Counter(
    "sluiceway_scheduler_sessions_closed", "Sessions closed by the scheduler, by cause.", ["cause"]
)
KV_STREAM_UP = Gauge(
    "sluiceway_scheduler_kv_stream_up", "1 while the kvstore answers what is published."
)
KV_MESSAGES = Counter("sluiceway_scheduler_kv_messages", "Messages sent to the kvstore.")
KV_SNAPSHOTS = Counter("sluiceway_scheduler_kv_snapshots", "Snapshots the kvstore has asked for.")
KV_BACKLOG_KEYS = Gauge(
    "sluiceway_scheduler_kv_backlog_keys",
    "Changed block keys that the kvstore has not acknowledged.",
)
