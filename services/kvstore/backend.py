"""The seam between the service and where the index lives; ``memory://`` is the reference.

A backend keeps a ``PrefixIndex`` in this process and answers from it. What differs is where events
are made durable before they are acknowledged, and who else hears of them.
"""

from __future__ import annotations

from typing import Protocol

from services.kvstore.events import Ack, EngineRecord, KvEvents
from services.kvstore.index import PrefixIndex


class IndexBackend(Protocol):
    """Where the index lives.

    Attributes:
        index: What matches are answered from; only the backend writes to it.
    """

    index: PrefixIndex

    @property
    def is_degraded(self) -> bool:
        """Whether the index may be behind because its store cannot be reached."""
        ...

    async def publish(self, events: KvEvents, *, record: EngineRecord, stream: int) -> Ack:
        """Take an event of a publisher.

        Args:
            events: The event.
            record: The engine, as the stream introduced it.
            stream: Which stream it came on; the engine lives as long as that.

        Raises:
            InvalidRequest: The event is malformed.
            Unavailable: It could not be made durable; the publisher sends it again later.
        """
        ...

    def end_stream(self, stream: int) -> None:
        """A publisher's stream has ended, for whatever reason."""
        ...

    async def run(self) -> None:
        """Do what has to be done meanwhile (leases, other copies), for ever."""
        ...
