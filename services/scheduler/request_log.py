"""Which attempts of which requests this scheduler has seen: for supersession and for Explain."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest
from services.scheduler.core.output import Finished
from services.scheduler.ticket import Decision, Ticket

MAX_ENDED = 4096
"""Ended requests that are remembered."""


@dataclass(slots=True)
class RequestRecord:
    """One request over all its attempts here.

    Attributes:
        attempt: The highest seen.
        live: Tickets that have not ended.
        ended: Why each choice that has ended was where it was, and its end; no tokens are kept.
    """

    attempt: int
    live: list[Ticket] = field(default_factory=list)
    ended: list[tuple[Decision | None, Finished]] = field(default_factory=list)


class RequestLog:
    """Records by request_id; those without live tickets are forgotten, oldest first."""

    def __init__(self) -> None:
        self._live: dict[str, RequestRecord] = {}
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()

    @property
    def num_live(self) -> int:
        """Requests that have a live ticket."""
        return len(self._live)

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a request that is alive or remembered."""
        return self._live.get(request_id) or self._ended.get(request_id)

    def open_attempt(self, request_id: str, attempt: int) -> list[Ticket]:
        """Begin an attempt.

        Returns:
            Live tickets of older attempts: they are superseded and must be aborted.

        Raises:
            InvalidRequest: This attempt or a later one has been seen.
        """
        record = self.find(request_id)
        if record is None:
            self._live[request_id] = RequestRecord(attempt)
            return []
        if attempt <= record.attempt:
            raise InvalidRequest(
                f"attempt {attempt} of request {request_id} comes after attempt {record.attempt}",
                param="attempt",
            )
        record.attempt = attempt
        self._ended.pop(request_id, None)
        self._live[request_id] = record
        return list(record.live)

    def enter(self, ticket: Ticket) -> None:
        """A ticket of the attempt that was opened last is alive."""
        self._live[ticket.submission.request_id].live.append(ticket)

    def end(self, ticket: Ticket, finished: Finished) -> None:
        """A ticket has ended; one that was refused before it entered leaves no trace."""
        request_id = ticket.submission.request_id
        record = self._live.get(request_id)
        if record is None or ticket not in record.live:
            return
        record.live.remove(ticket)
        record.ended.append((ticket.decision, finished))
        if not record.live:
            self._settle(request_id, record)

    def _settle(self, request_id: str, record: RequestRecord) -> None:
        del self._live[request_id]
        self._ended[request_id] = record
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
