"""The kvstore service: one copy of the KV index behind gRPC."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from services.common.lifecycle import Lifecycle
from services.common.pb import kvstore_pb2_grpc
from services.common.rpc import RpcServer
from services.common.telemetry import get_logger, start_metrics_server
from services.kvstore import metrics
from services.kvstore.backend import IndexBackend
from services.kvstore.bell import Bell
from services.kvstore.config import KvStoreConfig
from services.kvstore.open_backend import open_backend
from services.kvstore.servicer import KvStoreServicer

_REPORT_PERIOD_S = 1.0
_STOP_GRACE_S = 0.5

log = get_logger(__name__)


async def serve(config: KvStoreConfig, life: Lifecycle) -> None:
    """Run the kvstore until it is asked to stop.

    It is ready at once: an empty index is a right answer, and publishers fill it.

    Raises:
        ConfigError: ``kv_index_url`` cannot be used, or the port is taken.
    """
    changes = Bell()
    backend = open_backend(config, on_change=changes.ring)
    server = RpcServer(host=config.host, port=config.port, cluster_token=config.cluster_token)
    server.add(
        kvstore_pb2_grpc.add_KvStoreServicer_to_server,
        KvStoreServicer(backend, changes),
        "sluiceway.v1.KvStore",
    )
    address = await server.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(backend.run()),
                tasks.create_task(_report_for_ever(backend)),
            ]
            http_port = start_metrics_server(config.host, config.http_port)
            await server.set_ready(True)
            await server.set_progress(True)
            # The scheme alone: the rest of the URL may hold a password.
            index = urlsplit(config.kv_index_url).scheme
            log.info("listening", address=address, http_port=http_port, index=index)
            await life.stopping.wait()
            for task in background:
                task.cancel()
    finally:
        # Publishers and watchers stay as long as they may: cancelled, they find another copy.
        await server.stop(grace_s=min(config.drain_timeout_s, _STOP_GRACE_S))


async def _report_for_ever(backend: IndexBackend) -> None:
    while True:
        report(backend)
        await asyncio.sleep(_REPORT_PERIOD_S)


def report(backend: IndexBackend) -> None:
    """Show the state of an index in the metrics."""
    entries = backend.index.engines()
    metrics.ENGINES.set(len(entries))
    metrics.UNINDEXED_ENGINES.set(sum(not entry.is_indexed for entry in entries))
    metrics.KEYS.set(sum(entry.num_keys for entry in entries))
    metrics.RESERVED_BLOCKS.set(backend.index.num_reserved_blocks)
    metrics.DEGRADED.set(backend.is_degraded)
