"""Which versions of the wire this scheduler speaks."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.common.rpc import PROTOCOL

OLDEST_PROTOCOL = max(PROTOCOL - 1, 1)


def require_protocol(theirs: int, *, of: str) -> None:
    """Refuse a peer that is neither of our version nor one older.

    Args:
        theirs: The version in its Hello.
        of: Who it is, for the message.

    Raises:
        InvalidRequest: Names both versions.
    """
    if not OLDEST_PROTOCOL <= theirs <= PROTOCOL:
        raise InvalidRequest(
            f"{of} speaks protocol {theirs}, this scheduler {OLDEST_PROTOCOL} to {PROTOCOL}",
            param="protocol",
        )
