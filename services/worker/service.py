"""The worker service: one process around one model.

It listens for health and Info, dials a scheduler before it loads, and runs what the scheduler
sends.
"""

from __future__ import annotations

import asyncio
import sys

import grpc

from services.common.errors import Cancelled
from services.common.lifecycle import Lifecycle, freeze_garbage
from services.common.pb import common_pb2, worker_pb2, worker_pb2_grpc
from services.common.rpc import Endpoints, RpcServer
from services.common.telemetry import get_logger, start_metrics_server
from services.worker import metrics
from services.worker.attacher import Attacher
from services.worker.config import WorkerConfig
from services.worker.convert import facts_to_message, loading_to_message
from services.worker.executor import Executor
from services.worker.identity import Identity, identify
from services.worker.kv_cache.spec import LAYOUT
from services.worker.loader.load_model import quantization_method, weight_dtype
from services.worker.runner.build import (
    Built,
    Progress,
    RunnerOptions,
    build_runner,
    resolve_device,
)
from services.worker.state import WorkerState
from services.worker.step_clock import StepClock

log = get_logger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""With Python's default of 5 ms the executor's thread may hold up the I/O loop for as long."""

_WATCH_PERIOD_S = 0.5


async def serve(config: WorkerConfig, life: Lifecycle) -> None:
    """Run the worker until it is asked to stop and has drained.

    Raises:
        ConfigError: The model, the device or the memory is not what the settings need.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    options = runner_options(config)
    if config.quantization is not None:
        quantization_method(config.quantization)  # An unknown name is told before anything starts.
    dtype = await asyncio.to_thread(
        weight_dtype, config.model, dtype=config.dtype, device=options.device
    )
    identity = await asyncio.to_thread(
        identify,
        config.model,
        worker_id=config.worker_id,
        model=config.model_name,
        dtype=str(dtype),
        quantization=config.quantization,
        layout=LAYOUT,
    )
    await _Service(config, options, identity).run(life.stopping)


class _Service:
    """The parts of one worker process and their tasks."""

    def __init__(self, config: WorkerConfig, options: RunnerOptions, identity: Identity) -> None:
        self._config = config
        self._options = options
        self._state = WorkerState()
        self._clock = StepClock()
        self._executor = Executor(num_threads=config.num_threads, on_step=self._clock.on_step)
        self._is_stopping = False
        self._leaving = asyncio.Event()
        self._attacher = Attacher(
            Endpoints(config.schedulers),
            cluster_token=config.cluster_token,
            identity=identity,
            state=self._state,
            executor=self._executor,
            leaving=self._leaving,
        )
        self._server = RpcServer(
            host=config.host, port=config.port, cluster_token=config.cluster_token
        )
        self._server.add(
            worker_pb2_grpc.add_WorkerServicer_to_server,
            WorkerServicer(self._state, identity),
            "sluiceway.v1.Worker",
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping``, then drain."""
        address = await self._server.start()
        self._state.address = self._config.advertise_address or address
        start_metrics_server(self._config.host, self._config.http_port)
        log.info("listening", address=address)
        try:
            async with asyncio.TaskGroup() as tasks:
                attaching = tasks.create_task(self._attacher.run())
                background = [
                    tasks.create_task(self._load()),
                    tasks.create_task(self._watch_steps()),
                    tasks.create_task(self._tell_health()),
                ]
                await stopping.wait()
                await self._drain(attaching)
                for task in background:
                    task.cancel()
        finally:
            self._is_stopping = True
            self._executor.close()
            await self._server.stop(grace_s=1.0)

    async def _drain(self, attaching: asyncio.Task[None]) -> None:
        """Let the scheduler move or finish what runs here."""
        self._state.is_draining = True
        self._leaving.set()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await attaching
        except TimeoutError:
            log.warning("drain_timed_out", num_rows=self._executor.num_rows)

    async def _load(self) -> None:
        facts = await asyncio.wrap_future(self._executor.load(self._build))
        metrics.KV_BLOCKS.set(facts.num_blocks)
        metrics.KV_CACHE_BYTES.set(facts.kv_cache_bytes)
        freeze_garbage()
        self._state.on_loaded(facts)

    def _build(self) -> Built:
        return build_runner(self._options, report=self._report)

    def _report(self, progress: Progress) -> None:
        """Called in the executor's thread, which cannot be interrupted in any other way."""
        if self._is_stopping:
            raise Cancelled("the worker is stopping")
        self._state.progress = progress

    async def _watch_steps(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            is_stalled = self._clock.is_stalled(self._executor.step_age_s())
            if is_stalled != self._state.is_stalled:
                self._state.is_stalled = is_stalled
                log.warning("step_stalled" if is_stalled else "step_recovered")

    async def _tell_health(self) -> None:
        while True:
            self._state.changed.clear()
            await self._server.set_ready(self._state.is_ready and not self._state.is_draining)
            await self._server.set_progress(not self._state.is_stalled)
            await self._state.changed.wait()


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Answers ``Info``."""

    def __init__(self, state: WorkerState, identity: Identity) -> None:
        """
        Args:
            state: What is shown.
            identity: Who this is.
        """
        self._state = state
        self._identity = identity

    async def Info(
        self,
        request: worker_pb2.WorkerInfoRequest,
        context: grpc.aio.ServicerContext[worker_pb2.WorkerInfoRequest, worker_pb2.WorkerInfoReply],
    ) -> worker_pb2.WorkerInfoReply:
        """Say who this worker is and how far."""
        state, identity = self._state, self._identity
        shown = common_pb2.EngineState(
            engine_id=state.engine_id,
            worker_id=identity.worker_id,
            phase=_phase_of(state),
            model=identity.model,
            text_fp=identity.text_fp,
            kv_fp=identity.kv_fp,
            address=state.address,
            scheduler_address=state.scheduler_address,
        )
        if state.facts is None:
            shown.loading.CopyFrom(loading_to_message(state.progress))
        else:
            shown.info.CopyFrom(facts_to_message(state.facts, revision=identity.revision))
        return worker_pb2.WorkerInfoReply(state=shown)


def runner_options(config: WorkerConfig) -> RunnerOptions:
    """The settings that the runner is built from.

    Raises:
        ConfigError: There is no such device.
    """
    return RunnerOptions(
        model_dir=config.model,
        dtype=config.dtype,
        device=resolve_device(config.device),
        attention_backend=config.attention_backend,
        block_size=config.block_size,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        pipeline_depth=config.pipeline_depth,
        cpu_isa=config.cpu_isa,
        quantization=config.quantization,
        num_threads=config.num_threads,
    )


def _phase_of(state: WorkerState) -> common_pb2.EnginePhase.ValueType:
    if state.is_draining:
        return common_pb2.ENGINE_PHASE_DRAINING
    if state.facts is None:
        return common_pb2.ENGINE_PHASE_LOADING
    if not state.is_ready:
        return common_pb2.ENGINE_PHASE_GONE
    return common_pb2.ENGINE_PHASE_STALLED if state.is_stalled else common_pb2.ENGINE_PHASE_READY
