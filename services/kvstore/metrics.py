"""Instruments of the kvstore."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

EVENTS = Counter(
    "sluiceway_kvstore_events", "Events of publishers, by what became of them.", ["status"]
)
STREAMS = Gauge("sluiceway_kvstore_publisher_streams", "Publishers that are connected.")
MATCHES = Counter(
    "sluiceway_kvstore_matches",
    "Matches answered, by whether anybody held a block.",
    ["found"],
)
MATCH_SECONDS = Histogram(
    "sluiceway_kvstore_match_seconds",
    "Time to answer one match, in seconds.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1),
)
ENGINES = Gauge("sluiceway_kvstore_engines", "Engines that are listed.")
UNINDEXED_ENGINES = Gauge(
    "sluiceway_kvstore_unindexed_engines",
    "Engines that are listed without their blocks because the index is full.",
)
KEYS = Gauge("sluiceway_kvstore_keys", "Block keys held, of all engines.")
RESERVED_BLOCKS = Gauge(
    "sluiceway_kvstore_reserved_blocks", "Blocks that count against the index's bound."
)
DEGRADED = Gauge(
    "sluiceway_kvstore_degraded",
    "1 while the index may be behind because its store cannot be reached.",
)
