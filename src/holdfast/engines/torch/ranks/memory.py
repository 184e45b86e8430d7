"""A rank's memory, seen as one of several: what its engine's ranks agree on, and when its loss is the engine's end.

Always true: nothing of a pool is believed before every rank was heard; an engine of several ranks that works when one
of its vaults comes back empty gives back what it has mapped there, then ends, so that its standby goes on from memory
the vault knows. One that stands by verifies what it has mapped, and stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.pool import Agree
from holdfast.engines.torch.ranks.group import Group
from holdfast.kv.adopt import Survey
from holdfast.kv.intersection import agreed, packed
from holdfast.memory.errors import VaultRefused


def agree_in(group: Group) -> Agree:
    """Every rank hears every survey, and comes to the same answer by itself."""

    async def agree(found: Survey) -> Survey:
        return agreed(await asyncio.to_thread(group.gather, packed(found)), group.rank)

    return agree


def ends_when_emptied(memory: VaultMemory, fatal: Callable[[str], None]) -> None:
    """Call `fatal` when the vault had lost everything while this rank worked."""
    give_back = memory.client.on_reattached
    assert give_back is not None, "a pool has its own way back"
    why = f"the vault at {memory.socket_path} was restarted empty"

    async def reattached() -> None:
        try:
            await give_back()
        except VaultRefused as refused:
            if memory.owned is not None:
                fatal(f"{why}, and takes nothing back: {refused}")
            raise
        if memory.owned is not None:
            fatal(f"{why}; it has back what was mapped here")

    memory.client.on_reattached = reattached
