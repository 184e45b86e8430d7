"""Words to workers that get nothing to do: why. None is a silent zombie; it shows the reason in its health."""

from __future__ import annotations

import logging

from holdfast.core.address import parse_address
from holdfast.core.ports import Network
from holdfast.core.tasks import Tasks
from holdfast.discovery.registry import NotAdmitted
from holdfast.health.watcher import CONNECT_TIMEOUT_S
from holdfast.streams.link import NoticeConnection
from holdfast.wire.messages import NotTaken

log = logging.getLogger("holdfast.workers")


class Notices:
    """One frontend's words."""

    def __init__(self, network: Network, peer: str) -> None:
        self._network = network
        self._peer = peer
        self._tasks = Tasks("notices")

    def __len__(self) -> int:
        """How many are on their way."""
        return len(self._tasks)

    def not_admitted(self, change: NotAdmitted) -> None:
        """Its record or its card cannot be read, or says what cannot be."""
        name = change.record.name if change.record is not None else ""
        log.warning("%s is not admitted: %s", name or f"worker {change.key.instance:x}", change.reason)
        if change.record is not None:
            self._tasks.spawn(self.tell(change.record.address, change.reason), f"to {name}")

    async def tell(self, address: str, reason: str) -> None:
        connection = NoticeConnection(self._peer)
        try:
            transport = await self._network.connect(parse_address(address), lambda: connection, CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            log.warning("cannot tell the worker at %s that it is not admitted: %s", address, error)
            return
        connection.send(NotTaken(reason))
        transport.close()  # not abort: what was written goes out first

    async def stop(self) -> None:
        await self._tasks.stop()
