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
from holdfast.rollout.machine import Start
from holdfast.rollout.replica import Seen, Stage
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
from holdfast.supervise.machine import Life, Phase
from holdfast.supervise.seats import Devices, Needs, Taken, mib, unknown

Sets = Mapping[tuple[str, str], Pod]  # by service and set

_PROCESS = re.compile(r"(?P<service>.+)-(?P<set>[0-9a-f]{8})-(?P<number>\d+)(?:-engine-\d+|-vault(?:-r\d+)?)?")


@dataclass(frozen=True, slots=True)
class Whose:
    """The replica that a process is of."""

    name: str
    service: str
    set_id: str


def whose(process: str, deployment: str, services: Iterable[str]) -> Whose | None:
    """Of a process of this deployment, by its name; None: it is of no replica. A service that is not known is called as
    its processes are."""
    found = _PROCESS.fullmatch(process.removeprefix(f"{deployment}-"))
    if found is None or not process.startswith(f"{deployment}-"):
        return None
    service = {one.lower(): one for one in services}.get(found["service"], found["service"])
    return Whose(f"{service}-{found['number']}", service, found["set"])


def sets_of(kept: Iterable[tuple[Manifest, Digests]]) -> dict[tuple[str, str], Pod]:
    """What every set is, of all the manifests that are kept, each with the hashes of its secrets' values."""
    return {(pod.service, pod.namespace.rpartition("-")[2]): pod for one in kept for pod in pods(*one)}


@dataclass(frozen=True, slots=True)
class Ground:
    """What replicas are started on: the machine, its devices and what is known of their memory, how models are named,
    how many workers share a GPU."""

    machine: Machine
    gpus: Sequence[str]
    named: Named
    sharing: int = 1
    hosts: int = 0  # devices in host memory, which a simulator has in place of GPUs; 0: as many as are asked for
    has_bytes: Mapping[str, int] = field(default_factory=dict)  # of a device, where it is known
    needs: Needs = unknown

    def devices(self, *, on_gpus: bool) -> Devices:
        names = self.gpus if on_gpus else [f"host-{number + 1}" for number in range(self.hosts)]
        return Devices(names, self.sharing if on_gpus else 1, self.has_bytes)


@dataclass(frozen=True, slots=True)
class _Seating:
    """What a replica of a pod needs to sit on."""

    ranks: int
    devices: Devices
    needed_bytes: int = 0  # on each; 0: nobody knows

    @classmethod
    def of(cls, pod: Pod, ground: Ground) -> _Seating:
        """Refused, if the pod cannot be."""
        ranks, on_gpus = slots_needed(pod, ground.machine)
        if pod.component_type != WORKER:
            return cls(0, Devices())
        if not ranks and ground.hosts and pod.containers[0].gpus:
            ranks = 1  # a simulator without a standby
        devices = ground.devices(on_gpus=on_gpus)
        return cls(ranks, devices, ground.needs(worker_of(pod, ground.machine)) if ranks else 0)


def jobs_of(
    start: Start, sets: Sets, ground: Ground, taken: Collection[Taken], beside: Sequence[str] = ()
) -> list[Job]:
    """The processes of a replica that is to be started. `taken`: what others have, and what of it is there already;
    `beside`: on these devices, whoever is there. Refused says why it cannot be."""
    pod = sets.get((start.service, start.set_id))
    if pod is None:
        raise Refused(f"what the set {start.set_id} of {start.service} is, is not kept")
    seating = _Seating.of(pod, ground)
    devices, needed = seating.devices, seating.needed_bytes
    name = pod.replica(int(start.name.rpartition("-")[2]))
    seats = _own(name, taken)
    rest = max(0, seating.ranks - len(seats))
    seats += devices.seats(beside[len(seats) :], taken) if beside else devices.free(rest, taken)
    for seat in seats:
        if needed > devices.has_bytes.get(seat.device, needed):
            has = mib(devices.has_bytes[seat.device])
            raise Refused(f"it needs {mib(needed, up=True)} of memory, and {seat.device} has {has}")
    launches = replica_launches(pod, name, seats, ground.machine)
    settled = [with_model(launch, ground.named, ground.sharing) for launch in launches]
    return [Job.of(_bounded(launch, seating)) for launch in settled]


def _own(name: str, taken: Collection[Taken]) -> list[DeviceSlot]:
    """The seats of a replica, rank by rank; of one that was started in part only its first ones."""
    own = re.compile(rf"{re.escape(name)}(-vault(-r\d+)?)?")
    found = [one for one in taken if own.fullmatch(one.process)]
    return [one.seat for one in sorted(found, key=lambda one: (len(one.process), one.process))]


def _bounded(launch: Launch, seating: _Seating) -> Launch:
    """A vault keeps what its set needs and no more, where others could need what is left of its device."""
    if isinstance(launch, VaultLaunch) and launch.device in seating.devices.has_bytes:
        return structs.replace(launch, budget_bytes=seating.needed_bytes)
    return launch


def room_of(
    wish: Revision, there: Mapping[str, int], sets: Sets, ground: Ground, taken: Collection[Taken]
) -> dict[str, int]:
    """How many more of each service find devices, of those that need any. `there`: how many have places already. A
    place that one may still use is not told to another."""
    room: dict[str, int] = {}
    given: Counter[tuple[str, ...]] = Counter()  # of the devices of each kind
    for service, part in wish.parts.items():
        seating = _seating(sets.get((service, part.set_id)), ground)
        names = tuple(seating.devices.names)
        if names and seating.ranks:
            room[service] = (len(seating.devices.places(taken)) - given[names]) // seating.ranks
            more = part.replicas + part.surge - there.get(service, 0)
            given[names] += seating.ranks * max(0, min(room[service], more))
    return room


def roomy_of(
    wish: Revision, sets: Sets, ground: Ground, taken: Collection[Taken], seated: Mapping[str, Collection[str]]
) -> set[str]:
    """Beside whom one of its service's wanted set finds memory. `seated`: the devices of each replica."""
    roomy = set()
    for service, part in wish.parts.items():
        seating = _seating(sets.get((service, part.set_id)), ground)
        for name, devices in seated.items():
            own = name.rpartition("-")[0] == service and len(devices) == seating.ranks > 0
            if own and seating.devices.fits(devices, seating.needed_bytes, taken):
                roomy.add(name)
    return roomy


def refused_of(wish: Revision, sets: Sets, ground: Ground) -> dict[str, str]:
    """Why a set can never be started here, of each that cannot; said before anybody makes room for it."""
    refused = {}
    for service, part in wish.parts.items():
        pod = sets.get((service, part.set_id))
        try:
            seating = _Seating.of(pod, ground) if pod is not None else _Seating(0, Devices())
        except Refused as error:
            refused[part.set_id] = str(error)
        else:
            if lack := seating.devices.lack(seating.ranks, seating.needed_bytes):
                refused[part.set_id] = lack
    return refused


def _seating(pod: Pod | None, ground: Ground) -> _Seating:
    """What cannot be sits nowhere (`refused_of`)."""
    try:
        return _Seating.of(pod, ground) if pod is not None else _Seating(0, Devices())
    except Refused:
        return _Seating(0, Devices())


# -- what is seen of it


@dataclass(frozen=True, slots=True)
class Sighted:
    """A replica, and the names of its engines or of its frontend, by which the store knows them; others have none."""

    seen: Seen
    engines: tuple[str, ...] = ()
    frontend: str = ""


def sighted(whom: Whose, processes: Mapping[str, tuple[str, Life]]) -> Sighted:
    """A replica by its processes' roles and lives; what the store says of it is not in it yet."""
    lives = [life for _, life in processes.values()]
    refused = next((life.note for life in lives if life.phase is Phase.REFUSED), None)
    worst = max(lives, key=lambda life: life.failures)
    if not any(life.wanted for life in lives):
        stage = Stage.LEAVING
    elif any(role != "vault" and life.phase is Phase.READY for role, life in processes.values()):
        stage = Stage.SERVING
    else:
        stage = Stage.STARTING
    seen = Seen(
        service=whom.service,
        set_id=whom.set_id,
        stage=stage,
        crashes=worst.failures,
        trouble=f"cannot be started: {refused}" if refused is not None else "",
        how=worst.note if stage is Stage.STARTING else "",
    )
    engines = tuple(name for name, (role, _) in processes.items() if role == "worker")
    return Sighted(seen, engines, next((name for name, (role, _) in processes.items() if role == "frontend"), ""))
