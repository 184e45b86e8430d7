"""Ask a vault to move its weights: from the device to host memory, and back.

Always true: who asks needs no device of its own; a move that was begun goes on when who asked has left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from holdfast.memory.client.calls import open_connection
from holdfast.memory.protocol import Call, Demote, Moved, Promote

# All of a GPU's memory, pinned first at a few GB/s, takes half a minute; a machine may be busy.
MOVE_S = 300.0
CONNECT_S = 5.0


async def demote(path: str, timeout_s: float = MOVE_S, vault_uids: Collection[int] = ()) -> Moved:
    """The weights of the vault at this socket leave the device for host memory, and a KV pool that nobody owns goes:
    returns when the device's memory is given back. VaultRefused says why not (`empty`, `mapped` by whom, `busy`,
    `warm`, `over_budget`, `failed`); TimeoutError and ConnectionError as for every call, and the move may go on."""
    return await _move(path, Demote, timeout_s, vault_uids)


async def promote(path: str, timeout_s: float = MOVE_S, vault_uids: Collection[int] = ()) -> Moved:
    """They are on the device again, as they were committed: returns when they can be read. VaultRefused says why not
    (`hot`, `busy`, `over_budget`, `failed`)."""
    return await _move(path, Promote, timeout_s, vault_uids)


async def _move(path: str, make: Callable[[int], Call], timeout_s: float, vault_uids: Collection[int]) -> Moved:
    connection, _ = await open_connection(path, f"move-{os.getpid()}", -1, CONNECT_S, vault_uids=vault_uids)
    try:
        moved = await connection.call(make, timeout_s)
    finally:
        connection.close()
    assert isinstance(moved, Moved)
    return moved
