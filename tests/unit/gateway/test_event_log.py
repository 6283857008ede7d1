"""Events are kept for readers who come at any time."""

from __future__ import annotations

import asyncio

from services.gateway.event_log import EventLog


async def read(log: EventLog, start: int = 0) -> bytes:
    """All that a reader gets."""
    return b"".join([some async for some in log.read(start)])


async def test_readers_of_every_speed_and_start_get_every_event_once() -> None:
    log = EventLog()
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(log, start)) for start in (0, 0, 3)]
        for number in range(5):
            log.append(b"data: %d\n\ndata: more\n\n" % number)
            await asyncio.sleep(0)
        late = group.create_task(read(log))
        log.append(b"")
        log.close()
    whole = b"".join(log.events)
    assert len(log.events) == 10
    assert [reader.result() for reader in (*readers[:2], late)] == [whole] * 3
    assert readers[2].result() == b"".join(log.events[3:])


async def test_a_log_that_is_closed_is_read_to_its_end() -> None:
    log = EventLog([b"data: 1\n\n"], is_closed=True)
    assert await read(log) == b"data: 1\n\n"
    assert await read(log, 1) == await read(log, 9) == b""
