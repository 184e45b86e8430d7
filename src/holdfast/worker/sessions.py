"""All frontends' connections of a worker, and whose stream is whose.

Always true: one frame per frontend and engine step; a frontend that goes away takes its streams with it at once; a
stream's number is the frontend's own, the engine sees another that is unique here. Who finds no place is turned away
and told when there is one (`worker.shares`); a stream that ran before goes ahead of that line. A canary takes nobody's
place and is in no count of what was done for clients.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial

import msgspec

from holdfast.core.errors import Code, HoldfastError
from holdfast.core.requests import CANARY_TIER, Failure, Output
from holdfast.engines.contract import Engine, EngineEvents
from holdfast.wire.messages import Active, Closed, Draining, Generate, Reload, Room, Step, StepDown
from holdfast.worker.failures import exit_now
from holdfast.worker.session import Host, Session
from holdfast.worker.shares import Shares

# Of a request in the engine's queue, whatever its frontend says: a timer is kept for each.
WAIT_MS_MAX = 3_600_000
# A canary goes past capacity and ahead of everybody, so it is short: control's have up to 56 tokens.
CANARY_TOKENS_MAX = 256


class Sessions(EngineEvents):
    """All frontends' connections, between them and one engine."""

    def __init__(self, engine: Engine, host: Host) -> None:
        self._engine = engine
        self._host = host
        self._keys = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._owners: dict[int, tuple[Session, int]] = {}  # engine's number -> frontend's
        self._canary = 0  # the engine's number of the canary's stream
        self._shares: Shares[Session] = Shares()
        self._timer: asyncio.TimerHandle | None = None  # to the end of the first kept place
        self.open: set[Session] = set()
        self.requests_total = 0
        self.tokens_total = 0  # made for clients
        self.made_total = 0  # for canaries too: all that the running streams made
        self.say_last: Callable[[str], None] = lambda why: None  # to who watches, as the process exits

    def connection(self) -> Session:
        return Session(self, self._host)

    @property
    def streams(self) -> int:
        """Of clients."""
        return len(self._owners) - (self._canary in self._owners)

    # -- from frontends

    def generate(self, session: Session, message: Generate) -> None:
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
            if self._host.proving:  # streams come back in these steps: whoever asks is told to ask later
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
        """Give a request back whose wait for its first step is over, if it has not begun to run."""
        owner = self._owners.get(key)
        if owner is None or not self._engine.withdraw(key):
            return
        session, stream = owner
        del self._owners[key], session.streams[stream]
        self._turn_away(session, stream, "it had not begun to run when its wait was over")
        self._offer()

    def _admits(self, session: Session, message: Generate) -> bool:
        """Whether there is a place for a client's request; its frontend is told if not."""
        request = message.request
        if request.tier == CANARY_TIER:
            session.send_failure(message.stream, Code.INVALID_REQUEST, "a client's request in the canaries' tier")
            return False
        self._host.not_taken = ""  # whoever sends work has admitted this worker
        ran_before = len(request.tokens) > request.prompt_len
        leaves = max(0, self._places - message.places) if message.places else 0
        if self._shares.take(session, self._places - self.streams, leaves) or ran_before:
            return True
        self._turn_away(session, message.stream, f"{self.streams} streams are here, and others are in line", leaves)
        return False

    def ping(self, answer: Callable[[], None]) -> None:
        self._engine.ping(answer)

    def reload(self, session: Session, message: Reload) -> None:
        self._host.asked_to_reload(message, session.uid, session.send)

    def step_down(self, session: Session, message: StepDown) -> None:
        self._host.asked_to_step_down(message, session.uid)

    def cancel(self, session: Session, streams: list[int]) -> None:
        for stream in streams:
            key = session.streams.pop(stream, None)
            if key is not None:
                del self._owners[key]
                self._engine.cancel(key)
            else:  # it ended, or was turned away
                self._shares.forget_bound(session)
        self._offer()

    def passes(self, session: Session, heard: int | None = None) -> None:
        """It wants no place any more, or is gone. Where it was turned away more often than it had `heard` when it said
        so, it waits to hear of room: nothing else would end that."""
        if heard is None or heard >= session.turned_away:
            self._shares.leave(session)
        else:
            self._shares.decline(session)
        self._offer()

    # -- places

    @property
    def _places(self) -> int:
        limits = self._engine.limits
        return limits.concurrency + limits.queue

    def _turn_away(self, session: Session, stream: int, why: str, leaves: int = 0) -> None:
        """Not a failure: it never ran. The next free place, but for those it leaves, may be its frontend's."""
        self._shares.turn_away(session, leaves)
        session.turned_away += 1
        session.send_failure(stream, Code.WORKER_OVERLOADED, why)

    def _offer(self) -> None:
        """Tell those in line of places that came free."""
        if not self._shares:
            return
        free = self._places - self.streams
        offers = self._shares.offer(free, lambda session: len(session.streams), self._loop.time())
        for session, places in offers.items():
            session.send(Room(places))
        if self._timer is not None:
            self._timer.cancel()
        at_s = self._shares.given_up_at_s
        self._timer = self._loop.call_at(at_s, self._offer) if at_s is not None else None

    # -- from the engine

    def outputs(self, outputs: list[Output]) -> bool:
        """Send one step's outputs on; False if some frontend does not keep up."""
        by_session: dict[Session, list[Output]] = {}
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
        """The engine lost these streams: say so rather than leave the frontend waiting."""
        by_session: dict[Session, list[int]] = {}
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
        exit_now(why, self.say_last)

    # -- the beginning and the end

    def announce(self, epoch: int, doubt: str = "") -> None:
        """This engine leads now: everyone who is connected hears it at once; the store follows. `doubt`: why its
        answers may be wrong."""
        for session in self.open:
            if session.peer:
                session.send(Active(epoch, doubt))

    def hand_back(self, reason: str, *, drains: bool = True) -> None:
        """Every stream goes back to its frontend, to be resumed elsewhere; who drains takes no more. Where it does not,
        those in line stay there: they wait to hear of room, and nothing else would end that."""
        if drains:
            self._shares.clear()
        for session in list(self.open):
            streams = list(session.streams)
            if drains:
                session.send(Draining(reason))
            self.cancel(session, streams)
            failure = Failure(Code.ENGINE_SHUTDOWN, f"worker is draining: {reason}")
            if streams:
                session.send(Step([Output(stream, [], failure=failure) for stream in streams]))

    def reset_connections(self) -> None:
        """Break every connection: a chaos fault, or a leader that is none any more."""
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
