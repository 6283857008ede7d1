"""Between the index's values and the messages of the wire."""

from __future__ import annotations

from services.common.pb import kvstore_pb2 as pb
from services.kvstore.events import (
    Ack,
    AckStatus,
    EngineEntry,
    EngineMatch,
    EngineRecord,
    KvEvents,
    SnapshotChunk,
)

_ACK_STATUS = {
    AckStatus.OK: pb.KV_ACK_STATUS_OK,
    AckStatus.NEED_SNAPSHOT: pb.KV_ACK_STATUS_NEED_SNAPSHOT,
    AckStatus.FENCED: pb.KV_ACK_STATUS_FENCED,
}


def record_from_message(message: pb.EngineRecord) -> EngineRecord:
    """The engine that a publisher introduces."""
    return EngineRecord(
        engine_id=message.engine_id,
        worker_id=message.worker_id,
        scheduler_address=message.scheduler_address,
        model=message.model,
        text_fp=message.text_fp,
        kv_fp=message.kv_fp,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
    )


def record_to_message(record: EngineRecord) -> pb.EngineRecord:
    """The engine as it is listed."""
    return pb.EngineRecord(
        engine_id=record.engine_id,
        worker_id=record.worker_id,
        scheduler_address=record.scheduler_address,
        model=record.model,
        text_fp=record.text_fp,
        kv_fp=record.kv_fp,
        block_size=record.block_size,
        num_blocks=record.num_blocks,
    )


def events_from_message(message: pb.KvEvents) -> KvEvents:
    """One event of a publisher."""
    snapshot = message.snapshot
    return KvEvents(
        engine_id=message.engine_id,
        seq=message.seq,
        stored=message.stored,
        removed=message.removed,
        is_cleared=message.cleared,
        tier=message.tier,
        group=message.group,
        snapshot=SnapshotChunk(snapshot.base_seq, snapshot.chunk, snapshot.last)
        if message.HasField("snapshot")
        else None,
        is_gone=message.gone,
    )


def events_to_message(events: KvEvents) -> pb.KvEvents:
    """One event, to be written down or sent on."""
    message = pb.KvEvents(
        engine_id=events.engine_id,
        seq=events.seq,
        stored=events.stored,
        removed=events.removed,
        cleared=events.is_cleared,
        tier=events.tier,
        group=events.group,
        gone=events.is_gone,
    )
    if events.snapshot is not None:
        part = events.snapshot
        message.snapshot.CopyFrom(
            pb.Snapshot(base_seq=part.base_seq, chunk=part.chunk, last=part.is_last)
        )
    return message


def ack_to_message(ack: Ack) -> pb.KvAck:
    """The answer to an event."""
    return pb.KvAck(
        engine_id=ack.engine_id,
        status=_ACK_STATUS[ack.status],
        seq=ack.seq,
        seen_engine_id=ack.seen_engine_id,
    )


def match_to_message(match: EngineMatch) -> pb.EngineMatch:
    """What one engine holds of a chain."""
    return pb.EngineMatch(
        engine_id=match.record.engine_id,
        num_blocks=match.num_blocks.values(),
        tier=match.num_blocks.keys(),
        scheduler_address=match.record.scheduler_address,
    )


def entry_to_message(entry: EngineEntry) -> pb.EngineEntry:
    """An engine in the list."""
    return pb.EngineEntry(
        record=record_to_message(entry.record), seq=entry.seq, num_keys=entry.num_keys
    )
