"""Requests that are to end by somebody's word, asked for through the store: whichever frontend has one ends it.

Who asks writes a record and waits until it is gone: whoever ended the request removes it. A record that nobody removes
in time is removed by who wrote it, and one whose writer died by the next frontend that reads it.

Always true: a record names the key whose request it may end, as a digest, or nobody's in particular, which only who can
write the store says; an API key itself never stands there.
"""

from __future__ import annotations

import asyncio
import hashlib

import msgspec

from holdfast.discovery.keys import KILLS
from holdfast.store.contract import Deleted, Snapshot, Store

ANSWER_S = 3.0  # frontends hear of it within milliseconds
STORE_S = 2.0  # of one call
STALE_S = 60.0  # far longer than anybody waits, and than clocks differ


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is to end."""

    name: str  # its answer's id, or what its client called it
    deployment: str = ""  # of the frontend that has it; "": of any
    whose: str = ""  # its key's digest; "": anybody's
    at_unix_s: float = 0.0


_decode = msgspec.json.Decoder(Kill).decode


def digest(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest() if api_key else ""


def read(value: bytes) -> Kill | None:
    """None: it cannot be read."""
    try:
        return _decode(value)
    except (ValueError, RecursionError):
        return None


async def ask(store: Store, kill: Kill, token: str) -> bool:
    """Whether some frontend ended it. `token`: used once. StoreUnavailable, if the store is."""
    key = KILLS + token
    await store.put(key, msgspec.json.encode(kill), STORE_S)
    watch = store.watch(key)
    try:
        async with asyncio.timeout(ANSWER_S):
            async for event in watch:
                if isinstance(event, Deleted) or (isinstance(event, Snapshot) and key not in event.items):
                    return True
    except TimeoutError:
        await store.delete(key, STORE_S)
    finally:
        await watch.aclose()
    return False
