"""Weights into a vault and out of it: who loads by role, what is verified, and what replaces what cannot be trusted.

Always true: a write is begun only with the machine-wide writer lock, which is let go of when the load is over, however
it ends; what `load` returns with was verified in this process, or was written by it; every wait ends at the deadline;
weights that are right are never given up for others. Filling and verifying run in a thread, so that beats and
connections live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from holdfast.memory.client.mapped import Mapped
from holdfast.memory.client.weights import EMPTY, RO, RW, MemoryClient
from holdfast.memory.devices import OutOfMemory, view
from holdfast.memory.devices.pages import advise
from holdfast.memory.errors import StaleMemoryLayoutError, VaultRefused
from holdfast.memory.packing import TensorSpec
from holdfast.memory.writer_lock import WriterLock
from holdfast.memory.writer_policy import Action, Look, Watch, who_loads
from holdfast.spec.engines import Place
from holdfast.spec.names import is_host

LOOK_MS = 100  # how long one wait for a writer lasts before the lock and the phase are looked at again
RETRY_S = 0.05  # between two tries at a vault or a lock that is not free: shorter than anybody notices in a load
REPLACE_MS = 60_000  # for another writer at work to finish or die; the load's own deadline may come first
LET_GO_MS = 60_000  # for standbys to let go of what is to be dropped: each does it at once, unless its canary runs
ROOM_S = 10.0  # for memory to come back that the vault, its keeper and a dead engine have just let go of (fact 1)
LOCK_S = 60.0  # likewise, for the writer lock
DONTNEED = 4  # MADV_DONTNEED: of a shared mapping it drops the page tables, never the bytes

log = logging.getLogger(__name__)
T = TypeVar("T")


class WeightsPlan(Protocol):
    """One set of weights: what it is called, where its tensors go, how they are written and how they are checked."""

    identity: str
    meta: dict[str, str]

    @property
    def specs(self) -> list[TensorSpec]:
        """What is to be written; may be worked out when it is asked for, in a thread."""

    def fill(self, addresses: dict[str, int]) -> None:
        """Write everything; called in a thread. Keep no buffer afterwards (fact 4c)."""

    def verify(self, mapped: Mapped) -> str:
        """Why what is mapped is not this set, or nothing; called in a thread."""

    def use(self, mapped: Mapped | None) -> None:
        """From now on the weights are read here; None: nowhere, and their addresses mean nothing."""


class BytesPlan:
    """Weights that are at hand as plain bytes, by name, on a device that this process can read. `views` has what is
    mapped, while it is."""

    def __init__(self, identity: str, tensors: Mapping[str, bytes]) -> None:
        self.identity, self._tensors, self.meta = identity, tensors, dict[str, str]()
        sizes = {name: len(data) for name, data in tensors.items()}
        self.specs = [TensorSpec(name, (size,), (1,), "uint8", size) for name, size in sizes.items()]
        self.views: dict[str, memoryview] = {}

    def fill(self, addresses: dict[str, int]) -> None:
        for name, data in self._tensors.items():
            view(addresses[name], len(data), writable=True)[:] = data

    def verify(self, mapped: Mapped) -> str:
        if mapped.layout.identity != self.identity:
            return f"it is {mapped.layout.identity}, not {self.identity}"
        found, addresses = self._tensors.items(), mapped.addresses()
        wrong = [name for name, data in found if view(addresses[name], len(data)) != data]
        return f"{wrong[0]} is not what was written" if wrong else ""

    def use(self, mapped: Mapped | None) -> None:
        addresses = mapped.addresses() if mapped is not None else {}
        self.views = {name: view(at, len(self._tensors[name])) for name, at in addresses.items()}


@dataclass(slots=True)
class Loader:
    """One engine's way to its weights at one vault."""

    client: MemoryClient
    plan: WeightsPlan
    lock_dir: Path
    who: str
    _thread: asyncio.Future[Any] | None = None  # which fills or verifies; it outlives whoever waited for it

    async def connect(self, timeout_s: float) -> None:
        """Wait for the vault's socket and connect; ConnectionError if there is none in time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            left_s = max(RETRY_S, deadline_s - loop.time())
            try:
                await self.client.connect(left_s)
                return
            except ConnectionError:
                if loop.time() >= deadline_s:
                    raise
                await asyncio.sleep(RETRY_S)

    async def load(self, timeout_s: float, *, elected: bool = False) -> None:
        """Have the weights mapped and verified, writing them if that falls to this engine. One that is `elected`
        leaves nobody else the first go."""
        lock = WriterLock(self.lock_dir, self.who)
        try:
            async with asyncio.timeout(timeout_s):
                wrong = await self._once(lock, 0 if elected else self.client.engine_id)
                if wrong:
                    log.warning("the weights in the vault are not to be used: %s; loading them anew", wrong)
                    await self._replace(lock)
        except TimeoutError as error:
            raise TimeoutError(f"the weights were not there within {timeout_s:g} s: {error}") from error
        finally:
            lock.release()

    async def doubt(self, timeout_s: float) -> str:
        """Read everything that is mapped: what was wrong with it, or nothing. If something was, it is loaded anew."""
        lock = WriterLock(self.lock_dir, self.who)
        try:
            async with asyncio.timeout(timeout_s):
                wrong = await self.wrong()
                if wrong:
                    log.warning("the weights mapped here are damaged: %s; loading them anew", wrong)
                    await self._replace(lock)
                return wrong
        except TimeoutError as error:
            raise TimeoutError(f"the weights were not verified and loaded within {timeout_s:g} s: {error}") from error
        finally:
            lock.release()

    async def renew(self, timeout_s: float) -> None:
        """Load what is mapped anew, right or wrong."""
        lock = WriterLock(self.lock_dir, self.who)
        try:
            async with asyncio.timeout(timeout_s):
                await self._replace(lock)
        except TimeoutError as error:
            raise TimeoutError(f"the weights were not loaded anew within {timeout_s:g} s: {error}") from error
        finally:
            lock.release()

    async def map_current(self, timeout_s: float) -> None:
        """A newer generation is there: let go of the old one, map and verify this one."""
        await self.let_go()
        await self.client.release()
        await self.load(timeout_s)

    async def remap(self, place: Place, on_loading: Callable[[str], None], *, doubted: bool) -> None:
        """Map again what was unmapped; an empty vault is filled, by one who is elected."""
        if await self.client.remap(round(place.wake_s * 1000)) == EMPTY:
            log.warning("the vault is empty: loading the weights anew")
            on_loading("the vault is empty: the weights are loaded anew")
            await self.load(place.load_s, elected=True)
        elif doubted:
            await self.verify()
        self.plan.use(self.client.mapped)

    async def let_go(self) -> None:
        """Nothing here reads or writes the weights any more: they may be unmapped."""
        self.plan.use(None)
        if self._thread is not None:
            await asyncio.wait([self._thread])

    async def verify(self) -> None:
        """What is mapped is what it was; StaleMemoryLayoutError else."""
        wrong = await self.wrong()
        if wrong:
            raise StaleMemoryLayoutError(f"the weights mapped here are damaged: {wrong}")

    # -- inside

    async def _once(self, lock: WriterLock, role: int) -> str:
        """Until the weights are mapped: what is wrong with them, or nothing."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        got = await self._by_role(lock, role)
        size = self.client.mapped.size if self.client.mapped is not None else 0
        wrong = "" if got == RW else await self.wrong()
        if not wrong:
            self.plan.use(self.client.mapped)
            done = "written" if got == RW else "mapped and verified"
            log.info("weights %s: %d bytes %s in %.2f s", self.plan.identity, size, done, loop.time() - started_s)
        return wrong

    async def _by_role(self, lock: WriterLock, role: int) -> str:
        client, loop = self.client, asyncio.get_running_loop()
        watch, told = Watch(role), ""
        while True:
            try:
                # The lock first, then the device: a writer commits before it lets go.
                owner = None if lock.held else lock.owner()
                phase = json.loads(await client.status())["weights"]
                watch, plan = who_loads(watch, Look({client.device.name: phase}, owner, lock.held), loop.time())
                if plan.action is Action.TAKE_LOCK:
                    if not lock.try_acquire():
                        await asyncio.sleep(RETRY_S)
                    continue
                log.debug("weights: %s (%s)", plan.action, plan.reason)
                mode = "rw_or_ro" if plan.action is Action.LOAD else "ro"
                with contextlib.suppress(TimeoutError):
                    got = await client.acquire(mode, LOOK_MS, wait_for_writer=True)
                    if got == RW:
                        await self._write()
                    if got in (RO, RW):
                        return got
            except (ConnectionError, VaultRefused) as error:
                if isinstance(error, VaultRefused) and error.code not in ("aborted", "busy"):
                    raise
                if str(error) != told:
                    log.warning("the vault was lost while loading (%s); trying again", error)
                told = str(error)
                await self._come_back()

    async def _come_back(self) -> None:
        await asyncio.sleep(RETRY_S)
        with contextlib.suppress(ConnectionError):
            await self.client.connect()

    async def _replace(self, lock: WriterLock) -> None:
        """Load anew what cannot be used, beside it if there is room: nobody waits then. Else in its place."""
        await lock.acquire(LOCK_S)
        mapped = self.client.mapped
        assert mapped is not None, "nothing is mapped that could be replaced"
        hashed, others = mapped.layout.hash(), mapped.layout.identity != self.plan.identity
        await self.let_go()
        await self.client.release()
        try:
            got = await self.client.acquire("rw", REPLACE_MS, replace=hashed)
            assert got == RW, got
            await self._write()
            self.plan.use(self.client.mapped)
        except (OutOfMemory, VaultRefused) as error:
            if isinstance(error, VaultRefused) and error.code != "over_budget":
                raise
            await self.client.release()
            if others and json.loads(await self.client.status())["readers"]:
                raise  # another model's engines live on it
            log.warning("both do not fit (%s): what is there is dropped first", error)
            await self.client.drop(hashed, LET_GO_MS)
            wrong = await self._once(lock, 0)
            if wrong:
                raise StaleMemoryLayoutError(f"the weights were loaded anew, and are not right: {wrong}") from error

    async def _write(self) -> None:
        addresses = await self._allocated()
        log.info("writing the weights %s", self.plan.identity)
        await self._in_thread(lambda: self.plan.fill(addresses))
        await self.client.commit()
        self._untouch()

    async def _allocated(self) -> dict[str, int]:
        """Memory may be on its way back; what two copies need together will not come by waiting."""
        client, loop = self.client, asyncio.get_running_loop()
        deadline_s = loop.time() + ROOM_S
        specs = await self._in_thread(lambda: self.plan.specs)
        while True:
            try:
                return await client.allocate(specs, self.plan.identity, self.plan.meta)
            except OutOfMemory:
                beside = json.loads(await client.status())["layout_hash"] is not None
                if beside or loop.time() >= deadline_s:
                    raise
                await asyncio.sleep(RETRY_S)

    async def wrong(self) -> str:
        """Read everything that is mapped: what is wrong with it, or nothing."""
        mapped = self.client.mapped
        assert mapped is not None, "nothing is mapped"
        wrong = await self._in_thread(lambda: self.plan.verify(mapped))
        self._untouch()
        return wrong

    async def _in_thread(self, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(None, work)
        self._thread = future
        return await asyncio.shield(future)

    def _untouch(self) -> None:
        """On the host every page once touched delays the news of this process's death (fact 4c): touch none."""
        mapped = self.client.mapped
        if mapped is not None and mapped.present and is_host(self.client.device.name):
            advise(mapped.address, mapped.size, DONTNEED)
