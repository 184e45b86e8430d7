"""Is there another engine that can take over from this one? Asked before an engine gives up its place.

The store says which engines stand by; since a key may outlive its process by a lease, each is connected to as well, and
counts only if it answers that it stands by for the same group. What cannot be found out in time counts as no standby:
an engine in doubt then serves on, which does less harm than an end without a successor.
"""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.discovery.keys import STANDBYS, InstanceKey, InstanceRecord, decode_record, parse_key
from holdfast.store.contract import Snapshot, Store
from holdfast.wire.framed import Framed
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import decode_to_frontend

LOOK_S = 2.0  # for the store and for all standbys together; streams may be waiting
CONNECT_S = 0.5  # an engine that stands by has nothing else to do


class _Greeting(Framed):
    """A connection that is opened to read the other engine's `Welcome`."""

    purpose = "data"

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                self._first(decode_to_frontend(payload))
        except FrameError as error:
            self._break(f"sent what is not our protocol: {error}")


async def has_standby(store: Store, network: Network, me: InstanceKey, group: str) -> bool:
    """Return whether an engine of this group, other than `me`, is ready to take over; within `LOOK_S`."""
    try:
        async with asyncio.timeout(LOOK_S):
            for key, record in await _listed(store, me, group):
                if await _stands_by(network, key, record, group):
                    return True
    except TimeoutError:
        pass
    return False


async def _listed(store: Store, me: InstanceKey, group: str) -> list[tuple[InstanceKey, InstanceRecord]]:
    """Return the standbys of this group that the store knows, but for `me`."""
    found: list[tuple[InstanceKey, InstanceRecord]] = []
    async with contextlib.aclosing(store.watch(f"{STANDBYS}{me.namespace}/")) as watch:
        async for event in watch:
            if not isinstance(event, Snapshot):
                continue
            for path, value in event.items.items():
                key = parse_key(STANDBYS, path)
                with contextlib.suppress(ValueError):
                    record = decode_record(value)
                    if key is not None and key != me and record.group == group:
                        found.append((key, record))
            break
    return found


async def _stands_by(network: Network, key: InstanceKey, record: InstanceRecord, group: str) -> bool:
    connection = _Greeting("a leader of its group")
    try:
        await network.connect(parse_address(record.address), lambda: connection, CONNECT_S)
        welcome = await connection.welcome(CONNECT_S)
    except (OSError, ValueError):
        return False
    finally:
        connection.close()
    return (welcome.instance, welcome.group) == (key.instance, group) and not (welcome.active or welcome.asleep)
