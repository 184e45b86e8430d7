"""One frontend's data connection, as a worker sees it.

Always true: nothing is done for a peer that has not said a fitting Hello, and it has little time and room for that;
whatever a peer sends, it is told why it was refused; what waits to be sent to it is bounded by what its streams may
still make, and nothing waits for long for a peer that takes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import msgspec

from holdfast.core.errors import Code
from holdfast.core.peers import peer_uid
from holdfast.core.requests import Failure, Output
from holdfast.wire.accepting import SHARE, make_room, places
from holdfast.wire.frames import FrameError, FrameSplitter, encode
from holdfast.wire.messages import (
    VERSION,
    ArtefactPart,
    Cancel,
    Generate,
    GetArtefact,
    Hello,
    NotTaken,
    Pass,
    Ping,
    Pong,
    Refused,
    Reload,
    Reloaded,
    Step,
    StepDown,
    Welcome,
    decode_to_worker,
)
from holdfast.wire.net import Unread, tune

log = logging.getLogger("holdfast.worker")

PURPOSES = ("data", "canary")
ARTEFACT_PART_BYTES = 1024 * 1024
# For a frontend this far behind the engine eases off.
CONGESTED_BYTES = 1 * 1024 * 1024
# Frontends of one deployment; a connection beyond that is a leak.
SESSIONS_MAX = 256
# A greeting is tens of bytes, sent at once; who sends more or takes longer is not a frontend, and holds a place.
HELLO_BYTES_MAX = 4096
HELLO_WAIT_S = 5.0
# How long a refused peer may take to read why, before it is cut off.
LINGER_S = 2.0
# A card names one artefact; a frontend asks once for each.
ARTEFACTS_ASKED_MAX = 16
# What a peer says is shown in logs and on the status page.
SHOWN_CHARS_MAX = 200


class Host(Protocol):
    """What sessions need to know of their worker."""

    welcome: Welcome | None
    artefacts: dict[str, bytes]
    not_taken: str

    @property
    def refusing(self) -> str:
        """Why no work is taken now; empty: it is."""

    def asked_to_reload(self, message: Reload, uid: int | None, answer: Callable[[Reloaded], None]) -> None:
        """By somebody who may or may not: it hears what came of it."""


    def asked_to_step_down(self, message: StepDown, uid: int | None) -> None:
        """By a peer that may or may not."""


class Owner(Protocol):
    """Who holds the connections together: `worker.sessions.Sessions`."""

    open: set[Session]

    def generate(self, session: Session, message: Generate) -> None: ...

    def cancel(self, session: Session, streams: list[int]) -> None: ...

    def passes(self, session: Session, heard: int | None = None) -> None: ...

    def ping(self, answer: Callable[[], None]) -> None: ...

    def reload(self, session: Session, message: Reload) -> None: ...

    def step_down(self, session: Session, message: StepDown) -> None: ...


class Session(asyncio.Protocol):
    """One frontend's data connection, or that of somebody who asks known questions."""

    def __init__(self, owner: Owner, host: Host) -> None:
        self._owner = owner
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._splitter = FrameSplitter()
        self._unread = Unread(self._drop)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None  # to its Hello, later to its end
        self.over = False  # nothing more is read from it or sent to it
        self.since_s = self._loop.time()
        self._paused = False
        self._artefacts: deque[Iterator[ArtefactPart]] = deque()  # asked for and not sent yet
        self.peer = ""  # set by its Hello
        self.canary = False  # likewise
        self._uid: int | None = None
        self._uid_known = False
        self._asked = 0  # the last `Ping`
        self._unanswered = False  # the engine was asked, and has not said anything yet
        self.streams: dict[int, int] = {}  # frontend's number -> engine's
        self.turned_away = 0  # requests

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tune(transport)
        here = self._owner.open
        strangers = [(one.since_s, one.turn_out) for one in here if not one.peer and not one.over]
        refused = [(one.since_s, one.turn_out) for one in here if one.over]
        full = len(here) - len(refused) >= min(SESSIONS_MAX, places(SHARE))
        if full and not make_room(strangers):
            make_room(refused)  # of those who only have to leave there are never more
            self.refuse(Code.WORKER_OVERLOADED, f"{len(here)} frontends are connected already")
            here.add(self)
            return
        here.add(self)
        self._timer = self._loop.call_later(HELLO_WAIT_S, self._no_hello)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.open.discard(self)
        self._artefacts.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self.streams:
            log.info("frontend %s is gone: cancelling its %d streams", self.peer, len(self.streams))
        self._owner.cancel(self, list(self.streams))
        self._owner.passes(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send_artefacts()

    def data_received(self, data: bytes) -> None:
        if self.over:
            return
        try:
            for payload in self._splitter.feed(data):
                self._take(decode_to_worker(payload))
                if self.over:
                    return
            if not self.peer and self._splitter.held_bytes > HELLO_BYTES_MAX:
                raise FrameError(f"a Hello has at most {HELLO_BYTES_MAX} bytes")
        except FrameError as error:
            self.refuse(Code.INVALID_REQUEST, str(error))

    def _take(self, message: object) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif not self.peer:
            self.refuse(Code.INVALID_REQUEST, "the first message must be a Hello")
        elif isinstance(message, Generate):
            self._owner.generate(self, message)
        elif isinstance(message, Cancel):
            self._owner.cancel(self, message.streams)
        elif isinstance(message, Ping):
            self._ping(message.number)
        elif isinstance(message, Reload) and self.canary:
            self._owner.reload(self, message)
        elif isinstance(message, StepDown) and self.canary:
            self._owner.step_down(self, message)
        elif isinstance(message, Pass):
            self._owner.passes(self, message.turned_away)
        elif isinstance(message, GetArtefact):
            self._queue_artefact(message.sha256)
        elif isinstance(message, NotTaken):
            self._host.not_taken = message.reason[:SHOWN_CHARS_MAX]
            log.warning("frontend %s does not admit this worker: %s", self.peer, self._host.not_taken)

    def _greet(self, hello: Hello) -> None:
        if hello.version != VERSION:
            why = f"wire version {hello.version} is spoken to a worker of version {VERSION}"
            self.refuse(Code.INVALID_REQUEST, why)
        elif hello.purpose not in PURPOSES:
            purpose = hello.purpose[:SHOWN_CHARS_MAX]
            self.refuse(Code.INVALID_REQUEST, f"purpose {purpose!r} on a data socket; 'data' belongs here")
        elif self.peer:
            self.refuse(Code.INVALID_REQUEST, "a connection says Hello once")
        elif self._host.welcome is None:
            self.refuse(Code.CANNOT_CONNECT, "the worker is still starting")
        else:
            self.peer, self.canary = hello.peer[:SHOWN_CHARS_MAX] or "?", hello.purpose == "canary"
            if self._timer is not None:
                self._timer.cancel()
            self.send(self._host.welcome)

    def _no_hello(self) -> None:
        self.refuse(Code.INVALID_REQUEST, f"no Hello came within {HELLO_WAIT_S:g} s")

    # -- pings: however many come, the engine is asked once at a time, and answers the last of them

    def _ping(self, number: int) -> None:
        self._asked = number
        if not self._unanswered:
            self._unanswered = True
            self._owner.ping(self._pong)

    def _pong(self) -> None:
        self._unanswered = False
        self.send(Pong(self._asked))

    @property
    def uid(self) -> int | None:
        """Whose process of this machine is at the other end; None: nobody's that can be told. Looked up once: of a TCP
        connection that reads the kernel's list of all sockets, and whoever asks may ask for ever."""
        if not self._uid_known:
            sock = self._transport.get_extra_info("socket") if self._transport is not None else None
            self._uid, self._uid_known = peer_uid(sock) if sock is not None else None, True
        return self._uid

    # -- artefacts, as fast as the frontend reads them: a tokenizer may be larger than what may stay unsent

    def _queue_artefact(self, sha256: str) -> None:
        if len(self._artefacts) >= ARTEFACTS_ASKED_MAX:
            self.refuse(Code.INVALID_REQUEST, f"more than {ARTEFACTS_ASKED_MAX} artefacts asked for at once")
            return
        self._artefacts.append(_parts(sha256, self._host.artefacts.get(sha256, b"")))
        self._send_artefacts()

    def _send_artefacts(self) -> None:
        while self._artefacts and not self._paused:
            part = next(self._artefacts[0], None)
            if part is None:
                self._artefacts.popleft()
            else:
                self.send(part)

    # -- sending

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is None or self.over:
            return
        self._unread.write(self._transport, encode(message))

    def _drop(self, why: str) -> None:
        log.warning("frontend %s %s: dropping it", self.peer, why)
        self.over = True
        self.abort()

    def send_failure(self, stream: int, code: Code, message: str) -> None:
        self.send(Step([Output(stream, [], failure=Failure(code, message))]))

    def refuse(self, code: Code, reason: str) -> None:
        """Say why, and close."""
        log.warning("refusing %s: %s", self.peer or "a connection", reason)
        self.send(Refused(code, reason))
        self.over = True
        self._artefacts.clear()
        self._owner.cancel(self, list(self.streams))
        self._owner.passes(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            # Not closed at once: that would reset the connection under what the peer still sends, and lose the reason.
            self._transport.write_eof()
            self._timer = self._loop.call_later(LINGER_S, self.abort)

    def turn_out(self) -> None:
        self._owner.open.discard(self)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def congested(self) -> bool:
        return self.unsent_bytes > CONGESTED_BYTES


def _parts(sha256: str, data: bytes) -> Iterator[ArtefactPart]:
    if not data:
        yield ArtefactPart(sha256, 0, 0, b"")
    for start in range(0, len(data), ARTEFACT_PART_BYTES):
        yield ArtefactPart(sha256, start, len(data), data[start : start + ARTEFACT_PART_BYTES])
