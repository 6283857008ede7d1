"""Settings of the kvstore service."""

from __future__ import annotations

from pydantic import Field

from services.common.config import ServiceConfig


class KvStoreConfig(ServiceConfig):
    """What the kvstore can be told."""

    port: int = Field(50054, ge=0, le=65535, description="Port of gRPC; 0 = any free one.")
    http_port: int = Field(
        9104, ge=0, le=65535, description="Port of /metrics over HTTP; 0 = any free one."
    )
    kv_index_url: str = Field(
        "memory://",
        description="Where the index lives: memory:// for one copy of this service, "
        "redis://HOST:PORT or valkey://HOST:PORT for several.",
    )
    max_index_blocks: int = Field(
        10_000_000,
        ge=1,
        description="Blocks of all engines together that the index holds, about 100 bytes each; "
        "an engine beyond it is listed without its blocks.",
    )
    lease_s: float = Field(
        5.0,
        gt=0,
        description="How long an engine is remembered after its publisher has gone, in seconds.",
    )
