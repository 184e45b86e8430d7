"""What sharing weights through a vault costs: unmap and remap against their floor, and the memory importers use.

One run, real processes: a keeper and its vault, a writer that commits and ends, and importers. The floor is a bare
socket exchange of the same descriptors plus the same map calls, taken in turn with what it is compared to.

`python -m holdfast.bench.memory JSON` is such a process: it answers commands on stdin with one JSON object per line on
stdout. Every 2 MiB of the weights begin with their own number, so that a slab in the wrong place is seen.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import UserError
from holdfast.memory.client.weights import RO, MemoryClient
from holdfast.memory.devices import Device, DeviceError, open_device, view
from holdfast.memory.errors import VaultRefused
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, close_all
from holdfast.memory.layout import SLABS_MAX
from holdfast.memory.packing import TensorSpec
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.spec.names import is_host
from holdfast.testing.children import Child, ChildFailed

GIB = 1024**3
MIB = 1024**2
# Two engines, an active and a standby, are what a device has.
IMPORTERS = 2
SILENT_S = 600.0  # a writer of a large model says how far it is; an importer waits for it
PIECE_BYTES = 2 * MIB
TENSOR_BYTES = 64 * MIB
WAIT_MS = 600_000  # for a writer of a large model
_CONTROL_BYTES = socket.CMSG_SPACE(FDS_PER_FRAME_MAX * 4)

Progress = Callable[[int, int], None]  # bytes written so far, of all


@dataclass(frozen=True, slots=True)
class MemoryBench:
    """What to measure."""

    device: str = "host-0"
    gib: float = 2.0
    slab_mib: int = 1024
    rounds: int = 50

    @property
    def total_bytes(self) -> int:
        """In whole pieces of the granularity every device has."""
        return max(1, round(self.gib * GIB / (2 * MIB))) * 2 * MIB

    @property
    def slabs(self) -> int:
        return -(-self.total_bytes // (self.slab_mib * MIB))


class BenchProcess(Child):
    """A process of the bench; what it could not do is the user's to hear."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        super().__init__("-m", "holdfast.bench.memory", json.dumps(settings), log=log)

    def said(self) -> dict[str, Any]:
        try:
            heard: dict[str, Any] = self.next(SILENT_S)
        except ChildFailed as error:
            raise UserError(f"a process of the bench failed: {error}") from None
        if "error" in heard:
            raise UserError(f"cannot measure: {heard['error']}")
        return heard

    def asked(self, order: str) -> dict[str, Any]:
        self.tell(order)
        return self.said()


def run(bench: MemoryBench, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Everything, in a folder of its own; nothing is left behind."""
    if bench.slabs > SLABS_MAX:
        raise UserError(f"{bench.slabs} slabs are more than the {SLABS_MAX} a vault keeps; use a larger --slab-mib")
    folder = Path(tempfile.mkdtemp(prefix="hf-bench-", dir="/tmp"))
    path = str(folder / "gms.sock")
    vault = VaultProcesses(VaultSettings(bench.device, path), folder / "vault.log")
    shared = {
        "device": bench.device,
        "path": path,
        "slab_bytes": bench.slab_mib * MIB,
        "total_bytes": bench.total_bytes,
    }
    try:
        vault.start()
        commit_weights(shared, folder, progress)
        with ExitStack() as stack:
            roles = (shared | {"role": "import", "engine_id": place} for place in range(IMPORTERS))
            importers = [stack.enter_context(BenchProcess(role, folder / f"{role['engine_id']}.log")) for role in roles]
            for importer in importers:
                importer.said()
            copies = _copies(bench, importers)
            return _figures(bench, importers[0].asked(f"measure {bench.rounds}")) | copies
    finally:
        vault.stop()
        shutil.rmtree(folder, ignore_errors=True)


def commit_weights(shared: dict[str, Any], folder: Path, progress: Progress) -> None:
    """By a process of its own, which has ended when this returns."""
    with BenchProcess(shared | {"role": "write", "engine_id": 0}, folder / "writer.log") as writer:
        while "committed" not in (said := writer.said()):
            progress(said["written"], shared["total_bytes"])


def _copies(bench: MemoryBench, importers: list[BenchProcess]) -> dict[str, Any]:
    """All importers have touched every page: their shares of shared pages add up to the copies there are."""
    if not is_host(bench.device):
        return {"pss_mib": None, "physical_copies": None}
    pss_bytes = sum(int(importer.asked("pss")["pss_bytes"]) for importer in importers)
    return {
        "importers": len(importers),
        "pss_mib": round(pss_bytes / MIB, 1),
        "physical_copies": round(pss_bytes / bench.total_bytes, 3),
    }


def _figures(bench: MemoryBench, took: dict[str, list[float]]) -> dict[str, Any]:
    p50 = {name: statistics.median(values) for name, values in took.items()}
    return {
        "device": bench.device,
        "gib": round(bench.total_bytes / GIB, 3),
        "slab_mib": bench.slab_mib,
        "slabs": bench.slabs,
        "rounds": bench.rounds,
        "remap_ms_p50": round(p50["remap_ms"], 3),
        "unmap_ms_p50": round(p50["unmap_ms"], 3),
        "floor_ms_p50": round(p50["floor_ms"], 3),
        "remap_over_floor": round(p50["remap_ms"] / p50["floor_ms"], 1),
        "remap_ms_max": round(max(took["remap_ms"]), 3),
        # Remap is answered by other processes, the floor by nobody: on a busy machine their ratio grows.
        "load_1m": round(os.getloadavg()[0], 1),
    }


# -- its processes: one writes the weights and ends, the others import them and are measured


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def tensors(total_bytes: int, slab_bytes: int) -> list[TensorSpec]:
    size = min(TENSOR_BYTES, slab_bytes)
    sizes = [min(size, total_bytes - at) for at in range(0, total_bytes, size)]
    return [TensorSpec(f"t{place}", (size,), (1,), "uint8", size) for place, size in enumerate(sizes)]


def mark(number: int) -> bytes:
    return f"piece {number:016d}".encode()


async def write(client: MemoryClient, total_bytes: int) -> None:
    """Allocate, fill with progress, commit."""
    assert await client.acquire("rw", WAIT_MS) == "rw"
    specs = tensors(total_bytes, client.slab_bytes)
    addresses = await client.allocate(specs, f"bench-{total_bytes}")
    filler, written = bytearray(os.getrandom(PIECE_BYTES) * (TENSOR_BYTES // PIECE_BYTES)), 0
    for spec in specs:
        for at in range(0, spec.size_bytes, PIECE_BYTES):
            text = mark((written + at) // PIECE_BYTES)
            filler[at : at + len(text)] = text
        client.device.write(addresses[spec.name], memoryview(filler)[: spec.size_bytes])
        written += spec.size_bytes
        say(written=written)
    await client.commit(WAIT_MS / 1000)
    say(committed=True)


def verify(client: MemoryClient) -> None:
    """Every piece is where it belongs; on the host every page is touched, so that it counts in PSS."""
    assert client.mapped is not None
    number = 0
    addresses = client.mapped.addresses()
    for place in client.mapped.layout.tensors:
        for at in range(0, place.size_bytes, PIECE_BYTES):
            text = mark(number)
            assert client.device.read(addresses[place.name] + at, len(text)) == text, f"piece {number} is wrong"
            number += 1
    if is_host(client.device.name):
        bytes(view(client.mapped.address, client.mapped.size)[:: os.sysconf("SC_PAGE_SIZE")])


def shared_pss_bytes() -> int:
    """This process's share of shared pages, as the kernel divides them among all who map them."""
    with open("/proc/self/smaps_rollup") as rollup:
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in list(rollup)[1:]}
    return found["Pss_Shmem"]


async def measure(client: MemoryClient, rounds: int) -> dict[str, list[float]]:
    """Unmap, remap and the floor, in turn, so that all three see the same machine."""
    assert client.mapped is not None
    total = client.mapped.size
    floor_address = client.device.reserve(total)
    took: dict[str, list[float]] = {"unmap_ms": [], "remap_ms": [], "floor_ms": []}
    for _ in range(rounds):
        times = [time.perf_counter()]
        await client.unmap()
        times.append(time.perf_counter())
        assert await client.remap() == RO
        times.append(time.perf_counter())
        for name, began_s, ended_s in zip(("unmap_ms", "remap_ms"), times, times[1:], strict=False):
            took[name].append((ended_s - began_s) * 1000)
        sizes = list(client.mapped.layout.slab_sizes)
        took["floor_ms"].append(floor_ms(client.device, floor_address, sizes, client.mapped.fds))
    client.device.release(floor_address, total)
    verify(client)
    return took


def floor_ms(device: Device, address: int, sizes: list[int], fds: list[int]) -> float:
    """The least it can take: the same descriptors through a bare socket pair, and the same map calls."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    received: list[int] = []
    with one, other:
        began_s = time.perf_counter()
        for start in range(0, len(fds), FDS_PER_FRAME_MAX):
            batch = array.array("i", fds[start : start + FDS_PER_FRAME_MAX])
            one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, batch)])
            _, control, _, _ = other.recvmsg(1, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
            received += array.array("i", control[0][2])
        device.map_many(address, list(zip(sizes, received, strict=True)), writable=False)
        took_ms = (time.perf_counter() - began_s) * 1000
    device.unmap(address, sum(sizes))
    close_all(received)
    return took_ms


async def serve_commands(client: MemoryClient) -> None:
    """One at a time from stdin, until it ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, _, argument = line.strip().partition(" ")
        if command == "pss":
            say(pss_bytes=shared_pss_bytes())
        elif command == "measure":
            say(**await measure(client, int(argument)))


async def play(settings: dict[str, Any]) -> None:
    device = open_device(settings["device"])
    client = MemoryClient(settings["path"], device, settings["engine_id"], slab_bytes=settings["slab_bytes"])
    await client.connect()
    if settings["role"] == "write":
        await write(client, settings["total_bytes"])
    else:
        assert await client.acquire("ro", WAIT_MS, wait_for_writer=True) == RO
        verify(client)
        say(imported=True)
        await serve_commands(client)
    await client.close()
    device.close()


def main() -> int:
    try:
        asyncio.run(play(json.loads(sys.argv[1])))
    except (DeviceError, VaultRefused, OSError) as error:
        say(error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
