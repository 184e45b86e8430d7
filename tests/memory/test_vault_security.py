"""Who may do what at a vault: uids, locks, seals and descriptors, each tried from the wrong side."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import re
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from holdfast.core.errors import UserError
from holdfast.memory import protocol
from holdfast.memory.client.calls import VaultRefused, check_uid
from holdfast.memory.client.pool import PoolClient
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import Layout
from holdfast.memory.vault.launch import VaultProcesses
from holdfast.memory.vault.settings import VaultSettings
from holdfast.testing.processes import fd_count
from holdfast.testing.waiting import BOUND_S
from tests.rigs.memory.vaults import MIB, SOON_MS, Rig, digest, expected, facts, load, until, write

pytestmark = pytest.mark.processes
NOBODY = 65534
# A client that, as a user whom the vault may not know, asks for the lock to write and for the weights; what it got.
AS_NOBODY = """
import asyncio, os, sys
from holdfast.memory.client.weights import MemoryClient
from holdfast.memory.devices import open_device
from holdfast.memory.client.calls import VaultRefused
from holdfast.memory.writer_lock import WriterLock
from pathlib import Path
device = open_device("host-0")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    client = MemoryClient(sys.argv[1], device, 0)
    await client.connect(60)
    assert WriterLock(Path(sys.argv[1]).parent, "nobody").try_acquire()
    return await client.acquire("rw", 60_000)
try:
    print(asyncio.run(main()))
except VaultRefused as refused:
    print(refused.code)
"""


@pytest.fixture(scope="module")
def shared_rig() -> Iterator[Rig]:
    """For those who change nothing."""
    with Rig() as started:
        yield started


async def as_nobody(path: str) -> str:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AS_NOBODY, path), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await child.communicate()
    return said.decode().strip()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_another_uid_is_refused(rig: Rig) -> None:
    """By the kernel's word for who connected, whatever the socket's mode is."""
    rig.directory.chmod(0o755)
    os.chmod(rig.path(), 0o666)
    assert await as_nobody(rig.path()) == "forbidden"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_allowed_uid_can_use_the_directory_we_make() -> None:
    """The folder is passable, the socket answers, and the writer's lock can be taken; nobody can list the folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        os.chmod(above, 0o755)
        path = os.path.join(above, "made", "gms_host-0.sock")
        vault = VaultProcesses(VaultSettings("host-0", path, allowed_uids=(NOBODY,)))
        vault.start()
        try:
            assert await as_nobody(path) == "rw"
            assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o711
        finally:
            vault.stop()


def test_allowed_uid_is_told_what_is_in_its_way() -> None:
    """A folder above that others cannot pass is named at the start, not found out by the first of them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # made for its owner alone
        vault = VaultProcesses(
            VaultSettings("host-0", os.path.join(above, "made", "gms_host-0.sock"), allowed_uids=(NOBODY,))
        )
        with pytest.raises(UserError, match=re.escape(above)):
            vault.start()


def test_client_gives_nothing_to_a_strangers_vault() -> None:
    """Who listens at the path must be this user, root, or one that was named: else not even a greeting is sent."""
    for allowed in ((os.getuid(), ()), (0, ()), (NOBODY, (NOBODY,))):
        check_uid("gms_host-0.sock", *allowed)
    with pytest.raises(PermissionError):
        check_uid("gms_host-0.sock", NOBODY, ())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
async def test_strangers_vault_is_refused_by_who_connects() -> None:
    """The kernel says who listens: a socket that somebody else put there gets no pidfd and no page."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        path = os.path.join(folder, "gms_host-0.sock")
        code = (
            "import os, socket, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); os.chmod(sys.argv[1], 0o666)\n"
            "print('up', flush=True); c, _ = s.accept(); print(len(c.recv(100)), flush=True)"
        )
        stranger = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, path), stdout=asyncio.subprocess.PIPE
        )
        assert stranger.stdout is not None
        await stranger.stdout.readline()
        with pytest.raises(PermissionError, match="--vault-uid 65534"):
            await MemoryClient(path, open_device("host-0"), 0).connect(BOUND_S)
        assert (await stranger.communicate())[0] == b"0\n"


async def test_strangers_cost_little_before_they_are_known(rig: Rig) -> None:
    """A frame that is larger than a greeting is refused by its header, and its bytes are not kept."""
    vault = await until(lambda: rig.pids("server"), "the vault")
    async with rig.client(0):
        before = resident_kib(vault[0])
        socks = [socket.socket(socket.AF_UNIX) for _ in range(10)]
        loop = asyncio.get_running_loop()
        for sock in socks:
            sock.setblocking(False)
            await loop.sock_connect(sock, rig.path())
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(BOUND_S):
                    await loop.sock_sendall(sock, struct.pack(">IH", 31 * MIB, 0) + bytes(30 * MIB))
        assert resident_kib(vault[0]) - before < 20 * 1024
        for sock in socks:
            sock.close()


def resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith("VmRSS")))


async def test_epoch_that_would_keep_everybody_out_is_refused(rig: Rig) -> None:
    """Epochs grow by one or follow the clock: a larger one is a mistake, and the next leader is not made to pay."""
    async with rig.client(0) as wrong, rig.client(1) as right:
        for epoch in (2**62, time.time_ns() // 1_000_000 + 7 * 24 * 3600 * 1000):
            with pytest.raises(VaultRefused, match="far in the future"):
                await PoolClient(wrong, open_device("host-0")).acquire(epoch, "g", SOON_MS)
        await PoolClient(right, open_device("host-0")).acquire(time.time_ns() // 1_000_000, "g", SOON_MS)


# -- without the lock


def empty_layout(identity: str = "x") -> Layout:
    return Layout(identity, (), ())


WITHOUT_RIGHT: list[tuple[Callable[[int], msgspec.Struct], bool, str]] = [
    (lambda n: protocol.AddSlabs(n, [2 * MIB]), True, "not_writer"),
    (lambda n: protocol.CommitWeights(n, empty_layout()), False, "not_writer"),
    (protocol.FetchSlabs, False, "not_reader"),
    (lambda n: protocol.AskWeights(n, "rw", 0), False, "committed"),
    (lambda n: protocol.AskWeights(n, "rw", 0, replace="f" * 32), False, "stale"),
    (lambda n: protocol.AskWeights(n, "root", 0), False, "bad_request"),
    (lambda n: protocol.Donate(n, empty_layout(), True), False, "stale"),
    (lambda n: protocol.Donate(n, Layout("x", (2 * MIB,), ()), False), True, "stale"),
    (lambda n: protocol.AcquirePool(n, 99, "g", 0), False, "not_registered"),
    (lambda n: protocol.AddPoolSlabs(n, [2 * MIB], True), True, "not_owner"),
    (protocol.FetchPool, False, "not_registered"),
    (lambda n: protocol.Mapping(n, 99), False, "not_granted"),
    (lambda n: protocol.Mapping(n, 1), False, "stale_epoch"),
    (lambda n: protocol.Quiesced(n, 10), False, "not_registered"),
    (lambda n: protocol.DonatePool(n, 99, "g", [2 * MIB], True), True, "stale"),
    (protocol.ReleaseWeights, False, ""),
    (lambda n: protocol.CancelCall(n, 1), False, ""),
]


async def test_client_that_holds_no_lock_changes_nothing(rig: Rig) -> None:
    """Every message there is, sent without the right to it, is refused by name and leaves all as it was."""
    async with rig.client(0) as writer, rig.client(0) as owner, rig.client(1) as stranger:
        await write(writer)
        pool = PoolClient(owner, open_device("host-0"))
        await pool.acquire(10, "g", SOON_MS)
        await pool.make(MIB, [2 * MIB])
        before, fds = shown(await facts(writer)), fd_count(rig.pids("server")[0])
        for make, with_fd, code in WITHOUT_RIGHT:
            slab = [stranger.device.create(2 * MIB)] if with_fd else []
            assert await refusal(stranger, make, slab) == code, make(0)
            close_all(slab)
            assert shown(await facts(writer)) == before, make(0)
        await until(lambda: fd_count(rig.pids("server")[0]) <= fds, "nothing is left of what was sent")
        assert digest(writer) == expected(1)
        pool.unmap()


async def refusal(client: MemoryClient, make: Callable[[int], msgspec.Struct], fds: list[int]) -> str:
    """The code a call is refused with; empty: it was not."""
    try:
        await client.link().call(make, BOUND_S, fds)
    except VaultRefused as refused:
        return refused.code
    return ""


def shown(seen: dict[str, Any]) -> dict[str, Any]:
    return {key: seen[key] for key in seen if key not in ("history", "uptime_s", "counts")}


async def test_nobody_else_touches_what_a_writer_writes(rig: Rig) -> None:
    """While one writes, another session neither adds to it, nor commits it, nor sees it."""
    async with rig.client(0) as writer, rig.client(1) as stranger:
        await writer.acquire("rw", SOON_MS)
        await load(writer)
        assert writer.mapped is not None
        layout = writer.mapped.layout
        for make in (
            lambda n: protocol.CommitWeights(n, layout),
            protocol.FetchSlabs,
            lambda n: protocol.AddSlabs(n, []),
        ):
            assert await refusal(stranger, make, [])
        await stranger.link().call(protocol.ReleaseWeights, BOUND_S)
        assert (await facts(stranger))["weights"] == "RW"
        await writer.commit()
        assert digest(writer) == expected(1)


async def test_unsealed_set_is_not_taken_as_a_donation(rig: Rig) -> None:
    """After a total loss anyone may come; what was never committed is not sealed, and is refused."""
    async with rig.client(0):
        pass
    await rig.start_again()
    async with rig.client(0) as liar:
        slab = liar.device.create(2 * MIB)
        layout = Layout("x", (2 * MIB,), ())
        assert await refusal(liar, lambda n: protocol.Donate(n, layout, True), [slab]) == "wrong_fd"
        os.close(slab)
        assert (await facts(liar))["weights"] == "EMPTY"


# -- committed slabs


async def test_committed_host_slabs_cannot_be_written_by_any_path(rig: Rig) -> None:
    """Neither through the descriptors, nor through /proc (the vault's own too), nor by mapping or truncating."""
    async with rig.client(0) as writer, rig.client(1) as reader:
        await write(writer)
        await reader.acquire("ro", SOON_MS)
        assert reader.mapped is not None
        assert writer.mapped is not None
        paths = [f"/proc/self/fd/{fd}" for fd in (*reader.mapped.fds, *writer.mapped.fds)]
        for pid in (*rig.pids("server"), *rig.pids("keeper")):
            folder = f"/proc/{pid}/fd"
            paths += [f"{folder}/{name}" for name in os.listdir(folder) if "memfd:" in os.readlink(f"{folder}/{name}")]
        assert len(paths) >= 4
        for path in paths:
            try_to_write(path)
        assert digest(reader) == digest(writer) == expected(1)


def try_to_write(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        for attack in (
            lambda: os.pwrite(fd, b"evil", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 30),
            lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x20),
        ):
            with pytest.raises(PermissionError):
                attack()
    finally:
        os.close(fd)


async def test_commit_is_refused_while_a_writable_mapping_lives(rig: Rig) -> None:
    """A writer that keeps a hand in the slab cannot commit it."""
    async with rig.client(0) as writer:
        await writer.acquire("rw", SOON_MS)
        await load(writer)
        assert writer.mapped is not None
        kept = mmap.mmap(writer.mapped.fds[0], 4096)
        with pytest.raises(VaultRefused) as refused:
            await writer.commit()
        assert refused.value.code == "not_sealed"
        assert (await facts(writer))["weights"] == "RW"
        kept.close()
        await writer.commit()


# -- descriptors


def wrong_fds() -> dict[str, int]:
    """Everything that is not a slab."""
    pipe, _ = os.pipe()
    bare = os.memfd_create("bare", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(bare, 0, 2 * MIB)
    holes = os.memfd_create("holes", os.MFD_ALLOW_SEALING)
    os.ftruncate(holes, 2 * MIB)
    fcntl.fcntl(holes, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    never = os.memfd_create("never", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(never, 0, 2 * MIB)
    fcntl.fcntl(never, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    good = open_device("host-0").create(2 * MIB)
    small = open_device("host-0").create(4 * MIB)
    return {
        "socket": socket.socket(socket.AF_UNIX).detach(),
        "pipe": pipe,
        "plain file": os.open(__file__, os.O_RDONLY),
        "device": os.open("/dev/null", os.O_RDWR),
        "pidfd": os.pidfd_open(os.getpid()),
        "eventfd": os.eventfd(0),
        "unsealed memfd": bare,
        "memfd with holes": holes,
        "memfd never sealable": never,
        "read-only memfd": os.open(f"/proc/self/fd/{good}", os.O_RDONLY),
        "other size": small,
    }


async def test_wrong_descriptors_are_refused_by_name(rig: Rig) -> None:
    """As weights and as pool; the vault keeps none of them, and the writer can go on with the right ones."""
    async with rig.client(0) as writer, rig.client(0) as owner:
        await writer.acquire("rw", SOON_MS)
        await owner.register_mapping(None)
        await owner.link().call(lambda n: protocol.AcquirePool(n, 10, "g", SOON_MS), BOUND_S)
        before = fd_count(rig.pids("server")[0])
        for name, fd in wrong_fds().items():
            for client, make in (
                (writer, lambda n: protocol.AddSlabs(n, [2 * MIB])),
                (owner, lambda n: protocol.AddPoolSlabs(n, [2 * MIB], False)),
            ):
                assert await refusal(client, make, [fd]) == "wrong_fd", name
            os.close(fd)
        for sizes in ([], [2 * MIB, 2 * MIB], [-2 * MIB], [0]):
            slab = writer.device.create(2 * MIB)
            made = partial(protocol.AddSlabs, sizes=sizes)
            assert await refusal(writer, made, [slab]) == "bad_request"
            os.close(slab)
        await until(lambda: fd_count(rig.pids("server")[0]) <= before, "nothing is left of them")
        await load(writer)
        await writer.commit()


# -- the first words


def hello(version: int = protocol.VERSION) -> bytes:
    return protocol.encode(protocol.Hello(version, "someone", 0, os.getpid()))


def framed(body: bytes, count: int) -> bytes:
    return struct.pack(">IH", len(body), count) + body


@pytest.mark.parametrize(
    ("data", "fds", "code"),
    [
        (framed(hello(), 0), [], "bad_request"),
        (framed(hello(), 1), ["pipe"], "bad_request"),
        (framed(hello(), 2), ["pidfd", "pidfd"], "bad_request"),
        (framed(hello(version=99), 1), ["pidfd"], "bad_request"),
        (framed(protocol.encode(protocol.GetStatus(1)), 0), [], "bad_request"),
        (framed(b"\xc1", 0), [], "bad_request"),
        (struct.pack(">IH", 2**32 - 1, 0), [], None),
        (struct.pack(">IH", 10, 2**16 - 1), [], None),
        (framed(hello(), 1), [], None),
    ],
    ids=[f"words-{number}" for number in range(9)],  # not the words themselves: this process's pid is in them
)
async def test_wrong_first_words_end_the_connection(
    shared_rig: Rig, data: bytes, fds: list[str], code: str | None
) -> None:
    """A refusal with its reason where the frame can be read, the end of the connection in any case."""
    rig = shared_rig
    async with rig.client(0) as witness:
        before = fd_count(rig.pids("server")[0])
        said = await asyncio.to_thread(speak, rig.path(), data, fds)
        if code is not None:
            answer = protocol.from_vault.decode(said[6:])
            assert isinstance(answer, protocol.Failed)
            assert answer.code == code
        await until(lambda: fd_count(rig.pids("server")[0]) <= before, "nothing is left of it")
        assert witness.connected


def speak(path: str, data: bytes, kinds: list[str]) -> bytes:
    """Say something and hear everything until the vault hangs up."""
    made = [os.pidfd_open(os.getpid()) if kind == "pidfd" else os.open("/dev/null", os.O_RDONLY) for kind in kinds]
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(BOUND_S)
        sock.connect(path)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", made))] if made else []
        sock.sendmsg([data], rights)
        close_all(made)
        said = b""
        while part := sock.recv(65536):
            said += part
        return said


async def test_silent_connections_take_nothing_from_those_who_are_here(rig: Rig) -> None:
    """Hundreds that never say hello are bounded; whoever is served already does not notice."""
    async with rig.client(0) as writer:
        await writer.acquire("rw", SOON_MS)
        silent = [socket.socket(socket.AF_UNIX) for _ in range(300)]
        for sock in silent:
            sock.connect(rig.path())
        await load(writer)
        await writer.commit()
        assert fd_count(rig.pids("server")[0]) < 290
        for sock in silent:
            sock.close()
        late = MemoryClient(rig.path(), open_device("host-0"), 1)
        await until(lambda: _connects(late), "there is room again")
        assert await late.acquire("ro", SOON_MS) == "ro"
        await late.close()


async def _connects(client: MemoryClient) -> bool:
    try:
        await client.connect(BOUND_S)
    except VaultRefused:
        return False
    return True
