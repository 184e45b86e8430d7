"""The connections from frontends to one worker, and the streams of each.

Always true:

- The worker sends one frame per frontend and engine step.
- When a frontend disconnects, its streams are cancelled at once.
- Each frontend numbers its own streams; the engine gets other numbers, unique in this worker.
- The worker turns away a stream that finds no free slot, and offers its frontend one later (`worker.slot_queue`). A
  stream that ran before does not wait in that line.
- A canary takes no client's slot and is not counted as a client's request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Protocol

import msgspec

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.procfs import peer_uid
from holdfast.core.requests import CANARY_TIER, Failure, Output
from holdfast.core.text import printable
from holdfast.engines.contract import Engine, EngineEvents
from holdfast.wire.accepting import SHARE, connections_max, make_room
from holdfast.wire.connection import ServerConnection, turn_out_strangers
from holdfast.wire.frames import encode
from holdfast.wire.messages import (
    Active,
    ArtefactPart,
    Cancel,
    Closed,
    Draining,
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
    Room,
    Step,
    StepDown,
    ToWorker,
    Welcome,
    answer_hello,
    decode_to_worker,
)
from holdfast.wire.net import WatchedWriter
from holdfast.worker.slot_queue import SlotQueue

log = logging.getLogger("holdfast.worker")

PURPOSES = ("data", "canary")
ARTEFACT_PART_BYTES = 1024 * 1024
# Unsent bytes to one frontend above which the engine slows down, and above which artefacts wait.
CONGESTED_BYTES = 1 * 1024 * 1024
PAUSED_BYTES = 64 * 1024
# Frontends of one deployment; a connection beyond that is a leak.
SESSIONS_MAX = 256
# A greeting is tens of bytes, sent at once; a peer that sends more or takes longer is not a frontend.
HELLO_BYTES_MAX = 4096
HELLO_WAIT_S = 5.0
# A card names one artefact; a frontend asks once for each.
ARTEFACTS_ASKED_MAX = 16


class SessionHost(Protocol):
    """The worker, as its sessions see it."""

    welcome: Welcome | None
    artefacts: dict[str, bytes]
    not_taken: str

    @property
    def refusing(self) -> str:
        """Return why the worker accepts no work now; "" if it does."""

    @property
    def proving(self) -> bool:
        """Return True after a takeover, while the engine proves with a known question that what it took over is
        right."""

    def asked_to_reload(self, message: Reload, uid: int | None, answer: Callable[[Reloaded], None]) -> None:
        """Verify the weights if the peer is allowed to ask for it; call `answer` with the outcome or refusal."""

    def asked_to_step_down(self, message: StepDown, uid: int | None) -> None:
        """Hand over to the standby if the peer is allowed to ask for it."""


class FrontendSession(ServerConnection):
    """A connection that carries a frontend's streams, or the canaries of the control process.

    Always true: the worker does nothing for a peer before a valid Hello, which is bounded in time and bytes; a refusal
    has a reason; unsent data is bounded by what the peer's streams can still produce; a peer that reads nothing is soon
    dropped."""

    malformed_code = no_hello_code = Code.INVALID_REQUEST

    def __init__(self, owner: Sessions, host: SessionHost) -> None:
        super().__init__(decode_to_worker, hello_timeout_s=HELLO_WAIT_S, unsent_bytes_max=PAUSED_BYTES)
        self._owner = owner
        self._host = host
        self._unread = WatchedWriter(self._drop)
        self._paused = False
        self._artefacts: deque[Iterator[ArtefactPart]] = deque()  # asked for and not sent yet
        self.peer = ""  # set by its Hello
        self.canary = False  # set by its Hello: a connection for canaries
        self._asked = 0  # the last `Ping`
        self._unanswered = False  # the engine has not answered the ping yet
        self.streams: dict[int, int] = {}  # frontend's number -> engine's
        self.turned_away = 0  # number of requests turned away

    def on_connected(self) -> None:
        here = self._owner.open
        refused = [(one.since_s, one.turn_out) for one in here if one.over]
        full = len(here) - len(refused) >= min(SESSIONS_MAX, connections_max(SHARE))
        if full and not turn_out_strangers(here):
            make_room(refused)  # bounds the refused connections that have not closed yet
            self.refuse(Code.WORKER_OVERLOADED, f"{len(here)} frontends are connected already")
        here.add(self)

    def on_left(self, exc: Exception | None, *, refused: bool) -> None:
        self._artefacts.clear()
        if self.streams:
            log.info("frontend %s is gone: cancelling its %d streams", self.peer, len(self.streams))
        self._owner.cancel(self, list(self.streams))
        self._owner.passes(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.open.discard(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send_artefacts()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.peer and self._splitter.held_bytes > HELLO_BYTES_MAX:
            self.refuse(Code.INVALID_REQUEST, f"a Hello has at most {HELLO_BYTES_MAX} bytes")

    def refusal(self, code: str, reason: str) -> Refused:
        return Refused(code, reason)

    def peer_name(self) -> str:
        return self.peer or "a connection"

    @property
    def ignores_unknown(self) -> bool:  # type: ignore[override]
        """Return whether a message of unknown kind is ignored: refusing a frontend would cancel all of its streams."""
        return bool(self.peer)

    def on_message(self, message: ToWorker) -> None:
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
            self._host.asked_to_reload(message, self.uid, self.send)
        elif isinstance(message, StepDown) and self.canary:
            self._host.asked_to_step_down(message, self.uid)
        elif isinstance(message, Pass):
            self._owner.passes(self, message.turned_away)
        elif isinstance(message, GetArtefact):
            self._queue_artefact(message.sha256)
        elif isinstance(message, NotTaken):
            self._host.not_taken = printable(message.reason)
            log.warning("frontend %s does not admit this worker: %s", self.peer, self._host.not_taken)

    def _greet(self, hello: Hello) -> None:
        if hello.purpose not in PURPOSES:
            purpose = printable(hello.purpose)
            self.refuse(Code.INVALID_REQUEST, f"purpose '{purpose}' on a data socket; 'data' belongs here")
        elif self.peer:
            self.refuse(Code.INVALID_REQUEST, "a connection says Hello once")
        elif self._host.welcome is None:
            self.refuse(Code.CANNOT_CONNECT, "the worker is still starting")
        elif isinstance(answer := answer_hello(hello, self._host.welcome), str):
            self.refuse(Code.INVALID_REQUEST, answer)
        else:
            self.peer, self.canary = printable(hello.peer) or "?", hello.purpose == "canary"
            self.welcome(answer)

    # -- pings: one at a time goes to the engine, and its answer counts for the latest

    def _ping(self, number: int) -> None:
        self._asked = number
        if not self._unanswered:
            self._unanswered = True
            self._owner.ping(self._pong)

    def _pong(self) -> None:
        self._unanswered = False
        self.send(Pong(self._asked))

    @cached_property
    def uid(self) -> int | None:
        """Return the user of the peer's process, if it runs on this machine. Cached: for a TCP connection the lookup
        reads the kernel's list of all sockets, and a peer may cause many lookups."""
        return peer_uid(self.transport.get_extra_info("socket"))

    # -- artefacts, sent as fast as the frontend reads: a tokenizer may be larger than the bound on unsent bytes

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
        if not self.over:
            self._unread.write(self.transport, encode(message))

    def _drop(self, why: str) -> None:
        log.warning("frontend %s %s: dropping it", self.peer, why)
        self.abort()

    def send_failure(self, stream: int, code: Code, message: str) -> None:
        self.send(Step([Output(stream, [], failure=Failure(code, message))]))

    def turn_out(self) -> None:
        self._owner.open.discard(self)
        super().turn_out()

    def abort(self) -> None:
        self.transport.abort()

    @property
    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    @property
    def congested(self) -> bool:
        return self.unsent_bytes > CONGESTED_BYTES


def _parts(sha256: str, data: bytes) -> Iterator[ArtefactPart]:
    if not data:
        yield ArtefactPart(sha256, 0, 0, b"")
    for start in range(0, len(data), ARTEFACT_PART_BYTES):
        yield ArtefactPart(sha256, start, len(data), data[start : start + ARTEFACT_PART_BYTES])


# Bound on a request's wait in the engine's queue, whatever its frontend asks for: each has a timer.
WAIT_MS_MAX = 3_600_000
# A canary is admitted beyond capacity and ahead of all requests, so it must be short. The control process's canaries
# have up to 56 tokens.
CANARY_TOKENS_MAX = 256


class Sessions(EngineEvents):
    """All frontends' sessions of one engine; it passes requests to the engine and outputs back."""

    def __init__(self, engine: Engine, host: SessionHost) -> None:
        self._engine = engine
        self._host = host
        self._keys = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._owners: dict[int, tuple[FrontendSession, int]] = {}  # engine's number -> frontend's
        self._canary = 0  # the engine's number of the canary's stream
        self._slot_queue: SlotQueue[FrontendSession] = SlotQueue()
        self._timer: asyncio.TimerHandle | None = None  # until the first kept slot is given up
        self.open: set[FrontendSession] = set()
        self.requests_total = 0
        self.tokens_total = 0  # made for clients
        self.made_total = 0  # made for clients and canaries
        self.say_last: Callable[[str], None] = lambda why: None  # to observers, as the process exits

    def connection(self) -> FrontendSession:
        return FrontendSession(self, self._host)

    @property
    def streams(self) -> int:
        return len(self._owners) - (self._canary in self._owners)

    # -- from frontends

    def generate(self, session: FrontendSession, message: Generate) -> None:
        key = next(self._keys)
        stream = message.stream
        if self._host.refusing:
            session.send_failure(stream, Code.ENGINE_SHUTDOWN, f"this worker takes no work: {self._host.refusing}")
            return
        if stream in session.streams:
            session.refuse(Code.INVALID_REQUEST, f"stream {stream} is in use on this connection")
            return
        request = message.request
        if session.canary:
            if self._host.proving:  # the same steps resume streams: the canary can wait
                session.send_failure(stream, Code.WORKER_OVERLOADED, "it has just taken over, and proves itself")
                return
            if len(request.tokens) + request.sampling.max_tokens > CANARY_TOKENS_MAX:
                why = f"a known question has at most {CANARY_TOKENS_MAX} tokens with its answer"
                session.send_failure(stream, Code.INVALID_REQUEST, why)
                return
            self._canary = key if self._canary not in self._owners else self._canary
            request = msgspec.structs.replace(request, tier=CANARY_TIER)
        elif not self._admits(session, message):
            return
        try:
            self._engine.submit(key, request)
        except HoldfastError as error:
            if error.code is Code.WORKER_OVERLOADED and not session.canary:
                self._turn_away(session, stream, error.message)
            else:
                session.send_failure(stream, error.code, error.message)
            return
        self.requests_total += not session.canary
        self._owners[key] = (session, stream)
        session.streams[stream] = key
        if message.wait_ms > 0 and not session.canary:
            until_s = self._loop.time() + min(message.wait_ms, WAIT_MS_MAX) / 1000
            self._loop.call_at(until_s, partial(self._give_back_unbegun, key))
        self._offer()

    def _give_back_unbegun(self, key: int) -> None:
        """Turn a request away if it has not begun to run when its wait is over."""
        owner = self._owners.get(key)
        if owner is None or not self._engine.withdraw(key):
            return
        session, stream = owner
        del self._owners[key], session.streams[stream]
        self._turn_away(session, stream, "it had not begun to run when its wait was over")
        self._offer()

    def _admits(self, session: FrontendSession, message: Generate) -> bool:
        """Return whether there is a slot for a client's request; if not, turn it away."""
        request = message.request
        if request.tier == CANARY_TIER:
            session.send_failure(message.stream, Code.INVALID_REQUEST, "a client's request in the canaries' tier")
            return False
        self._host.not_taken = ""  # a frontend that sends work has admitted this worker
        ran_before = len(request.tokens) > request.prompt_len
        leaves = max(0, self._slots - message.places) if message.places else 0
        if self._slot_queue.admit(session, self._slots - self.streams, leaves) or ran_before:
            return True
        self._turn_away(session, message.stream, f"{self.streams} streams are here, and others are in line", leaves)
        return False

    def ping(self, answer: Callable[[], None]) -> None:
        self._engine.ping(answer)

    def cancel(self, session: FrontendSession, streams: list[int]) -> None:
        for stream in streams:
            key = session.streams.pop(stream, None)
            if key is not None:
                del self._owners[key]
                self._engine.cancel(key)
            else:  # it ended, or was turned away
                self._slot_queue.forget_bound(session)
        self._offer()

    def passes(self, session: FrontendSession, heard: int | None = None) -> None:
        """Remove a frontend from the line: it passed or disconnected.

        `heard` is how many refusals it had received when it passed (None: it disconnected, or its version does not
        report that). If the worker has sent more, the frontend waits for an offer and stays in line."""
        if heard is None or heard >= session.turned_away:
            self._slot_queue.leave(session)
        else:
            self._slot_queue.decline(session)
        self._offer()

    # -- slots

    @property
    def _slots(self) -> int:
        limits = self._engine.limits
        return limits.concurrency + limits.queue

    def _turn_away(self, session: FrontendSession, stream: int, why: str, leaves: int = 0) -> None:
        """Refuse a request that never ran, and put its frontend in line for the next slot beyond `leaves`."""
        self._slot_queue.turn_away(session, leaves)
        session.turned_away += 1
        session.send_failure(stream, Code.WORKER_OVERLOADED, why)

    def _offer(self) -> None:
        """Offer free slots to the frontends in line."""
        if not self._slot_queue:
            return
        free = self._slots - self.streams
        offers = self._slot_queue.offer(free, lambda session: len(session.streams), self._loop.time())
        for session, offered in offers.items():
            session.send(Room(offered))
        if self._timer is not None:
            self._timer.cancel()
        at_s = self._slot_queue.given_up_at_s
        self._timer = self._loop.call_at(at_s, self._offer) if at_s is not None else None

    # -- from the engine

    def outputs(self, outputs: list[Output]) -> bool:
        """Send one step's outputs to the frontends; return False if one of them does not keep up."""
        by_session: dict[FrontendSession, list[Output]] = {}
        owners = self._owners
        for output in outputs:
            owner = owners.get(output.stream)
            if owner is None:
                continue
            session, stream = owner
            self.made_total += len(output.tokens)
            if not session.canary:
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
        self._offer()
        return keeping_up

    def closed(self, streams: list[int]) -> None:
        """Tell the frontends which streams the engine lost, so that they do not wait for them."""
        by_session: dict[FrontendSession, list[int]] = {}
        for key in streams:
            owner = self._owners.pop(key, None)
            if owner is not None:
                session, stream = owner
                del session.streams[stream]
                by_session.setdefault(session, []).append(stream)
        for session, theirs in by_session.items():
            session.send(Closed(theirs))
        self._offer()

    def fatal(self, why: str) -> None:
        """Exit at once, after a sticky device error or a lost rank: an orderly end cannot be trusted, and a fence waits
        for this process to end. Tell the observers why, without waiting for them."""
        log.critical("%s: exiting at once", why)
        try:
            self.say_last(why)
        finally:
            os._exit(1)

    # -- the beginning and the end

    def announce(self, epoch: int, inexact_reason: str = "") -> None:
        """Tell every connected frontend that this engine leads now. `inexact_reason`: why its answers may
        be wrong."""
        for session in self.open:
            if session.peer:
                session.send(Active(epoch, inexact_reason))

    def hand_back(self, reason: str, *, drains: bool = True) -> None:
        """Return every stream to its frontend, which resumes it on another worker. `drains` False: this worker will
        serve again, so frontends in line stay there and wait for an offer."""
        if drains:
            self._slot_queue.clear()
        for session in list(self.open):
            streams = list(session.streams)
            if drains:
                session.send(Draining(reason))
            self.cancel(session, streams)
            failure = Failure(Code.ENGINE_SHUTDOWN, f"worker is draining: {reason}")
            if streams:
                session.send(Step([Output(stream, [], failure=failure) for stream in streams]))

    def reset_connections(self) -> None:
        """Abort every connection: as a chaos fault, or because this engine leads no more."""
        for session in list(self.open):
            session.abort()

    async def flushed(self, timeout_s: float) -> bool:
        """Wait until all unsent data is sent; return False if a frontend did not read it in time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while any(session.unsent_bytes for session in self.open):
            if loop.time() > deadline_s:
                return False
            await asyncio.sleep(0.01)
        return True
