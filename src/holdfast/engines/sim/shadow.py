"""The sim engine as a shadow engine: weights and KV in a vault, so that another can go on where this one ended.

Always true: before `wake` only private memory is written; tokens depend on what is read from both memories, so memory
that is not what it should be shows; a wake returns with every rank under the epoch. Everything is mapped, verified and
tried by the canary when `load` returns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from holdfast.engines.contract import Canary, Woken
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.canary import TOKENS, canary_request, run_canary
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.place import Place
from holdfast.engines.sim.computer import TOKEN_BYTES, SimComputer, geometry
from holdfast.engines.sim.engine import SimEngine
from holdfast.engines.sim.faults import Fault
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.ranks import Ranks
from holdfast.engines.sim.serving import scheduler_settings
from holdfast.engines.sim.settings import REVISION, SimSettings
from holdfast.engines.sim.vocabulary import load
from holdfast.engines.sim.weights import SimWeights
from holdfast.kv.resumes import Resumes
from holdfast.memory.devices import open_device, view

GIB = 1024**3
CHECK_S = 30.0  # for weights that are being mapped anew
PRIVATE_BYTES = 4096


def make_canary() -> Canary:
    request = canary_request(load().size)
    sequence = Sequence(load(), request.tokens, request.prompt_len, request.sampling)
    return Canary(request, tuple(sequence.advance() for _ in range(TOKENS)))


class ShadowSim(SimEngine):
    """`load`, `start`, then any number of (`wake`, `rest`)."""

    def __init__(self, settings: SimSettings, rng: random.Random, place: Place) -> None:
        super().__init__(settings, rng)
        self.place = place
        self.canary = make_canary()
        self.on_owner_gone: Callable[[int], None] = lambda epoch: None
        self.on_memory: Callable[[str], None] = lambda why: None
        self.on_loading: Callable[[str], None] = lambda why: None
        pool_bytes = settings.kv_blocks * settings.block_size * TOKEN_BYTES
        self.weights = SimWeights(REVISION, round(settings.vault_gib * GIB) - pool_bytes)
        self.memory = VaultMemory(
            socket_path=place.vault_socket,
            device=open_device(place.device),
            host=open_device("host-0"),
            engine_id=place.engine_id,
            who=place.who,
            lock_dir=Path(place.vault_socket).parent,
            geometry=geometry(self.weights.identity, settings.block_size, settings.kv_blocks),
            private_bytes=max(PRIVATE_BYTES, TOKEN_BYTES * 2 * settings.block_size),
            unmapped=place.unmapped,
            direct=place.direct,
            own_s=place.wake_s,
            load_s=place.load_s,
            vault_uids=place.vault_uids,
            on_owner_gone=lambda epoch: self.on_owner_gone(epoch),
            on_memory=lambda why: self.on_memory(why),
            on_fatal=lambda why: self.on_fatal(why),
            on_loading=lambda why: self.on_loading(why),
            on_room=self._room_came,
        )
        self.gpu_fence = self.memory.gpu_fence
        self.ranks = Ranks(settings.ranks - 1, lambda why: self.on_fatal(why))
        self._blocks: PoolBlocks | None = None
        self._checked = False  # the last canary's outcome

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.memory!r}>"

    # -- standing by

    @property
    def last_epoch(self) -> int:
        return self.memory.client.last_epoch

    @property
    def resumes(self) -> Resumes:
        return self._blocks.resumes if self._blocks is not None else Resumes()

    async def load(self) -> None:
        await self.memory.load(self.weights)
        await self.ranks.start(self.place.vault_socket, self.place.device, self.place.engine_id, self.place.load_s)
        if not await self.check():
            return  # its caller checks too, and says so
        if self.place.unmapped:
            await self.memory.sleep()

    async def stop(self) -> None:
        await super().stop()
        self._blocks = None
        self.ranks.stop()
        await self.memory.close()

    async def check(self) -> bool:
        """The canary through a scheduler of its own, in private pages. Asleep there is nothing to read: the last
        outcome stands. A wedged engine makes no token: not right."""
        if self.memory.asleep:
            return self._checked
        try:
            async with asyncio.timeout(CHECK_S):
                await self.memory.settled.wait()
        except TimeoutError:
            return False
        self._checked = not self.faults.wedged and self._run_canary() == self.canary.tokens
        return self._checked

    def _run_canary(self) -> tuple[int, ...]:
        mapping = self.memory.pool.mapping
        assert mapping is not None, "private memory is mapped from the first load on"
        pages = view(mapping.private_address, mapping.private_size, writable=True)
        size = self.settings.block_size
        # Its own limits: an engine too small for its canary is still tried by it.
        settings = replace(scheduler_settings(self.settings), context_tokens_max=len(pages) // TOKEN_BYTES)
        computer = SimComputer(pages, size, self.faults, self.weights.right)
        blocks = range(len(pages) // (size * TOKEN_BYTES))
        try:
            return run_canary(self.canary.request, settings, computer, blocks, size)
        finally:
            computer.close()

    # -- awake

    def _begin(self) -> None:
        """It serves once it is woken."""

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        faults = self.faults
        if faults.wake_fails:
            faults.wake_fails = False
            raise ConnectionError("the wake failed on command (fault wake_fails)")
        if faults.wake_hangs:
            await asyncio.Event().wait()
        owned = await self.memory.own(epoch)
        await self.ranks.wake(epoch, pass_fds, self.place.wake_s)
        size = self.memory.geometry.block_bytes * self.memory.geometry.block_count
        pages = view(owned.pages_address, size, writable=True)
        self._blocks = PoolBlocks(owned.pool)
        self._serve(self._blocks, pages, self.weights.right)
        return Woken(owned.blocks, owned.reason, owned.marks)

    def canary_passed(self) -> None:
        if self.memory.owned is not None:
            self.memory.owned.pool.canary_passed()

    async def rest(self) -> None:
        """Streams that still run get no further word but that they are closed here."""
        left = self._rest()
        if left:
            self._closed(left)
        self._blocks = None
        await self.ranks.rest(self.place.wake_s)
        await self.memory.rest()

    def _room_came(self) -> None:
        if self._loop is not None and self._serving is not None:
            self._serving.admit(self._loop.time())
            self._rearm()

    # -- faults

    def _inject_shadow(self, fault: Fault) -> None:
        if fault.kind == "memory_flip":
            self.weights.damage()
        else:
            self.faults.switch(fault)

    def _recover(self) -> None:
        super()._recover()
        if not self.memory.asleep:
            self.weights.use(self.memory.client.mapped)
