"""The worker's side of the wire: frontends' connections, and whose stream is whose.

Always true: one frame per frontend and engine step; a frontend that goes away takes its streams with it at once; a
stream's number is the frontend's own, the engine sees another that is unique here; whatever a peer sends, the
worker lives on and the peer is told why it was refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Protocol, cast

import msgspec

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import Failure, Output
from holdfast.engines.contract import Engine
from holdfast.wire.frames import FrameError, FrameSplitter
from holdfast.wire.messages import (
    VERSION,
    ArtefactPart,
    Cancel,
    Closed,
    Draining,
    Generate,
    GetArtefact,
    Hello,
    NotTaken,
    Refused,
    Step,
    Welcome,
    decode_to_worker,
    encode,
)
from holdfast.wire.net import set_nodelay

log = logging.getLogger("holdfast.worker")

ARTEFACT_PART_BYTES = 1024 * 1024
# A frontend this far behind is asked for patience by the engine (which eases off), and dropped at the second bound:
# at real engines' speeds (thousands of tokens a second) that is minutes of not reading.
CONGESTED_BYTES = 1 * 1024 * 1024
UNSENT_BYTES_MAX = 32 * 1024 * 1024
# Frontends of one deployment; a connection beyond that is a leak.
SESSIONS_MAX = 256


class Host(Protocol):
    """What sessions need to know of their worker."""

    welcome: Welcome | None
    artefacts: dict[str, bytes]
    draining: str
    not_taken: str


class Sessions:
    """All frontends' connections, between them and one engine."""

    def __init__(self, engine: Engine, host: Host) -> None:
        self._engine = engine
        self._host = host
        self._keys = itertools.count(1)
        self._owners: dict[int, tuple[Session, int]] = {}  # engine's number -> frontend's
        self.open: set[Session] = set()
        self.requests_total = 0
        self.tokens_total = 0

    def connection(self) -> Session:
        return Session(self, self._host)

    @property
    def streams(self) -> int:
        return len(self._owners)

    # -- from frontends

    def generate(self, session: Session, message: Generate) -> None:
        key = next(self._keys)
        stream = message.stream
        if self._host.draining:
            session.send_failure(stream, Code.ENGINE_SHUTDOWN, f"worker is draining: {self._host.draining}")
            return
        if stream in session.streams:
            session.refuse(Code.INVALID_REQUEST, f"stream {stream} is in use on this connection")
            return
        try:
            self._engine.submit(key, message.request)
        except HoldfastError as error:
            session.send_failure(stream, error.code, error.message)
            return
        self.requests_total += 1
        self._owners[key] = (session, stream)
        session.streams[stream] = key

    def cancel(self, session: Session, streams: list[int]) -> None:
        for stream in streams:
            key = session.streams.pop(stream, None)
            if key is not None:
                del self._owners[key]
                self._engine.cancel(key)

    # -- from the engine

    def take_step(self, outputs: list[Output]) -> bool:
        """Send one step's outputs on; False if some frontend does not keep up."""
        by_session: dict[Session, list[Output]] = {}
        owners = self._owners
        for output in outputs:
            owner = owners.get(output.stream)
            if owner is None:
                continue
            session, stream = owner
            self.tokens_total += len(output.tokens)
            if output.finish is not None or output.failure is not None:
                del owners[output.stream]
                del session.streams[stream]
            output.stream = stream
            mine = by_session.get(session)
            if mine is None:
                by_session[session] = [output]
            else:
                mine.append(output)
        keeping_up = True
        for session, mine in by_session.items():
            session.send(Step(mine))
            keeping_up &= not session.congested
        return keeping_up

    def take_closed(self, keys: list[int]) -> None:
        """The engine lost these streams: say so rather than leave the frontend waiting."""
        by_session: dict[Session, list[int]] = {}
        for key in keys:
            owner = self._owners.pop(key, None)
            if owner is not None:
                session, stream = owner
                del session.streams[stream]
                by_session.setdefault(session, []).append(stream)
        for session, streams in by_session.items():
            session.send(Closed(streams))

    # -- the end

    def hand_back(self, reason: str) -> None:
        """Draining: every stream goes back to its frontend, to be resumed elsewhere."""
        for session in list(self.open):
            streams = list(session.streams)
            session.send(Draining(reason))
            self.cancel(session, streams)
            failure = Failure(Code.ENGINE_SHUTDOWN, f"worker is draining: {reason}")
            if streams:
                session.send(Step([Output(stream, [], failure=failure) for stream in streams]))

    def reset_connections(self) -> None:
        """Break every connection as a network fault would (a chaos fault)."""
        for session in list(self.open):
            session.abort()

    async def flushed(self, timeout_s: float) -> bool:
        """Wait until everything sent has left; False if some frontend did not take it in time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while any(session.unsent_bytes for session in self.open):
            if loop.time() > deadline_s:
                return False
            await asyncio.sleep(0.01)
        return True


class Session(asyncio.Protocol):
    """One frontend's data connection."""

    def __init__(self, sessions: Sessions, host: Host) -> None:
        self._sessions = sessions
        self._host = host
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self.peer = ""  # set by its Hello
        self.streams: dict[int, int] = {}  # frontend's number -> engine's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        set_nodelay(transport)
        if len(self._sessions.open) >= SESSIONS_MAX:
            self.refuse(Code.WORKER_OVERLOADED, f"{SESSIONS_MAX} frontends are connected already")
            return
        self._sessions.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._sessions.open.discard(self)
        if self.streams:
            log.info("frontend %s is gone: cancelling its %d streams", self.peer, len(self.streams))
        self._sessions.cancel(self, list(self.streams))

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                if self._transport is None:
                    return
                self._take(decode_to_worker(payload))
        except FrameError as error:
            self.refuse(Code.INVALID_REQUEST, str(error))

    def _take(self, message: object) -> None:
        if isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, NotTaken):
            self._host.not_taken = message.reason
            log.warning("frontend %s does not admit this worker: %s", self.peer, message.reason)
        elif not self.peer:
            self.refuse(Code.INVALID_REQUEST, "the first message must be a Hello")
        elif isinstance(message, Generate):
            self._sessions.generate(self, message)
        elif isinstance(message, Cancel):
            self._sessions.cancel(self, message.streams)
        elif isinstance(message, GetArtefact):
            self._send_artefact(message.sha256)

    def _greet(self, hello: Hello) -> None:
        if hello.version != VERSION:
            why = f"wire version {hello.version} is spoken to a worker of version {VERSION}"
            self.refuse(Code.INVALID_REQUEST, why)
        elif hello.purpose != "data":
            self.refuse(Code.INVALID_REQUEST, f"purpose {hello.purpose!r} on a data socket; 'data' belongs here")
        elif self._host.welcome is None:
            self.refuse(Code.CANNOT_CONNECT, "the worker is still starting")
        else:
            self.peer = hello.peer or "?"
            self.send(self._host.welcome)

    def _send_artefact(self, sha256: str) -> None:
        data = self._host.artefacts.get(sha256, b"")
        if not data:
            self.send(ArtefactPart(sha256, 0, 0, b""))
        for start in range(0, len(data), ARTEFACT_PART_BYTES):
            self.send(ArtefactPart(sha256, start, len(data), data[start : start + ARTEFACT_PART_BYTES]))

    # -- sending

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is None:
            return
        self._transport.write(encode(message))
        if self.unsent_bytes > UNSENT_BYTES_MAX:
            log.warning("frontend %s does not read: dropping it", self.peer)
            self.abort()

    def send_failure(self, stream: int, code: Code, message: str) -> None:
        self.send(Step([Output(stream, [], failure=Failure(code, message))]))

    def refuse(self, code: Code, reason: str) -> None:
        """Say why, and close."""
        log.warning("refusing %s: %s", self.peer or "a connection", reason)
        if self._transport is not None:
            self._transport.write(encode(Refused(code, reason)))
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def congested(self) -> bool:
        return self.unsent_bytes > CONGESTED_BYTES
