"""A frontend's link to one worker: the data connection and the streams on it. `health.watcher` receives its heartbeats.

The hot path is `DataConnection.data_received`: from a received frame to every client's write in one synchronous pass
(facts 33). A standby's `Active` frame is handled in the same way: held requests are sent to it without a task or timer
in between.

A consumer that raises is our own bug and ends only its stream. A broken connection fails all its streams at once; a
verdict moves them while the connection is up. Output of an old attempt finds no entry in `streams` and is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Protocol

import msgspec

from holdfast.core.errors import Code
from holdfast.core.requests import Output
from holdfast.core.text import printable
from holdfast.discovery.registry import Instance
from holdfast.health.standing import WEIGHTS, HealthStatus
from holdfast.routing.table import RouteSlot
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.observations import WorkerCounts
from holdfast.streams.stats import TokenGaps
from holdfast.streams.takeovers import LeaderClaim
from holdfast.streams.verdicts import TrafficShare
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import (
    Active,
    ArtefactPart,
    Closed,
    Draining,
    GetArtefact,
    Pass,
    Ping,
    Room,
    Step,
    ToFrontend,
    Welcome,
)
from holdfast.wire.worker_connection import WorkerConnection

# A tokenizer of 35 MB over a slow link; nothing waits on it but the first request of its worker set.
TIMEOUT_S = 30.0
BYTES_MAX = 256 * 1024 * 1024
LAST_RESORT_WEIGHT = WEIGHTS[HealthStatus.SUSPICIOUS]  # of a worker that serves although its verdict gives it 0


class LinkEvents(Protocol):
    """Receives what happens on a link (the dispatcher)."""

    clock: Callable[[], float]

    def output_began(self, flight: Flight, cached: int) -> None: ...
    def stream_over(self, flight: Flight, *, tell_worker: bool) -> None: ...
    def attempt_failed(
        self, flight: Flight, code: str, message: str, *, tell_worker: bool = False, faulty: bool = True
    ) -> None: ...
    def consumer_raised(self, flight: Flight, error: Exception) -> None: ...
    def turned_away(self, flight: Flight) -> None: ...
    def has_room(self, link: WorkerLink, places: int) -> None: ...
    def took_over(self, link: WorkerLink) -> None: ...


class WorkerLink:
    """A worker and the streams that run on it."""

    def __init__(self, instance: Instance, events: LinkEvents) -> None:
        self.instance = instance
        self.events = events
        self.slot = RouteSlot(instance.key.instance, capacity=0)
        self.streams: dict[int, Flight] = {}
        self.workers: WorkerSet | None = None
        self.welcome: Welcome | None = None
        self.data: DataConnection | None = None
        self.withdrawn = False  # its key is gone from the store
        self.draining = False
        self.active = False  # the worker says that it takes work; False: it stands by
        self.epoch = 0
        self.group = ""
        self.deterministic = True
        self.inexact_reason = ""  # why its answers may be wrong, as the worker says
        self.trusted = False  # its liveness allows work (`WorkerLiveness.routable`)
        self.admit_max: int | None = None  # limit on its streams while it is on probation (`WorkerLiveness`)
        self.since_s = 0.0  # when it was discovered
        self.share = TrafficShare()  # of traffic, by control's verdict
        self.had_traffic = False  # its share was above 0 at some time
        self.eligible_ignoring_rollout = False  # its share would be above 0 without a rollout or fleet
        self.called_in = (
            False  # a spare, or a worker with a verdict against it, that serves because no other of its set does
        )
        self.postponed = ""  # why its streams must leave once another worker can take them
        self.on_sign_of_life: Callable[[], None] = lambda: None  # called at once, not at the next tick
        self.heard = False  # something came on the data connection since the last tick
        self.reason = "connecting"
        self.gaps = TokenGaps()  # shared by all links of its model, from `join` on
        self._asked = 0  # number of the last `Ping`
        self.counts = WorkerCounts()  # shared by all links of its instance; set by the roster

    def give_up_reservations(self) -> None:
        """Tell the worker that this frontend no longer waits for a place."""
        if self.data is not None:
            self.data.send(Pass(self.data.turned_away))

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the worker; a connection that cannot take it counts as broken."""
        if self.data is not None:
            self.data.send(message)

    def ask(self) -> None:
        """Send a `Ping` to the engine's loop; any answer is a sign of life."""
        self._asked += 1
        self.send(Ping(self._asked))

    @property
    def claim(self) -> LeaderClaim:
        return LeaderClaim(self.instance.key.namespace, self.group, self.epoch, self.slot.name)

    def on_welcome(self, welcome: Welcome) -> None:
        """Apply the worker's state from a new connection; it replaces that from the old one."""
        self.active, self.epoch, self.group = welcome.active, welcome.epoch, welcome.group
        self.deterministic, self.inexact_reason = welcome.deterministic, welcome.doubt
        self.draining = False

    def check(self, welcome: Welcome) -> None:
        """Raise ConnectionError unless the process at the address is the worker of the store's record."""
        key = self.instance.key
        expected = (key.instance, key.namespace, self.instance.record.checksum)
        if (welcome.instance, welcome.namespace, welcome.checksum) != expected:
            raise ConnectionError("another worker answers at its address")

    def stop_routing(self) -> None:
        """Send it no more work: its streams that are placed again must not return to it."""
        if self.workers is not None:
            self.workers.table.update(self.slot, routable=False)

    @property
    def gone(self) -> bool:
        """Return whether the engine takes no more work: its connection ended, it drains, it was found stopped, or
        control saw its process end (which may be known before the connection ends)."""
        return self.data is None or self.draining or not self.trusted or self.share.status == HealthStatus.DEAD.name

    @property
    def stands_by(self) -> bool:
        """Return whether it is a standby that would get work if it took over."""
        sound = self.workers is not None and not self.gone
        return sound and not self.active and self.share.weight > 0.0

    @property
    def objection(self) -> str:
        """Return why control's verdict gives it no work; "" if it gets some, or if no other worker can serve."""
        return "" if self.called_in else self.share.objection

    @property
    def weight(self) -> float:
        """Return its weight in the route table while it is routable."""
        return self.share.weight or LAST_RESORT_WEIGHT

    @property
    def last_resort(self) -> bool:
        """Return whether it gets work only because too few others can serve, although a check counts against it."""
        return self.share.last_resort or (self.called_in and self.share.weight == 0.0)

    def fail_streams(self, code: Code, message: str, *, tell_worker: bool, faulty: bool = True) -> None:
        """Fail every stream's attempt on this worker, higher tiers first, then older streams first. Not `faulty`: they
        leave by decision, and no failure is counted."""
        self.counts.burst += 1
        for flight in sorted(self.streams.values(), key=lambda flight: (flight.tier, flight.age)):
            self.events.attempt_failed(flight, code, message, tell_worker=tell_worker, faulty=faulty)

    def __repr__(self) -> str:
        return f"<WorkerLink {self.instance.name} {self.reason}, {len(self.streams)} streams>"


class DataConnection(WorkerConnection):
    """The connection on which requests are sent and steps received. It also fetches the files that a model card names
    by content hash: a tokenizer has megabytes, too large for the store."""

    def __init__(self, link: WorkerLink, peer: str) -> None:
        super().__init__(peer)
        self._link = link
        self._now = link.events.clock
        self.turned_away = 0  # requests
        self._artefacts: dict[str, bytearray] = {}  # received parts of requested artefacts

    def on_welcome(self, welcome: Welcome) -> None:
        self._link.on_welcome(welcome)

    def peer_name(self) -> str:
        return printable(self._link.instance.name)

    def on_closed(self) -> None:
        link = self._link
        if link.data is self:
            link.data = None
            link.stop_routing()
            link.fail_streams(Code.DISCONNECTED, f"{link.instance.name}: {self.ended}", tell_worker=False)

    def data_received(self, data: bytes) -> None:
        link = self._link
        link.heard = True
        link.counts.burst += 1
        dirty: list[Flight] = []  # their consumers have something to flush
        try:
            for payload in self._splitter.feed(data):
                message = self.read(payload)
                if type(message) is Step:  # not through `on_message`: this is the path of every token
                    self._on_step(message, dirty)
                elif message is not None:
                    self.on_message(message)
        except FrameError as error:
            self.on_unreadable(error)
        for flight in dirty:
            flight.consumer.dirty = False
            try:
                flight.consumer.flush()
            except Exception as error:
                link.events.consumer_raised(flight, error)

    def _on_step(self, step: Step, dirty: list[Flight]) -> None:
        streams = self._link.streams
        events = self._link.events
        gaps, counts = self._link.gaps, self._link.counts
        now_s = self._now()
        counts.tokens += len(step.outputs)  # mostly one each; corrected below
        since_s, count = 0.0, 0  # of consecutive streams with the same time of their last token: mostly the whole step
        for output in step.outputs:
            flight = streams.get(output.stream)
            tokens = output.tokens
            if output.finish is not None and flight is not None:
                self._reject_false_end(flight, output)
            failure = output.failure
            if failure is not None and not tokens:  # not shown to the consumer: it may still answer with an HTTP status
                counts.tokens -= 1
                self.turned_away += failure.code == Code.WORKER_OVERLOADED
                if flight is not None and flight.first_output and failure.code == Code.WORKER_OVERLOADED:
                    events.turned_away(flight)
                elif flight is not None:
                    events.attempt_failed(flight, failure.code, failure.message)
                continue
            if flight is None or not flight.ledger.accept(flight.attempt, tokens):
                continue
            consumer = flight.consumer
            try:
                if flight.first_output:
                    if self._link.inexact_reason:
                        flight.ledger.mark_inexact(self._link.inexact_reason)
                    events.output_began(flight, output.cached)
                over = consumer.on_output(output)
            except Exception as error:
                events.consumer_raised(flight, error)
                continue
            if tokens:
                if flight.last_token_at_s != since_s:
                    gaps.add(since_s, now_s, count)
                    since_s, count = flight.last_token_at_s, 0
                count += 1
                flight.last_token_at_s = now_s
                if len(tokens) > 1:
                    counts.tokens += len(tokens) - 1
                    gaps.counts[0] += len(tokens) - 1  # they came in the same frame: a gap of 0
            if not consumer.dirty:
                consumer.dirty = True
                dirty.append(flight)
            if over or output.finish is not None:
                events.stream_over(flight, tell_worker=output.finish is None and failure is None)
            elif failure is not None:
                events.attempt_failed(flight, failure.code, failure.message)
        gaps.add(since_s, now_s, count)

    @staticmethod
    def _reject_false_end(flight: Flight, output: Output) -> None:
        """Turn an end that cannot be the stream's real end into a failure."""
        assert output.finish is not None, output
        why = flight.ledger.cut_short(output.tokens, output.finish)
        if why is not None:
            output.finish, output.failure = None, why

    def on_message(self, message: ToFrontend) -> None:
        link = self._link
        if isinstance(message, Closed):
            for stream in message.streams:
                flight = link.streams.get(stream)
                if flight is not None:
                    why = "the worker closed the stream without its end"
                    link.events.attempt_failed(flight, Code.STREAM_INCOMPLETE, why)
        elif isinstance(message, Room):
            link.events.has_room(link, message.places)
        elif isinstance(message, Draining):
            link.draining = True
            link.reason = f"draining: {printable(message.reason)}"
            link.stop_routing()
            # The worker will give its streams back one by one; do not wait for that, and move higher tiers first.
            link.fail_streams(Code.ENGINE_SHUTDOWN, f"worker is {link.reason}", tell_worker=False)
        elif isinstance(message, Active):
            link.active, link.epoch, link.draining, link.inexact_reason = True, message.epoch, False, message.doubt
            link.reason = message.doubt or "serving"
            for flight in list(link.streams.values()) if message.doubt else ():
                flight.ledger.mark_inexact(message.doubt)  # their earlier tokens may be wrong too
            link.on_sign_of_life()
            link.events.took_over(link)
        elif isinstance(message, ArtefactPart):
            self._on_artefact_part(message)
        else:
            super().on_message(message)

    async def fetch_artefact(self, sha256: str) -> bytes:
        """Fetch and return an artefact; raise ConnectionError or TimeoutError if that fails."""
        self._artefacts[sha256] = bytearray()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found: bytes = await self.ask(sha256, GetArtefact(sha256))
        finally:
            del self._artefacts[sha256]
        if not found:
            raise ConnectionError(f"worker does not have the artefact {sha256} its card names")
        if hashlib.sha256(found).hexdigest() != sha256:
            raise ConnectionError(f"artefact {sha256} arrived with other content")
        return found

    def _on_artefact_part(self, part: ArtefactPart) -> None:
        gathered = self._artefacts.get(part.sha256)
        if gathered is None:
            return
        if part.total == 0 or part.total > BYTES_MAX or part.offset != len(gathered):
            self.answer(part.sha256, b"")
            return
        gathered += part.data
        if len(gathered) >= part.total:
            self.answer(part.sha256, bytes(gathered))
