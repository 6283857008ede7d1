"""Short names for keys and engines."""

from __future__ import annotations

from collections.abc import Iterable

from services.kvstore.events import EngineRecord, KvEvents, SnapshotChunk


def key(number: int) -> bytes:
    """The key with this number."""
    return number.to_bytes(16, "big")


def pack(numbers: Iterable[int]) -> bytes:
    """Keys side by side."""
    return b"".join(map(key, numbers))


def record(engine_id: int, *, worker_id: str = "", num_blocks: int = 100) -> EngineRecord:
    """An engine; each has a worker of its own unless one is named."""
    return EngineRecord(
        engine_id=engine_id,
        worker_id=worker_id or f"worker-{engine_id}",
        scheduler_address="scheduler:1",
        model="m",
        text_fp="fp",
        block_size=16,
        num_blocks=num_blocks,
    )


def stored(engine_id: int, seq: int, numbers: Iterable[int], *, tier: str = "") -> KvEvents:
    """An event that stores keys."""
    return KvEvents(engine_id, seq, stored=pack(numbers), tier=tier)


def chunk(
    engine_id: int, numbers: Iterable[int], *, base_seq: int, number: int = 0, is_last: bool = True
) -> KvEvents:
    """One chunk of a snapshot."""
    part = SnapshotChunk(base_seq, number, is_last)
    return KvEvents(engine_id, base_seq, stored=pack(numbers), snapshot=part)
