"""A process with a device, told what to do over a socket: an engine, or (device "none") one that only keeps fds.

Run as a script it serves; imported it is `Peer`, the other end. Slabs cross by SCM_RIGHTS, close-on-exec, in batches.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from holdfast.memory.devices import Device, DeviceError, open_device

BATCH = 250  # fds in one message: the kernel takes 253
MESSAGE_BYTES = 65536
ANSWER_S = 120.0  # the slowest act, filling 120 GiB, takes seconds
PATTERN_BYTES = 1 << 20


def send(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """One message and its fds, in as many batches as they need."""
    batches = [fds[at : at + BATCH] for at in range(0, len(fds), BATCH)] if fds else [[]]
    socket.send_fds(sock, [json.dumps(message | {"batches": len(batches)}).encode()], batches[0])
    for batch in batches[1:]:
        socket.send_fds(sock, [b"+"], batch)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int], float]:
    """A message, its fds, and how long the fds took to come once the message was there."""
    data, fds, flags, _ = socket.recv_fds(sock, MESSAGE_BYTES, BATCH, socket.MSG_CMSG_CLOEXEC)
    start = time.perf_counter()
    if not data:
        raise EOFError
    assert not flags & socket.MSG_CTRUNC
    message = json.loads(data)
    for _ in range(message["batches"] - 1):
        _, more, flags, _ = socket.recv_fds(sock, 1, BATCH, socket.MSG_CMSG_CLOEXEC)
        assert not flags & socket.MSG_CTRUNC
        fds += more
    return message, fds, (time.perf_counter() - start) * 1e3


def pattern(seed: int) -> bytes:
    """Bytes that tell one slab from another."""
    return hashlib.shake_128(str(seed).encode()).digest(PATTERN_BYTES)


class Agent:
    """What an engine does with a device, one request at a time; a method per request."""

    def __init__(self, sock: socket.socket, device: str) -> None:
        self.sock = sock
        self.device: Device | None = None if device == "none" else open_device(device)
        self.kept: list[int] = []
        self.sizes: list[int] = []
        self.address = 0

    def serve(self) -> None:
        loaded = sorted({name.split(".")[0] for name in sys.modules} & {"cuda", "torch"})
        send(self.sock, {"pid": os.getpid(), "loaded": loaded})
        while True:
            message, fds, receive_ms = receive(self.sock)
            try:
                reply = getattr(self, message["op"])(fds, **message["with"])
            except DeviceError as error:
                reply = {"error": type(error).__name__, "cause": error.cause, "mend": error.mend}
            given = reply.pop("fds", [])
            send(self.sock, reply | {"receive_ms": receive_ms}, given)
            if reply.pop("close", False):
                for fd in given:
                    os.close(fd)

    # -- one that keeps fds only

    def keep(self, fds: list[int]) -> dict[str, Any]:
        self.kept += fds
        return {"kept": len(self.kept)}

    def give(self, fds: list[int]) -> dict[str, Any]:
        return {"fds": self.kept}

    def drop(self, fds: list[int]) -> dict[str, Any]:
        for fd in self.kept:
            os.close(fd)
        self.kept = []
        return {}

    # -- an engine

    def create(self, fds: list[int], count: int, size: int, seed: int) -> dict[str, Any]:
        """New slabs, filled and left mapped; their fds go to the asker and are not kept."""
        assert self.device is not None
        made = [self.device.create(size) for _ in range(count)]
        self.sizes, self.address = [size] * count, self.device.reserve(size * count)
        self.device.map_many(self.address, list(zip(self.sizes, made, strict=True)), writable=True)
        self.fill([], seed)
        return {"fds": made, "close": True, "address": self.address}

    def reserve(self, fds: list[int], sizes: list[int]) -> dict[str, Any]:
        assert self.device is not None
        self.sizes, self.address = sizes, self.device.reserve(sum(sizes))
        return {"address": self.address}

    def map(self, fds: list[int], writable: bool, each: bool = False) -> dict[str, Any]:
        """Map the slabs sent along at the reserved address, in one call or one by one."""
        assert self.device is not None
        start, at = time.perf_counter(), self.address
        if each:
            for size, fd in zip(self.sizes, fds, strict=True):
                self.device.map(at, size, fd, writable=writable)
                at += size
        else:
            self.device.map_many(self.address, list(zip(self.sizes, fds, strict=True)), writable=writable)
        map_ms = (time.perf_counter() - start) * 1e3
        for fd in fds:
            os.close(fd)
        return {"map_ms": map_ms}

    def unmap(self, fds: list[int]) -> dict[str, Any]:
        assert self.device is not None
        start = time.perf_counter()
        self.device.unmap(self.address, sum(self.sizes))
        return {"unmap_ms": (time.perf_counter() - start) * 1e3}

    def protect(self, fds: list[int], writable: bool) -> dict[str, Any]:
        assert self.device is not None
        start = time.perf_counter()
        self.device.protect(self.address, sum(self.sizes), writable=writable)
        return {"protect_ms": (time.perf_counter() - start) * 1e3}

    def fill(self, fds: list[int], seed: int) -> dict[str, Any]:
        assert self.device is not None
        at = self.address
        for number, size in enumerate(self.sizes):
            for offset in range(0, size, PATTERN_BYTES):
                self.device.write(at + offset, pattern(seed + number))
            at += size
        self.device.synchronize()
        return {}

    def verify(self, fds: list[int], seed: int) -> dict[str, Any]:
        """How many pieces of all mapped bytes are not what `fill` wrote."""
        assert self.device is not None
        at, wrong = self.address, 0
        for number, size in enumerate(self.sizes):
            pieces = (self.device.read(at + offset, PATTERN_BYTES) for offset in range(0, size, PATTERN_BYTES))
            wrong += sum(piece != pattern(seed + number) for piece in pieces)
            at += size
        return {"wrong": wrong}

    def poke(self, fds: list[int]) -> dict[str, Any]:
        """Store at the first mapped byte as code of the engine would, past every check of ours."""
        ctypes.memset(self.address, 0xA5, 1)
        return {}


class Peer:
    """An agent's process, as seen from the test."""

    def __init__(self, device: str, script: str = __file__) -> None:
        self.sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(ANSWER_S)
        with other:
            command = [sys.executable, script, str(other.fileno()), device]
            self.process = subprocess.Popen(command, pass_fds=[other.fileno()])
        self.hello, _, _ = receive(self.sock)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.sock.close()

    def ask(self, op: str, fds: list[int] | None = None, **arguments: object) -> dict[str, Any]:
        """The reply; fds in it under "fds" are the asker's to close. EOFError if the process died."""
        send(self.sock, {"op": op, "with": arguments}, fds)
        try:
            reply, given, _ = receive(self.sock)
        except ConnectionResetError as error:
            raise EOFError from error
        return reply | {"fds": given}

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken everything back."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def main(agent: type[Agent]) -> None:
    """Serve on the socket named on the command line until it closes."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    try:
        agent(sock, sys.argv[2]).serve()
    except EOFError:
        return


if __name__ == "__main__":
    main(Agent)
