"""Carries a deployment's rollouts out on this machine: observe, step, write the state, act.

Theory. The machine (`rollout.machine`) gets everything at once and returns the desired state of each replica; here that
becomes jobs of the supervisor. Nothing is done that is not written down before, so a supervisor that continues after
this one, with the same jobs on its disk and the same state in the store, does what is left. To drain a worker, to let
it serve again and to wake a standby needs no action here: the state says so, and frontends read it; but a process that
is no worker drains by being asked to leave.

Always true: where the store does not answer, or has a record that cannot be read, nothing is started or stopped; one
process carries out a deployment (`OwnedElsewhere` ends this one); why a replica cannot be started is seen in the next
observation, as its fault.
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
from holdfast.discovery.keys import DEPLOYMENTS, HISTORY, ROLLOUT_STATUS
from holdfast.rollout import machine, records
from holdfast.rollout.machine import DESIRED_RUNNING, ObservedReplica, ReplicaStage
from holdfast.rollout.records import (
    KEPT,
    DesiredDeployment,
    HistoryEntry,
    RolloutStatus,
    StateWriter,
    active_revision,
    desired_revision,
    encode_status,
    history_key,
    is_gone,
    new_sets,
    read_entry,
    surplus,
    updated_entries,
)
from holdfast.rollout.status import report
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.secrets import Digests
from holdfast.spec.manifest.types import WORKER, Manifest
from holdfast.store.contract import Registration, Store, StoreUnavailable
from holdfast.store.mirror import Mirror
from holdfast.supervise.device_places import DeviceClaim, device_claims
from holdfast.supervise.job_list import JobList
from holdfast.supervise.loop import Supervisor
from holdfast.supervise.machine import Life
from holdfast.supervise.machine import Phase as JobPhase
from holdfast.supervise.observe import SetTraffic, observe, observe_store, prefixes, sources_of
from holdfast.supervise.own_control import OwnControl, has_planner
from holdfast.supervise.replicas import (
    LocalReplica,
    ReplicaId,
    StartContext,
    jobs_of,
    observe_processes,
    refused_of,
    replica_id_of,
    room_of,
    sets_of,
    with_memory_beside,
)

OBSERVE_S = 0.5  # between two looks, where the store tells of nothing: processes become ready, and leave
HEARD_S = 0.5  # for a frontend to read that it is replaced before it is asked to leave: it leaves otherwise then


class RolloutController:
    """Carries one deployment's rollouts out."""

    def __init__(
        self,
        name: str,
        store: Store,
        supervisor: Supervisor,
        job_list: JobList,
        context: StartContext,
        *,
        status: RolloutStatus,
        tell: Callable[[str], None],
        control: OwnControl | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._store = store
        self._supervisor = supervisor
        self._jobs = job_list
        self.context = context
        self.status = status  # published, for commands that wait
        self._tell = tell
        self._control = control
        self._clock = clock or SystemClock()
        self._mirror = Mirror(store, (DEPLOYMENTS + name, f"{HISTORY}{name}/", *prefixes(name)))
        self._writer = StateWriter(store, name)
        self.state = machine.NOTHING
        self._manifests: dict[str, Manifest | None] = {}  # by text
        self._not_started: dict[str, LocalReplica] = {}  # of replicas that could not be started
        self._traffic = SetTraffic()
        self._tasks = Tasks(f"rollouts of {name}")
        self._registered: Registration | None = None
        self._is_adopted = False  # what an earlier supervisor left was looked at

    def __repr__(self) -> str:
        return f"<rollouts of {self.name}: {self.state.phase}, revision {self.state.target.number}>"

    async def run(self) -> None:
        """Run until the deployment was deleted and is gone. OwnedElsewhere, if another process carries it out."""
        try:
            async with beside(self._mirror.run(), "what the store says"):
                await self._mirror.whole.wait()
                await self._open()
                self._registered = self._store.register(ROLLOUT_STATUS + self.name, encode_status(self.status))
                while not await self._reconcile():
                    await done_within(self._mirror.news.wait(), OBSERVE_S)
        finally:
            if self._registered is not None:
                await self._registered.withdraw()
            await self._tasks.stop()

    async def _open(self) -> None:
        while True:
            try:
                self.state = await self._writer.open(self._clock.unix_s())
            except StoreUnavailable as error:
                self._report_trouble(str(error))
            else:
                return

    # -- one turn

    async def _reconcile(self) -> bool:
        """Take one step; return whether the deployment is gone for good."""
        self._mirror.news.clear()
        try:
            deployment, manifest = self._desired()
            self._complete_adopted()
            observation, now_s = self._observe(deployment, manifest), self._clock.unix_s()
            state, actions = machine.step(self.state, observation, now_s)
            await self._writer.write(state)
            self.state = state
            self._carry_out(actions)
            await self._keep_history(deployment)
            self._update_status(serial=deployment.serial, report=report(state, observation, now_s), trouble="")
            if is_gone(deployment, state):
                if self._control is not None:
                    await self._control.stop()  # it would write verdicts on
                await records.forget(self._store, self.name)
                return True
        except (StoreUnavailable, UserError) as error:
            self._report_trouble(str(error))
        return False

    def _desired(self) -> tuple[DesiredDeployment, Manifest]:
        """Return the desired state and its manifest. UserError says why nothing can be done."""
        data = self._mirror.values.get(DEPLOYMENTS + self.name)
        if data is None:
            raise UserError(f"no manifest of {self.name} has been applied yet")
        deployment = records.decode_desired(self.name, data)
        manifest = self._manifest(deployment.manifest)
        if manifest is None:
            raise UserError(f"the manifest of revision {deployment.revision} of {self.name} cannot be read here")
        return deployment, manifest

    def _observe(self, deployment: DesiredDeployment, manifest: Manifest) -> machine.Observation:
        desired, state = desired_revision(deployment, manifest), self.state
        known = [desired, state.target, *([state.stable] if state.stable is not None else [])]
        services = {service for one in known for service in one.parts}
        desired_states = {name: one.desired for name, one in state.replicas.items()}
        store, here, now_s = (
            observe_store(self._mirror.values, self.name),
            self._local_replicas(services),
            self._clock.unix_s(),
        )
        self._traffic.take(store.reports, sources_of(here, store), now_s)
        there = Counter(one.service for one in state.replicas.values())
        active, claims = active_revision(desired, state), self._device_claims()
        sets = sets_of([(manifest, deployment.secret_digests)] if active is desired else self._kept_manifests())
        room = room_of(active, there, sets, self.context, claims)
        fitting = with_memory_beside(active, sets, self.context, claims, self._devices_of(services))
        brought, since_s = new_sets(desired, state, now_s)
        traffic = self._traffic.of(now_s, brought, since_s)
        refused = refused_of(active, sets, self.context)
        if self._control is not None and not deployment.deleted:
            self._control.keep(self._tasks, planned=has_planner(active, sets))
        workers = manifest.of_type(WORKER) if active is desired and not store.is_led else ()
        unchecked = frozenset(service for service, _ in brought if service in workers)
        return observe(
            desired,
            here,
            store,
            desired_states,
            room=room,
            fitting=fitting,
            traffic=traffic,
            refused=refused,
            unchecked=unchecked,
        )

    def _local_replicas(self, services: set[str]) -> dict[str, LocalReplica]:
        """Return the replicas that have processes here, and those that could not be started."""
        found: dict[ReplicaId, dict[str, tuple[str, Life]]] = {}
        for name, slot in self._supervisor.slots.items():
            replica_id = replica_id_of(name, self.name, services) if slot.job.deployment == self.name else None
            if replica_id is not None and slot.life.phase is not JobPhase.OVER:
                found.setdefault(replica_id, {})[name] = (slot.job.role, slot.life)
        replicas = self.state.replicas
        deployment = {name for name, one in replicas.items() if one.desired in DESIRED_RUNNING}
        self._not_started = {name: one for name, one in self._not_started.items() if name in deployment}
        return self._not_started | {
            replica_id.name: observe_processes(replica_id, processes) for replica_id, processes in found.items()
        }

    # -- what is to be done

    def _carry_out(self, actions: tuple[machine.RolloutAction, ...]) -> None:
        for action in actions:
            match action:
                case machine.StartReplica():
                    self._start(action)
                case machine.StopReplica(name):
                    self._stop(name)
                case machine.DrainReplica(name) if not self._is_worker(name):
                    self._stop(name, after_s=HEARD_S)
                case machine.LogLine(text):
                    self._tell(f"{self.name}: {text}")

    def _start(self, start: machine.StartReplica) -> None:
        try:
            beside = self._devices_of([start.service]).get(start.beside, ())
            jobs = jobs_of(start, sets_of(self._kept_manifests()), self.context, self._device_claims(), beside)
        except Refused as error:
            seen = ObservedReplica(service=start.service, set_id=start.set_id, stage=ReplicaStage.STARTING)
            self._not_started[start.name] = LocalReplica(structs.replace(seen, trouble=f"cannot be started: {error}"))
            return
        self._jobs.enter(jobs)  # at once: the next that is started finds its devices taken
        self._tasks.spawn(self._jobs.add(jobs), f"start {start.name}")

    def _complete_adopted(self) -> None:
        """Complete, once, replicas of which an earlier supervisor started only some processes. Those that are there
        stay as they are."""
        for name, one in self.state.replicas.items() if not self._is_adopted else ():
            if one.desired in DESIRED_RUNNING and self._processes(name):
                self._start(machine.StartReplica(name, one.service, one.set_id, one.beside))
        self._is_adopted = True

    def _device_claims(self) -> list[DeviceClaim]:
        return device_claims((slot.job for slot in self._supervisor.slots.values()), self.context.needs)

    def _devices_of(self, services: Collection[str]) -> dict[str, list[str]]:
        """Return the devices of every replica that has any."""
        seated: dict[str, list[str]] = {}
        for one in self._device_claims():
            if (replica_id := replica_id_of(one.process, self.name, services)) is not None:
                seated.setdefault(replica_id.name, []).append(one.seat.device)
        return seated

    def _stop(self, replica: str, after_s: float = 0.0) -> None:
        self._tasks.spawn(self._remove(replica, self._processes(replica), after_s), f"stop {replica}")

    async def _remove(self, replica: str, processes: list[str], after_s: float) -> None:
        await asyncio.sleep(after_s)
        known = self.state.replicas.get(replica)
        if known is None or known.desired not in DESIRED_RUNNING:  # else it serves again meanwhile
            await self._jobs.remove(processes)

    def _processes(self, replica: str) -> list[str]:
        one = self.state.replicas[replica]
        replica_id = ReplicaId(replica, one.service, one.set_id)
        return [name for name in self._supervisor.slots if replica_id_of(name, self.name, [one.service]) == replica_id]

    def _is_worker(self, replica: str) -> bool:
        return any(self._supervisor.slots[name].job.role == "worker" for name in self._processes(replica))

    # -- what is kept

    async def _keep_history(self, deployment: DesiredDeployment) -> None:
        """Write what became of each revision, by the rollout's state."""
        entries = self._entries()
        if deployment.revision not in {entry.number for entry in entries}:
            await records.add_to_history(self._store, self.name, deployment)
        for entry in updated_entries(entries, self.state):
            await records.write_entry(self._store, self.name, entry)
        for number in surplus(entries, self.state):
            await self._store.delete(history_key(self.name, number), records.TIMEOUT_S)

    def _entries(self) -> list[HistoryEntry]:
        values = self._mirror.values.items()
        read = [read_entry(key, value) for key, value in values if key.startswith(f"{HISTORY}{self.name}/")]
        return [entry for entry in read if entry is not None]

    def _kept_manifests(self) -> list[tuple[Manifest, Digests]]:
        """Return the manifests that are kept, oldest first, the desired one last; each with its secrets' hashes."""
        deployment, manifest = self._desired()
        kept = ((self._manifest(entry.manifest), entry.secret_digests) for entry in self._entries())
        return [*((one, digests) for one, digests in kept if one is not None), (manifest, deployment.secret_digests)]

    def _manifest(self, text: str) -> Manifest | None:
        if text not in self._manifests:
            if len(self._manifests) > 2 * KEPT:
                self._manifests.clear()
            self._manifests[text] = check(text.encode()).manifest
        return self._manifests[text]

    def _report_trouble(self, why: str) -> None:
        if why != self.status.trouble:
            self._tell(f"{self.name}: {why}")
        self._update_status(trouble=why)

    def _update_status(self, **news: Any) -> None:
        told = structs.replace(self.status, **news)
        if told != self.status and self._registered is not None:
            self._registered.update(encode_status(told))
        self.status = told
