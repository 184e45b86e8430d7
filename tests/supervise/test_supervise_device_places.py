"""Devices and their memory: who finds a place of its own, who one beside another, and what is promised to whom."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast.core.errors import Refused
from holdfast.rollout.machine import StartReplica
from holdfast.rollout.revision import revision_of
from holdfast.spec.deployment import DeviceSlot
from holdfast.spec.jobs import Job
from holdfast.spec.launch import VaultLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.types import Manifest
from holdfast.supervise.device_places import DeviceClaim, Devices, device_claims
from holdfast.supervise.replicas import StartContext, jobs_of, refused_of, room_of, sets_of, with_memory_beside

MIB = 1024 * 1024
TEXT = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Worker:
      componentType: worker
      failover: {enabled: FAILOVER}
      resources: {limits: {gpu: 1}}
      extraPodSpec: {mainContainer: {args: [--engine, sim, --sim-tpot-ms, "TPOT"]}}
"""
FAILOVER = pytest.mark.parametrize("failover", [True, False], ids=["pair", "alone"])


def manifest_of(tpot: int, *, failover: bool) -> Manifest:
    text = TEXT.replace("FAILOVER", str(failover).lower()).replace("TPOT", str(tpot))
    manifest = check(text.encode()).manifest
    assert manifest is not None
    return manifest


def ground_of(has_mib: int, devices: int = 1) -> StartContext:
    """Devices of so much memory each, of which an engine needs 64 MiB."""
    has_bytes = {f"host-{number + 1}": has_mib * MIB for number in range(devices)}
    machine = Machine(Path("/tmp/hf"), {"HOME": "/"})
    return StartContext(
        machine, (), lambda _e, source, _m: (source, "m"), hosts=devices, has_bytes=has_bytes, needs=lambda _: 64 * MIB
    )


class Bench:
    """An old set and a new one, and one replica of the old."""

    def __init__(self, has_mib: int, *, failover: bool, devices: int = 1) -> None:
        self.context = ground_of(has_mib, devices)
        old, new = (manifest_of(tpot, failover=failover) for tpot in (9, 10))
        self.sets = sets_of([(old, {}), (new, {})])
        self.old, self.wish = revision_of(old, 1), revision_of(new, 2)
        self.there = jobs_of(self.start(1, new=False), self.sets, self.context, ())

    def start(self, number: int, *, new: bool = True, beside: str = "") -> StartReplica:
        part = (self.wish if new else self.old).parts["Worker"]
        return StartReplica(f"Worker-{number}", "Worker", part.set_id, beside)

    @property
    def claims(self) -> list[DeviceClaim]:
        return device_claims(self.there, self.context.needs)

    def roomy(self) -> set[str]:
        return with_memory_beside(self.wish, self.sets, self.context, self.claims, {"Worker-1": ["host-1"]})

    def room(self) -> dict[str, int]:
        return room_of(self.wish, {"Worker": 1}, self.sets, self.context, self.claims)


@FAILOVER
def test_memory_for_two_is_room_beside(failover: bool) -> None:
    """Where the device has as much as both need, and not a byte less; a place of its own there is none either way."""
    for has_mib, roomy in ((127, set()), (128, {"Worker-1"})):
        bench = Bench(has_mib, failover=failover)
        assert (bench.roomy(), bench.room()) == (roomy, {"Worker": 0})
        with pytest.raises(Refused, match="1 devices are needed, and 0 are free"):
            jobs_of(bench.start(2), bench.sets, bench.context, bench.claims)


@FAILOVER
def test_one_beside_another_takes_its_memory_and_then_its_place(failover: bool) -> None:
    """On the same device, with sockets of its own; a third finds nothing there; when the first has gone the device is
    the second's, and free for nobody."""
    bench = Bench(128, failover=failover)
    first = bench.there
    second = jobs_of(bench.start(2, beside="Worker-1"), bench.sets, bench.context, bench.claims, ["host-1"])
    seats = [one.seat for one in device_claims([*first, *second])]
    assert seats == [DeviceSlot("host-1", "host-1"), DeviceSlot("host-1", "host-1.2" if failover else "host-1")]
    bench.there = [*first, *second]
    assert (bench.roomy(), bench.room()) == (set(), {"Worker": 0})
    bench.there = second
    assert bench.room() == {"Worker": 0}
    assert bench.roomy() == {"Worker-1"}, "the next may stand by there"


def test_a_vault_is_promised_what_its_set_needs() -> None:
    """Where its device's memory is known; else it may take what there is, and nothing fits beside it."""
    bench = Bench(128, failover=True)
    (vault,) = [job for job in bench.there if job.role == "vault"]
    assert msgspec.json.decode(vault.settings, type=VaultLaunch).budget_bytes == 64 * MIB
    unbound = DeviceClaim("p", DeviceSlot("host-1", "host-1"), 0)
    assert not Devices(("host-1",), 1, {"host-1": 512 * MIB}).fits(["host-1"], 1, [unbound])
    assert not Devices(("host-1",), 1, {}).fits(["host-1"], 1, [])
    assert not Devices(("host-1",), 1, {"host-1": 9}).fits(["host-1"], 0, []), "nobody knows what it needs"


@FAILOVER
def test_a_replica_that_is_there_in_part_keeps_its_seats(failover: bool) -> None:
    """Whoever completes it asks for what was asked for before, byte for byte; nothing more is taken."""
    bench = Bench(128, failover=failover)
    second = jobs_of(bench.start(2, beside="Worker-1"), bench.sets, bench.context, bench.claims, ["host-1"])
    for start, jobs in ((bench.start(1, new=False), bench.there), (bench.start(2), second)):
        claims = device_claims([*bench.there, *second])
        assert jobs_of(start, bench.sets, bench.context, claims) == jobs


def test_what_no_device_could_hold_is_refused() -> None:
    """With what it needs and what there is."""
    bench = Bench(64, failover=True)
    with pytest.raises(Refused, match="needs 64 MiB of memory, and host-1 has 63 MiB"):
        jobs_of(bench.start(2), bench.sets, ground_of(63), ())


@FAILOVER
def test_what_no_device_could_hold_is_known_before_anybody_leaves(failover: bool) -> None:
    """Of a set that is wanted, whoever has the devices now; what only waits for a place is not refused."""
    bench = Bench(64, failover=failover)
    set_id = bench.wish.parts["Worker"].set_id
    assert bench.room() == {"Worker": 0}
    assert refused_of(bench.wish, bench.sets, bench.context) == {}
    assert refused_of(bench.wish, bench.sets, ground_of(63)) == {
        set_id: "it needs 64 MiB of memory on a device, and none has more than 63 MiB"
    }


@pytest.mark.parametrize(
    ("ranks", "needed", "lack"),
    [
        (1, 0, ""),
        (1, 9, ""),
        (2, 9, "it needs 9 MiB of memory on each of 2 devices, and only 1 has that"),
        (2, 5, ""),
        (1, 10, "it needs 10 MiB of memory on a device, and none has more than 9 MiB"),
        (3, 1, "it needs 3 devices, and there are 2"),
    ],
)
def test_what_devices_lack(ranks: int, needed: int, lack: str) -> None:
    """One has 9 MiB and one 5: what is needed on each of so many, or is not known."""
    devices = Devices(("host-1", "host-2"), 1, {"host-1": 9 * MIB, "host-2": 5 * MIB})
    assert devices.lack(ranks, needed * MIB) == lack
    assert Devices().lack(ranks, needed * MIB) == "", "there are as many as are asked for"


def test_devices_are_given_out_once_by_kind() -> None:
    """A lone worker has one, where there are any to give; where there are none, it needs none."""
    bench = Bench(64, failover=False, devices=2)
    assert bench.room() == {"Worker": 1}
    (job,) = jobs_of(bench.start(2), bench.sets, bench.context, bench.claims)
    assert [one.seat.device for one in device_claims([job])] == ["host-2"]
    anywhere = StartContext(bench.context.machine, (), bench.context.named)
    jobs: list[Job] = jobs_of(bench.start(3), bench.sets, anywhere, bench.claims)
    assert (device_claims(jobs), room_of(bench.wish, {}, bench.sets, anywhere, ())) == ([], {})
