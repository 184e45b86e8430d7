"""Carries out what a fleet's controller asks of this machine: one look, one step, the deeds, and a record of it all.

Theory. What is asked stands in the store, and what is here are jobs, kept by a `backend`; their names and settings say
which replica each is of; the agent (`fleet.agent`) says what follows from both. So a supervisor that was killed is
followed by one that finds the same orders and the same processes, and nothing is started twice. What the node tells of
itself is leased: with its agent gone it is not there.

Whoever else counts what of the devices is taken (`backend`) is told, too: before one comes back from host memory, and
of each that is there.

Always true: before what the store says is whole nothing is done; while the store is away nothing new is asked for, and
what runs goes on; a replica's vaults may keep what it was promised, and no more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import structs

from holdfast.core.errors import Refused, UserError
from holdfast.core.ports import Clock, Network, SystemClock
from holdfast.core.tasks import Tasks, beside, done_within
from holdfast.discovery.keys import MODELS
from holdfast.fleet import agent
from holdfast.fleet.actions import Action
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Health, Replica, ReplicaPhase
from holdfast.fleet.records import DesiredModel, NodeRecord, Orders, desired_key, node_key, orders_key, read
from holdfast.health.standing import UNCHECKED, HealthCause
from holdfast.spec.jobs import Job
from holdfast.spec.launch import Launch, VaultLaunch
from holdfast.spec.manifest.addresses import NO_DIGESTS
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine, replica_launches
from holdfast.spec.manifest.whole import Named, with_model
from holdfast.store.contract import Registration, Store
from holdfast.store.mirror import Mirror
from holdfast.supervise.backend import Kept, NodeBackend
from holdfast.supervise.device_places import NO_DEVICE, Devices, device_claims
from holdfast.supervise.levels import LOST, Levels, vaults_of
from holdfast.supervise.machine import Life
from holdfast.supervise.machine import Phase as JobPhase
from holdfast.supervise.observe import StoreObservation, observe_store, prefixes
from holdfast.supervise.replicas import sets_of

log = logging.getLogger("holdfast.up")

TELL_S = 5.0  # after which it is told anew that this node is there, though nothing changed
LOOK_S = 0.5  # between two looks, where the store tells of nothing: processes become ready, and leave


class Hosting:
    """This machine as one node of a fleet. `backend` keeps its replicas' processes."""

    def __init__(
        self,
        deployment: str,
        node: str,
        store: Store,
        backend: NodeBackend,
        machine: Machine,
        named: Named,
        *,
        tell: Callable[[str], None],
        network: Network,
        clock: Clock | None = None,
    ) -> None:
        self.deployment = deployment
        self.node = node
        self._store = store
        self._backend = backend
        self._machine = machine
        self._named = named
        self._tell = tell
        self._clock = clock or SystemClock()
        self._orders = orders_key(deployment, node)
        self._mirror = Mirror(store, (self._orders, f"{MODELS}{deployment}/", *prefixes(deployment)))
        self._replicas: dict[str, agent.LocalReplica] = {}
        self._refused: dict[str, str] = {}  # why a replica could not be started, by its name
        self._deeds = Tasks(f"replicas on {node}")
        self._leaving: set[str] = set()  # whose processes are being ended
        self._seats: dict[str, bool] = {}  # whether the backend counts it on its devices, as far as it was told
        self._seating: set[str] = set()  # of whom it is being told
        self._levels = Levels(machine.state_dir, network, backend.kept, self._mirror.news.set)
        self._registered: Registration | None = None
        self._bug: str | None = None  # of the last look
        self._told = NodeRecord(node=agent.node_of(node, backend.totals, {}), again_s=TELL_S)
        self._told_s = 0.0

    def __repr__(self) -> str:
        return f"<{self.node}: {len(self._replicas)} replicas of {self.deployment}>"

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with beside(self._mirror.run(), "what the store says"):
                await self._mirror.whole.wait()
                while True:
                    self._mirror.news.clear()
                    await self._levels.look()
                    self._look()
                    await done_within(self._mirror.news.wait(), LOOK_S)
        finally:
            if self._registered is not None:
                await self._registered.withdraw()
            await self._levels.stop()
            await self._deeds.stop()

    # -- one step

    def _look(self) -> None:
        """A bug of ours costs a look, and not the supervisor with all that it keeps."""
        try:
            self._step()
        except Exception as error:
            if str(error) != self._bug:
                log.exception("bug while %s looked at its replicas", self.node)
                self._tell(f"{self.node}: a bug while looking at its replicas: {type(error).__name__}: {error}")
            self._bug = str(error)
        else:
            self._bug = None

    def _step(self) -> None:
        try:
            data = self._mirror.values.get(self._orders)
            orders = Orders() if data is None else read(Orders, self._orders, data)
        except UserError as error:  # of another version: what runs goes on, and nothing is answered
            self._tell(f"{self.node}: {error}")
            return
        found = self._backend.kept()
        said = observe_store(self._mirror.values, self.deployment)
        observed = {name: self._observe(name, one, said) for name, one in found.items()}
        for name, why in self._refused.items():
            observed.setdefault(name, agent.ObservedProcesses(fatal=why))
        result = agent.step(self._replicas, orders, observed, self._clock.unix_s())
        self._replicas = result.replicas
        self._refused = {name: why for name, why in self._refused.items() if name in result.replicas}
        self._say(result, found)
        for action in result.actions:
            match action:
                case agent.StartReplica(order):
                    self._start(order)
                case agent.RemoveReplica(name) if name not in self._leaving and name in found:
                    self._leaving.add(name)
                    self._tell(f"{self.node}: {name} leaves")
                    self._deeds.spawn(self._remove(name), f"stop {name}")
                case agent.MoveReplica(order, to) if order.name in found and order.name not in self._leaving:
                    if to is Level.WARM or self._is_seated(order.name, order.id):
                        self._levels.move(order, to)
        self._seats = {name: seat for name, seat in self._seats.items() if name in result.replicas}
        for name in (name for name, local in result.replicas.items() if name in found and not local.replica.on_devices):
            self._is_seated(name)

    def _observe(self, name: str, one: Kept, said: StoreObservation) -> agent.ObservedProcesses:
        lives = {name: life for name, (job, life) in one.processes.items() if job.role == "worker"}
        leads = any(life.phase is JobPhase.READY and name in said.leading for name, life in lives.items())
        health, why = self._health(lives, said) if leads else (Health.AWAY, _loop_of(one.processes))
        return agent.ObservedProcesses(
            exists=True,
            serves=leads,
            health=health,
            why=why,
            running=said.streams(tuple(lives)) if leads else 0,
            fatal=_trouble(life for _, life in one.processes.values()) or (LOST if name in self._levels.lost else ""),
            replica=self._replica(one),
            in_host=self._levels.in_host.get(name),
            failed_move=self._levels.wrong.get(name, ("", "")),
        )

    def _health(self, engines: Iterable[str], said: StoreObservation) -> tuple[Health, str]:
        """Return control's verdict on the engine that leads; where no control leads, none is needed."""
        where = next((said.leading[name] for name in engines if name in said.leading), None)
        record = said.verdicts.get(where.path) if where is not None else None
        if record is None:
            return (Health.UNCHECKED, UNCHECKED) if said.is_led else (Health.SOUND, "")
        standing = record.standing
        if record.replace:
            return Health.UNFIT, record.replace
        if standing.weight > 0.0 and not record.last_resort:
            return Health.SOUND, ""
        health = Health.UNCHECKED if set(standing.causes) <= {HealthCause.UNCHECKED} else Health.DOUBTED
        return health, standing.reason

    def _replica(self, one: Kept) -> Replica:
        """As its processes' settings tell it."""
        seats = [
            each for each in device_claims(job for job, _ in one.processes.values()) if each.seat.device != NO_DEVICE
        ]
        seats.sort(key=lambda each: (len(each.process), each.process))
        return Replica(
            model=one.whom.service,
            version=one.whom.set_id,
            serial=one.serial,
            node=self.node,
            devices=tuple(each.seat.device for each in seats),
            phase=ReplicaPhase.PROVISIONING,
            since_s=self._clock.unix_s(),
            device_bytes=max((each.promised_bytes for each in seats), default=0),
            host_bytes=sum(each.host_budget_bytes for each in vaults_of(job for job, _ in one.processes.values())),
        )

    def _say(self, result: agent.AgentResult, found: Mapping[str, Kept]) -> None:
        told = structs.replace(
            self._told,
            node=agent.node_of(self.node, self._backend.totals, result.replicas),
            replicas=tuple(local.replica for local in result.replicas.values() if not local.is_gone),
            answers=result.answers,
            pid=os.getpid(),
            host=os.uname().nodename,
            processes={name: tuple(one.processes) for name, one in found.items()},
        )
        now_s = self._clock.unix_s()
        if told != self._told or self._registered is None or not 0 <= now_s - self._told_s < TELL_S:
            self._told, self._told_s = structs.replace(told, number=told.number + 1), now_s
            data = msgspec.json.encode(structs.replace(self._told, at_unix_s=now_s))
            if self._registered is None:
                self._registered = self._store.register(node_key(self.deployment, self.node), data)
            else:
                self._registered.update(data)

    # -- what is to be done

    def _start(self, action: Action) -> None:
        try:
            jobs = self._jobs(action)
        except (Refused, OSError, RuntimeError, ValueError) as error:  # a path that cannot be, a home that is not there
            self._refused[action.name] = f"cannot be started: {error}"
            self._mirror.news.set()
            return
        self._tell(f"{self.node}: {action.name} comes, to be {action.level.word} on {', '.join(action.devices)}")
        self._backend.enter(action.name, jobs)  # at once: the next that is started finds its sockets taken
        self._deeds.spawn(self._backend.start(action.name, jobs), f"start {action.name}")

    def _jobs(self, action: Action) -> list[Job]:
        """Refused says why it cannot be."""
        key = desired_key(self.deployment, action.model)
        data = self._mirror.values.get(key)
        if data is None:
            raise Refused(f"{action.model} is no longer in the fleet")
        try:
            manifest = check(read(DesiredModel, key, data).manifest.encode()).manifest
        except UserError as error:
            raise Refused(str(error)) from error
        pod = None if manifest is None else sets_of([(manifest, NO_DIGESTS)]).get((action.model, action.version))
        if pod is None:
            raise Refused(f"what the version {action.version} of {action.model} is, is not kept")
        seats = Devices().seats(action.devices, device_claims(self._backend.jobs()))
        launches = replica_launches(pod, pod.replica(action.serial), seats, self._machine)
        settled = [with_model(launch, self._named, sharing=1) for launch in launches]
        return [Job.of(_bounded(launch, action)) for launch in settled]

    def _is_seated(self, name: str, order: str = "") -> bool:
        """As it is to be, on its devices by an order's id or else on none; if not yet, the backend is asked for it."""
        if self._seats.get(name) is bool(order):
            return True
        if name not in self._seating:
            self._seating.add(name)
            self._deeds.spawn(self._seat(name, order), f"seat {name}")
        return False

    async def _seat(self, name: str, order: str) -> None:
        try:
            await (self._backend.seat(name) if order else self._backend.unseat(name))
        except (Refused, OSError) as error:
            if not order:
                return  # the next look asks again
            self._levels.wrong[name] = (order, str(error) or type(error).__name__)
        else:
            self._seats[name] = bool(order)
        finally:
            self._seating.discard(name)
        self._mirror.news.set()

    async def _remove(self, name: str) -> None:
        try:
            await self._backend.remove(name)
        finally:
            self._leaving.discard(name)
            self._mirror.news.set()


def _bounded(launch: Launch, action: Action) -> Launch:
    """A vault keeps what was promised, and no more; of several each has its part of the host's memory."""
    if not isinstance(launch, VaultLaunch):
        return launch
    host_bytes = action.host_bytes // len(action.devices)
    bounds = {"budget_bytes": action.device_bytes, "host_budget_bytes": host_bytes, "leased": bool(host_bytes)}
    return structs.replace(launch, **bounds)


def _loop_of(processes: Mapping[str, tuple[Job, Life]]) -> str:
    """Return which process of a replica crashes again and again, for people; "": none does."""
    loops = (f"{name}: {life}" for name, (_, life) in processes.items() if life.phase is JobPhase.CRASH_LOOP)
    return next(loops, "")


def _trouble(lives: Iterable[Life]) -> str:
    """Why one of them will never serve; "": each may yet."""
    return next((f"cannot be started: {life.note}" for life in lives if life.is_hopeless), "")
