"""Responses that are made in the background, though nobody waits, until they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from services.common.errors import Cancelled, SluicewayError
from services.gateway.admission import Admission
from services.gateway.disconnect import unless
from services.gateway.event_log import EventLog
from services.gateway.http_errors import unexpected
from services.gateway.openai.responses.plan import ResponsePlan
from services.gateway.openai.responses.store import ResponseStore, Turn
from services.gateway.sse import EventStream

Work = Callable[[EventStream], Awaitable[None]]


class ResponseJob:
    """One response that is being made.

    Attributes:
        planned: What is made.
        log: Its events; none unless it is streamed.
        has_ended: Set once it can be found in the store.
    """

    def __init__(self, planned: ResponsePlan) -> None:
        """
        Args:
            planned: What is to be made.
        """
        self.planned = planned
        self.log = EventLog()
        self.has_ended = asyncio.Event()
        self._is_unwanted = asyncio.Event()

    def as_json(self) -> bytes:
        """The response by now."""
        return self.as_turn().response

    async def cancel(self) -> None:
        """End it, if it has not ended; return once it has."""
        self._is_unwanted.set()
        await self.has_ended.wait()

    async def run(self, work: Work, admission: Admission) -> None:
        """Make the response, whatever happens.

        Args:
            work: Makes it, and writes its events into the stream that it is given.
            admission: Says when it cannot be waited for.
        """
        reply = self.planned.reply
        self.log.append(reply.begin())
        try:
            stream = EventStream(self.log.send if self.planned.plan.is_stream else _drop)
            await unless(work(stream), admission.wait_cut_off(), self._wait_unwanted())
        except Cancelled:
            self.log.append(reply.cancel())
        except SluicewayError as error:
            self.log.append(reply.fail(error))
        except Exception as error:
            self.log.append(reply.fail(unexpected(error)))

    async def _wait_unwanted(self) -> None:
        await self._is_unwanted.wait()
        raise Cancelled("the response was cancelled")

    def as_turn(self) -> Turn:
        """What is kept of it."""
        return Turn.of(
            self.planned.reply.as_json(),
            given=self.planned.given,
            before=self.planned.before,
            events=self.log.events,
        )


async def _drop(_message: object) -> None:
    """ASGI's ``send`` where nobody listens."""


class ResponseJobs:
    """The responses that are being made; ``run`` must run for as long as there may be some."""

    def __init__(self, store: ResponseStore, admission: Admission) -> None:
        """
        Args:
            store: Where they are kept once they have ended.
            admission: See ``ResponseJob.run``.
        """
        self._store = store
        self._admission = admission
        self._running: dict[tuple[str, str], ResponseJob] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Own the tasks that make responses, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            await asyncio.Event().wait()

    def start(
        self, planned: ResponsePlan, work: Work, *, tenant: str, held: ExitStack
    ) -> ResponseJob:
        """Begin to make a response.

        Args:
            planned: What is to be made.
            work: Makes it.
            tenant: Whose it is.
            held: Closed once it has ended.
        """
        assert self._group is not None, "run() must run"
        job = ResponseJob(planned)
        self._running[tenant, planned.reply.response_id] = job
        self._group.create_task(self._see_through(job, work, tenant=tenant, held=held))
        return job

    async def _see_through(
        self, job: ResponseJob, work: Work, *, tenant: str, held: ExitStack
    ) -> None:
        response_id = job.planned.reply.response_id
        try:
            with held:
                await job.run(work, self._admission)
            self._store.put(tenant, response_id, job.as_turn())
        except Exception as error:
            unexpected(error)  # a bug with one of them: the others go on
        finally:
            del self._running[tenant, response_id]
            job.log.close()
            job.has_ended.set()

    def get(self, tenant: str, response_id: str) -> ResponseJob | None:
        """One that is being made; ``None`` = it is not, or is somebody else's."""
        return self._running.get((tenant, response_id))
