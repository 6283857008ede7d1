"""Where every request of one engine stands, and the only ways from one place to another.

Each request is in exactly one of: the waiting queue; the running list; set aside until its grammar
is prepared; following a sibling that computes their common prompt; or gone, with one ``Finished``
left behind. Decides nothing: the scheduler says who moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import DeadlineExceeded, RequestFailed, SluicewayError
from services.scheduler.core.counters import Counters
from services.scheduler.core.expiry import ExpiryHeap
from services.scheduler.core.finish import finished_record
from services.scheduler.core.fork_group import ForkGroup
from services.scheduler.core.kv_cache_manager import KVCacheManager
from services.scheduler.core.output import Finished, FinishReason
from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.request_queue import RequestQueue
from services.scheduler.core.stop import Stop


class RequestTable:
    """The requests that have not ended, by handle and by place.

    Attributes:
        by_handle: All of them.
        waiting: In order of rank; the set aside and the followers are not in it.
        running: In order of rank: whoever is last is preempted first.
        ended_rows: Handles that the worker is to be told have ended.
        preempted_rows: Handles that the worker is to be told may come back.
        finished: Ends that the clients are to be told of.
    """

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        quarantine: Quarantine,
        counters: Counters,
        prepare_timeout_s: float,
    ) -> None:
        self.by_handle: dict[int, Request] = {}
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.ended_rows: list[int] = []
        self.preempted_rows: list[int] = []
        self.finished: list[Finished] = []
        self._forked: dict[int, Request] = {}  # not running, but holding blocks of a sibling
        self._kv = kv
        self._quarantine = quarantine
        self._counters = counters
        self._prepare_timeout_s = prepare_timeout_s
        self._expiries = ExpiryHeap()

    @property
    def num_waiting(self) -> int:
        """Requests that have not ended and do not run, wherever they wait."""
        return len(self.by_handle) - len(self.running)

    # ---- in

    def enter(self, choices: Sequence[Request], *, now: float) -> None:
        """Take in the unfinished choices of one request; the first computes the common prompt."""
        group = ForkGroup(choices[0], list(choices[1:])) if len(choices) > 1 else None
        for request in choices:
            self.by_handle[request.handle] = request
            request.fork_group = group
            if request.needs_prepare:
                self._set_aside(request, now=now)
            if request.deadline_s is not None:
                self._expiries.push(request.deadline_s, request.handle)
        leader = choices[0]
        leader.num_uncached_tokens = leader.num_tokens - self._kv.num_cached_tokens(leader)
        self._queue(leader)

    def _set_aside(self, request: Request, *, now: float) -> None:
        request.become(RequestStatus.WAITING_FOR_PREPARE)
        self._expiries.push(now + self._prepare_timeout_s, request.handle)

    def bring_back(self, request: Request) -> None:
        """What a request was set aside for is there."""
        request.become(RequestStatus.WAITING)
        request.needs_prepare = False
        self._queue(request)

    def _queue(self, request: Request) -> None:
        """Put a request into the waiting queue, unless something else must happen first."""
        if request.is_queued:
            self.waiting.add(request)

    # ---- running and back

    def start(self, request: Request) -> bool:
        """From the queue to the running list.

        Returns:
            Whether it came with blocks of a sibling.
        """
        self.waiting.remove(request)
        request.become(RequestStatus.RUNNING)
        self.running.add(request)
        return self._forked.pop(request.handle, None) is not None

    def preempt(self, request: Request) -> None:
        """Take all blocks from a running request; it waits again, with the tokens it has."""
        self.running.remove(request)
        self._kv.free(request)
        request.drop_row()
        request.become(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self._counters.preemptions += 1
        self.preempted_rows.append(request.handle)
        self.waiting.add(request)
        if request.deadline_s is not None:
            self._expiries.push(request.deadline_s, request.handle)

    # ---- choices that share a prompt

    def fork(self, leader: Request) -> None:
        """The prompt is computed once this step has run: its full blocks serve all choices."""
        assert leader.fork_group is not None
        for follower in leader.fork_group.dissolve():
            self._kv.fork(leader, follower)
            follower.num_uncached_tokens = follower.num_tokens - follower.num_slots
            follower.prompt_logprobs_done = True  # the prompt is the same: the leader's are given
            if follower.block_ids:
                self._forked[follower.handle] = follower
            self._queue(follower)

    def give_up_a_fork(self) -> bool:
        """Free at least one block that only a waiting fork holds; false if there is none."""
        for request in reversed(self._forked.values()):
            if self._kv.pool.has_sole_holder(request.block_ids):
                self._give_up_fork(request)
                return True
        return False

    def give_up_forks(self, block_ids: set[int] | None = None) -> None:
        """Make waiting forks compute the prompt for themselves when their turn comes.

        Args:
            block_ids: Only those that hold one of these; None = all.
        """
        for request in list(self._forked.values()):
            if block_ids is None or not block_ids.isdisjoint(request.block_ids):
                self._give_up_fork(request)

    def _give_up_fork(self, request: Request) -> None:
        del self._forked[request.handle]
        if request.is_queued:
            self.waiting.remove(request)
        self._kv.free(request)
        request.num_uncached_tokens = request.num_tokens
        self._queue(request)

    # ---- out

    def finish(
        self,
        request: Request,
        stop: Stop,
        *,
        now: float,
        error: SluicewayError | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        """The only end: blocks free, row ended, exactly one ``Finished``."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.ended_rows.append(request.handle)
        elif request.is_queued:
            self.waiting.remove(request)
        del self.by_handle[request.handle]
        self._forked.pop(request.handle, None)
        self._kv.free(request)
        self._quarantine.discard(request)
        request.drop_row()
        request.become(RequestStatus.FINISHED)
        self.note_end(request, stop, error=error, kept_tokens=kept_tokens, now=now)
        self._leave_group(request)

    def _leave_group(self, request: Request) -> None:
        if request.fork_group is not None:
            successor = request.fork_group.remove(request)
            if successor is not None:
                self._queue(successor)

    def note_end(
        self,
        request: Request,
        stop: Stop,
        *,
        now: float,
        error: SluicewayError | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        """Leave the record of an end; by itself for a request that has ended before it came in."""
        self._counters.finished[stop.reason] += 1
        self.finished.append(
            finished_record(request, stop, error=error, kept_tokens=kept_tokens, now=now)
        )

    def fail(self, request: Request, error: SluicewayError, *, now: float) -> None:
        """End a request with an error."""
        self.finish(request, Stop(FinishReason.ERROR), error=error, now=now)

    def withdraw(self, request: Request) -> None:
        """Let go of a request that waits in the queue and holds nothing, without an end."""
        self.waiting.remove(request)
        del self.by_handle[request.handle]

    # ---- time

    def expire(self, *, now: float) -> None:
        """End requests that wait beyond their deadline, or too long for their grammar."""
        for handle in self._expiries.pop_due(now):
            request = self.by_handle.get(handle)
            if request is None or request.status is RequestStatus.RUNNING:
                continue
            if request.deadline_s is not None and request.deadline_s <= now:
                self.fail(request, deadline_passed(), now=now)
            elif request.status is RequestStatus.WAITING_FOR_PREPARE:
                message = (
                    "the worker did not prepare the request's grammar "
                    f"in {self._prepare_timeout_s:g} s"
                )
                self.fail(request, RequestFailed(message), now=now)

    def next_expiry(self) -> float | None:
        """When ``expire`` may next have something to do."""
        return self._expiries.next()


def deadline_passed() -> DeadlineExceeded:
    """The error of a request whose time is up."""
    return DeadlineExceeded("the request's deadline passed before it was answered")
