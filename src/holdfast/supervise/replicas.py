"""A rollout's replicas as processes of this machine: what one is started as, whose a process is, what it is seen to do.

A replica is called `{service}-{number}`; its processes' names begin with its pod's, `{deployment}-{service}-{set}-
{number}`, so that which of its deployment's a process is of can be told from its name, by a supervisor that has read
nothing else. Whose deployment it is of cannot: `a-b-c-…` may be of `a` or of `a-b`. Its job says that.

Always true: a device that one replica's memory is on is given to no other while any of its processes is there, but to
one that stands by beside it. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from holdfast.core.errors import Refused
from holdfast.rollout.machine import ObservedReplica, ReplicaStage, StartReplica
from holdfast.rollout.revision import Revision
from holdfast.spec.deployment import DeviceSlot
from holdfast.spec.jobs import Job
from holdfast.spec.launch import Launch, VaultLaunch
from holdfast.spec.manifest.local import Machine, replica_launches, slots_needed, worker_of
from holdfast.spec.manifest.pod import Pod
from holdfast.spec.manifest.pods import pods
from holdfast.spec.manifest.secrets import Digests
from holdfast.spec.manifest.types import WORKER, Manifest
from holdfast.spec.manifest.whole import Named, with_model
from holdfast.supervise.device_places import DeviceClaim, Devices, MemoryNeeds, mib, unknown_needs
from holdfast.supervise.machine import Life, Phase

Sets = Mapping[tuple[str, str], Pod]  # by service and set

_PROCESS = re.compile(r"(?P<service>.+)-(?P<set>[0-9a-f]{8})-(?P<number>\d+)(?:-engine-\d+|-vault(?:-r\d+)?)?")


@dataclass(frozen=True, slots=True)
class ReplicaId:
    """The replica that a process belongs to."""

    name: str
    service: str
    set_id: str


def replica_id_of(process: str, deployment: str, services: Iterable[str]) -> ReplicaId | None:
    """Return the replica of a process of this deployment, by its name; None: it is of no replica. A service that is not
    known is called as its processes are."""
    found = _PROCESS.fullmatch(process.removeprefix(f"{deployment}-"))
    if found is None or not process.startswith(f"{deployment}-"):
        return None
    service = {one.lower(): one for one in services}.get(found["service"], found["service"])
    return ReplicaId(f"{service}-{found['number']}", service, found["set"])


def sets_of(kept: Iterable[tuple[Manifest, Digests]]) -> dict[tuple[str, str], Pod]:
    """Return what every set is, of all the manifests that are kept, each with the hashes of its secrets' values."""
    return {(pod.service, pod.namespace.rpartition("-")[2]): pod for one in kept for pod in pods(*one)}


@dataclass(frozen=True, slots=True)
class StartContext:
    """What replicas are started on: the machine, its devices and what is known of their memory, how models are named,
    how many workers share a GPU."""

    machine: Machine
    gpus: Sequence[str]
    named: Named
    sharing: int = 1
    hosts: int = 0  # devices in host memory, which a simulator has in place of GPUs; 0: as many as are asked for
    has_bytes: Mapping[str, int] = field(default_factory=dict)  # of a device, where it is known
    needs: MemoryNeeds = unknown_needs

    def devices(self, *, on_gpus: bool) -> Devices:
        names = self.gpus if on_gpus else [f"host-{number + 1}" for number in range(self.hosts)]
        return Devices(names, self.sharing if on_gpus else 1, self.has_bytes)


@dataclass(frozen=True, slots=True)
class _Placement:
    """What a replica of a pod needs of devices."""

    ranks: int
    devices: Devices
    needed_bytes: int = 0  # on each; 0: not known

    @classmethod
    def of(cls, pod: Pod, context: StartContext) -> _Placement:
        """Refused, if the pod cannot be."""
        ranks, on_gpus = slots_needed(pod, context.machine)
        if pod.component_type != WORKER:
            return cls(0, Devices())
        if not ranks and context.hosts and pod.containers[0].gpus:
            ranks = 1  # a simulator without a standby
        devices = context.devices(on_gpus=on_gpus)
        return cls(ranks, devices, context.needs(worker_of(pod, context.machine)) if ranks else 0)


def jobs_of(
    start: StartReplica, sets: Sets, context: StartContext, claims: Collection[DeviceClaim], beside: Sequence[str] = ()
) -> list[Job]:
    """Return the processes of a replica that is to be started. `claims`: what others have, and what of it is there
    already; `beside`: on these devices, even if they are taken. Refused says why it cannot be."""
    pod = sets.get((start.service, start.set_id))
    if pod is None:
        raise Refused(f"what the set {start.set_id} of {start.service} is, is not kept")
    placement = _Placement.of(pod, context)
    devices, needed = placement.devices, placement.needed_bytes
    name = pod.replica(int(start.name.rpartition("-")[2]))
    seats = _own_slots(name, claims)
    rest = max(0, placement.ranks - len(seats))
    seats += devices.seats(beside[len(seats) :], claims) if beside else devices.free(rest, claims)
    for seat in seats:
        if needed > devices.has_bytes.get(seat.device, needed):
            has = mib(devices.has_bytes[seat.device])
            raise Refused(f"it needs {mib(needed, up=True)} of memory, and {seat.device} has {has}")
    launches = replica_launches(pod, name, seats, context.machine)
    settled = [with_model(launch, context.named, context.sharing) for launch in launches]
    return [Job.of(_bounded(launch, placement)) for launch in settled]


def _own_slots(name: str, claims: Collection[DeviceClaim]) -> list[DeviceSlot]:
    """The seats of a replica, rank by rank; of one that was started in part only its first ones."""
    own = re.compile(rf"{re.escape(name)}(-vault(-r\d+)?)?")
    found = [one for one in claims if own.fullmatch(one.process)]
    return [one.seat for one in sorted(found, key=lambda one: (len(one.process), one.process))]


def _bounded(launch: Launch, placement: _Placement) -> Launch:
    """A vault keeps what its set needs and no more, where others could need what is left of its device."""
    if isinstance(launch, VaultLaunch) and launch.device in placement.devices.has_bytes:
        return structs.replace(launch, budget_bytes=placement.needed_bytes)
    return launch


def room_of(
    desired: Revision, there: Mapping[str, int], sets: Sets, context: StartContext, claims: Collection[DeviceClaim]
) -> dict[str, int]:
    """Return how many more of each service find devices, of those that need any. `there`: how many have places already.
    A place that one service may still use is not shown to another."""
    room: dict[str, int] = {}
    given: Counter[tuple[str, ...]] = Counter()  # of the devices of each kind
    for service, part in desired.parts.items():
        placement = _placement_of(sets.get((service, part.set_id)), context)
        names = tuple(placement.devices.names)
        if names and placement.ranks:
            room[service] = (len(placement.devices.places(claims)) - given[names]) // placement.ranks
            more = part.replicas + part.surge - there.get(service, 0)
            given[names] += placement.ranks * max(0, min(room[service], more))
    return room


def with_memory_beside(
    desired: Revision,
    sets: Sets,
    context: StartContext,
    claims: Collection[DeviceClaim],
    devices_of: Mapping[str, Collection[str]],
) -> set[str]:
    """Return the replicas beside which one of the service's desired set finds memory. `devices_of`: the devices of each
    replica."""
    fitting = set()
    for service, part in desired.parts.items():
        placement = _placement_of(sets.get((service, part.set_id)), context)
        for name, devices in devices_of.items():
            own = name.rpartition("-")[0] == service and len(devices) == placement.ranks > 0
            if own and placement.devices.fits(devices, placement.needed_bytes, claims):
                fitting.add(name)
    return fitting


def refused_of(desired: Revision, sets: Sets, context: StartContext) -> dict[str, str]:
    """Return why a set can never be started here, for each that cannot; known before a replica makes room for it."""
    refused = {}
    for service, part in desired.parts.items():
        pod = sets.get((service, part.set_id))
        try:
            placement = _Placement.of(pod, context) if pod is not None else _Placement(0, Devices())
        except Refused as error:
            refused[part.set_id] = str(error)
        else:
            if lack := placement.devices.lack(placement.ranks, placement.needed_bytes):
                refused[part.set_id] = lack
    return refused


def _placement_of(pod: Pod | None, context: StartContext) -> _Placement:
    """What cannot be sits nowhere (`refused_of`)."""
    try:
        return _Placement.of(pod, context) if pod is not None else _Placement(0, Devices())
    except Refused:
        return _Placement(0, Devices())


# -- what is seen of it


@dataclass(frozen=True, slots=True)
class LocalReplica:
    """A replica, and the names of its engines or of its frontend, by which the store knows them; others have none."""

    observed: ObservedReplica
    engines: tuple[str, ...] = ()
    frontend: str = ""


def observe_processes(replica_id: ReplicaId, processes: Mapping[str, tuple[str, Life]]) -> LocalReplica:
    """Return a replica by its processes' roles and lives; what the store says of it is not in it yet."""
    lives = [life for _, life in processes.values()]
    refused = next((life.note for life in lives if life.phase is Phase.REFUSED), None)
    worst = max(lives, key=lambda life: life.failures)
    if not any(life.wanted for life in lives):
        stage = ReplicaStage.LEAVING
    elif any(role != "vault" and life.phase is Phase.READY for role, life in processes.values()):
        stage = ReplicaStage.SERVING
    else:
        stage = ReplicaStage.STARTING
    seen = ObservedReplica(
        service=replica_id.service,
        set_id=replica_id.set_id,
        stage=stage,
        crashes=worst.failures,
        trouble=f"cannot be started: {refused}" if refused is not None else "",
        how=worst.note if stage is ReplicaStage.STARTING else "",
    )
    engines = tuple(name for name, (role, _) in processes.items() if role == "worker")
    return LocalReplica(seen, engines, next((name for name, (role, _) in processes.items() if role == "frontend"), ""))
