"""What an owner waits for beside its work once it has taken a pool over: the dead one's last writes, then its streams.

Always true: a quarantined block is given back past the GPU fence and not before (fact 4b); every wait that a stream may
be in because of a takeover ends, fence or no fence; the pool's books change only while `books` is held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager

from holdfast.memory.kv.pool import Pool

# The slowest fence of an engine that was killed whole took 0.2 s (an H200 with 120 GiB mapped). After that a stream
# that waits for room loses more than one that finds a block evicted.
FENCE_PATIENCE_S = 0.25
AWAITED_S = 60.0  # twice as long as frontends hold streams: whoever comes back later may find its blocks evicted


async def after_takeover(
    pool: Pool,
    fenced: Callable[[], Coroutine[None, None, None]],
    books: AbstractContextManager[object],
    on_room: Callable[[], None],
) -> None:
    """`fenced()` ends at the GPU fence; `on_room` hears when somebody who waits for room should ask again."""
    async with asyncio.TaskGroup() as tasks:
        fence = tasks.create_task(fenced())
        await asyncio.wait([fence], timeout=FENCE_PATIENCE_S)
        if not fence.done():
            with books:
                pool.fence_is_late()
            on_room()
    with books:
        came = pool.gpu_fence_passed()
    if came:
        on_room()
    await asyncio.sleep(AWAITED_S)
    with books:
        pool.streams_resumed()
