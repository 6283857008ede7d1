"""The worker's instruments; what dashboards of engines read is the gateway's business."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

STEPS = Counter("sluiceway_worker_steps", "Steps that ran.")
FAILED_STEPS = Counter("sluiceway_worker_failed_steps", "Steps that an exception ended.")
TOKENS = Counter("sluiceway_worker_tokens", "Tokens that went through the model.")
STEP_SECONDS = Histogram(
    "sluiceway_worker_step_seconds", "Time of a step, from bytes to bytes.", buckets=_SECONDS
)
DEVICE_SECONDS = Histogram(
    "sluiceway_worker_device_seconds",
    "Part of a step spent in forward and sampling.",
    buckets=_SECONDS,
)
GAP_SECONDS = Histogram(
    "sluiceway_worker_gap_seconds", "Time between two steps in which none ran.", buckets=_SECONDS
)
ROWS = Gauge("sluiceway_worker_rows", "Requests that have a row.")
KV_BLOCKS = Gauge("sluiceway_worker_kv_blocks", "KV blocks, the null block included.")
KV_CACHE_BYTES = Gauge("sluiceway_worker_kv_cache_bytes", "Size of the KV cache.")
ATTACHMENTS = Counter(
    "sluiceway_worker_attachments", "Attachments to a scheduler, by how they ended.", ["end"]
)
