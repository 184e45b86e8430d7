"""A machine on which one manifest is kept by a supervisor that may be killed, and what is done to it from outside.

Always true: nothing here is told by the supervisor itself: which processes run is read from records on disk and from
frontends' own pages, what is decided from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from bench import ROOT
from bench.rollouts.keeper import Keeping
from bench.rollouts.shapes import NAME, Shape
from holdfast.core.address import parse_address
from holdfast.core.tasks import beside
from holdfast.discovery.keys import REPORTS, ROLLOUTS
from holdfast.roles import rolled
from holdfast.rollout import machine
from holdfast.rollout.machine import DesiredState, RolloutPhase, RolloutState
from holdfast.rollout.records import AskedManifest, applied, change_desired
from holdfast.spec.manifest.checking import check
from holdfast.store.contract import Put, Snapshot, Store
from holdfast.store.mirror import Mirror
from holdfast.store.opening import open_store
from holdfast.supervise.records import Record, read_records
from holdfast.supervise.replicas import ReplicaId, replica_id_of
from holdfast.supervise.status_client import get_facts as ask_page
from holdfast.testing.rig import DeploymentRig
from holdfast.testing.waiting import until
from holdfast.wire.net import SocketNetwork

KEEPER = "keeper"
WAIT_S = 240.0  # for a rollout, its drains and its watch on a machine that others use too
PAGE_S = 5.0  # silence that is no starvation: a frontend that answers later than that does not serve


class Site(DeploymentRig):
    """Use it as a context manager, and `kept` inside it."""

    store: Store

    def __init__(self, gpus: Sequence[tuple[str, int]] = ()) -> None:
        """`gpus` are devices, and bytes of each."""
        super().__init__()
        self._gpus = tuple(zip(*gpus, strict=True)) or ((), ())
        self.state = machine.NOTHING
        self.memories: list[tuple[float, RolloutState]] = []  # every one that was written, with its time
        self.on_memory: Callable[[RolloutState], None] = lambda memory: None
        self._network = SocketNetwork()
        self.lives = 0  # of supervisors
        self.reports: Mirror

    # -- the supervisor

    def keep(self, shape: Shape, dies_at: int = 0) -> None:
        """Start a supervisor; there is none."""
        self.lives += 1
        names, sizes = self._gpus
        site = rolled.Site(
            state_dir=str(self.folder),
            manifest=shape.manifest(),
            environ=self.env,
            port=self.port,
            gpus=names,
            gpu_bytes=sizes,
            wait_s=WAIT_S,
        )
        path = self.folder / f"keeping-{self.lives}.json"
        path.write_bytes(msgspec.json.encode(Keeping(site, dies_at)))
        command = [sys.executable, "-m", "bench.rollouts.keeper", str(path)]
        path_of_modules = filter(None, (str(ROOT), self.env.get("PYTHONPATH")))
        self.start(KEEPER, command, {"PYTHONPATH": os.pathsep.join(path_of_modules)})

    def kill_keeper(self) -> None:
        self.processes[KEEPER].kill()
        self.processes[KEEPER].wait()

    @property
    def is_kept(self) -> bool:
        return self.processes[KEEPER].poll() is None

    def said(self) -> list[str]:
        """All that its supervisors said."""
        with contextlib.suppress(OSError):
            return self.log(KEEPER).splitlines()
        return []

    # -- what is wanted and decided

    @contextlib.asynccontextmanager
    async def kept(self, shape: Shape) -> AsyncIterator[None]:
        """Run a supervisor, with the store at hand."""
        self.keep(shape)
        socket = self.folder / "run" / "store.sock"
        await until(lambda: socket.exists() or not self.is_kept, "the store", WAIT_S)
        assert self.is_kept, self.said()[-12:]
        self.store = open_store(f"unix://{socket}", self._network, random.Random(1))
        await self.store.start()
        try:
            self.reports = Mirror(self.store, (f"{REPORTS}{NAME}/",))
            async with beside(self._follow(), "the rollout's memory"), beside(self.reports.run(), "reports"):
                yield
        finally:
            await self.store.close()

    async def _follow(self) -> None:
        key = ROLLOUTS + NAME
        async for event in self.store.watch(key):
            value = event.items.get(key) if isinstance(event, Snapshot) else None
            if isinstance(event, Put) and event.key == key:
                value = event.value
            if value is not None:
                self.state = machine.decode(value)
                self.memories.append((time.monotonic(), self.state))
                self.on_memory(self.state)

    async def apply(self, shape: Shape) -> int:
        """Ask for it; the revision's number."""
        text = shape.manifest()
        manifest = check(text.encode()).manifest
        assert manifest is not None, check(text.encode()).problems
        undone = self.state.undone if self.state.phase is RolloutPhase.STEADY else 0
        change = applied(AskedManifest.of(text, manifest), time.time(), undone=undone)
        return (await change_desired(self.store, NAME, change)).revision

    async def settled(self, number: int, shape: Shape) -> None:
        """Until that revision is over: in place as `shape` has it, or undone."""
        manifest = check(shape.manifest().encode()).manifest
        assert manifest is not None
        sizes = {name: service.replicas for name, service in manifest.spec.services.items()}
        try:
            await until(lambda: is_over(self.state, number, sizes), f"revision {number} to be in place", WAIT_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.state.phase}, {self.said()[-12:]}") from None

    # -- which are there

    def records_alive(self, role: str) -> list[Record]:
        return [record for record in read_records(self.folder) if record.role == role and record.alive]

    def replica(self, record: Record) -> ReplicaId | None:
        return replica_id_of(record.name, NAME, self.state.target.parts)

    async def frontends(self) -> dict[str, dict[str, Any]]:
        """What every frontend shows of itself, on its own page."""
        records = [record for record in self.records_alive("frontend") if record.status]
        asked = (ask_page(parse_address(record.status), self._network, PAGE_S) for record in records)
        pages = zip(records, await asyncio.gather(*asked), strict=True)
        return {record.name: page for record, page in pages if page is not None}

    async def leads(self, record: Record) -> bool:
        """Whether it is the active of its group, or has none."""
        page = await ask_page(parse_address(record.status), self._network, PAGE_S) if record.status else None
        return page is not None and page.get("state") != "standby"

    def kill(self, record: Record) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)


def is_over(memory: RolloutState, number: int, sizes: Mapping[str, int]) -> bool:
    """Whether nothing more is to come of a revision."""
    if memory.phase is not RolloutPhase.STEADY or memory.desired_number != number:
        return False
    here = Counter(one.service for one in memory.replicas.values() if one.desired is DesiredState.SERVE and one.counted)
    wanted = {name: part.replicas for name, part in memory.target.parts.items()}
    return here == Counter(wanted) and len(memory.replicas) == here.total() and (memory.undone > 0 or wanted == sizes)
