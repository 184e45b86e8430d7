"""The socket on which faults are commanded: one JSON object per line in, one per line out.

Always true: only the owner of the process can reach it (the socket's mode is 0600); a line that is too long, not
JSON or not a known fault is answered with its cause and changes nothing; a fault that ends or freezes the process
is answered before it is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.engines.sim.faults import FATAL, Fault, Faults, parse_fault

LINE_BYTES_MAX = 4096  # a command has a name and one number
ANSWER_BYTES_MAX = 65_536  # a refusal quotes the line it refuses
CONNECTIONS_MAX = 8  # a person and a test; more is a mistake
FLUSH_TURNS_MAX = 100  # turns of the event loop for an answer of 100 bytes to leave; it takes one or two
CLIENT_TIMEOUT_S = 5.0  # a live worker answers in milliseconds; a stopped one never does


class ChaosServer:
    """Serves `inject` on a Unix socket. Start it inside a running event loop; `close` removes the socket."""

    def __init__(self, path: str, inject: Callable[[Fault], None], faults: Faults) -> None:
        self._path = path
        self._inject = inject
        self._faults = faults
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # of a killed process; anything else there is not ours
            if stat.S_ISSOCK(os.lstat(self._path).st_mode):
                os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Bound and closed to others before the first connection can be made.
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=LINE_BYTES_MAX)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        self._server = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if len(self._writers) > CONNECTIONS_MAX:
                await _answer(writer, _refusal(f"at most {CONNECTIONS_MAX} connections"))
                return
            while await self._serve_line(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the commander went away
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            await _answer(writer, _refusal(f"a line may have at most {LINE_BYTES_MAX} bytes"))
            return False  # where the next line starts is not known
        fault, answer = self._execute(line)
        await _answer(writer, answer)
        if fault is not None:
            self._inject(fault)
        return True

    def _execute(self, line: bytes) -> tuple[Fault | None, dict[str, object]]:
        """Carry a command out and say so; a fatal one is handed back to be carried out after the answer."""
        try:
            command = json.loads(line)
            if not isinstance(command, dict):
                raise ValueError('a command is a JSON object such as {"fault": "slow", "factor": 20}')
            fault = parse_fault(command)
            if fault.kind not in FATAL:
                self._inject(fault)
        except (ValueError, RecursionError) as error:
            return None, _refusal(str(error))
        except HoldfastError as error:
            return None, _refusal(error.message)
        answer = {"ok": True, "fault": fault.kind, "pid": os.getpid(), "active": self._faults.status()}
        return (fault if fault.kind in FATAL else None), answer


def _refusal(error: str) -> dict[str, object]:
    return {"ok": False, "error": error}


async def _answer(writer: asyncio.StreamWriter, answer: dict[str, object]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    await writer.drain()
    for _ in range(FLUSH_TURNS_MAX):  # uvloop writes at the end of a turn; a crash must not overtake its answer
        if writer.transport.get_write_buffer_size() == 0:
            return
        await asyncio.sleep(0)


def send_fault(path: str, fault: dict[str, Any], timeout_s: float = CLIENT_TIMEOUT_S) -> dict[str, Any]:
    """Send a fault and return the answer. Raise OSError (TimeoutError too) if no process answers there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        client.connect(path)
        client.sendall(json.dumps(fault).encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            part = client.recv(LINE_BYTES_MAX)
            if not part or len(received) > ANSWER_BYTES_MAX:
                raise ConnectionError(f"{path} closed the connection without an answer")
            received += part
        answer: dict[str, Any] = json.loads(received)
        return answer
