"""Choices of one request that wait for the first of them to compute the common prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.core.request import Request


@dataclass(slots=True, eq=False)
class ForkGroup:
    """The leader computes the prompt; the followers are in no queue until it has.

    The group dissolves when the leader's prompt is computed. If the leader ends before, the next
    follower leads.
    """

    leader: Request
    followers: list[Request]

    def remove(self, request: Request) -> Request | None:
        """Take out a member that has ended.

        Returns:
            The new leader, if the leader was taken out and somebody is left to follow it.
        """
        request.fork_group = None
        if request is not self.leader:
            self.followers.remove(request)
            return None
        if not self.followers:
            return None
        self.leader = self.followers.pop(0)
        return self.leader

    def dissolve(self) -> list[Request]:
        """The prompt is computed: everybody is on their own.

        Returns:
            The followers, in order of their choices.
        """
        followers, self.followers = self.followers, []
        for member in (self.leader, *followers):
            member.fork_group = None
        return followers
