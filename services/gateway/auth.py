"""API keys: who may call, and as which tenant.

Keys are kept as hashes and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import ConfigError, Unauthenticated
from services.gateway.http_errors import error_response

OPEN_PATHS = frozenset({"/health", "/live", "/metrics", "/version"})
TENANT_HEX_DIGITS = 16
_HASH_PREFIX = "sha256:"


class ApiKeys:
    """The keys that clients may use."""

    def __init__(self, keys: Sequence[str]) -> None:
        """
        Args:
            keys: In clear, or "sha256:" and the hex of a key's SHA-256.

        Raises:
            ConfigError: A hash that is none, or an empty key.
        """
        self._hashes = [_hash_of(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def tenant_of(self, headers: Headers) -> str:
        """Who sends these headers.

        Returns:
            A label made of the key's hash; "" if no keys are in use.

        Raises:
            Unauthenticated: No key, a wrong one, or more than one.
        """
        if not self._hashes:
            return ""
        key = _given_key(headers)
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        # Every hash is compared, so that the time tells nothing about which one is close.
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        if not any(matches):
            raise Unauthenticated("this API key is not valid")
        return digest.hex()[:TENANT_HEX_DIGITS]


def _given_key(headers: Headers) -> str:
    """The one key that a client sends, as OpenAI's clients do or as Anthropic's do."""
    given = headers.getlist("authorization")
    alone = headers.getlist("x-api-key")
    if len(given) + len(alone) != 1:
        raise Unauthenticated(
            "send one header: Authorization: Bearer YOUR_KEY, or X-Api-Key: YOUR_KEY"
        )
    if alone:
        return alone[0]
    scheme, _, key = given[0].partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("the Authorization header must read: Bearer YOUR_KEY")
    return key


def _hash_of(key: str) -> bytes:
    if not key:
        raise ConfigError("api_key: an empty key would open the door to everybody")
    if not key.startswith(_HASH_PREFIX):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_HASH_PREFIX))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigError("api_key: after sha256: there must be 64 hexadecimal digits")
    return digest


def cache_namespace(secret: bytes, *, tenant: str, cache_salt: str) -> str:
    """The namespace of a request's KV blocks, which only the gateway can make.

    Args:
        secret: The cluster's key.
        tenant: "" = nobody in particular.
        cache_salt: As the client gave it; "" = none.

    Returns:
        "" where there is neither, so that everybody shares.
    """
    if not tenant and not cache_salt:
        return ""
    message = tenant.encode() + b"\0" + cache_salt.encode()
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


class RequireKey:
    """ASGI middleware: no route but the open ones is reached without a key."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        """
        Args:
            app: What is behind the door.
            keys: Who may pass.
        """
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            scope["tenant"] = self._keys.tenant_of(Headers(scope=scope))
        except Unauthenticated as error:
            headers = {"www-authenticate": "Bearer"}
            reply = error_response(error, path=scope["path"], headers=headers)
            await reply(scope, receive, send)
            return
        await self._app(scope, receive, send)
