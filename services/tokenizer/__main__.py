"""Runs the tokenizer service: ``python -m services.tokenizer --model DIR``."""

from __future__ import annotations

import asyncio
import sys

from services.common.fingerprint import text_fingerprint
from services.common.lifecycle import Lifecycle, freeze_garbage, run_service
from services.common.pb.tokenizer_pb2_grpc import add_TokenizerServicer_to_server
from services.common.rpc import RpcServer
from services.common.telemetry import get_logger, start_metrics_server
from services.tokenizer import metrics
from services.tokenizer.chat_template import ChatTemplates
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.encode import Encoder
from services.tokenizer.kvstore_client import KvStoreClient
from services.tokenizer.prompt import PromptReader
from services.tokenizer.scheduler_client import SchedulerClient
from services.tokenizer.service import TokenizerService

log = get_logger(__name__)

STOP_GRACE_S = 1.0


async def serve(config: TokenizerConfig, life: Lifecycle) -> None:
    """Serve until ``life.stopping``, then let what runs finish.

    Args:
        config: Resolved settings.
        life: Says when to stop.

    Raises:
        ConfigError: The model directory lacks something, or the port is taken.
    """
    encoder = Encoder(config.model, num_threads=config.encode_threads)
    text_fp = text_fingerprint(config.model)
    schedulers = SchedulerClient(
        config.schedulers, text_fp=text_fp, cluster_token=config.cluster_token
    )
    kvstore = KvStoreClient(config.kvstores, cluster_token=config.cluster_token)
    service = TokenizerService(
        model=config.model_name,
        text_fp=text_fp,
        encoder=encoder,
        prompts=PromptReader(
            encoder,
            ChatTemplates.load(config.model),
            trust_request_template=config.trust_request_chat_template,
        ),
        schedulers=schedulers,
        kvstore=kvstore,
        life=life,
        max_choices=config.max_choices,
    )
    server = RpcServer(host=config.host, port=config.port, cluster_token=config.cluster_token)
    server.add(add_TokenizerServicer_to_server, service, "sluiceway.v1.Tokenizer")
    http_port = start_metrics_server(config.host, config.http_port)
    freeze_garbage()
    try:
        async with schedulers.running(), kvstore.running():
            address = await server.start()
            log.info("listening", address=address, http_port=http_port, text_fp=text_fp)
            await _tell_readiness(service, server, schedulers, life)
            await service.run_out(timeout_s=config.drain_timeout_s)
            # What is left only watches, and would watch for ever.
            await server.stop(grace_s=STOP_GRACE_S)
    finally:
        encoder.close()


async def _tell_readiness(
    service: TokenizerService, server: RpcServer, schedulers: SchedulerClient, life: Lifecycle
) -> None:
    """Keep the health service true until the service is asked to stop."""
    last: str | None = None
    async with asyncio.TaskGroup() as tasks:
        stopping = tasks.create_task(life.stopping.wait())
        stopping.add_done_callback(lambda _: schedulers.changed.fire())
        await server.set_progress(True)
        while not life.stopping.is_set():
            reason = service.not_ready_reason()
            if reason != last:
                last = reason
                await server.set_ready(not reason)
                log.info("ready" if not reason else "not_ready", reason=reason)
            metrics.SESSIONS.set(len(schedulers.sessions))
            await schedulers.changed.wait(timeout_s=1.0)
    await server.set_ready(False)


if __name__ == "__main__":
    sys.exit(run_service(TokenizerConfig, section="tokenizer", serve=serve))
