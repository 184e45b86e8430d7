"""What follows a takeover: a look at the weights where too many owners have died, and beside the work that then begins
the dead one's last writes and the return of its streams.

Always true: a quarantined block is given back past the GPU fence and not before (fact 4b); every wait that a stream may
be in because of a takeover ends, fence or no fence; the pool's books change only while `books` is held; no number of
deaths makes the next takeover impossible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager

from holdfast.engines.shadow.loading import Loader
from holdfast.engines.shadow.pool import Owned
from holdfast.kv.pool import Pool

DOUBT_FROM_ADOPTIONS = 3  # the first death was an accident, after the second the pool was emptied: is it the weights?
# The slowest fence of an engine that was killed whole took 0.2 s (an H200 with 120 GiB mapped). After that a stream
# that waits for room loses more than one that finds a block evicted.
FENCE_PATIENCE_S = 0.25
AWAITED_S = 60.0  # twice as long as frontends hold streams: whoever comes back later may find its blocks evicted

log = logging.getLogger(__name__)


async def doubt_weights(owned: Owned, loader: Loader, on_loading: Callable[[str], None], timeout_s: float) -> None:
    """The pool is empty, and once the weights are known to be right there is nothing left to doubt: what dies from now
    on is counted anew, so that the next one to take over is not doomed by those before it."""
    log.warning("adopted %d times without a canary: the weights are verified", owned.adoptions)
    on_loading("the weights are verified, and loaded anew if they are damaged")
    await loader.doubt(timeout_s)
    owned.pool.canary_passed()


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
