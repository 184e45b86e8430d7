"""Loads weights into a vault and maps them: decides which engine loads, what is verified, and when weights are
replaced.

Always true:
- An engine writes only with the machine-wide writer lock, and releases it when the load ends, also by an error.
- When `load` returns, this process has verified or written the weights.
- Every wait ends at the deadline.
- `load` and `repair` never replace weights that are right.

Filling and verifying run in a thread, so that heartbeats and connections go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from holdfast.memory.client.calls import StaleMemoryLayoutError, VaultRefused
from holdfast.memory.client.weights import EMPTY, RO, RW, MappedWeights, MemoryClient
from holdfast.memory.devices import OutOfMemory, view
from holdfast.memory.devices.pages import advise
from holdfast.memory.layout import TensorSpec
from holdfast.memory.writer_lock import LoadAction, LoadLook, LoadWatch, WriterLock, plan_load
from holdfast.spec.engines import FailoverSettings
from holdfast.spec.names import is_host

LOOK_MS = 100  # one wait for a writer, before the lock and the phase are read again
RETRY_S = 0.05  # between two tries at a vault or lock that is not free: negligible beside a load
REPLACE_MS = 60_000  # for another writer to finish or die; the load's own deadline may come first
LET_GO_MS = 60_000  # for standbys to unmap weights that will be dropped: at once, unless a canary runs
ROOM_S = 10.0  # for memory that the vault, its keeper and a dead engine just released to come free (fact 1)
LOCK_S = 60.0  # for another process to release the writer lock
DONTNEED = 4  # MADV_DONTNEED: of a shared mapping it drops the page tables, never the bytes

log = logging.getLogger(__name__)
T = TypeVar("T")


class WeightsPlan(Protocol):
    """One set of weights: its identity, its tensors, how they are written and how they are checked."""

    identity: str
    meta: dict[str, str]

    @property
    def specs(self) -> list[TensorSpec]:
        """Return the tensors to write; may be computed on first use, in a thread."""

    def fill(self, addresses: dict[str, int]) -> None:
        """Write everything; called in a thread. Keep no buffer afterwards (fact 4c)."""

    def verify(self, mapped: MappedWeights) -> str:
        """Return why the mapped weights are not this set, or ""; called in a thread."""

    def use(self, mapped: MappedWeights | None) -> None:
        """Read the weights at this mapping from now on; None: they are unmapped, and old addresses are invalid."""


class BytesPlan:
    """Weights given as plain bytes, by name, on a device whose memory this process can read. `views` holds the mapped
    bytes."""

    def __init__(self, identity: str, tensors: Mapping[str, bytes]) -> None:
        self.identity, self._tensors, self.meta = identity, tensors, dict[str, str]()
        sizes = {name: len(data) for name, data in tensors.items()}
        self.specs = [TensorSpec(name, (size,), (1,), "uint8", size) for name, size in sizes.items()]
        self.views: dict[str, memoryview] = {}

    def fill(self, addresses: dict[str, int]) -> None:
        for name, data in self._tensors.items():
            view(addresses[name], len(data), writable=True)[:] = data

    def verify(self, mapped: MappedWeights) -> str:
        if mapped.layout.identity != self.identity:
            return f"it is {mapped.layout.identity}, not {self.identity}"
        found, addresses = self._tensors.items(), mapped.addresses()
        wrong = [name for name, data in found if view(addresses[name], len(data)) != data]
        return f"{wrong[0]} is not what was written" if wrong else ""

    def use(self, mapped: MappedWeights | None) -> None:
        addresses = mapped.addresses() if mapped is not None else {}
        self.views = {name: view(at, len(self._tensors[name])) for name, at in addresses.items()}


@dataclass(slots=True)
class Loader:
    client: MemoryClient
    plan: WeightsPlan
    lock_dir: Path
    engine_name: str
    _thread: asyncio.Future[Any] | None = None  # fills or verifies; it goes on if the wait for it is cancelled

    async def connect(self, timeout_s: float) -> None:
        """Wait for the vault's socket and connect; raise ConnectionError if there is none in time."""
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
        """Map and verify the weights; write them if no other engine does. An `elected` engine does not let another
        engine try first."""
        async with self._bounded(timeout_s, "there") as lock:
            wrong = await self._once(lock, 0 if elected else self.client.engine_id)
            if wrong:
                log.warning("the weights in the vault are not to be used: %s; loading them anew", wrong)
                await self._replace(lock)

    async def repair(self, timeout_s: float) -> str:
        """Verify the mapped weights, and load them again if they are damaged; return what was wrong, or ""."""
        async with self._bounded(timeout_s, "verified and loaded") as lock:
            wrong = await self.wrong()
            if wrong:
                log.warning("the weights mapped here are damaged: %s; loading them anew", wrong)
                await self._replace(lock)
            return wrong

    async def renew(self, timeout_s: float) -> None:
        """Load the mapped weights again, right or wrong."""
        async with self._bounded(timeout_s, "loaded again") as lock:
            await self._replace(lock)

    async def map_current(self, timeout_s: float) -> None:
        """Unmap the old generation; map and verify the newer one."""
        await self.stop_using()
        await self.client.release()
        await self.load(timeout_s)

    async def remap(self, failover: FailoverSettings, on_loading: Callable[[str], None], *, doubted: bool) -> None:
        """Map the unmapped weights again; load them if the vault is empty, and verify them if `doubted`."""
        if await self.client.remap(round(failover.wake_s * 1000)) == EMPTY:
            log.warning("the vault is empty: loading the weights again")
            on_loading("the vault is empty: the weights are loaded again")
            await self.load(failover.load_s, elected=True)
        elif doubted:
            await self.verify()
        self.plan.use(self.client.mapped)

    async def stop_using(self) -> None:
        """Stop reading and writing the weights, so that they may be unmapped."""
        self.plan.use(None)
        if self._thread is not None:
            await asyncio.wait([self._thread])

    async def verify(self) -> None:
        """Raise StaleMemoryLayoutError if the mapped weights are damaged."""
        wrong = await self.wrong()
        if wrong:
            raise StaleMemoryLayoutError(f"the weights mapped here are damaged: {wrong}")

    # -- inside

    @contextlib.asynccontextmanager
    async def _bounded(self, timeout_s: float, what: str) -> AsyncIterator[WriterLock]:
        """Yield the writer lock and release it at the end; on TimeoutError, name `what` was not done in time."""
        lock = WriterLock(self.lock_dir, self.engine_name)
        try:
            async with asyncio.timeout(timeout_s):
                yield lock
        except TimeoutError as error:
            raise TimeoutError(f"the weights were not {what} within {timeout_s:g} s: {error}") from error
        finally:
            lock.release()

    async def _once(self, lock: WriterLock, role: int) -> str:
        """Map the weights; return what is wrong with them, or ""."""
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
        watch, told = LoadWatch(role), ""
        while True:
            try:
                # Read the lock first, then the device: a writer commits before it releases the lock.
                owner = None if lock.held else lock.owner()
                phase = json.loads(await client.status())["weights"]
                watch, plan = plan_load(watch, LoadLook({client.device.name: phase}, owner, lock.held), loop.time())
                if plan.action is LoadAction.TAKE_LOCK:
                    if not lock.try_acquire():
                        await asyncio.sleep(RETRY_S)
                    continue
                log.debug("weights: %s (%s)", plan.action, plan.reason)
                mode = "rw_or_ro" if plan.action is LoadAction.LOAD else "ro"
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
        """Load the weights again: beside the old ones if there is room, so that no engine waits, else in their
        place."""
        await lock.acquire(LOCK_S)
        mapped = self.client.mapped
        assert mapped is not None, "nothing is mapped that could be replaced"
        hashed, others = mapped.layout.hash(), mapped.layout.identity != self.plan.identity
        await self.stop_using()
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
                raise  # engines of another model read these weights
            log.warning("both do not fit (%s): what is there is dropped first", error)
            await self.client.drop(hashed, LET_GO_MS)
            wrong = await self._once(lock, 0)
            if wrong:
                raise StaleMemoryLayoutError(f"the weights were loaded again, and are not right: {wrong}") from error

    async def _write(self) -> None:
        addresses = await self._allocated()
        log.info("writing the weights %s", self.plan.identity)
        await self._in_thread(lambda: self.plan.fill(addresses))
        await self.client.commit()
        self._untouch()

    async def _allocated(self) -> dict[str, int]:
        """Allocate the tensors; wait for memory that is being freed. Do not wait if there is no room for two copies."""
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
        """Read all mapped weights; return what is wrong with them, or ""."""
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
        """Drop the page tables of weights in host memory: each touched page delays the detection of this process's
        death (fact 4c)."""
        mapped = self.client.mapped
        if mapped is not None and mapped.present and is_host(self.client.device.name):
            advise(mapped.address, mapped.size, DONTNEED)
