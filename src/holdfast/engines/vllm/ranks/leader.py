"""Leads the other ranks of a vLLM engine. The leader is the engine's own process, and rank 0.

Only the leader has vLLM's EngineCore, a scheduler, and a pool that decides about blocks. Each method that vLLM calls on
its worker is first sent to the other ranks (pickled, as between vLLM's own processes), then run by the leader's worker.
The all-reduces inside the forward pass keep the ranks in step.

Always true: all methods but `start_ranks` and `stop` are called in the step thread. Blocks that a step published are
published on every rank before its outputs leave that thread. When one rank ends, the engine ends. With one rank all of
this does nothing.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engines.host.memory import VaultMemory
from holdfast.engines.ranks.frames import ANSWER_S
from holdfast.engines.ranks.leader import RankProcesses, StepLeader
from holdfast.spec.engines import FailoverSettings, VllmSettings

START_S = 300.0  # a process that imports vLLM on a busy machine takes a minute
SHARED_MEMORY = Path("/dev/shm")


class VllmRankWork(msgspec.Struct, frozen=True):
    """What a further rank holds and computes, as plain data."""

    path: str  # of the model
    identity: str
    settings: VllmSettings
    failover: FailoverSettings = msgspec.field(name="place")
    rank: int
    ranks: int
    meeting: str


class VllmLeader(StepLeader):
    """The leader of a vLLM engine's ranks: call `start_ranks` once; later calls run on every rank."""

    def __init__(self, failover: FailoverSettings) -> None:
        super().__init__(failover, START_S)
        at = Path(failover.vault_socket)
        self._folder = at.with_name(f"{at.stem}.ranks-{failover.engine_id}")
        self.meeting = ""  # the address at which vLLM's ranks find each other

    async def start_ranks(
        self, memory: VaultMemory, ranks: RankProcesses, path: str, identity: str, settings: VllmSettings
    ) -> None:
        """Start every rank; return when all have done their imports."""
        if self.count == 1:
            return
        memory.join(self.agreement(ranks))
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a killed engine with this number
        self._folder.mkdir(mode=0o700)
        # What vLLM shares between ranks on CPUs is named after this file.
        file, name = tempfile.mkstemp(prefix="holdfast-", dir=self._folder)
        os.close(file)
        self.meeting = f"file://{name}"

        def work(rank: int) -> bytes:
            failover = self._failover.of_rank(rank)
            return msgspec.json.encode(VllmRankWork(path, identity, settings, failover, rank, self.count, self.meeting))

        await self.start(ranks, "holdfast.engines.vllm.ranks.rank", work)
        for steps in self.steps:
            steps.settimeout(self._failover.load_s)  # one rank may compile kernels that another has already

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def met(self) -> None:
        """Remove the names of vLLM's shared memory, which every rank has mapped by now: a killed engine then leaves no
        files."""
        for steps in self.steps:
            steps.settimeout(ANSWER_S)
        name = self.meeting.rpartition("/")[2]
        for file in SHARED_MEMORY.glob(f"{name}-*") if name else ():
            file.unlink(missing_ok=True)

    # -- in the step thread

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, answered: bool) -> None:
        self.send(pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL), answered=answered)

    def results(self) -> list[Any]:
        return [pickle.loads(answer) for answer in self.answers()]
