"""The published keys of a pool, packed side by side: a snapshot of all is one copy of memory."""

from __future__ import annotations

from services.common.block_hash import KEY_SIZE_BYTES


class PublishedKeys:
    """Counts the published copies of each key and keeps every key once, in no order."""

    def __init__(self) -> None:
        self._num_copies: dict[bytes, int] = {}
        self._place_of: dict[bytes, int] = {}
        self._packed = bytearray()

    def add(self, key: bytes) -> bool:
        """Count a copy; whether it is the key's first."""
        copies = self._num_copies.get(key, 0)
        self._num_copies[key] = copies + 1
        if copies:
            return False
        self._place_of[key] = len(self._packed)
        self._packed += key
        return True

    def remove(self, key: bytes) -> bool:
        """Count a copy less; whether it was the key's last."""
        copies = self._num_copies[key] - 1
        if copies:
            self._num_copies[key] = copies
            return False
        del self._num_copies[key]
        # The last key moves into the gap.
        place = self._place_of.pop(key)
        last = bytes(self._packed[-KEY_SIZE_BYTES:])
        del self._packed[-KEY_SIZE_BYTES:]
        if last != key:
            self._packed[place : place + KEY_SIZE_BYTES] = last
            self._place_of[last] = place
        return True

    def num_copies(self) -> dict[bytes, int]:
        """Copies of each key, for checks."""
        return dict(self._num_copies)

    def packed(self) -> bytes:
        """All keys, 16 bytes each."""
        return bytes(self._packed)
