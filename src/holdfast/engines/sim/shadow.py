"""The sim engine as a tenant: weights and KV in a vault, so that another can go on where this one ended.

Always true: before `begin` only private memory is written; tokens depend on what is read from both memories, so memory
that is not what it should be shows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from holdfast.engines.contract import Woken
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.canary import TOKENS, canary_request, canary_steps, run_canary_in_loop
from holdfast.engines.shadow.engine import Tenant, VaultEngine
from holdfast.engines.shadow.flips import Flips
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.pool import Owned
from holdfast.engines.shadow.proving import Canary
from holdfast.engines.shadow.ranks import Ranks
from holdfast.engines.sim.computer import TOKEN_BYTES, SimComputer, geometry
from holdfast.engines.sim.engine import SimEngine
from holdfast.engines.sim.faults import Fault
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.serving import scheduler_settings
from holdfast.engines.sim.vocabulary import Tongue, Vocabulary
from holdfast.engines.sim.weights import HEAD, SimWeights
from holdfast.kv.resumes import Resumes
from holdfast.memory.client.pool_mapping import PoolMapping
from holdfast.memory.devices import view
from holdfast.spec.engines import Place, SimSettings

GIB = 1024**3
PRIVATE_BYTES = 4096


def make_canary(vocabulary: Vocabulary) -> Canary:
    request = canary_request(vocabulary.size)
    sequence = Sequence(vocabulary, request.tokens, request.prompt_len, request.sampling)
    return Canary(request, tuple(sequence.advance() for _ in range(TOKENS)))


class SimTenant(SimEngine, Tenant):
    """The sim over mapped memory: it serves between `begin` and `end`."""

    def __init__(self, settings: SimSettings, rng: random.Random) -> None:
        super().__init__(settings, rng)
        self._canary = make_canary(self.vocabulary)
        pool_bytes = settings.kv_blocks * settings.block_size * TOKEN_BYTES
        self.weights: SimWeights = SimWeights(Tongue.of(settings).weights, round(settings.vault_gib * GIB) - pool_bytes)
        self.geometry = geometry(self.weights.identity, settings.block_size, settings.kv_blocks)
        self.private_bytes = max(PRIVATE_BYTES, TOKEN_BYTES * 2 * settings.block_size)
        self._blocks: PoolBlocks | None = None
        self._flips: Flips | None = None

    @property
    def canary(self) -> Canary:
        return self._canary

    @property
    def resumes(self) -> Resumes:
        return self._blocks.resumes if self._blocks is not None else Resumes()

    # -- standing by

    def _serve_alone(self) -> None:
        """It serves once there is a pool."""

    async def settle(self, memory: VaultMemory, ranks: Ranks) -> None:
        self._flips = Flips(memory)
        ranks.seat_guests(self.settings.ranks - 1)
        await memory.settled.wait()
        await ranks.load()

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """The canary through a scheduler of its own, in private pages. A wedged engine makes no token: not right."""
        if self.faults.wedged:
            return "it makes no tokens"
        return "" if await self._run_canary(mapping, dropped) == self._canary.tokens else self._canary.suspects

    async def _run_canary(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> tuple[int, ...]:
        pages = view(mapping.private_address, mapping.private_size, writable=True)
        size = self.settings.block_size
        # Its own limits: an engine too small for its canary is still tried by it.
        settings = replace(scheduler_settings(self.settings), context_tokens_max=len(pages) // TOKEN_BYTES)
        computer = SimComputer(self.vocabulary, pages, size, self.faults, self.weights.right)
        blocks = range(len(pages) // (size * TOKEN_BYTES))
        steps = canary_steps(self._canary.request, settings, computer.compute, blocks, size)
        try:
            return await run_canary_in_loop(steps, dropped)
        finally:
            computer.close()

    # -- awake

    async def begin(self, owned: Owned) -> None:
        size = self.geometry.block_bytes * self.geometry.block_count
        pages = view(owned.pages_address, size, writable=True)
        self._blocks = PoolBlocks(owned.pool)
        self._serve(self._blocks, pages, self.weights.right)

    async def end(self) -> list[int]:
        self._blocks = None
        return self._rest()

    def room(self) -> None:
        if self._loop is not None and self._serving is not None:
            self._serving.admit(self._loop.time())
            self._rearm()

    # -- faults

    def _inject_shadow(self, fault: Fault) -> None:
        assert self._flips is not None, "faults come after the load"
        if fault.kind == "memory_flip":
            self._flips.flip_all(HEAD, 0x10)
        elif fault.kind == "flip_bits":
            self.faults.flipped += self._flips.flip_random(int(fault.value))
        else:
            self.faults.switch(fault)

    def _recover(self) -> None:
        super()._recover()
        if self._flips is not None:
            self._flips.mend()


class ShadowSim(VaultEngine[SimTenant]):
    """The sim as a shadow engine, whose wakes fail and hang on command, and whose weights are accused on command."""

    def __init__(self, settings: SimSettings, rng: random.Random, place: Place) -> None:
        super().__init__(SimTenant(settings, rng), place)

    async def verify(self) -> str:
        accused = "the weights are damaged, on command (fault wrong_verify)" if self.tenant.faults.wrong_verify else ""
        return accused or await super().verify()

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        faults = self.tenant.faults
        if faults.wake_fails:
            faults.wake_fails = False
            raise ConnectionError("the wake failed on command (fault wake_fails)")
        if faults.wake_hangs:
            await asyncio.Event().wait()
        return await super().wake(epoch, pass_fds)
