"""A process's connection to a vault: made, watched, and made again by itself after the vault's death.

Always true: a lost vault is told at once (`on_lost`) while everything mapped stays usable; who has something mapped, or
a mapper's seat, reattaches for as long as it lives; `connected` means that the vault knows all that is mapped here;
when the vault has lost everything, what is mapped is given back, but never weights that were not committed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import SystemRandom

from holdfast.core.tasks import Tasks
from holdfast.memory.client.calls import MemoryLost, Notice, VaultConnection, open_connection
from holdfast.memory.client.mapped import Mapped
from holdfast.memory.devices.contract import Device
from holdfast.memory.errors import VaultRefused
from holdfast.memory.protocol import Donate, Mapping, PoolNews, Resume

SLAB_BYTES = 1024**3  # remap cost is the number of handles, not bytes (facts 5)
CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
# Soon at first, for a vault its keeper starts again; then at a pace that is well within what a vault that has lost
# everything waits for those who can give it back (1 s for the pool).
REATTACH_S = (0.0, 0.01, 0.05, 0.1, 0.2)


@dataclass(slots=True)
class AttachedClient:
    """What a client of a vault is apart from its calls (client.py)."""

    path: str
    device: Device
    engine_id: int
    slab_bytes: int = SLAB_BYTES
    vault_uids: tuple[int, ...] = ()  # whose vault it may be, besides this user's and root's
    on_lost: Callable[[str], None] = lambda why: None
    on_notice: Callable[[Notice], None] = lambda notice: None
    name: str = field(default_factory=lambda: f"{SystemRandom().getrandbits(64):016x}")
    mapped: Mapped | None = None
    load: int = 0  # of what is mapped, or was last (`Layout.load`)
    epoch: int | None = None
    last_epoch: int = 0  # the largest one this process has heard of as granted
    on_reattached: Callable[[], Awaitable[None]] | None = None  # the pool's own way back after a total loss
    registered: bool = False  # as a mapper of the device; that outlasts the connection
    _writing: VaultConnection | None = None  # the connection the write lock was got on, and ends with
    _connection: VaultConnection | None = None
    _attached: asyncio.Event = field(default_factory=asyncio.Event)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reattaching: Tasks = field(default_factory=lambda: Tasks("vault client"))  # one at a time
    _closed: bool = False

    async def connect(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Raises ConnectionError, TimeoutError or VaultRefused."""
        await self._open(timeout_s)

    async def _open(self, timeout_s: float) -> None:
        """Connect, unless that is so already, and see that the vault has what is mapped here."""
        async with asyncio.timeout(timeout_s), self._opening:
            if self.connected:
                return
            mapped = self.mapped
            held = mapped.layout.hash() if mapped is not None and mapped.can_be_given_back else None
            resume = Resume(held, self.epoch) if held is not None or self.registered else None
            self._attached.clear()
            connection, welcome = await open_connection(
                self.path,
                self.name,
                self.engine_id,
                timeout_s,
                on_notice=self._noticed,
                on_lost=self._lost,
                resume=resume,
                vault_uids=self.vault_uids,
            )
            self._connection = connection
            self.last_epoch = max(self.last_epoch, welcome.pool_epoch)
            try:
                if resume is not None and not welcome.resumed:
                    await self._give_back()
            except BaseException:
                connection.close("it could not all be given back")
                raise
            self._attached.set()

    def _noticed(self, notice: Notice) -> None:
        if isinstance(notice, PoolNews):
            self.last_epoch = max(self.last_epoch, notice.epoch)
        self.on_notice(notice)

    @property
    def connected(self) -> bool:
        """And all that is mapped here known to the vault."""
        return self._connection is not None and self._connection.open and self._attached.is_set()

    async def until_connected(self, timeout_s: float) -> None:
        """Wait for the reattachment that is under way; ConnectionError when there is none, or it takes too long."""
        if self.connected:
            return
        if self._closed or not self._has_a_seat:
            raise ConnectionError(f"not connected to the vault at {self.path}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._attached.wait()
        except TimeoutError:
            raise ConnectionError(f"the vault at {self.path} was not back in {timeout_s:.1f} s") from None

    @property
    def _has_a_seat(self) -> bool:
        return self.registered or (self.mapped is not None and self.mapped.can_be_given_back)

    def _lost(self, why: str) -> None:
        if self._closed or self._connection is None:
            return
        self._connection = None
        self._attached.clear()
        self.on_lost(why)
        if self._has_a_seat and not len(self._reattaching):
            self._reattaching.spawn(self._reattach(), f"reattach to {self.path}")

    async def _reattach(self) -> None:
        """Come back to a restarted vault without unmapping anything; bounded only by this process's life."""
        tries = 0
        while not self._closed and self._has_a_seat and not self.connected:
            await asyncio.sleep(REATTACH_S[min(tries, len(REATTACH_S) - 1)])
            tries += 1
            with contextlib.suppress(OSError, VaultRefused):
                await self._open(CONNECT_TIMEOUT_S)

    async def _give_back(self) -> None:
        """The vault does not have what is mapped here: hand it over, part by part; what it refuses is lost to it."""
        for give in (self._give_weights_back, self._give_pool_back):
            try:
                await give()
            except VaultRefused as refused:
                self.on_notice(MemoryLost(f"the vault does not take back what is mapped here: {refused}"))

    async def _give_weights_back(self) -> None:
        mapped = self.mapped
        if mapped is not None and mapped.can_be_given_back:
            await self.link().hand_over(lambda n, _, last: Donate(n, mapped.layout, last), CALL_TIMEOUT_S, mapped.fds)

    async def _give_pool_back(self) -> None:
        if self.registered:
            await self.link().call(lambda n: Mapping(n, None), CALL_TIMEOUT_S)
        if self.on_reattached is not None:
            await self.on_reattached()

    def link(self) -> VaultConnection:
        if self._connection is None:
            raise ConnectionError(f"not connected to the vault at {self.path}")
        return self._connection

    async def register_mapping(self, epoch: int | None = None) -> None:
        """Say that this process maps the device's pages: the fences count it, and it hears the pool's news."""
        await self.link().call(lambda n: Mapping(n, epoch), CALL_TIMEOUT_S)
        self.registered = True
        if epoch is not None:
            self.epoch = epoch
