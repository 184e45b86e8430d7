"""Frames nobody should send, by the ten thousand, at a real vault: no crash, no leak, no hang.

HOLDFAST_FUZZ_FRAMES says how many (the full count is 100,000). The sender is a child process of its own (this very
file, run as a program), so that everything it leaves behind must be gone with it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import random
import select
import socket
import struct
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.memory import protocol
from holdfast.memory.fdsocket import close_all
from holdfast.memory.layout import Layout, TensorLocation
from holdfast.testing.processes import fd_count
from tests.rigs.memory.vaults import MIB, SOON_MS, Rig, digest, expected, facts, until, write

ROOT = Path(__file__).parents[2]
FUZZER = (sys.executable, "-m", "tests.memory.test_vault_fuzz")  # this file as a process of its own

pytestmark = pytest.mark.processes
FRAMES = int(os.environ.get("HOLDFAST_FUZZ_FRAMES", "10000"))


@pytest.mark.long
async def test_fuzzed_frames_neither_crash_nor_leak_nor_hang() -> None:
    """The same vault serves a well-behaved client throughout, and has no more descriptors afterwards."""
    seed = os.environ.get("HOLDFAST_TEST_SEED", "1")
    with Rig() as rig:
        async with rig.client(0) as writer, rig.client(1) as reader:
            await write(writer)
            vault, keeper = rig.pids("server"), rig.pids("keeper")
            before = (fd_count(vault[0]), fd_count(keeper[0]))
            fuzzer = await asyncio.create_subprocess_exec(*FUZZER, rig.path(), seed, str(FRAMES), cwd=ROOT)
            served = 0
            while fuzzer.returncode is None:
                assert await reader.acquire("ro", SOON_MS) == "ro"
                assert digest(reader) == expected(1)
                await reader.release()
                served += 1
                await asyncio.sleep(0.02)
            assert fuzzer.returncode == 0
            assert served > 10
            await until(lambda: fd_count(vault[0]) <= before[0] and fd_count(keeper[0]) <= before[1], "nothing is left")
            assert (rig.pids("server"), rig.pids("keeper")) == (vault, keeper)
            seen = await facts(reader)
            assert (seen["weights"], seen["readers"], seen["waiting"], len(seen["clients"])) == ("RO", 1, 0, 2)


# -- the sender


class Fuzzer:
    """One stream of wrong frames; a new connection whenever the vault hangs up."""

    def __init__(self, path: str, seed: str) -> None:
        self._path = path
        self._rng = random.Random(f"fuzz/{seed}")
        self._fds = [os.pidfd_open(os.getpid()), os.open("/dev/null", os.O_RDWR), *os.pipe(), socket.socket().detach()]
        for size in (MIB, 2 * MIB):
            memfd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
            os.posix_fallocate(memfd, 0, size)
            self._fds.append(memfd)
        self._sock = socket.socket(socket.AF_UNIX)
        self._greeted = 0

    def run(self, frames: int) -> None:
        self._connect()
        for _ in range(frames):
            data, fds, sound = self._frame()
            try:
                self._send(data, fds)
                self._listen() if sound else self._hear_all()
            except OSError:
                self._connect()

    def _listen(self) -> None:
        """Drop what was answered; descriptors that are not received are closed by the kernel."""
        if select.select([self._sock], [], [], 0)[0] and not self._sock.recv(1 << 20):
            raise ConnectionResetError

    def _hear_all(self) -> None:
        """After a frame that may have broken the stream: end it, and wait until the vault has dealt with all of it."""
        self._sock.shutdown(socket.SHUT_WR)
        while self._sock.recv(1 << 20):
            pass
        self._connect()

    def _connect(self) -> None:
        self._sock.close()
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(60)
        self._sock.connect(self._path)
        if self._rng.random() < 0.9:
            resume = self._rng.choice([None, None, protocol.Resume("0" * 32, 5), protocol.Resume(None, None)])
            hello = protocol.Hello(protocol.VERSION, f"f{self._rng.randrange(20)}", 9, os.getpid(), resume)
            with contextlib.suppress(OSError):
                self._send(framed(protocol.encode(hello), 1), self._fds[:1])

    def _send(self, data: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._sock.sendmsg([data], rights)

    def _frame(self) -> tuple[bytes, list[int], bool]:
        """Bytes, descriptors, and whether the next frame can be told from this one."""
        rng = self._rng
        fds = [rng.choice(self._fds) for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 5, 60]))]
        count = len(fds) if rng.random() < 0.95 else rng.randrange(300)
        body = protocol.encode(self._message())
        match rng.randrange(10):
            case 0:
                return rng.randbytes(rng.randrange(1, 200)), fds, False
            case 1:
                return framed(rng.randbytes(rng.randrange(200)), count), fds, False
            case 2:
                return struct.pack(">IH", rng.randrange(2**32), count) + body, fds, False
            case 3:
                return framed(body, count)[: rng.randrange(1, len(body) + 6)], fds, False
            case 4 | 5:
                changed = bytearray(body)
                for _ in range(rng.randrange(1, 4)):
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                return framed(bytes(changed), count), fds, False
            case _:
                return framed(body, count), fds, count == len(fds)

    def _message(self) -> msgspec.Struct:
        rng = self._rng
        call = rng.choice([0, 1, 7, rng.randrange(2**32), -1])
        number = rng.choice([0, 1, 5, 10, 2**31, 2**63, -1, rng.randrange(2**64)])
        sizes = [rng.choice([0, -1, MIB, 2 * MIB, 2**62]) for _ in range(rng.choice([0, 1, 1, 2, 5]))]
        text = rng.choice(["", "g", "0" * 32, "x" * 300, "é\0"])
        place = TensorLocation(text, rng.randrange(-1, 3), number, (number, 1), (1,), "u8", number)
        layout = Layout(text, tuple(sizes), (place,) * rng.randrange(3))
        yes = rng.random() < 0.5
        return rng.choice(
            [
                protocol.Hello(rng.choice([1, 2, number]), text, 0, 1),
                protocol.AskWeights(call, rng.choice(["ro", "rw", "rw_or_ro", text]), rng.randrange(100), yes, text),
                protocol.AskWeights(call, "ro", rng.randrange(-5, 50), yes),
                protocol.AddSlabs(call, sizes),
                protocol.CommitWeights(call, layout),
                protocol.ReleaseWeights(call),
                protocol.FetchSlabs(call),
                protocol.AcquirePool(call, number, text, rng.randrange(50)),
                protocol.AddPoolSlabs(call, sizes, yes),
                protocol.FetchPool(call),
                protocol.Mapping(call, rng.choice([None, None, number])),
                protocol.Quiesced(call, number),
                protocol.CancelCall(call, rng.choice([0, 1, 7])),
                protocol.GetStatus(call),
                protocol.Demote(call),
                protocol.Promote(call),
                protocol.Donate(call, layout, yes),
                protocol.DonatePool(call, number, text, sizes, yes, rng.choice([0, 1, number])),
                protocol.Put(call, "weights/1", b"", False),
                protocol.Done(call),
            ]
        )

    def close(self) -> None:
        self._sock.close()
        close_all(self._fds)


def framed(body: bytes, count: int) -> bytes:
    return struct.pack(">IH", len(body), count % 2**16) + body


if __name__ == "__main__":
    sender = Fuzzer(sys.argv[1], sys.argv[2])
    sender.run(int(sys.argv[3]))
    sender.close()
