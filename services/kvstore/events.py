"""What publishers tell the index and what it answers: plain values, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.common.block_hash import KEY_SIZE_BYTES
from services.common.errors import InvalidRequest

DEVICE_TIER = ""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What the index knows of an engine besides its blocks; see ``EngineRecord`` of the wire."""

    engine_id: int
    worker_id: str
    scheduler_address: str = ""
    model: str = ""
    text_fp: str = ""
    kv_fp: str = ""
    block_size: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """Makes an event one chunk of a snapshot.

    Attributes:
        base_seq: Events up to and including this one are contained.
        chunk: Its number, from 0.
        is_last: The snapshot is whole with it.
    """

    base_seq: int
    chunk: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class KvEvents:
    """One numbered change of an engine's blocks; cleared first, then removed, then stored.

    Attributes:
        engine_id: The engine.
        seq: Contiguous per engine, from 1; of no meaning in a snapshot.
        stored: Keys, 16 bytes each, packed.
        removed: Keys, packed.
        is_cleared: Nothing is held any more, on any tier.
        tier: Where the blocks lie; "" = device.
        group: KV group.
        snapshot: Set in a chunk of a snapshot, whose keys are ``stored``.
        is_gone: The engine has ended.
    """

    engine_id: int
    seq: int = 0
    stored: bytes = b""
    removed: bytes = b""
    is_cleared: bool = False
    tier: str = DEVICE_TIER
    group: int = 0
    snapshot: SnapshotChunk | None = None
    is_gone: bool = False


class AckStatus(Enum):
    """How the index took an event."""

    OK = "ok"
    NEED_SNAPSHOT = "need_snapshot"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Ack:
    """Answer to an event.

    Attributes:
        engine_id: The engine.
        status: What became of the event.
        seq: The last event that the index has applied, with all before it.
        seen_engine_id: If fenced, the newer engine of the same worker.
    """

    engine_id: int
    status: AckStatus
    seq: int = 0
    seen_engine_id: int = 0


@dataclass(frozen=True, slots=True)
class EngineMatch:
    """How much of a chain of keys an engine holds.

    Attributes:
        record: The engine.
        num_blocks: Per tier, device first: how many blocks of the chain's unbroken beginning that
            tier and those before it hold.
    """

    record: EngineRecord
    num_blocks: dict[str, int]


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine as the index lists it.

    Attributes:
        record: The engine.
        seq: The last event applied.
        num_keys: Keys held, all tiers and groups together.
        is_indexed: Whether its blocks are kept; not beyond the index's bound.
    """

    record: EngineRecord
    seq: int
    num_keys: int
    is_indexed: bool


def check_keys(events: KvEvents) -> None:
    """Refuse packed keys of a wrong length.

    Raises:
        InvalidRequest: Names the field.
    """
    for name, packed in (("stored", events.stored), ("removed", events.removed)):
        _check_length(packed, field=name)


def _check_length(packed: bytes, *, field: str) -> None:
    if len(packed) % KEY_SIZE_BYTES:
        raise InvalidRequest(
            f"{field} holds {len(packed)} bytes; keys are {KEY_SIZE_BYTES} bytes each", param=field
        )


def unpack_keys(packed: bytes, *, field: str) -> list[bytes]:
    """Split packed keys.

    Raises:
        InvalidRequest: The length is not a multiple of 16.
    """
    _check_length(packed, field=field)
    return [packed[i : i + KEY_SIZE_BYTES] for i in range(0, len(packed), KEY_SIZE_BYTES)]
