"""The second door of the scheduler: whether the waiting request at hand may start in this step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from services.scheduler.core.quarantine import Quarantine
from services.scheduler.core.request import Request


class Verdict(Enum):
    """ADMIT it; SKIP it and look at the next; STOP: nobody behind it may pass it either."""

    ADMIT = auto()
    SKIP = auto()
    STOP = auto()


class AdmissionRule(Protocol):
    """One reason not to start a request. The first rule that does not admit decides."""

    def judge(self, request: Request, running: Sequence[Request]) -> Verdict:
        """Look at a waiting request, given those that run (newly admitted ones included)."""


class SeatRule:
    """At most ``max_num_seqs`` requests run."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def judge(self, request: Request, running: Sequence[Request]) -> Verdict:
        """See ``AdmissionRule``."""
        return Verdict.ADMIT if len(running) < self._max_num_seqs else Verdict.STOP


class AloneRule:
    """A request that is suspected of killing engines shares a step with nobody.

    It stops the queue until the engine is empty, so that it cannot be passed for ever.
    """

    def judge(self, request: Request, running: Sequence[Request]) -> Verdict:
        """See ``AdmissionRule``."""
        if running and (request.runs_alone or running[0].runs_alone):
            return Verdict.STOP
        return Verdict.ADMIT


class QuarantineRule:
    """While a failing request is sought, only the group under test runs."""

    def __init__(self, quarantine: Quarantine) -> None:
        self._quarantine = quarantine

    def judge(self, request: Request, running: Sequence[Request]) -> Verdict:
        """See ``AdmissionRule``."""
        return Verdict.ADMIT if self._quarantine.admits(request) else Verdict.SKIP
