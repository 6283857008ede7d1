"""What the index must still be told about one engine's KV blocks. Pure: no network, no clock.

Changes that are not on their way yet are folded to the last word per key, so an index that is slow
or away costs memory for the engine's own blocks at most; past a bound the feed starts over with a
snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.common.block_hash import KEY_SIZE_BYTES

MAX_UNACKED = 8
"""Messages of one engine on their way; what comes meanwhile is folded."""

MAX_BACKLOG_KEYS = 65_536
"""Changed keys that wait or are unacknowledged; beyond it a snapshot is cheaper."""

SNAPSHOT_CHUNK_KEYS = 65_536


@dataclass(frozen=True, slots=True)
class EngineCard:
    """What the index knows of an engine besides its blocks."""

    engine_id: int
    worker_id: str
    scheduler_address: str
    model: str
    text_fp: str
    kv_fp: str
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KvChange:
    """One numbered message: applied in the order cleared, removed, stored.

    Attributes:
        seq: Contiguous per engine, from 1; chunks of one snapshot share theirs.
        stored: Keys, packed.
        removed: Likewise.
        is_snapshot: ``stored`` is one chunk of everything that the engine holds at ``seq``.
        chunk: Number of the chunk, from 0.
        is_last: It is the snapshot's last chunk.
        is_gone: The engine has ended.
    """

    seq: int
    stored: bytes = b""
    removed: bytes = b""
    is_cleared: bool = False
    is_snapshot: bool = False
    chunk: int = 0
    is_last: bool = False
    is_gone: bool = False

    @property
    def num_changed(self) -> int:
        """Keys that count against the backlog: a snapshot's own do not."""
        num_bytes = 0 if self.is_snapshot else len(self.stored) + len(self.removed)
        return num_bytes // KEY_SIZE_BYTES


class KvFeed:
    """Changes of one engine on their way to one copy of the index.

    Call ``change`` whenever blocks change, ``reconnect`` when a stream opens, ``messages`` for what
    can be sent now, and one of ``acknowledge``, ``need_snapshot`` and ``fence`` for every answer.

    Attributes:
        card: The engine.
        is_fenced: A newer engine of the same worker exists; nothing is sent any more.
        is_done: The index has been told that the engine has ended.
        num_snapshots: Snapshots begun so far.
    """

    def __init__(self, card: EngineCard, *, published_keys: Callable[[], bytes]) -> None:
        """
        Args:
            card: The engine.
            published_keys: All keys that the changes so far amount to, packed; asked for each
                snapshot, on the event loop: a pool of any size must give them in no time.
        """
        self.card = card
        self._published_keys = published_keys
        self.is_fenced = False
        self.is_done = False
        self.num_snapshots = 0
        self._folded: dict[bytes, bool] = {}
        self._is_cleared = False
        self._unacked: deque[KvChange] = deque()
        self._num_sent = 0  # of the unacknowledged, those that are on the present stream
        self._last_seq = 0
        self._must_introduce = True
        self._must_snapshot = False
        self._snapshot_seq: int | None = None
        self._is_gone = False
        self._num_backlog = 0

    @property
    def num_backlog_keys(self) -> int:
        """Changed keys that wait or are unacknowledged."""
        return len(self._folded) + self._num_backlog

    @property
    def has_unacked(self) -> bool:
        """Whether an answer is due."""
        return bool(self._unacked)

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended."""
        return self._is_gone

    @property
    def is_over(self) -> bool:
        """Whether the feed can be forgotten."""
        return self._is_gone and (self.is_done or self.is_fenced)

    def change(
        self, *, stored: Iterable[bytes], removed: Iterable[bytes], is_cleared: bool = False
    ) -> None:
        """Blocks of the engine have changed: cleared first, then removed, then stored."""
        if self.is_fenced:
            return
        if is_cleared:
            self._folded.clear()
            self._is_cleared = True
        self._folded.update(dict.fromkeys(removed, False))
        self._folded.update(dict.fromkeys(stored, True))
        if self.num_backlog_keys > MAX_BACKLOG_KEYS:
            self._start_over()

    def end(self) -> None:
        """The engine has ended."""
        self._folded.clear()
        self._is_cleared = False
        self._must_snapshot = False
        self._published_keys = bytes  # the engine's cache must not live on here
        self._is_gone = True

    def reconnect(self) -> None:
        """A stream begins: introduce the engine and send again what is unacknowledged."""
        self._must_introduce = True
        self._num_sent = 0

    def messages(self) -> Iterator[tuple[KvChange, bool]]:
        """What can be sent now, in order; each counts as sent once yielded.

        Yields:
            The message, and whether it must carry the engine's card.
        """
        if self.is_fenced or self.is_done:
            return
        self._queue_news()
        while self._num_sent < len(self._unacked):
            self._num_sent += 1
            introduces, self._must_introduce = self._must_introduce, False
            yield self._unacked[self._num_sent - 1], introduces

    def acknowledge(self, seq: int) -> None:
        """The index has applied everything up to ``seq``."""
        while self._unacked and self._unacked[0].seq <= seq:
            change = self._unacked.popleft()
            self._num_backlog -= change.num_changed
            self._num_sent = max(self._num_sent - 1, 0)
            self.is_done = self.is_done or change.is_gone
        if self._snapshot_seq is not None and seq >= self._snapshot_seq:
            self._snapshot_seq = None

    def need_snapshot(self, last_contiguous: int) -> None:
        """The index has a gap after ``last_contiguous``."""
        if self._snapshot_seq is not None and last_contiguous < self._snapshot_seq:
            return  # answers something sent before the snapshot that is under way
        if self._is_gone:
            self.is_done = True  # it does not know the engine, so it has nothing to forget
        else:
            self._start_over()

    def fence(self) -> None:
        """A newer engine of the worker exists; this one has nothing more to say."""
        self.is_fenced = True
        self._forget_unsent()

    def _start_over(self) -> None:
        self._forget_unsent()
        self._must_snapshot = True

    def _forget_unsent(self) -> None:
        self._folded.clear()
        self._is_cleared = False
        self._unacked.clear()
        self._num_sent = self._num_backlog = 0
        self._snapshot_seq = None

    def _queue_news(self) -> None:
        """Number what is to be said next, if the window has room for it."""
        if self._is_gone:
            if not any(change.is_gone for change in self._unacked):
                self._queue(KvChange(self._next_seq(), is_gone=True))
        elif self._must_snapshot:
            self._queue_snapshot()
        elif self._has_news() and len(self._unacked) < MAX_UNACKED:
            self._queue(self._take_folded())

    def _has_news(self) -> bool:
        # A stream on which the engine was never named gets an empty message: the index then knows
        # that the engine lives, and asks for a snapshot if it has missed something.
        unnamed = self._must_introduce and not self._unacked
        return bool(self._folded) or self._is_cleared or unnamed

    def _take_folded(self) -> KvChange:
        change = KvChange(
            self._next_seq(),
            stored=b"".join(key for key, is_stored in self._folded.items() if is_stored),
            removed=b"".join(key for key, is_stored in self._folded.items() if not is_stored),
            is_cleared=self._is_cleared,
        )
        self._folded.clear()
        self._is_cleared = False
        return change

    def _queue_snapshot(self) -> None:
        self._must_snapshot = False
        self.num_snapshots += 1
        self._folded.clear()
        self._is_cleared = False
        seq = self._snapshot_seq = self._next_seq()
        keys = self._published_keys()
        size = SNAPSHOT_CHUNK_KEYS * KEY_SIZE_BYTES
        starts = range(0, max(len(keys), 1), size)
        for chunk, start in enumerate(starts):
            self._queue(
                KvChange(
                    seq,
                    stored=keys[start : start + size],
                    is_snapshot=True,
                    chunk=chunk,
                    is_last=chunk == len(starts) - 1,
                )
            )

    def _queue(self, change: KvChange) -> None:
        self._unacked.append(change)
        self._num_backlog += change.num_changed

    def _next_seq(self) -> int:
        self._last_seq += 1
        return self._last_seq
