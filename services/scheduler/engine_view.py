"""Engines as tokenizers and people see them."""

from __future__ import annotations

from collections.abc import Mapping

from services.common.pb import common_pb2
from services.scheduler.attachment import Attachment
from services.scheduler.convert import facts_to_message, load_to_message, loading_to_message
from services.scheduler.lives import EngineState

_PHASES: Mapping[EngineState, common_pb2.EnginePhase.ValueType] = {
    EngineState.LOADING: common_pb2.ENGINE_PHASE_LOADING,
    EngineState.READY: common_pb2.ENGINE_PHASE_READY,
    EngineState.STALLED: common_pb2.ENGINE_PHASE_STALLED,
    EngineState.DRAINING: common_pb2.ENGINE_PHASE_DRAINING,
    EngineState.GONE: common_pb2.ENGINE_PHASE_GONE,
}


def attachment_to_message(attachment: Attachment, *, address: str) -> common_pb2.EngineState:
    """An engine as tokenizers and Stats see it.

    Args:
        attachment: The engine.
        address: Under what tokenizers reach this scheduler.
    """
    identity = attachment.identity
    message = common_pb2.EngineState(
        engine_id=identity.engine_id,
        worker_id=identity.worker_id,
        phase=_PHASES[attachment.state],
        model=identity.model,
        text_fp=identity.text_fp,
        kv_fp=identity.kv_fp,
        address=identity.address,
        scheduler_address=address,
    )
    if attachment.loading is not None:
        message.loading.CopyFrom(loading_to_message(attachment.loading))
    if attachment.engine is not None:
        message.info.CopyFrom(facts_to_message(attachment.engine.facts))
        load_to_message(attachment.engine.load(), message.load)
    return message
