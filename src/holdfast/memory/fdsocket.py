"""Frames with file descriptors over a Unix socket: a 6-byte header (length, number of fds), then the body.

asyncio's transports cannot carry descriptors, so this uses a non-blocking socket with the event loop's readiness calls.
Always true:
- Received descriptors are close-on-exec; those that no handler took are closed.
- A truncated control message is an error, never silently fewer descriptors (fact 4d).
- Lengths and counts are checked before anything is stored.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.procfs import peer_uid

# The kernel's own bound on one message (SCM_MAX_FD).
FDS_PER_FRAME_MAX = 253
# A layout is the largest message: 100,000 tensors with long names take some 20 MB.
FRAME_BYTES_MAX = 32 * 1024 * 1024
# Unsent data for a peer that does not read; a set of slabs takes a few kB per frame.
UNSENT_BYTES_MAX = 64 * 1024 * 1024
UNSENT_FDS_MAX = 8192  # twice the slabs of the largest set
# Frames of one peer handled before other peers get their turn: some milliseconds.
FRAMES_PER_TURN = 32

_HEADER = struct.Struct(">IH")
_SO_PEERPIDFD = 77  # Python has no name for it yet
_RECEIVE_BYTES = 256 * 1024


class FdProtocolError(Exception):
    """Raised when the peer broke the framing; the connection is closed."""


@dataclass(slots=True)
class Frame:
    """A received frame. Its handler owns the descriptors and takes or closes them."""

    body: bytes
    fds: list[int]

    def close_fds(self) -> None:
        close_all(self.fds)


@dataclass(slots=True)
class _Outgoing:
    data: memoryview
    fds: list[int] = field(default_factory=list)  # duplicates of ours, closed when sent


class FdSplitter:
    """Splits received bytes and descriptors into frames. Its only side effect: it closes refused descriptors."""

    __slots__ = ("_buffer", "_fds", "bytes_max", "fds_max")

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX, fds_max: int = FDS_PER_FRAME_MAX) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self.bytes_max, self.fds_max = bytes_max, fds_max  # of one frame

    def feed(self, data: bytes, fds: list[int]) -> list[Frame]:
        self._fds.extend(fds)
        self._buffer += data
        frames: list[Frame] = []
        try:
            used = self._cut(frames)
            if len(self._fds) > self.fds_max:
                raise FdProtocolError("more descriptors than any frame may have")
        except FdProtocolError:
            for frame in frames:
                frame.close_fds()
            raise
        del self._buffer[:used]  # once for all frames: a peer may send many small ones
        return frames

    def _cut(self, frames: list[Frame]) -> int:
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._buffer, at)
            if size > self.bytes_max or count > self.fds_max:
                raise FdProtocolError(f"frame announces {size} bytes and {count} descriptors, over the limits")
            start = at + _HEADER.size
            if len(self._buffer) < start + size:
                break
            if count > len(self._fds):
                raise FdProtocolError(f"frame announces {count} descriptors, {len(self._fds)} came")
            at = start + size
            frames.append(Frame(bytes(self._buffer[start:at]), [self._fds.popleft() for _ in range(count)]))
        return at

    def close(self) -> None:
        close_all(list(self._fds))
        self._fds.clear()


class FdConnection:
    """One connection on the running loop. `on_frame` and `on_lost` are called from it, `on_lost` exactly once."""

    def __init__(self, sock: socket.socket, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._splitter = FdSplitter()
        self._arrived: deque[Frame] = deque()
        self._paused = False
        self._outgoing: deque[_Outgoing] = deque()
        self._unsent_bytes = 0
        self._unsent_fds = 0
        self._writing = False
        self._deaf = False  # the peer no longer reads; its last frames and its EOF are still to be read
        self.open = True
        self.peer_ended = False  # the peer closed the connection; else we did, for example out of memory
        self._loop.add_reader(sock.fileno(), self._readable)

    def fileno(self) -> int:
        return self._sock.fileno()

    def allow(self, bytes_max: int, fds_max: int) -> None:  # in a frame, from now on
        self._splitter.bytes_max, self._splitter.fds_max = bytes_max, fds_max

    def peer_uid(self) -> int | None:
        return peer_uid(self._sock)

    def peer_pidfd(self) -> list[int]:
        """Return a pidfd of the process that connected; none before Linux 6.5 or if the process has ended."""
        try:
            return [self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)]
        except OSError:
            return []

    # -- receiving

    def _readable(self) -> None:
        try:
            split = self._splitter
            self._arrived += split.feed(*receive(self._sock, min(_RECEIVE_BYTES, split.bytes_max), split.fds_max))
        except (BlockingIOError, InterruptedError):
            return
        except FdProtocolError as error:
            self.close(str(error))
            return
        except OSError as error:
            self._lose(error)
            return
        except EOFError:
            self.peer_ended = True
            self.close("connection closed by the other side")
            return
        self._deliver()

    def _deliver(self) -> None:
        """Pass frames to the handler, a few at a time. Nothing more is read, not even EOF, until all are passed on."""
        for _ in range(FRAMES_PER_TURN):
            if not self.open or not self._arrived:
                break
            self._on_frame(self._arrived.popleft())
        if not self.open:
            return
        if self._arrived:
            self._loop.call_soon(self._deliver)
        if bool(self._arrived) is not self._paused:
            self._paused = bool(self._arrived)
            if self._paused:
                self._loop.remove_reader(self._sock.fileno())
            else:
                self._loop.add_reader(self._sock.fileno(), self._readable)

    # -- sending

    def send(self, body: bytes, fds: list[int] | None = None) -> None:
        """Queue a frame; descriptors are duplicated, so the caller keeps its own."""
        if not self.open or self._deaf:
            return
        assert len(body) <= FRAME_BYTES_MAX
        assert fds is None or len(fds) <= FDS_PER_FRAME_MAX
        try:
            copies = copy_all(fds or [])
        except OSError as error:
            self.close(f"no descriptors left to send: {error}")
            return
        data = _HEADER.pack(len(body), len(copies)) + body
        self._outgoing.append(_Outgoing(memoryview(data), copies))
        self._unsent_bytes += len(data)
        self._unsent_fds += len(copies)
        if self._unsent_bytes > UNSENT_BYTES_MAX or self._unsent_fds > UNSENT_FDS_MAX:
            self.close("the other side does not read")
        elif not self._writing:
            self._writable()

    def _writable(self) -> None:
        while self._outgoing and self.open:
            first = self._outgoing[0]
            try:
                sent = self._send_some(first)
            except (BlockingIOError, InterruptedError):
                break
            except BrokenPipeError:
                self._deaf = True
                self._drop_unsent()
                break
            except OSError as error:
                self._lose(error)
                return
            self._unsent_bytes -= sent
            first.data = first.data[sent:]
            if not first.data:
                self._outgoing.popleft()
        self._want_write(bool(self._outgoing))

    def _send_some(self, outgoing: _Outgoing) -> int:
        if not outgoing.fds:
            return self._sock.send(outgoing.data)
        rights = array.array("i", outgoing.fds)
        sent = self._sock.sendmsg([outgoing.data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        close_all(outgoing.fds)
        self._unsent_fds -= len(outgoing.fds)
        outgoing.fds = []
        return sent

    def _want_write(self, wanted: bool) -> None:
        if wanted is self._writing or not self.open:
            return
        self._writing = wanted
        if wanted:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _lose(self, error: OSError) -> None:
        self.peer_ended = isinstance(error, ConnectionResetError)
        self.close(f"connection lost: {error}")

    def _drop_unsent(self) -> None:
        for outgoing in self._outgoing:
            close_all(outgoing.fds)
        self._outgoing.clear()
        self._unsent_bytes = self._unsent_fds = 0

    def close(self, why: str = "closed") -> None:
        """Close now; frames not yet sent are dropped. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._drop_unsent()
        for frame in self._arrived:
            frame.close_fds()
        self._arrived.clear()
        self._splitter.close()
        self._sock.close()
        self._on_lost(why)


def receive(
    sock: socket.socket, data_bytes: int = _RECEIVE_BYTES, fds_max: int = FDS_PER_FRAME_MAX, also: int = 0
) -> tuple[bytes, list[int]]:
    """Call recvmsg once. Raises EOFError at the end, FdProtocolError if descriptors were cut off."""
    fds = array.array("i")
    control_bytes = socket.CMSG_SPACE(fds_max * fds.itemsize)
    data, control, flags, _ = sock.recvmsg(data_bytes, control_bytes, socket.MSG_CMSG_CLOEXEC | also)
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        close_all(list(fds))
        raise FdProtocolError("descriptors were cut off on the way (out of descriptors, or more than a frame may have)")
    if not data:
        close_all(list(fds))
        raise EOFError
    return data, list(fds)


def copy_all(fds: list[int]) -> list[int]:
    """Return close-on-exec copies of all, or raise OSError and keep none."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # one by one: if one fails, the others must be closed
    except OSError:
        close_all(copies)
        raise
    return copies


def close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
