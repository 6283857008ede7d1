"""Settings of the worker. What it discovers about itself travels as WorkerInfo instead."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.common.config import ServiceConfig
from services.worker.native.isa import IsaSetting


class WorkerConfig(ServiceConfig):
    """What the worker can be told."""

    port: int = Field(
        50053, ge=0, le=65535, description="gRPC port to listen on; 0 = any free one."
    )
    http_port: int = Field(
        9103, ge=0, le=65535, description="Port of /metrics over HTTP; 0 = any free one."
    )
    advertise_address: str | None = Field(
        None,
        description="host:port under which others reach this worker; default: the listening one.",
    )
    worker_id: str | None = Field(
        None,
        description="Label of this worker for people; default: host name, pid and a random part.",
    )
    schedulers: tuple[str, ...] = Field(
        ("127.0.0.1:50052",),
        min_length=1,
        description="Addresses of the schedulers, host:port or dns:///name:port; one is dialled.",
    )
    model: Path = Field(
        ..., description="Directory that holds config.json, the safetensors and the tokenizer."
    )
    served_model_name: str | None = Field(
        None,
        description="Name that requests use; default: the last part of the model's path.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Of weights, activations and KV cache; auto = the checkpoint's."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto = CUDA where there is one, else the CPU."
    )
    attention_backend: str = Field(
        "auto",
        description="Name of a file in services/worker/attention; auto = native_cpu where the "
        "native library is, else torch_sdpa.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="Threads of one torch operation on the CPU; default: OMP_NUM_THREADS, else one "
        "per core.",
    )
    omp_spin_count: int = Field(
        10_000,
        ge=0,
        description="Rounds that a waiting thread of torch's OpenMP spins before it sleeps, unless "
        "GOMP_SPINCOUNT says it: more keeps the other processes from the cores.",
    )
    quantization: str | None = Field(
        None,
        description="Name of a file in services/worker/quantization (int8, int4): weights of "
        "linear layers are kept in so many bits; default: as they are.",
    )
    cpu_isa: IsaSetting = Field(
        "auto",
        description="Highest instruction set that the native CPU library uses; auto = the "
        "machine's best, off = torch computes all.",
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens of one KV block.")
    num_gpu_blocks_override: int | None = Field(
        None, ge=2, description="KV blocks, whatever memory there is; the null block included."
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Size of the KV cache in bytes; default: computed from what memory is free.",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the device's memory that this worker may fill; default: 0.92 on "
        "CUDA; on the CPU the KV cache takes a quarter of what is free, at most 4 GiB.",
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Most tokens of one sequence, prompt and output; default: the model's limit, "
        "or what the KV cache holds if that is less.",
    )
    max_num_seqs: int = Field(
        256,
        ge=1,
        le=4096,
        description="Most requests that run at once; never more than max_num_batched_tokens.",
    )
    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Most tokens that one step computes over all requests."
    )
    pipeline_depth: int = Field(
        2, ge=1, le=8, description="Most steps that the scheduler may have in flight here."
    )

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or self.model.resolve().name
