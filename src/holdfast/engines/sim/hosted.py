"""Hosts the sim engine in a vault, which has its weights and KV, so that another engine can continue its streams.

Always true: before `begin` only private memory is written. Tokens depend on the bytes read from weights and KV, so
wrong memory makes wrong tokens. Only engines with a vault import numpy, so that other workers start faster.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from holdfast.engines.contract import Woken
from holdfast.engines.host.engine import HostedEngine, VaultEngine
from holdfast.engines.host.flips import Flips
from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.host.pool import Owned
from holdfast.engines.host.proving import Canary
from holdfast.engines.paged.blocks import PoolBlocks
from holdfast.engines.paged.canary import TOKENS, canary_request, canary_steps, run_canary_in_loop
from holdfast.engines.ranks.leader import RankProcesses
from holdfast.engines.sim.computer import TOKEN_BYTES, SimComputer, geometry, weights_bytes
from holdfast.engines.sim.engine import SimEngine
from holdfast.engines.sim.faults import Fault
from holdfast.engines.sim.language import Sequence
from holdfast.engines.sim.serving import scheduler_settings
from holdfast.engines.sim.vocabulary import LanguageVariant
from holdfast.kv.pool import Resumes
from holdfast.memory.client.pool import PoolMapping
from holdfast.memory.client.weights import MappedWeights
from holdfast.memory.devices import view
from holdfast.memory.layout import TensorSpec
from holdfast.spec.engines import FailoverSettings, SimSettings

MIB = 1024 * 1024
ODD = 0x9E3779B97F4A7C15
MASK = 2**64 - 1
WORD_BYTES = 8
HEAD_WORDS = 512
HEAD = "head"
BODY_TENSORS = 4
PIECE_WORDS = MIB // WORD_BYTES  # fits a core's cache: filling and adding run at the memory's speed
BYTES_MIN = 2 * MIB  # one slab on any device
SUM = "sum"  # its name in the layout's meta


class SimWeights:
    """The sim engine's weights: bytes that follow from their identity, so that any reader can tell what they must be.

    Word i is (i + seed) * ODD modulo 2**64; a tensor starts where the one before it ended. Their sum is known ahead and
    kept in the layout, so a reader can verify everything it maps. The first tensor is the *head*: every step reads a
    word of it, and a wrong word makes wrong tokens, as damaged weights would.
    """

    def __init__(self, revision: str, total_bytes: int) -> None:
        total_bytes = max(BYTES_MIN, total_bytes // (2 * MIB) * (2 * MIB))
        self.identity = f"{revision}, {total_bytes} bytes"
        self.seed = int.from_bytes(blake2b(self.identity.encode(), digest_size=8).digest(), "little")
        self.specs = _specs(total_bytes // WORD_BYTES)
        count = sum(spec.shape[0] for spec in self.specs)
        self.meta = {SUM: f"{(count * (count - 1) // 2 + count * self.seed) * ODD & MASK:016x}"}
        self._head: memoryview | None = None
        self._right = tuple((index + self.seed) * ODD & MASK for index in range(HEAD_WORDS))
        self._at = 0

    # -- written and verified, in a thread

    def fill(self, addresses: dict[str, int]) -> None:
        piece = np.arange(PIECE_WORDS, dtype=np.uint64) * np.uint64(ODD)
        first = 0
        for spec in self.specs:
            words = _array(addresses[spec.name], spec.shape[0], writable=True)
            for start in range(0, len(words), PIECE_WORDS):
                part = words[start : start + PIECE_WORDS]
                offset = np.uint64((first + start + self.seed) * ODD & MASK)
                np.add(piece[: len(part)], offset, out=part)
            first += spec.shape[0]

    def verify(self, mapped: MappedWeights) -> str:
        """Read all weights; return what is wrong with them, or ""."""
        if mapped.layout.identity != self.identity or mapped.layout.meta != self.meta:
            return f"it is {mapped.layout.identity}, not {self.identity}"
        addresses = mapped.addresses()
        total = 0
        for location in mapped.layout.tensors:
            words = _array(addresses[location.name], location.shape[0])
            total += int(np.sum(words, dtype=np.uint64))
        found = f"{total & MASK:016x}"
        return "" if found == self.meta[SUM] else f"its words add up to {found}, not {self.meta[SUM]}"

    # -- read by every step

    def use(self, mapped: MappedWeights | None) -> None:
        """Read the weights at this mapping from now on; None: nothing is mapped."""
        if self._head is not None:
            self._head.release()
        address = mapped.addresses()[HEAD] if mapped is not None else 0
        self._head = view(address, HEAD_WORDS * WORD_BYTES).cast("Q") if mapped is not None else None

    def right(self) -> bool:
        """Read the next word of the head; return True if it is right."""
        assert self._head is not None, "no weights are mapped"
        at = self._at
        self._at = (at + 1) % HEAD_WORDS
        return bool(self._head[at] == self._right[at])


def _specs(words: int) -> list[TensorSpec]:
    body = words - HEAD_WORDS
    each = body // BODY_TENSORS
    sizes = {HEAD: HEAD_WORDS} | {f"layers.{layer}": each for layer in range(BODY_TENSORS)}
    sizes[f"layers.{BODY_TENSORS - 1}"] += body - each * BODY_TENSORS
    return [TensorSpec(name, (size,), (1,), "uint64", size * WORD_BYTES) for name, size in sizes.items()]


def _array(address: int, words: int, *, writable: bool = False) -> NDArray[np.uint64]:
    return np.frombuffer(view(address, words * WORD_BYTES, writable=writable), np.uint64)


PRIVATE_BYTES = 4096


class HostedSim(SimEngine, HostedEngine):
    """The sim engine over mapped memory: it serves between `begin` and `end`."""

    def __init__(self, settings: SimSettings, rng: random.Random) -> None:
        super().__init__(settings, rng)
        asked = canary_request(self.vocabulary.size)
        text = Sequence(self.vocabulary, asked.tokens, asked.prompt_len, asked.sampling)
        self._canary = Canary(asked, tuple(text.advance() for _ in range(TOKENS)))
        self.weights: SimWeights = SimWeights(LanguageVariant.of(settings).weights, weights_bytes(settings))
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
        """Do nothing: it serves once there is a pool."""

    async def prepare(self, memory: VaultMemory, ranks: RankProcesses) -> None:
        self._flips = Flips(memory)
        ranks.start_at_own_vault(self.settings.ranks - 1)
        await memory.weights_ready.wait()
        await ranks.load()

    async def check(self, mapping: PoolMapping, dropped: Callable[[], bool]) -> str:
        """Run the canary in a separate scheduler, in private pages. A wedged engine makes no token, which is a wrong
        answer."""
        if self.faults.wedged:
            return "it makes no tokens"
        pages = view(mapping.private_address, mapping.private_size, writable=True)
        size = self.settings.block_size
        # Its own limits: an engine too small for its canary is still tried by it.
        settings = replace(scheduler_settings(self.settings), context_tokens_max=len(pages) // TOKEN_BYTES)
        computer = SimComputer(self.vocabulary, pages, size, self.faults, self.weights.right)
        blocks = range(len(pages) // (size * TOKEN_BYTES))
        steps = canary_steps(self._canary.request, settings, computer.compute, blocks, size, dropped)
        try:
            tokens = await run_canary_in_loop(steps)
        finally:
            computer.close()
        return "" if tokens == self._canary.tokens else self._canary.suspects

    # -- awake

    async def begin(self, owned: Owned) -> None:
        size = self.geometry.block_bytes * self.geometry.block_count
        pages = view(owned.pages_address, size, writable=True)
        self._blocks = PoolBlocks(owned.pool)
        self._serve(self._blocks, pages, self.weights.right)

    async def end(self) -> list[int]:
        self._blocks = None
        return self._end_serving()

    def room(self) -> None:
        if self._loop is not None and self._serving is not None:
            self._serving.admit(self._loop.time())
            self._rearm()

    # -- faults

    def _inject_in_vault(self, fault: Fault) -> None:
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


class VaultSim(VaultEngine[HostedSim]):
    """The sim as a failover engine: on command its wakes fail or hang, and its weights are reported as damaged."""

    def __init__(self, settings: SimSettings, rng: random.Random, failover: FailoverSettings) -> None:
        super().__init__(HostedSim(settings, rng), failover)

    async def verify(self) -> str:
        accused = "the weights are damaged, on command (fault wrong_verify)" if self.hosted.faults.wrong_verify else ""
        return accused or await super().verify()

    async def wake(self, epoch: int, pass_fds: tuple[int, ...] = ()) -> Woken:
        faults = self.hosted.faults
        if faults.wake_fails:
            faults.wake_fails = False
            raise ConnectionError("the wake failed on command (fault wake_fails)")
        if faults.wake_hangs:
            await asyncio.Event().wait()
        return await super().wake(epoch, pass_fds)
