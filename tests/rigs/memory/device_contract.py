"""What every device must do, as one list of checks: the host's tests and the GPU's run the same."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from holdfast.memory.devices import BusyError, Device, DeviceError, OutOfMemory, WrongFd, check_slab_fd
from holdfast.memory.devices.fds import seal_memfd
from holdfast.memory.devices.host_memory import open_host_memory
from holdfast.spec.names import is_host
from tests.rigs.memory.device_agent import Peer

FREE_S = 60.0  # for memory to be free again after its last user's end, at any load


@dataclass(frozen=True, slots=True)
class Rig:
    """A device under test, how to start another process with it, and a slab's size."""

    device: Device
    peer: Callable[[], Peer]
    size: int


@contextmanager
def slab(rig: Rig) -> Iterator[int]:
    fd = rig.device.create(rig.size)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def mapped(rig: Rig, fd: int, *, writable: bool = True) -> Iterator[int]:
    """The slab at an address of its own, for a while."""
    address = rig.device.reserve(rig.size)
    try:
        rig.device.map(address, rig.size, fd, writable=writable)
        yield address
    finally:
        rig.device.unmap(address, rig.size)
        rig.device.release(address, rig.size)


def until(true: Callable[[], bool]) -> bool:
    """Whether it comes true in time: a driver may give memory back a moment after the close."""
    deadline = time.monotonic() + FREE_S
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def a_new_slab_is_known_by_its_fd(rig: Rig) -> None:
    with slab(rig) as fd:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert check_slab_fd(rig.device.name, fd) in (rig.size, 0)


def a_slab_has_the_same_bytes_at_every_address(rig: Rig) -> None:
    with slab(rig) as fd, mapped(rig, fd) as one, mapped(rig, fd, writable=False) as other:
        rig.device.write(one + 12345, b"the same pages")
        assert one != other
        assert rig.device.read(other + 12345, 14) == b"the same pages"


def a_mapping_outlives_its_fd(rig: Rig) -> None:
    fd = rig.device.create(rig.size)
    address = rig.device.reserve(rig.size)
    rig.device.map(address, rig.size, fd, writable=True)
    os.close(fd)
    rig.device.write(address, b"still here")
    assert rig.device.read(address, 10) == b"still here"
    rig.device.unmap(address, rig.size)
    rig.device.release(address, rig.size)


def addresses_stay_put_across_unmap_and_map(rig: Rig) -> None:
    with slab(rig) as fd, mapped(rig, fd) as address:
        rig.device.write(address, b"kept")
        rig.device.unmap(address, rig.size)
        others = [rig.device.reserve(rig.size) for _ in range(8)]
        assert all(abs(other - address) >= rig.size for other in others)
        rig.device.map(address, rig.size, fd, writable=False)
        assert rig.device.read(address, 4) == b"kept"
        for other in others:
            rig.device.release(other, rig.size)


def many_slabs_are_mapped_side_by_side(rig: Rig) -> None:
    fds = [rig.device.create(rig.size) for _ in range(3)]
    address = rig.device.reserve(4 * rig.size)
    rig.device.map_many(address + rig.size, [(rig.size, fd) for fd in fds], writable=True)
    across = b"over the edge of two slabs"
    rig.device.write(address + 2 * rig.size - 7, across)
    assert rig.device.read(address + 2 * rig.size - 7, len(across)) == across
    rig.device.unmap(address, 4 * rig.size)
    rig.device.map(address, rig.size, fds[1], writable=False)
    assert rig.device.read(address, len(across) - 7) == across[7:]
    rig.device.unmap(address, 4 * rig.size)
    rig.device.release(address, 4 * rig.size)
    for fd in fds:
        os.close(fd)


def one_bad_slab_among_many_maps_none(rig: Rig) -> None:
    before = open_fds()
    reading, writing = os.pipe()
    with slab(rig) as fd:
        address = rig.device.reserve(3 * rig.size)
        with pytest.raises(WrongFd):
            rig.device.map_many(address, [(rig.size, fd), (rig.size, reading), (rig.size, fd)], writable=True)
        with pytest.raises(DeviceError):
            rig.device.read(address, 1)
        rig.device.map(address, rig.size, fd, writable=True)
        rig.device.unmap(address, rig.size)
        rig.device.release(address, 3 * rig.size)
    os.close(reading)
    os.close(writing)
    assert open_fds() == before


def what_is_no_slab_is_refused(rig: Rig) -> None:
    address = rig.device.reserve(rig.size)
    with tempfile.TemporaryFile() as file, socket.socket() as sock, open("/dev/null") as null:
        file.truncate(rig.size)
        pidfd, plain = os.pidfd_open(os.getpid()), os.memfd_create("plain")
        os.posix_fallocate(plain, 0, rig.size)
        for wrong in (file.fileno(), sock.fileno(), null.fileno(), pidfd, plain, 999_999):
            with pytest.raises(WrongFd):
                check_slab_fd(rig.device.name, wrong)
            with pytest.raises(WrongFd):
                rig.device.map(address, rig.size, wrong, writable=False)
        os.close(pidfd)
        os.close(plain)
    rig.device.release(address, rig.size)


def scratch_may_be_written_and_keeps_what_is_ones_own(rig: Rig) -> None:
    step, size = rig.device.granularity, 64 * rig.size
    own = ((step, step), (size - 2 * step, 2 * step))
    places = [start + at for start, length in own for at in range(0, length, step)]
    before, address = open_fds(), rig.device.reserve(size + rig.size)
    rig.device.scratch(address, size, own)
    for place in places:
        rig.device.write(address + place, place.to_bytes(8, "little"))
    for at in range(0, size, rig.size):
        if at not in places:
            rig.device.write(address + at, b"anything")
    assert [int.from_bytes(rig.device.read(address + place, 8), "little") for place in places] == places
    with pytest.raises(DeviceError):
        rig.device.write(address + size, b"beyond it")
    rig.device.unmap(address, size)
    with pytest.raises(DeviceError):
        rig.device.read(address + places[0], 1)
    rig.device.release(address, size + rig.size)
    assert open_fds() == before


def scratch_costs_little_and_makes_room_for_a_slab(rig: Rig) -> None:
    size = 256 * rig.size  # of a GPU, slabs of 128 MiB and its halves

    def seen() -> bool:
        before = rig.device.free_bytes()
        rig.device.scratch(address, size, ((0, rig.device.granularity),))
        during = rig.device.free_bytes()
        rig.device.unmap(address, size)
        return during > before - size // 2

    address = rig.device.reserve(size)
    assert any(seen() for _ in range(5))  # others allocate meanwhile
    with slab(rig) as fd:
        rig.device.map(address, rig.size, fd, writable=True)
        with pytest.raises(BusyError):
            rig.device.scratch(address, size)
        rig.device.scratch(address + rig.size, size - rig.size)
        rig.device.write(address, b"a slab's")
        rig.device.write(address + rig.size, b"no slab's")
        with pytest.raises(BusyError):
            rig.device.release(address, size)
        rig.device.unmap(address + rig.size, size - rig.size)
        assert rig.device.read(address, 8) == b"a slab's"
        rig.device.unmap(address, rig.size)
    rig.device.release(address, size)


def scratch_of_a_wrong_shape_is_refused(rig: Rig) -> None:
    step = rig.device.granularity
    address = rig.device.reserve(2 * rig.size)
    wrong_own = [((0, step + 1),), ((1, step),), ((step, 0),), ((rig.size, step),), ((step, step), (0, step))]
    wrong_own += [((0, 2 * step), (step, step)), ((-step, step),), ((0, rig.size + step),)]
    for own in wrong_own:
        with pytest.raises(DeviceError):
            rig.device.scratch(address, rig.size, own)
    for at, size in ((address, step + 1), (address, 0), (address + 1, step), (address, 4 * rig.size)):
        with pytest.raises(DeviceError):
            rig.device.scratch(at, size)
    with pytest.raises(DeviceError):
        rig.device.read(address, 1)
    rig.device.scratch(address, rig.size, ((0, step), (step, step)))  # side by side is apart
    rig.device.unmap(address, rig.size)
    rig.device.release(address, 2 * rig.size)


def places_that_are_not_free_are_refused(rig: Rig) -> None:
    with slab(rig) as fd, mapped(rig, fd) as address:
        with pytest.raises(BusyError):
            rig.device.map(address, rig.size, fd, writable=True)
        with pytest.raises(BusyError):
            rig.device.release(address, rig.size)
        with pytest.raises(DeviceError):
            rig.device.map(address + 64 * rig.size, rig.size, fd, writable=True)
        with pytest.raises(DeviceError):
            rig.device.unmap(address, rig.size // 2)
        with pytest.raises(DeviceError):
            rig.device.release(address, rig.size // 2)
        with pytest.raises(DeviceError):
            rig.device.create(rig.device.granularity + 1)
        with pytest.raises(DeviceError):
            rig.device.read(address + rig.size - 1, 2)


def access_can_be_taken_and_given_back(rig: Rig) -> None:
    with slab(rig) as fd, mapped(rig, fd) as address:
        rig.device.write(address, b"first")
        rig.device.protect(address, rig.size, writable=False)
        with pytest.raises(DeviceError):
            rig.device.write(address, b"never")
        assert rig.device.read(address, 5) == b"first"
        rig.device.protect(address, rig.size, writable=True)
        rig.device.write(address, b"after")
        assert rig.device.read(address, 5) == b"after"


def a_read_only_mapping_cannot_be_written_past_our_checks(rig: Rig) -> None:
    """The process that tries dies, or its device tells it: the bytes are the same."""
    with slab(rig) as fd, mapped(rig, fd) as address, rig.peer() as reader:
        rig.device.write(address, b"read only")
        reader.ask("reserve", sizes=[rig.size])
        assert "error" not in reader.ask("map", [fd], writable=False)
        with suppress(EOFError):
            assert "error" in reader.ask("poke")
        assert rig.device.read(address, 9) == b"read only"


def a_sealed_slab_is_read_on(rig: Rig) -> None:
    with slab(rig) as fd, mapped(rig, fd) as address:
        rig.device.write(address, b"committed")
        rig.device.synchronize()
        rig.device.protect(address, rig.size, writable=False)
        if is_host(rig.device.name):  # an fd of a GPU's driver cannot be: there the vault's lock stands for it
            seal_memfd(fd)
            seal_memfd(fd)
        assert rig.device.read(address, 9) == b"committed"
        with mapped(rig, fd, writable=False) as other:
            assert rig.device.read(other, 9) == b"committed"


def a_checksum_is_over_the_bytes(rig: Rig) -> None:
    content = os.urandom(rig.size)
    with slab(rig) as fd, mapped(rig, fd) as one, mapped(rig, fd, writable=False) as other:
        rig.device.write(one, content)
        expected = hashlib.blake2b(content, digest_size=16).hexdigest()
        assert rig.device.checksum(one, rig.size) == rig.device.checksum(other, rig.size) == expected
        rig.device.write(one + rig.size - 1, bytes([content[-1] ^ 1]))
        assert rig.device.checksum(other, rig.size) != expected


def too_much_is_refused_and_nothing_is_taken(rig: Rig) -> None:
    before = open_fds()
    free = rig.device.free_bytes()
    with pytest.raises(OutOfMemory):
        rig.device.create((free // rig.device.granularity + 1024) * rig.device.granularity)
    assert rig.device.free_bytes() > free // 2
    assert open_fds() == before


def a_slab_takes_its_bytes_at_once_and_gives_them_back(rig: Rig) -> None:
    size = 64 * rig.size

    def seen() -> bool:
        before = rig.device.free_bytes()
        fd = rig.device.create(size)
        during = rig.device.free_bytes()
        os.close(fd)
        return during < before - size // 2 and until(lambda: rig.device.free_bytes() > before - size // 2)

    # Other processes allocate and free meanwhile: it must be seen once, and half the slab is enough to tell.
    assert any(seen() for _ in range(5))


def another_process_writes_what_we_read(rig: Rig) -> None:
    with slab(rig) as fd, mapped(rig, fd, writable=False) as address, rig.peer() as writer:
        writer.ask("reserve", sizes=[rig.size])
        assert "error" not in writer.ask("map", [fd], writable=True)
        before = rig.device.checksum(address, rig.size)
        assert "error" not in writer.ask("fill", seed=7)
        assert rig.device.checksum(address, rig.size) != before
        assert writer.ask("verify", seed=7)["wrong"] == 0


def slabs_survive_their_creators_sigkill(rig: Rig) -> None:
    with rig.peer() as creator, rig.peer() as heir:
        fds = creator.ask("create", count=3, size=rig.size, seed=11)["fds"]
        creator.kill()
        heir.ask("reserve", sizes=[rig.size] * 3)
        assert "error" not in heir.ask("map", fds, writable=True)
        assert heir.ask("verify", seed=11)["wrong"] == 0
        heir.ask("fill", seed=12)
        assert heir.ask("verify", seed=12)["wrong"] == 0
    for fd in fds:
        os.close(fd)


def host_memory_beside_it_keeps_what_is_copied_there(rig: Rig) -> None:
    """Out, over other bytes, and in again; given back, all of it is."""
    memory = open_host_memory(rig.device)
    half = rig.size // 2
    with slab(rig) as fd, mapped(rig, fd) as address:
        try:
            rig.device.write(address, b"a" * half + b"b" * half)
            (kept,) = memory.allocate([rig.size])
            for offset in (0, half):
                memory.copy_out(kept + offset, address + offset, half)
            memory.wait()
            assert ctypes.string_at(kept, rig.size) == b"a" * half + b"b" * half
            rig.device.write(address, b"c" * rig.size)
            for offset in (half, 0):
                memory.copy_in(address + offset, kept + offset, half)
            memory.wait()
            assert rig.device.read(address, rig.size) == b"a" * half + b"b" * half
            with pytest.raises(OutOfMemory):
                memory.allocate([rig.size, 1 << 50])
        finally:
            memory.close()
            memory.close()


def nothing_leaks(rig: Rig) -> None:
    def once() -> None:
        with slab(rig) as fd, mapped(rig, fd) as one, mapped(rig, fd) as _:
            rig.device.protect(one, rig.size, writable=False)

    def counts() -> tuple[set[str], int]:
        with open("/proc/self/maps") as maps:
            return open_fds(), len(maps.readlines())

    once()
    fds, maps = counts()
    free = rig.device.free_bytes()
    for _ in range(64):
        once()
    fds_after, maps_after = counts()
    assert fds_after == fds
    assert maps_after <= maps + 16  # Python's own arenas come and go
    if not is_host(rig.device.name):  # there, others use memory too, and what leaks is an fd or a mapping
        assert until(lambda: rig.device.free_bytes() > free - 32 * rig.size)


CHECKS: list[Callable[[Rig], None]] = [
    a_new_slab_is_known_by_its_fd,
    a_slab_has_the_same_bytes_at_every_address,
    a_mapping_outlives_its_fd,
    addresses_stay_put_across_unmap_and_map,
    many_slabs_are_mapped_side_by_side,
    one_bad_slab_among_many_maps_none,
    what_is_no_slab_is_refused,
    scratch_may_be_written_and_keeps_what_is_ones_own,
    scratch_costs_little_and_makes_room_for_a_slab,
    scratch_of_a_wrong_shape_is_refused,
    places_that_are_not_free_are_refused,
    access_can_be_taken_and_given_back,
    a_read_only_mapping_cannot_be_written_past_our_checks,
    a_sealed_slab_is_read_on,
    a_checksum_is_over_the_bytes,
    too_much_is_refused_and_nothing_is_taken,
    a_slab_takes_its_bytes_at_once_and_gives_them_back,
    another_process_writes_what_we_read,
    slabs_survive_their_creators_sigkill,
    host_memory_beside_it_keeps_what_is_copied_there,
    nothing_leaks,
]
