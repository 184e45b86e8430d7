"""The other ranks of a vLLM engine, from the leader's side. The leader is the engine's own process, and rank 0.

It alone has vLLM's EngineCore, a scheduler and a pool that decides. Whatever vLLM asks of its worker is told to the
others before the leader's own worker does it, and the sums inside the forward pass keep all in step.

Always true: everything here but `seat` and `stop` is called in the step thread; what a step published is published on
every rank before its outputs leave that thread; one rank's end is the engine's. With one rank all of this does nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engines.shadow.acts import NotedIndex
from holdfast.engines.shadow.frames import ANSWER_S
from holdfast.engines.shadow.memory import VaultMemory
from holdfast.engines.shadow.ranks import Ranks
from holdfast.engines.shadow.seat import ends_when_emptied
from holdfast.engines.shadow.table import LeadersTable
from holdfast.engines.vllm.ranks.words import Told, answers, tell
from holdfast.kv.pool import Pool
from holdfast.spec.engines import Place, VllmSettings

START_S = 300.0  # a process that imports vLLM on a busy machine takes a minute
SHARED_MEMORY = Path("/dev/shm")


class RankWork(msgspec.Struct, frozen=True):
    """What a further rank is told: plain data."""

    path: str  # of the model
    identity: str
    settings: VllmSettings
    place: Place
    rank: int
    ranks: int
    meeting: str


class Leader:
    """`seat` once; then whatever is told is done on every rank."""

    def __init__(self, place: Place) -> None:
        self.count = 1 + len(place.more_vaults)
        self._place = place
        at = Path(place.vault_socket)
        self._folder = at.with_name(f"{at.stem}.ranks-{place.engine_id}")
        self.meeting = ""  # where vLLM's ranks find each other
        self._steps: list[socket.socket] = []
        self._tables: list[socket.socket] = []
        self._index: NotedIndex | None = None

    async def seat(self, memory: VaultMemory, ranks: Ranks, path: str, identity: str, settings: VllmSettings) -> None:
        """Every rank started, with all that it needs imported."""
        if self.count == 1:
            return
        ends_when_emptied(memory)
        shutil.rmtree(self._folder, ignore_errors=True)  # one of this number that was killed left it
        self._folder.mkdir(mode=0o700)
        # What vLLM shares between ranks on CPUs is named after this file.
        file, name = tempfile.mkstemp(prefix="holdfast-", dir=self._folder)
        os.close(file)
        self.meeting = f"file://{name}"
        for rank in range(1, self.count):
            place = self._place.of_rank(rank)
            work = RankWork(path, identity, settings, place, rank, self.count, self.meeting)
            steps, table = ranks.seat("holdfast.engines.vllm.ranks.rank", msgspec.json.encode(work))
            steps.settimeout(self._place.load_s)  # one may have kernels to compile that another has
            self._steps.append(steps)
            self._tables.append(table)
        memory.peers = LeadersTable(self._tables, self._place.wake_s, ranks.fenced)
        await ranks.order("hello", START_S)

    def stop(self) -> None:
        for each in (*self._steps, *self._tables):
            each.close()
        self._steps.clear()
        self._tables.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def met(self) -> None:
        """vLLM is made on every rank. What it shares between them is mapped by now: nobody needs its names any more,
        and a killed engine leaves none."""
        for steps in self._steps:
            steps.settimeout(ANSWER_S)
        name = self.meeting.rpartition("/")[2]
        for file in SHARED_MEMORY.glob(f"{name}-*") if name else ():
            file.unlink(missing_ok=True)

    # -- in the step thread

    def note(self, pool: Pool) -> None:
        """From now on the others hear what is done to this pool's index."""
        if self.count > 1:
            pool.index = self._index = NotedIndex(pool.index)

    def tell(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, answered: bool) -> None:
        tell(self._steps, Told(self._acts(), method, args, kwargs, answered))

    def answers(self) -> list[Any]:
        return answers(self._steps)

    def published(self) -> None:
        """What was published here is published on every rank."""
        if self._index is not None and self._index.published:
            self._settle(Told(self._acts()))

    def rest(self) -> None:
        """What the index says, every rank's says; every call told so far is over there."""
        if self.count > 1:
            self._settle(Told(self._acts(), at_rest=True))

    def forget(self) -> None:
        """Nothing more is noted."""
        self._index = None

    # -- inside

    def _acts(self) -> list[Any]:
        return self._index.taken() if self._index is not None else []

    def _settle(self, told: Told) -> None:
        tell(self._steps, told)
        answers(self._steps)
