"""The scheduler's gRPC face, and the life of its process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.common.errors import NotFound, Unavailable
from services.common.lifecycle import Lifecycle, freeze_garbage
from services.common.pb import common_pb2, scheduler_pb2_grpc, worker_pb2
from services.common.pb import scheduler_pb2 as pb
from services.common.rpc import RpcServer
from services.common.telemetry import get_logger, start_metrics_server
from services.scheduler import convert, metrics
from services.scheduler.attachment import Attachment
from services.scheduler.config import SchedulerConfig
from services.scheduler.engine import EnginePolicy
from services.scheduler.engine_view import attachment_to_message
from services.scheduler.fleet import Fleet
from services.scheduler.kv_events import KvPublisher
from services.scheduler.liveness import Judge
from services.scheduler.request_log import RequestRecord
from services.scheduler.served_stream import StreamHost
from services.scheduler.session import Session
from services.scheduler.worker_link import WorkerLink

TICK_S = 0.1
STOP_GRACE_S = 1.0
_WILDCARDS = ("0.0.0.0", "::", "[::]")

log = get_logger(__name__)


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serves Sessions, Attaches and what people ask; decides nothing itself."""

    def __init__(self, fleet: Fleet, streams: StreamHost) -> None:
        """
        Args:
            fleet: The engines.
            streams: Runs Sessions and Attaches.
        """
        self._fleet = fleet
        self._streams = streams
        self._wall = convert.WallClock.now()

    def Session(
        self, request_iterator: AsyncIterator[pb.ClientFrame], context: object
    ) -> AsyncIterator[pb.ServerFrame]:
        """One per tokenizer process."""
        session = Session(self._fleet, wall=self._wall, describe=self._describe)
        return self._streams.serve(session, request_iterator)

    def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.WorkerFrame], context: object
    ) -> AsyncIterator[worker_pb2.EngineFrame]:
        """One per worker process."""
        return self._streams.serve(WorkerLink(self._fleet), request_iterator)

    async def Stats(self, request: pb.StatsRequest, context: object) -> pb.StatsReply:
        """Engines and counts, as they are now."""
        return pb.StatsReply(
            engines=[self._describe(attachment) for attachment in self._fleet.attachments()],
            num_sessions=self._fleet.num_sessions,
            num_requests=self._fleet.requests.num_live,
        )

    async def Explain(
        self, request: common_pb2.ExplainRequest, context: object
    ) -> common_pb2.ExplainReply:
        """What became of a request, or what it is at."""
        record = self._fleet.requests.find(request.request_id)
        if record is None:
            return common_pb2.ExplainReply(found=False)
        return _explain(record, wall=self._wall)

    async def ResetCache(
        self, request: common_pb2.ResetCacheRequest, context: object
    ) -> common_pb2.ResetCacheReply:
        """Forget cached prefixes; engines whose requests hold blocks are left alone and counted."""
        engines = [a.engine for a in self._fleet.attachments() if a.engine is not None]
        num_reset = sum(engine.reset_prefix_cache() for engine in engines)
        return common_pb2.ResetCacheReply(
            engines_reset=num_reset, engines_busy=len(engines) - num_reset
        )

    async def Drain(
        self, request: common_pb2.DrainRequest, context: object
    ) -> common_pb2.DrainReply:
        """Let one worker go once it is empty, or with no target stop taking requests."""
        if not request.target:
            return common_pb2.DrainReply(engines_draining=self._fleet.drain_all())
        attachment = self._fleet.find_worker(request.target)
        if attachment is None:
            raise NotFound(f"no worker {request.target!r} is attached", param="target")
        self._fleet.drain_engine(attachment)
        return common_pb2.DrainReply(engines_draining=1)

    def _describe(self, attachment: Attachment) -> common_pb2.EngineState:
        return attachment_to_message(attachment, address=self._fleet.address)


@dataclass(frozen=True, slots=True)
class OpenScheduler:
    """A scheduler that accepts connections.

    Attributes:
        address: "host:port" of its gRPC server.
        fleet: Its engines.
    """

    address: str
    fleet: Fleet


@asynccontextmanager
async def open_scheduler(config: SchedulerConfig) -> AsyncGenerator[OpenScheduler, None]:
    """Accept connections; on leaving, end whatever is left."""
    async with asyncio.TaskGroup() as tasks:
        publisher = KvPublisher(config.kvstores, cluster_token=config.cluster_token)
        fleet = Fleet(tasks=tasks, policy=_policy(config), publisher=publisher)
        streams = StreamHost(tasks)
        server = RpcServer(host=config.host, port=config.port, cluster_token=config.cluster_token)
        server.add(
            scheduler_pb2_grpc.add_SchedulerServicer_to_server,
            SchedulerServicer(fleet, streams),
            "sluiceway.v1.Scheduler",
        )
        address = await server.start()
        fleet.address = config.advertise_address or await _reachable(address)
        background = [
            tasks.create_task(publisher.run()),
            tasks.create_task(_tick(fleet, streams)),
            tasks.create_task(_report_health(fleet, server)),
        ]
        try:
            yield OpenScheduler(address, fleet)
        finally:
            fleet.abandon_all("the scheduler stops")
            streams.end_all(Unavailable("the scheduler has stopped"))
            await server.stop(grace_s=STOP_GRACE_S)
            for task in background:
                task.cancel()


async def serve(config: SchedulerConfig, life: Lifecycle) -> None:
    """Run the scheduler until it is asked to stop; then drain."""
    async with open_scheduler(config) as scheduler:
        http_port = start_metrics_server(config.host, config.http_port)
        freeze_garbage()
        log.info("listening", address=scheduler.address, http_port=http_port)
        await life.stopping.wait()
        await drain(scheduler.fleet, timeout_s=config.drain_timeout_s)


async def drain(fleet: Fleet, *, timeout_s: float) -> None:
    """Refuse new requests and wait until those that are here have ended.

    Args:
        fleet: The engines.
        timeout_s: How long to wait; what is left then is the caller's to end.
    """
    fleet.drain_all()
    try:
        async with asyncio.timeout(timeout_s):
            await fleet.wait_until_empty()
    except TimeoutError:
        log.warning("drain_timed_out", num_requests=fleet.num_tickets)


async def _tick(fleet: Fleet, streams: StreamHost) -> None:
    judge = Judge(period_s=TICK_S, now=time.monotonic())
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        if judge.may_judge(now):
            streams.judge(now)
            fleet.tick()
        metrics.SESSIONS.set(fleet.num_sessions)


async def _report_health(fleet: Fleet, server: RpcServer) -> None:
    while True:
        fleet.changed.clear()
        await server.set_ready(fleet.is_ready)
        await server.set_progress(fleet.is_progressing)
        await fleet.changed.wait()


def _policy(config: SchedulerConfig) -> EnginePolicy:
    return EnginePolicy(
        pipeline_depth=config.pipeline_depth,
        enable_prefix_caching=config.enable_prefix_caching,
        max_waiting=config.max_waiting,
        policy=config.scheduling_policy,
        step_time_target_s=config.step_time_target_ms / 1e3,
    )


async def _reachable(address: str) -> str:
    """The listening address as another machine would dial it."""
    host, _, port = address.rpartition(":")
    if host not in _WILDCARDS:
        return address
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        socket.gethostname(), int(port), family=socket.AF_INET, type=socket.SOCK_STREAM
    )
    return f"{found[0][4][0]}:{port}"


def _explain(record: RequestRecord, *, wall: convert.WallClock) -> common_pb2.ExplainReply:
    states = {ticket.life.state.name.lower() for ticket in record.live}
    reply = common_pb2.ExplainReply(found=True, state=",".join(sorted(states)) or "finished")
    for decision, finished in record.ended:
        life = convert.life_to_message(finished.life, clock=wall)
        if decision is not None:
            life.decision.CopyFrom(convert.decision_to_message(decision, finished=finished))
        reply.lives.append(life)
    for ticket in record.live:
        reply.lives.add(
            arrival_unix_ns=wall.unix_ns(ticket.request.arrival_s), attempt=ticket.request.attempt
        )
    return reply
