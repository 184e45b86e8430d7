"""Replicas of one Ray node, each an actor in a placement group of its devices: what `Hosting` keeps them by there.

Theory. A replica's name is its actor's; its placement group's name says the node as well. So an agent that was killed
is followed by one that finds the groups of its node, and in each the actor that lives, or none. Ray says when an actor
has died, in milliseconds, and never that it is stopped (facts 30): so each is asked for its processes' lives, within a
bound, and of one that is silent the kernel says whether it is stopped. Then it is killed by its pid, which Ray sees.

A replica in host memory has no devices, so it has no group: others are placed there. Ray ends whoever is in a group
that is removed; so one that may ever be WARM is beside its group, on the same node, and is found by what its process
wrote down. The host memory of WARM replicas is one group for the node, of Ray's `memory`.

Always true: what Ray counts as taken is taken: a group is removed when no process of its replica is left, or none of
their memory on its devices. Nothing is killed for being slow: a silent actor whose process runs is waited for, for as
long as its engines may serve without it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import Refused
from holdfast.core.procfs import is_stopped
from holdfast.core.tasks import Tasks, beside, first, true_within
from holdfast.roles.ray import cluster
from holdfast.roles.ray.cluster import Gone, Handle, RayNode
from holdfast.roles.ray.model_actor import ROLE, ModelActor, record_name, replica_of
from holdfast.spec.jobs import STOP_S as ROLES_STOP_S
from holdfast.spec.jobs import Job
from holdfast.supervise.backend import Kept, kept_of
from holdfast.supervise.device_places import NO_DEVICE, device_claims
from holdfast.supervise.incidents import Incident, fold, kept_apart
from holdfast.supervise.leftovers import sweep
from holdfast.supervise.levels import vaults_of
from holdfast.supervise.machine import KERNEL_S, Life, Phase
from holdfast.supervise.processes import LocalProcesses
from holdfast.supervise.records import Record, forget, read_record, read_records

# For Ray to find devices that its node should have: milliseconds where they are free, and who leaves them for host
# memory gives them back within a second. Longer, and nobody is told that somebody else has them.
GROUP_S = 5.0
BEGIN_S = 60.0  # for an actor's process to come up: 2 s here, more on a loaded machine
LOOK_S = 0.5  # between two questions to an actor
SILENT_S = 2.0  # past it the kernel is asked; an actor that runs answers in milliseconds
STOPPED_LOOKS = 2  # in a row: a debugger's short stop is no death
WEDGED_S = 60.0  # silent for so long though it runs: its engines serve, and nobody looks after them
STOP_S = ROLES_STOP_S["worker"] + ROLES_STOP_S["vault"] + KERNEL_S  # of an actor: its engines, then its memory
END_S = 10.0  # for what a killed actor kept: the kernel tears down memory first (facts 4c)
END_LOOK_S = 0.05
LATE = "Ray did not answer in time"


@dataclass(slots=True)
class _Actor:
    jobs: Sequence[Job]
    lives: dict[str, Life]
    handle: Handle | None = None
    record: Record | None = None  # of its own process
    silent_s: float | None = None  # since when; None: it answers
    stopped_looks: int = 0
    condemned: str = ""  # why it was killed
    seated: bool = False  # it has its group
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # it is not removed while it is started

    def become(self, phase: Phase, note: str) -> None:
        self.lives = {job.name: Life(phase=phase, note=note) for job in self.jobs}


class RayBackend:
    """The replicas of one Ray node. `totals`: what they may have together of each device."""

    def __init__(
        self,
        deployment: str,
        node: RayNode,
        state_dir: Path,
        totals: Mapping[str, int],
        environ: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        self.totals = dict(totals)
        self._deployment = deployment
        self._node = node
        self._state_dir = state_dir
        self._environ = environ
        self._tell = tell
        self._groups = cluster.groups_of(deployment, node.name)
        self._actors: dict[str, _Actor] = {}
        self._tasks = Tasks(f"actors on {node.name}")

    # -- what Hosting asks

    def kept(self) -> dict[str, Kept]:
        lives = [(job, one.lives[job.name]) for one in self._actors.values() for job in one.jobs]
        return kept_of(self._deployment, lives)

    def jobs(self) -> list[Job]:
        return [job for one in self._actors.values() for job in one.jobs]

    def enter(self, replica: str, jobs: Sequence[Job]) -> None:
        self._actors.setdefault(replica, _Actor(jobs, {job.name: Life() for job in jobs}))

    async def start(self, replica: str, jobs: Sequence[Job]) -> None:
        one = self._actors.get(replica)
        if one is None:
            return
        async with one.lock:
            try:
                await self._place(replica, one)
            except (Gone, Refused, TimeoutError, ValueError) as error:
                one.become(Phase.REFUSED, str(error) or LATE)
                return
        self._tasks.spawn(self._keep(replica, one), replica)

    async def remove(self, replica: str) -> None:
        one = self._actors.get(replica)
        if one is None:
            return
        async with one.lock:
            if one.handle is not None:
                try:
                    await cluster.answer(one.handle.stop.remote(), STOP_S)
                except (Gone, TimeoutError) as error:
                    self._tell(f"{replica} did not end in order: {error}")
                await cluster.asked(cluster.kill, one.handle)
            await self._clear(replica, one)

    async def seat(self, replica: str) -> None:
        one = self._actors.get(replica)
        if one is None:
            raise Refused("it has just gone")
        async with one.lock:
            if not one.seated:
                try:
                    await self._seat(replica, one)
                except TimeoutError as error:
                    raise Refused(LATE) from error

    async def unseat(self, replica: str) -> None:
        one = self._actors.get(replica)
        if one is None:
            return
        async with one.lock:
            await cluster.asked(cluster.remove_group, self._groups + replica)
            one.seated = False

    # -- one actor

    def _shares(self, one: _Actor) -> list[float]:
        return [
            cluster.share_of(each.promised_bytes, self.totals.get(each.seat.device, 0))
            for each in sorted(device_claims(one.jobs), key=lambda each: (len(each.process), each.process))
            if each.seat.device != NO_DEVICE
        ] or [1.0]

    async def _seat(self, replica: str, one: _Actor) -> Any:
        """Its group, once Ray has placed it; Refused, if there is no room for it."""
        shares, resource = self._shares(one), self._node.resource
        name, bundles = self._groups + replica, [{resource: share} for share in shares]
        group = await cluster.asked(cluster.make_group, name, bundles, self._node.id)
        if not await cluster.asked(cluster.is_placed, group, GROUP_S):
            await cluster.asked(cluster.remove_group, name)
            lacks = f"Ray has not {sum(shares):g} {resource} free on {self._node.name}"
            raise Refused(f"{lacks}; `ray status` shows who has")
        one.seated = True
        return group

    async def _place(self, replica: str, one: _Actor) -> None:
        group = await self._seat(replica, one)
        words = (str(self._state_dir), list(one.jobs), dict(self._environ))
        if vaults_of(one.jobs):  # it may leave its devices, and live
            where = cluster.on_node(self._node.id)
        else:
            where = cluster.in_group(group, self._node.resource, self._shares(one)[0])
        handle = await cluster.asked(cluster.begin, where, ModelActor, replica, replica, *words)
        one.handle = handle
        one.record, _ = await cluster.answer(handle.begin.remote(), BEGIN_S)

    async def _keep(self, replica: str, one: _Actor) -> None:
        """Until it is over, however that comes."""
        assert one.handle is not None
        async with beside(cluster.answer(one.handle.over.remote(), None), "over") as over:
            while not over.done():
                await self._look_at(replica, one)
                await first((asyncio.sleep(LOOK_S),), (over,))
            died = over.exception()
        told = []
        if died is not None:
            self._tell(f"{replica} died: {died}")
            pid = one.record.pid if one.record is not None else 0
            told = [Incident(time.time(), replica, ROLE, pid, one.condemned or str(died))]
        async with one.lock:
            await self._clear(replica, one, told)

    async def _look_at(self, replica: str, one: _Actor) -> None:
        now_s = asyncio.get_running_loop().time()
        assert one.handle is not None
        try:
            one.lives |= await cluster.answer(one.handle.look.remote(), SILENT_S)
        except Gone:
            return  # what waits for its end hears of it
        except TimeoutError:
            one.silent_s = now_s if one.silent_s is None else one.silent_s
        else:
            one.silent_s, one.stopped_looks = None, 0
            return
        stopped = one.record is not None and one.record.alive and is_stopped(one.record.pid)
        one.stopped_looks = one.stopped_looks + 1 if stopped else 0
        silent_s = asyncio.get_running_loop().time() - one.silent_s
        if one.stopped_looks >= STOPPED_LOOKS or silent_s > WEDGED_S:
            one.condemned = f"it was {'stopped' if stopped else 'silent'}, and was killed"
            self._tell(f"{replica}: {one.condemned}")
            self._kill(one.record)

    def _kill(self, record: Record | None) -> None:
        """By its pid, held by a pidfd; what it kept is tied to it."""
        process = LocalProcesses(self._state_dir).adopt(record) if record is not None else None
        if process is not None:
            process.send(signal.SIGKILL)

    async def _clear(self, replica: str, one: _Actor, told: Sequence[Incident] = ()) -> None:
        """Nothing of it is left, here and in Ray, but what is `told` of it. Asked again, nothing happens."""
        if self._actors.get(replica) is not one:
            return
        one.become(Phase.KILLED, "its actor has ended")
        self._kill(one.record)
        await self._ended([job.name for job in one.jobs], one.record)
        await cluster.asked(cluster.remove_group, self._groups + replica)
        for name in (*(job.name for job in one.jobs), record_name(replica)):
            forget(self._state_dir, name)
        del self._actors[replica]
        self._tidy([record_name(replica)], told)

    def _tidy(self, gone: Iterable[str], told: Sequence[Incident] = ()) -> None:
        """Put the incidents of those who are gone with the node's own, and leave nothing else of them on its disk."""
        try:
            for name in gone:
                fold(self._state_dir, name, told)
        except OSError as error:
            self._tell(f"incidents of {self._node.name} cannot be written: {error}")
        sweep(self._state_dir, self._deployment, [job.name for job in self.jobs()])

    async def _ended(self, names: Sequence[str], actor: Record | None) -> None:
        """Returns when none of them lives; or in time: Ray may then give to another what is not free yet."""
        records = [record for name in names if (record := read_record(self._state_dir, name)) is not None]
        records += [actor] if actor is not None else []
        if not await true_within(lambda: not any(record.alive for record in records), END_S, END_LOOK_S):
            left = [record.name for record in records if record.alive]
            self._tell(f"{', '.join(left)} did not end within {END_S:g} s")

    # -- after another agent, and at the end

    async def adopt(self) -> None:
        """Go on with the actors that an earlier agent of this node began; groups without one are removed."""
        own = cluster.host_group(self._deployment, self._node.name)
        groups = [name for name in await cluster.asked(cluster.groups, self._groups) if name != own]
        seated = {group.removeprefix(self._groups) for group in groups}
        written = {replica_of(one.name) for one in read_records(self._state_dir) if one.role == ROLE and one.alive}
        for replica in sorted(seated | written):
            handle = await cluster.asked(cluster.find, replica)
            one = await self._adopted(replica, handle) if handle is not None else None
            if one is None:
                await cluster.asked(cluster.remove_group, self._groups + replica)
            else:
                one.seated = replica in seated
                self._actors[replica] = one
                self._tell(f"{replica} is adopted")
                self._tasks.spawn(self._keep(replica, one), replica)
        self._tidy(kept_apart(self._state_dir) - {record_name(replica) for replica in self._actors})

    async def _adopted(self, replica: str, handle: Handle) -> _Actor | None:
        """None: it has died, or is stopped, and is killed."""
        try:
            record, jobs = await cluster.answer(handle.begin.remote(), BEGIN_S)
            lives = await cluster.answer(handle.look.remote(), BEGIN_S)
        except (Gone, TimeoutError):
            record = read_record(self._state_dir, record_name(replica))
            self._kill(record)
            await cluster.asked(cluster.kill, handle)
            await self._ended([], record)
            return None
        return _Actor(jobs, {job.name: Life() for job in jobs} | lives, handle, record)

    async def stop(self) -> None:
        """All of them, at once."""
        await asyncio.gather(*(self.remove(replica) for replica in list(self._actors)))
        await self._tasks.stop()
