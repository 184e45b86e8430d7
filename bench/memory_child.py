"""A process of `python -m bench.memory` and `bench.warm`: it writes the weights and ends, or imports and measures them.

`python -m bench.memory_child JSON` answers commands on stdin with one JSON object per line on stdout. Every 2 MiB of
the weights begin with their own number, so that a slab in the wrong place is seen.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import sys
import time
from typing import Any

from holdfast.memory.client.calls import VaultRefused
from holdfast.memory.client.weights import RO, MemoryClient
from holdfast.memory.devices import Device, DeviceError, open_device, view
from holdfast.memory.fdsocket import FDS_PER_FRAME_MAX, close_all
from holdfast.memory.layout import TensorSpec
from holdfast.spec.names import is_host

MIB = 1024**2
PIECE_BYTES = 2 * MIB
TENSOR_BYTES = 64 * MIB
WAIT_MS = 600_000  # for a writer of a large model
_CONTROL_BYTES = socket.CMSG_SPACE(FDS_PER_FRAME_MAX * 4)


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
    """Return this process's share of shared pages, as the kernel divides them among all that map them."""
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
    await client.connect(WAIT_MS / 1000)  # the vault was only just started
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
        say(error=str(error) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
