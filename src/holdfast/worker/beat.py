"""The worker's heartbeat, sent from a separate thread over separate sockets (facts 31a).

This module uses threads, sockets and `time.monotonic` directly, unlike the rest of the worker. On a machine with 64
busy processes a beat from the event loop came 2.0 s late, from a separate thread 0.23 s. A beat must also go out while
the event loop is busy or wedged: its purpose is to tell that apart from death.

Always true: the thread wakes at least every 0.2 s, also without work (the observer's probe relies on it); no observer
can make it wait; a beat is built from the progress at that moment.
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
from holdfast.core.procfs import ThreadTimes, read_thread
from holdfast.engines.contract import Progress
from holdfast.health.watcher import own_identity
from holdfast.wire.accepting import SHARE_OF_PAGES, connections_max
from holdfast.wire.frames import FrameError, FrameSplitter, encode
from holdfast.wire.messages import (
    Beat,
    Failing,
    Hello,
    ProcessIdentity,
    Refused,
    Welcome,
    answer_hello,
    decode_to_worker,
)
from holdfast.wire.net import naming, tune_socket, unix_socket

BEAT_S = 0.2  # between two ticks of the thread
IDLE_BEAT_S = 1.0
# Frontends and a supervisor watch a worker; more than this is a leak somewhere.
OBSERVERS_MAX = 64
# A greeting is tens of bytes, sent at once; a peer that sends more or takes longer is not an observer.
HELLO_BYTES_MAX = 4096
HELLO_WAIT_S = 5.0
# A few seconds of beats: an observer that is further behind than that is dropped, and connects again when it runs.
SEND_BUFFER_BYTES = 16 * 1024
# Without free descriptors the listener stays readable: sleep instead of spinning, much shorter than a beat.
ACCEPT_REST_S = 0.02
# The thread wakes at once when asked to stop and has nothing slow to finish.
STOP_WAIT_S = 2.0


class StuckMeter:
    """Measures how long the engine has had work without a step, less the time its thread waited for a CPU.

    Pure; sampled at every tick. A thread that spins (in a GPU wait that never ends) uses CPU: its engine is wedged. A
    thread that is runnable but gets no CPU is starved: its engine is not wedged (facts 24, 31). Without schedstat all
    time counts.
    """

    __slots__ = ("_at", "_steps", "_stuck_s", "_thread", "_times", "_worked")

    def __init__(self) -> None:
        self._at = 0.0
        self._steps = -1
        self._worked = False
        self._thread: tuple[int, int] | None = None
        self._times: ThreadTimes | None = None
        self._stuck_s = 0.0

    def sample(self, now: float, progress: Progress, times: ThreadTimes | None) -> float:
        """Take one sample; return `stuck_ms`."""
        works = progress.running + progress.waiting > 0
        if not works or not self._worked or progress.steps != self._steps:
            self._stuck_s = 0.0
        else:
            # If this thread overslept, the excess is not counted: the thread was starved, and probably the engine too.
            gap_s = now - self._at
            same = progress.thread == self._thread
            counted_s = min(gap_s, 1.25 * BEAT_S) if same else 0.0
            self._stuck_s += max(0.0, counted_s - self._waited_s(gap_s, times))
        self._at, self._steps, self._worked = now, progress.steps, works
        self._thread, self._times = progress.thread, times
        return self._stuck_s * 1000

    def _waited_s(self, gap_s: float, times: ThreadTimes | None) -> float:
        last = self._times
        if times is None or last is None:
            return 0.0
        # The kernel adds a wait to run_delay when it ends; an unfinished wait shows as runnable without new CPU time.
        if times.state == "R" and times.cpu_ns == last.cpu_ns:
            return gap_s
        return (times.run_delay_ns - last.run_delay_ns) / 1e9


class Beats(Protocol):
    """The sender of a worker's beats; `BeatThread` outside of tests."""

    late_s: float  # a chaos fault: the delay between making a beat and sending it

    @property
    def address(self) -> Address:
        """Return where it listens, with the port that was picked."""

    @property
    def identity(self) -> ProcessIdentity:
        """Return the identity of this process, for observers on the same machine."""

    def start(self) -> None: ...

    def set_welcome(self, welcome: Welcome) -> None:
        """Set the answer to an observer's Hello; observers that connect before this is set are refused for now."""

    def say_last(self, why: str) -> None:
        """Tell every observer why this process exits now. Callable from any thread; does not wait."""

    def stop(self) -> bool:
        """Close every connection; return False if the sender did not end in time."""


MakeBeats = Callable[[Address, Callable[[], Progress]], Beats]


@dataclass(eq=False, slots=True)
class _Observer:
    sock: socket.socket
    greet_by: float
    splitter: FrameSplitter = field(default_factory=FrameSplitter)
    received_bytes: int = 0
    greeted: bool = False


class BeatThread:
    """Sends beats to every observer that has connected and sent a Hello. `start` binds the socket and raises OSError if
    that fails; `stop` is bounded."""

    def __init__(self, address: Address, progress: Callable[[], Progress]) -> None:
        self._wanted = address
        self._progress = progress
        self._welcome: Welcome | None = None
        self._observers: set[_Observer] = set()
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._meter = StuckMeter()
        self._count = 0
        self.late_s = 0.0
        self._due: deque[tuple[float, bytes]] = deque()  # beats with their send times; more than one only if `late_s`
        self._sent_at = 0.0
        self._last: Progress | None = None  # as last sent
        self._newcomer = False
        # A daemon thread: a worker that ends by an exception must not be kept alive by its heartbeat.
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
        self._welcome = welcome

    def say_last(self, why: str) -> None:
        for observer in [o for o in list(self._observers) if o.greeted]:
            with contextlib.suppress(OSError):
                observer.sock.send(encode(Failing(why)))  # small enough to be sent whole, even if `_send` runs now

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
                    # Do not catch up after a late tick: a second beat at once would tell nothing new.
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
        while self._due and (self._due[0][0] <= now or self.late_s == 0.0):  # fault cleared: send all delayed beats
            beat = self._due.popleft()[1]
            for observer in [o for o in self._observers if o.greeted]:
                self._send(observer, beat)

    def _is_news(self, progress: Progress) -> bool:
        """Return whether a beat is due now: there is work, or the last beat reported work (an observer then waits only
        0.5 s for the next beat), or steps or load changed."""
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
        full = len(self._observers) >= min(OBSERVERS_MAX, connections_max(SHARE_OF_PAGES))
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
            self._drop(observer)  # it left, or it sent something besides its Hello
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
        elif (welcome := self._welcome) is None:
            self._refuse(observer, Code.CANNOT_CONNECT, "the worker is still starting")
        elif isinstance(answer := answer_hello(message, welcome), str):
            self._refuse(observer, Code.INVALID_REQUEST, answer)
        else:
            observer.greeted = self._newcomer = True
            self._send(observer, encode(answer))

    def _refuse(self, observer: _Observer, code: Code, reason: str) -> None:
        self._send(observer, encode(Refused(code, reason)))
        self._drop(observer)

    def _send(self, observer: _Observer, data: bytes) -> None:
        try:
            sent = observer.sock.send(data)
        except OSError:  # includes BlockingIOError: the observer does not read
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
    """Return a listening socket and its address."""
    with naming(address):
        if isinstance(address, TcpAddress):
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            sock = socket.create_server((address.host, address.port), family=family, backlog=OBSERVERS_MAX)
            address = TcpAddress(address.host, sock.getsockname()[1])
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address.path)  # each worker has its own path: this file is left from a dead process
            sock = unix_socket(address.path)
    sock.setblocking(False)
    return sock, address
