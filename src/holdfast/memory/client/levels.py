"""Ask a vault where its weights are, and to move them: from the device to host memory, and back.

Always true: who asks needs no device of its own; a move that was begun goes on when who asked has left.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import msgspec

from holdfast.memory.client.calls import open_connection
from holdfast.memory.protocol import Call, Demote, GetStatus, Moved, Promote, Status

# All of a GPU's memory, pinned first at a few GB/s, takes half a minute; a machine may be busy.
MOVE_S = 300.0
CONNECT_S = 5.0


class Standing(msgspec.Struct, frozen=True):
    """What a vault says of itself."""

    weights: str  # EMPTY, RW, COMMITTED, RO on the device; WARM, DEMOTING, PROMOTING; LOST from host memory
    device_bytes: int = 0
    host_bytes: int = 0


async def standing(path: str, timeout_s: float = CONNECT_S, vault_uids: Collection[int] = ()) -> Standing:
    """Where the weights of the vault at this socket are. TimeoutError and ConnectionError as for every call."""
    connection, _ = await open_connection(path, f"look-{os.getpid()}", -1, timeout_s, vault_uids=vault_uids)
    try:
        status = await connection.call(GetStatus, timeout_s)
    finally:
        connection.close()
    assert isinstance(status, Status)
    return msgspec.json.decode(status.facts, type=Standing)


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
