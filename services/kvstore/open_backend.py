"""From ``kv_index_url`` to the backend that it names."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from services.common.errors import ConfigError
from services.kvstore.backend import IndexBackend
from services.kvstore.config import KvStoreConfig
from services.kvstore.index import PrefixIndex
from services.kvstore.memory_backend import MemoryBackend

_REDIS_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
_REDIS_TIMEOUT_S = 2.0


def open_backend(config: KvStoreConfig, *, on_change: Callable[[], None]) -> IndexBackend:
    """Make the backend; nothing is connected before it runs.

    Args:
        config: The service's settings.
        on_change: Called when the list of engines, or whether the index is degraded, has changed.

    Raises:
        ConfigError: No backend has such an address.
    """
    index = PrefixIndex(max_blocks=config.max_index_blocks, on_change=on_change)
    scheme = urlsplit(config.kv_index_url).scheme
    if scheme == "memory":
        return MemoryBackend(index, lease_s=config.lease_s, clock=time.monotonic)
    if scheme in _REDIS_SCHEMES:
        return _open_redis(config, index, on_change=on_change)
    raise ConfigError(
        f"kv_index_url {config.kv_index_url!r} must begin with memory://, redis:// or valkey://"
    )


def _open_redis(
    config: KvStoreConfig, index: PrefixIndex, *, on_change: Callable[[], None]
) -> IndexBackend:
    try:
        from services.kvstore.redis_index import RedisBackend
        from services.kvstore.redis_store import RedisStore
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kv_index_url {config.kv_index_url!r} needs the package redis: "
            "run `pip install 'sluiceway[kvstore]'`"
        ) from error
    try:
        store = RedisStore(config.kv_index_url, lease_s=config.lease_s, timeout_s=_REDIS_TIMEOUT_S)
    except ValueError as error:
        raise ConfigError(f"kv_index_url {config.kv_index_url!r}: {error}") from error
    return RedisBackend(
        index,
        store,
        lease_s=config.lease_s,
        max_blocks=config.max_index_blocks,
        clock=time.monotonic,
        on_change=on_change,
    )
