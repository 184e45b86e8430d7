"""Places on devices: which replicas have one, how much memory is promised there, and what still fits. Pure.

A place is a device's, taken by one replica, or by as many as share it. A standby beside another replica has none: it
uses what memory is left on that one's device, and gets the place when the other has gone.

Always true: what is promised on a device together is not more than it has, where that is known; where it is not, or
what a replica took is not, nothing fits beside another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import msgspec

from holdfast.core.errors import Refused
from holdfast.spec.deployment import DeviceSlot
from holdfast.spec.jobs import Job
from holdfast.spec.launch import VaultLaunch, WorkerLaunch
from holdfast.spec.names import is_host

NO_DEVICE = WorkerLaunch().failover.device  # of a worker that was given no device
MemoryNeeds = Callable[[WorkerLaunch], int]  # bytes on each of its devices, weights and KV; 0: not known


def mib(size: int, *, up: bool = False) -> str:
    return f"{-(-size // 2**20) if up else size // 2**20:,} MiB"


def unknown_needs(_launch: WorkerLaunch) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """A process's memory on a device."""

    process: str
    seat: DeviceSlot
    promised_bytes: int = 0  # 0: as much as it likes


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of one kind. Without names: host memory, as many devices as are asked for."""

    names: Sequence[str] = ()
    sharing: int = 1  # replicas that have a place on one device
    has_bytes: Mapping[str, int] = field(default_factory=dict)  # where it is known

    def free(self, ranks: int, claims: Collection[DeviceClaim]) -> list[DeviceSlot]:
        """Return the first places that no replica has; Refused, where there are too few."""
        if not self.names:
            there = {one.seat.device for one in claims}
            new = (device for number in count(1) if (device := f"host-{number}") not in there)
            return [DeviceSlot(device, device) for device in islice(new, ranks)]
        places = self.places(claims)[:ranks]
        if len(places) < ranks:
            raise Refused(f"{ranks} {self._word} are needed, and {len(places)} are free")
        return self.seats(places, claims)

    @property
    def _word(self) -> str:
        return "devices" if all(map(is_host, self.names)) else "GPUs"

    def places(self, claims: Collection[DeviceClaim]) -> list[str]:
        """Return the devices of free places, one after the other before any has a second."""
        used = Counter(one.seat.device for one in claims)
        return [device for turn in range(self.sharing) for device in self.names if used[device] <= turn]

    def seats(self, devices: Iterable[str], claims: Collection[DeviceClaim]) -> list[DeviceSlot]:
        """Return slots on these devices, even if they are taken, each with a socket of its own."""
        sockets = {one.seat.socket_name for one in claims}
        found = []
        for device in devices:
            names = (f"{device}.{turn}" if turn > 1 else device for turn in count(1))
            seat = DeviceSlot(device, next(name for name in names if name not in sockets))
            sockets.add(seat.socket_name)
            found.append(seat)
        return found

    def lack(self, ranks: int, needed_bytes: int) -> str:
        """Return why a replica that needs so much could never be placed here, even if all others left; "": it could."""
        if not self.names or not ranks:
            return ""
        if ranks > len(self.names) * self.sharing:
            return f"it needs {ranks} {self._word}, and there are {len(self.names)}"
        large = [device for device in self.names if needed_bytes <= self.has_bytes.get(device, needed_bytes)]
        if ranks <= len(large) * self.sharing:
            return ""
        where = "a device" if ranks == 1 else f"each of {ranks} devices"
        most = mib(max(self.has_bytes[device] for device in self.names if device not in large))
        there = f"only {len(large)} has that" if large else f"none has more than {most}"
        return f"it needs {mib(needed_bytes, up=True)} of memory on {where}, and {there}"

    def fits(self, devices: Collection[str], needed_bytes: int, claims: Collection[DeviceClaim]) -> bool:
        """Return whether one more, that needs so much on each of these, finds it there; 0: its need is not known."""
        return needed_bytes > 0 and all(needed_bytes <= self._left_bytes(device, claims) for device in devices)

    def _left_bytes(self, device: str, claims: Collection[DeviceClaim]) -> int:
        promised = [one.promised_bytes for one in claims if one.seat.device == device]
        return self.has_bytes.get(device, 0) - sum(promised) if all(promised) else 0


def device_claims(jobs: Iterable[Job], needs: MemoryNeeds = unknown_needs) -> list[DeviceClaim]:
    """Return the claims of vaults, and of workers that were given a device and have no vault."""
    found = []
    for job in jobs:
        if job.role == "vault":
            vault = msgspec.json.decode(job.settings, type=VaultLaunch)
            name = vault.socket_path.rpartition("/gms_")[2].removesuffix(".sock")
            found.append(DeviceClaim(job.name, DeviceSlot(vault.device, name), vault.budget_bytes))
        elif job.role == "worker":
            worker = msgspec.json.decode(job.settings, type=WorkerLaunch)
            device = worker.failover.device
            if not worker.failover.vault_socket and device != NO_DEVICE:
                found.append(DeviceClaim(job.name, DeviceSlot(device, device), needs(worker)))
    return found
