"""Carries a deployment's rollouts out on this machine: one look, one step, the memory written, and then what is to do.

Theory. The machine (`rollout.machine`) is told everything at once and says what is wanted of each replica; here that
becomes jobs of the supervisor. Nothing is done that is not written down before, so whoever goes on after this process,
with the same jobs on its disk and the same memory in the store, does what is left. To drain a worker, to call it back
and to wake one that stands by needs no deed of ours: the memory says so, and frontends read it; but a process that is
no worker drains by being asked to leave.

Always true: where the store does not answer, or says something that cannot be read, nothing is started or stopped; one
process carries out a deployment (`Overtaken` ends this one); what a replica cannot be started for is seen in the next
look, as its trouble.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from msgspec import structs

from holdfast.core.errors import Refused, UserError
from holdfast.core.ports import Clock, SystemClock
from holdfast.core.tasks import Tasks, beside, done_within
from holdfast.discovery.keys import DEPLOYMENTS, HISTORY, STEWARDS
from holdfast.rollout import machine, records
from holdfast.rollout.history import KEPT, Entry, noted, surplus
from holdfast.rollout.records import Wanted, WrittenMemory, history_key, read_entry
from holdfast.rollout.replica import COMING, Seen, Stage
from holdfast.rollout.status import report
from holdfast.rollout.steward import Steward, encode
from holdfast.rollout.wishes import is_gone, on_trial, wish_of, worked_at
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.secrets import Digests
from holdfast.spec.manifest.types import WORKER, Manifest
from holdfast.store.contract import Registration, Store, StoreUnavailable
from holdfast.store.mirror import Mirror
from holdfast.supervise.changing import Changing
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Life
from holdfast.supervise.machine import Phase as JobPhase
from holdfast.supervise.outlook import look_of, prefixes, said_by, sources_of
from holdfast.supervise.own_control import OwnControl, has_planner
from holdfast.supervise.replicas import (
    Ground,
    Sighted,
    Whose,
    jobs_of,
    refused_of,
    room_of,
    roomy_of,
    sets_of,
    sighted,
    whose,
)
from holdfast.supervise.seats import Taken, taken_by
from holdfast.supervise.traffic import SetTraffic

LOOK_S = 0.5  # between two looks, where the store tells of nothing: processes become ready, and leave
HEARD_S = 0.5  # for a frontend to read that it is replaced before it is asked to leave: it leaves otherwise then


class Rolling:
    """One deployment's rollouts."""

    def __init__(
        self,
        name: str,
        store: Store,
        supervisor: Supervisor,
        changing: Changing,
        ground: Ground,
        *,
        place: Steward,
        tell: Callable[[str], None],
        control: OwnControl | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._store = store
        self._supervisor = supervisor
        self._changing = changing
        self.ground = ground
        self.steward = place  # what it tells of itself, to whoever waits
        self._tell = tell
        self._control = control
        self._clock = clock or SystemClock()
        self._mirror = Mirror(store, (DEPLOYMENTS + name, f"{HISTORY}{name}/", *prefixes(name)))
        self._written = WrittenMemory(store, name)
        self.memory = machine.NOTHING
        self._manifests: dict[str, Manifest | None] = {}  # by text
        self._troubles: dict[str, Sighted] = {}  # of replicas that could not be started
        self._traffic = SetTraffic()
        self._deeds = Tasks(f"rollouts of {name}")
        self._registered: Registration | None = None
        self._is_adopted = False  # what an earlier supervisor left was looked at

    def __repr__(self) -> str:
        return f"<rollouts of {self.name}: {self.memory.phase}, revision {self.memory.target.number}>"

    async def run(self) -> None:
        """Until the deployment was deleted and is gone. Overtaken, if another carries it out."""
        try:
            async with beside(self._mirror.run(), "what the store says"):
                await self._mirror.whole.wait()
                await self._open()
                self._registered = self._store.register(STEWARDS + self.name, encode(self.steward))
                while not await self._turn():
                    await done_within(self._mirror.news.wait(), LOOK_S)
        finally:
            if self._registered is not None:
                await self._registered.withdraw()
            await self._deeds.stop()

    async def _open(self) -> None:
        while True:
            try:
                self.memory = await self._written.open(self._clock.unix_s())
            except StoreUnavailable as error:
                self._wait_for(str(error))
            else:
                return

    # -- one turn

    async def _turn(self) -> bool:
        """Whether it is gone for good."""
        self._mirror.news.clear()
        try:
            wanted, manifest = self._wanted()
            self._complete()
            look, now_s = self._look(wanted, manifest), self._clock.unix_s()
            memory, acts = machine.step(self.memory, look, now_s)
            await self._written.write(memory)
            self.memory = memory
            self._carry_out(acts)
            await self._keep_history(wanted)
            self._say(serial=wanted.serial, report=report(memory, look, now_s), trouble="")
            if is_gone(wanted, memory):
                if self._control is not None:
                    await self._control.stop()  # it would write verdicts on
                await records.forget(self._store, self.name)
                return True
        except (StoreUnavailable, UserError) as error:
            self._wait_for(str(error))
        return False

    def _wanted(self) -> tuple[Wanted, Manifest]:
        """UserError says why nothing can be done."""
        data = self._mirror.values.get(DEPLOYMENTS + self.name)
        if data is None:
            raise UserError(f"no manifest of {self.name} has been applied yet")
        wanted = records.read_wanted(self.name, data)
        manifest = self._manifest(wanted.manifest)
        if manifest is None:
            raise UserError(f"the manifest of revision {wanted.revision} of {self.name} cannot be read here")
        return wanted, manifest

    def _look(self, wanted: Wanted, manifest: Manifest) -> machine.Look:
        wish, memory = wish_of(wanted, manifest), self.memory
        known = [wish, memory.target, *([memory.stable] if memory.stable is not None else [])]
        services = {service for one in known for service in one.parts}
        wants = {name: one.want for name, one in memory.replicas.items()}
        said, here, now_s = said_by(self._mirror.values, self.name), self._here(services), self._clock.unix_s()
        self._traffic.take(said.reports, sources_of(here, said), now_s)
        there = Counter(one.service for one in memory.replicas.values())
        next_one, taken = worked_at(wish, memory), self._taken()
        sets = sets_of([(manifest, wanted.secret_digests)] if next_one is wish else self._kept())
        room = room_of(next_one, there, sets, self.ground, taken)
        roomy = roomy_of(next_one, sets, self.ground, taken, self._seated(services))
        brought, since_s = on_trial(wish, memory, now_s)
        traffic = self._traffic.of(now_s, brought, since_s)
        refused = refused_of(next_one, sets, self.ground)
        if self._control is not None and not wanted.deleted:
            self._control.keep(self._deeds, planned=has_planner(next_one, sets))
        workers = manifest.of_type(WORKER) if next_one is wish and not said.is_led else ()
        unjudged = frozenset(service for service, _ in brought if service in workers)
        return look_of(
            wish, here, said, wants, room=room, roomy=roomy, traffic=traffic, refused=refused, unjudged=unjudged
        )

    def _here(self, services: set[str]) -> dict[str, Sighted]:
        """The replicas that have processes here, and those that could not be started."""
        found: dict[Whose, dict[str, tuple[str, Life]]] = {}
        for name, slot in self._supervisor.slots.items():
            whom = whose(name, self.name, services) if slot.job.deployment == self.name else None
            if whom is not None and slot.life.phase is not JobPhase.OVER:
                found.setdefault(whom, {})[name] = (slot.job.role, slot.life)
        replicas = self.memory.replicas
        wanted = {name for name, one in replicas.items() if one.want in COMING}
        self._troubles = {name: one for name, one in self._troubles.items() if name in wanted}
        return self._troubles | {whom.name: sighted(whom, processes) for whom, processes in found.items()}

    # -- what is to be done

    def _carry_out(self, acts: tuple[machine.Act, ...]) -> None:
        for act in acts:
            match act:
                case machine.Start():
                    self._start(act)
                case machine.Stop(name):
                    self._stop(name)
                case machine.Drain(name) if not self._is_worker(name):
                    self._stop(name, after_s=HEARD_S)
                case machine.Tell(text):
                    self._tell(f"{self.name}: {text}")

    def _start(self, start: machine.Start) -> None:
        try:
            beside = self._seated([start.service]).get(start.beside, ())
            jobs = jobs_of(start, sets_of(self._kept()), self.ground, self._taken(), beside)
        except Refused as error:
            seen = Seen(service=start.service, set_id=start.set_id, stage=Stage.STARTING)
            self._troubles[start.name] = Sighted(structs.replace(seen, trouble=f"cannot be started: {error}"))
            return
        self._changing.enter(jobs)  # at once: the next that is started finds its devices taken
        self._deeds.spawn(self._changing.add(jobs), f"start {start.name}")

    def _complete(self) -> None:
        """Once: an earlier supervisor may not have lived to start all processes of a replica. Those that are there stay
        as they are."""
        for name, one in self.memory.replicas.items() if not self._is_adopted else ():
            if one.want in COMING and self._processes(name):
                self._start(machine.Start(name, one.service, one.set_id, one.beside))
        self._is_adopted = True

    def _taken(self) -> list[Taken]:
        return taken_by((slot.job for slot in self._supervisor.slots.values()), self.ground.needs)

    def _seated(self, services: Collection[str]) -> dict[str, list[str]]:
        """The devices of every replica that has any."""
        seated: dict[str, list[str]] = {}
        for one in self._taken():
            if (whom := whose(one.process, self.name, services)) is not None:
                seated.setdefault(whom.name, []).append(one.seat.device)
        return seated

    def _stop(self, replica: str, after_s: float = 0.0) -> None:
        self._deeds.spawn(self._remove(replica, self._processes(replica), after_s), f"stop {replica}")

    async def _remove(self, replica: str, processes: list[str], after_s: float) -> None:
        await asyncio.sleep(after_s)
        known = self.memory.replicas.get(replica)
        if known is None or known.want not in COMING:  # else it was called back meanwhile
            await self._changing.remove(processes)

    def _processes(self, replica: str) -> list[str]:
        one = self.memory.replicas[replica]
        whom = Whose(replica, one.service, one.set_id)
        return [name for name in self._supervisor.slots if whose(name, self.name, [one.service]) == whom]

    def _is_worker(self, replica: str) -> bool:
        return any(self._supervisor.slots[name].job.role == "worker" for name in self._processes(replica))

    # -- what is kept

    async def _keep_history(self, wanted: Wanted) -> None:
        """Write what became of each revision, as the memory knows it."""
        entries = self._entries()
        if wanted.revision not in {entry.number for entry in entries}:
            await records.note_asked(self._store, self.name, wanted)
        for entry in noted(entries, self.memory):
            await records.note(self._store, self.name, entry)
        for number in surplus(entries, self.memory):
            await self._store.delete(history_key(self.name, number), records.TIMEOUT_S)

    def _entries(self) -> list[Entry]:
        values = self._mirror.values.items()
        read = [read_entry(key, value) for key, value in values if key.startswith(f"{HISTORY}{self.name}/")]
        return [entry for entry in read if entry is not None]

    def _kept(self) -> list[tuple[Manifest, Digests]]:
        """The manifests that are kept, oldest first, what is wanted now last; each with its secrets' hashes."""
        wanted, manifest = self._wanted()
        kept = ((self._manifest(entry.manifest), entry.secret_digests) for entry in self._entries())
        return [*((one, digests) for one, digests in kept if one is not None), (manifest, wanted.secret_digests)]

    def _manifest(self, text: str) -> Manifest | None:
        if text not in self._manifests:
            if len(self._manifests) > 2 * KEPT:
                self._manifests.clear()
            self._manifests[text] = check(text.encode()).manifest
        return self._manifests[text]

    def _wait_for(self, why: str) -> None:
        if why != self.steward.trouble:
            self._tell(f"{self.name}: {why}")
        self._say(trouble=why)

    def _say(self, **news: Any) -> None:
        told = structs.replace(self.steward, **news)
        if told != self.steward and self._registered is not None:
            self._registered.update(encode(told))
        self.steward = told
