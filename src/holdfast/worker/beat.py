"""The worker's heartbeat, sent from a thread of its own over sockets of its own (facts 31a).

Plain threads, sockets and `time.monotonic` here on purpose, against the habit of the other shells: on a machine
with 64 busy processes a beat from the event loop came 2.0 s late, from a thread of its own 0.23 s; and a beat
must go out while the event loop is busy or stuck, because telling that apart from death is what it is for.

Always true: the thread wakes at least every 0.2 s, work or no work (the observer's probe counts on it); no
observer can make it wait; a beat says only what is so at the moment it is sent.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.core.address import Address, TcpAddress, UnixAddress
from holdfast.core.errors import Code
from holdfast.core.procfs import read_thread
from holdfast.engines.contract import Progress
from holdfast.health.watcher import own_identity
from holdfast.wire.accepting import SHARE_OF_PAGES, places
from holdfast.wire.frames import FrameError, FrameSplitter, encode
from holdfast.wire.messages import VERSION, Beat, Failing, Hello, ProcessIdentity, Refused, Welcome, decode_to_worker
from holdfast.wire.net import CannotListenError, tune_socket
from holdfast.worker.stuck import BEAT_S, StuckMeter

IDLE_BEAT_S = 1.0
# Frontends and a supervisor watch a worker; more than this is a leak somewhere.
OBSERVERS_MAX = 64
# A greeting is tens of bytes, sent at once; who sends more or takes longer is not an observer.
HELLO_BYTES_MAX = 4096
HELLO_WAIT_S = 5.0
# A few seconds of beats: an observer that is further behind than that is dropped, and connects anew when it runs.
SEND_BUFFER_BYTES = 16 * 1024
# Out of descriptors the listener stays readable: rest a moment instead of spinning, well within a beat.
ACCEPT_REST_S = 0.02
# The thread wakes at once when asked to stop and has nothing slow to finish.
STOP_WAIT_S = 2.0


class Beats(Protocol):
    """What sends a worker's beats. The real one is `BeatThread`."""

    late_s: float  # a chaos fault: a beat goes out so much after it was made

    @property
    def address(self) -> Address:
        """Where it listens, with the port that was picked."""

    @property
    def identity(self) -> ProcessIdentity:
        """Who beats, for observers on the same machine."""

    def start(self) -> None: ...

    def set_welcome(self, welcome: Welcome) -> None:
        """Who this worker is; observers that come before this is known are asked to come again."""

    def say_last(self, why: str) -> None:
        """Tell everybody why this process exits now; from any thread, and without waiting for anybody."""

    def stop(self) -> bool:
        """Close every connection; False if it did not end in time."""


MakeBeats = Callable[[Address, Callable[[], Progress]], Beats]


@dataclass(eq=False, slots=True)
class _Observer:
    sock: socket.socket
    greet_by: float
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    received_bytes: int = 0
    greeted: bool = False


class BeatThread:
    """Beats to whoever connects and says hello. `start` binds (and raises what binding raises); `stop` is bounded."""

    def __init__(self, address: Address, progress: Callable[[], Progress]) -> None:
        self._wanted = address
        self._progress = progress
        self._welcome: bytes | None = None
        self._observers: set[_Observer] = set()
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._meter = StuckMeter()
        self._count = 0
        self.late_s = 0.0
        self._due: deque[tuple[float, bytes]] = deque()  # due when; as many as `late_s` makes
        self._sent_at = 0.0
        self._last: Progress | None = None  # as last sent
        self._newcomer = False
        # A daemon, so that a worker that ends by an exception is not kept by its own heartbeat.
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def __repr__(self) -> str:
        return f"beat thread at {self._wanted}: {len(self._observers)} observers, {self._count} beats"

    def start(self) -> None:
        self._listener, self._address = _listen(self._wanted)
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._thread.start()

    @property
    def address(self) -> Address:
        return self._address

    @property
    def identity(self) -> ProcessIdentity:
        assert self._thread.native_id is not None, "asked before start"
        return own_identity(self._thread.native_id)

    def set_welcome(self, welcome: Welcome) -> None:
        self._welcome = encode(welcome)

    def say_last(self, why: str) -> None:
        for observer in [o for o in list(self._observers) if o.greeted]:
            with contextlib.suppress(OSError):
                observer.sock.send(encode(Failing(why)))  # a frame this small goes whole, whoever else sends

    def stop(self) -> bool:
        self._stopping = True
        with contextlib.suppress(OSError):  # the thread may have ended, and closed its sockets, by itself
            self._wake_out.send(b"x")
        self._thread.join(STOP_WAIT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            tick_at = time.monotonic()
            while not self._stopping:
                now = time.monotonic()
                if now >= tick_at:
                    self._tick(now)
                    # A late tick is not made up for: two at once would say nothing more.
                    tick_at = tick_at + BEAT_S if tick_at + BEAT_S > now else now + BEAT_S
                for key, _ in self._selector.select(max(0.0, tick_at - time.monotonic())):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._wake_in:
                        self._read(key.data)
        finally:
            self._close()

    def _tick(self, now: float) -> None:
        progress = self._progress()
        stuck_ms = self._meter.sample(now, progress, read_thread(*progress.thread) if progress.thread else None)
        for observer in [o for o in self._observers if not o.greeted and now > o.greet_by]:
            self._drop(observer)
        self._send_due(now)
        if not (self._newcomer or self._is_news(progress) or now - self._sent_at >= IDLE_BEAT_S - BEAT_S / 2):
            return
        self._count += 1
        self._sent_at, self._last, self._newcomer = now, progress, False
        beat = encode(
            Beat(
                count=self._count,
                steps=progress.steps,
                stuck_ms=stuck_ms,
                step_ms_p99=progress.step_ms_p99,
                budget_ms=progress.budget_ms,
                running=progress.running,
                waiting=progress.waiting,
                tokens=progress.tokens,
                load=progress.load,
                blocks=progress.kv.blocks,
                blocks_free=progress.kv.blocks - progress.kv.held,
            )
        )
        self._due.append((now + self.late_s, beat))
        self._send_due(now)

    def _send_due(self, now: float) -> None:
        while self._due and (self._due[0][0] <= now or self.late_s == 0.0):  # not late any more: nor is what waits
            beat = self._due.popleft()[1]
            for observer in [o for o in self._observers if o.greeted]:
                self._send(observer, beat)

    def _is_news(self, progress: Progress) -> bool:
        """Work is there, or was when we last beat: an observer that was told of work waits only 0.5 s for the next."""
        last = self._last
        if last is None or progress.running + progress.waiting > 0:
            return True
        return last.running + last.waiting > 0 or (progress.steps, progress.load) != (last.steps, last.load)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            time.sleep(ACCEPT_REST_S)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        tune_socket(sock)
        observer = _Observer(sock, greet_by=time.monotonic() + HELLO_WAIT_S)
        full = len(self._observers) >= min(OBSERVERS_MAX, places(SHARE_OF_PAGES))
        strangers = [other for other in self._observers if not other.greeted] if full else []
        self._observers.add(observer)
        self._selector.register(sock, selectors.EVENT_READ, observer)
        if strangers:
            self._drop(min(strangers, key=lambda other: other.greet_by))
        elif full:
            self._refuse(observer, Code.WORKER_OVERLOADED, f"{len(self._observers) - 1} observers are here already")

    def _read(self, observer: _Observer) -> None:
        if observer not in self._observers:
            return  # dropped earlier in the same round
        try:
            data = observer.sock.recv(HELLO_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        observer.received_bytes += len(data)
        if not data or observer.greeted or observer.received_bytes > HELLO_BYTES_MAX:
            self._drop(observer)  # it left, or it talks where there is nothing to say
            return
        try:
            frames = observer.splitter.feed(data)
            if frames:
                self._greet(observer, decode_to_worker(frames[0]))
        except FrameError as error:
            self._refuse(observer, Code.INVALID_REQUEST, str(error))

    def _greet(self, observer: _Observer, message: object) -> None:
        if not isinstance(message, Hello) or message.purpose != "beat":
            self._refuse(observer, Code.INVALID_REQUEST, "this socket only answers a Hello with purpose 'beat'")
        elif message.version != VERSION:
            why = f"wire version {message.version} is spoken to a worker of version {VERSION}"
            self._refuse(observer, Code.INVALID_REQUEST, why)
        elif self._welcome is None:
            self._refuse(observer, Code.CANNOT_CONNECT, "the worker is still starting")
        else:
            observer.greeted = self._newcomer = True
            self._send(observer, self._welcome)

    def _refuse(self, observer: _Observer, code: Code, reason: str) -> None:
        self._send(observer, encode(Refused(code, reason)))
        self._drop(observer)

    def _send(self, observer: _Observer, data: bytes) -> None:
        try:
            sent = observer.sock.send(data)
        except OSError:  # among them BlockingIOError: it does not read
            sent = 0
        if sent < len(data):
            self._drop(observer)

    def _drop(self, observer: _Observer) -> None:
        if observer in self._observers:
            self._observers.remove(observer)
            self._selector.unregister(observer.sock)
            observer.sock.close()

    def _close(self) -> None:
        for observer in list(self._observers):
            self._drop(observer)
        self._selector.close()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
        if isinstance(self._address, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address.path)


def _listen(address: Address) -> tuple[socket.socket, Address]:
    """A listening socket and where it ended up."""
    try:
        return _bind(address)
    except OSError as error:
        raise CannotListenError(error.errno, error.strerror or str(error), str(address)) from error


def _bind(address: Address) -> tuple[socket.socket, Address]:
    if isinstance(address, TcpAddress):
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.create_server((address.host, address.port), family=family, backlog=OBSERVERS_MAX)
        bound: Address = TcpAddress(address.host, sock.getsockname()[1])
    else:
        sock, bound = socket.socket(socket.AF_UNIX), address
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.path)  # the path names one worker's beat: what lies there is a dead predecessor's
        sock.bind(address.path)
        os.chmod(address.path, 0o600)
        sock.listen(OBSERVERS_MAX)
    sock.setblocking(False)
    return sock, bound
