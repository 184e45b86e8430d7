"""One worker as a frontend holds it: a data connection and the streams on it. Its beats come by `health.watcher`.

The hot path is `DataConnection.data_received`: from a received frame to every client's write in one synchronous
pass (facts 33). A consumer that raises is our own bug, and ends its stream only. A broken connection fails all its
streams at once; a judge's verdict moves them while the connection stands. Whatever an old attempt still sends finds no
entry in `streams` and is dropped. A standby's `Active` is as hot: from its frame to the held requests it is sent there
is no task and no timer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from holdfast.core.errors import Code
from holdfast.core.requests import Output
from holdfast.discovery.registry import Instance
from holdfast.health.standing import WEIGHTS, Status
from holdfast.routing.slots import Slot
from holdfast.streams.artefacts import Artefacts
from holdfast.streams.flight import Flight, WorkerSet
from holdfast.streams.groups import Claim
from holdfast.streams.sightings import Sighting
from holdfast.streams.standings import Share
from holdfast.streams.stats import TokenGaps
from holdfast.wire.framed import Framed
from holdfast.wire.frames import FrameError
from holdfast.wire.messages import (
    Active,
    ArtefactPart,
    Closed,
    Draining,
    Pass,
    Ping,
    Room,
    Step,
    Welcome,
    decode_to_frontend,
)

CALLED_WEIGHT = WEIGHTS[Status.SUSPICIOUS]  # of one that serves though its verdict leaves it nothing


class LinkEvents(Protocol):
    """Who is told what happens on a link (the dispatcher)."""

    clock: Callable[[], float]

    def output_began(self, flight: Flight, cached: int) -> None: ...
    def stream_over(self, flight: Flight, *, tell_worker: bool) -> None: ...
    def attempt_failed(
        self, flight: Flight, code: str, message: str, *, tell_worker: bool = False, faulty: bool = True
    ) -> None: ...
    def broke(self, flight: Flight, error: Exception) -> None: ...
    def turned_away(self, flight: Flight) -> None: ...
    def has_room(self, link: WorkerLink, places: int) -> None: ...
    def took_over(self, link: WorkerLink) -> None: ...


class WorkerLink:
    """A worker and the streams that run on it."""

    def __init__(self, instance: Instance, events: LinkEvents) -> None:
        self.instance = instance
        self.events = events
        self.slot = Slot(instance.key.instance, capacity=0)
        self.streams: dict[int, Flight] = {}
        self.workers: WorkerSet | None = None
        self.welcome: Welcome | None = None
        self.data: DataConnection | None = None
        self.withdrawn = False  # its key is gone from the store
        self.draining = False
        self.active = False  # by its own word: it takes work; False: it stands by
        self.epoch = 0
        self.group = ""
        self.deterministic = True
        self.doubt = ""  # why its answers may be wrong, by its own word
        self.trusted = False  # the judge's word, as last told: it may get work,
        self.admit_max: int | None = None  # and at most so many streams
        self.since_s = 0.0  # when it was first heard of
        self.share = Share()  # what control's verdict leaves it
        self.let_in = False  # that was something, once
        self.fit = False  # it would be something, whatever a rollout says
        self.called = False  # it serves only because no other of its set does: a spare, or one in doubt
        self.postponed = ""  # why its streams are to leave once another can take them
        self.on_word: Callable[[], None] = lambda: None  # told of a sign of life that cannot wait for the next tick
        self.heard = False  # something came on the data connection since the last tick
        self.reason = "connecting"
        self.gaps = TokenGaps()  # its model's, once it has one
        self._asked = 0  # the last `Ping`
        self.seen = Sighting()  # its instance's, once the roster knows it

    def leave_line(self) -> None:
        """Tell it that we wait for no place there any more."""
        if self.data is not None:
            self.data.send(Pass(self.data.turned_away))

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; a connection that cannot take it is broken."""
        if self.data is not None:
            self.data.send(message)

    def ask(self) -> None:
        """Is its engine's loop alive? Whatever comes back is a sign of life."""
        self._asked += 1
        self.send(Ping(self._asked))

    @property
    def claim(self) -> Claim:
        return Claim(self.instance.key.namespace, self.group, self.epoch, self.slot.name)

    def greeted(self, welcome: Welcome) -> None:
        """What it says of itself on a new connection; whatever was said on the old one is void."""
        self.active, self.epoch, self.group = welcome.active, welcome.epoch, welcome.group
        self.deterministic, self.doubt = welcome.deterministic, welcome.doubt
        self.draining = False

    def check(self, welcome: Welcome) -> None:
        """The process behind an address must be the one the store spoke of."""
        key = self.instance.key
        expected = (key.instance, key.namespace, self.instance.record.checksum)
        if (welcome.instance, welcome.namespace, welcome.checksum) != expected:
            raise ConnectionError("another worker answers at its address")

    def stop_routing(self) -> None:
        """No more work for it from this moment on; what comes back from it must not go there again."""
        if self.workers is not None:
            self.workers.table.update(self.slot, routable=False)

    @property
    def gone(self) -> bool:
        """Return whether the engine takes no work any more: its connection ended, it drains, it was found stopped, or
        control saw its process end (that news may come before the connection's end does)."""
        return self.data is None or self.draining or not self.trusted or self.share.status == Status.DEAD.name

    @property
    def stands_by(self) -> bool:
        """Whether it is a standby that would get work if it took over."""
        sound = self.workers is not None and not self.gone
        return sound and not self.active and self.share.weight > 0.0

    @property
    def objection(self) -> str:
        """Why control's verdict leaves it no work; "": it leaves some, or no other can do it."""
        return "" if self.called else self.share.objection

    @property
    def weight(self) -> float:
        """The share of its traffic that it gets while it gets any."""
        return self.share.weight or CALLED_WEIGHT

    @property
    def last_resort(self) -> bool:
        """Whether it gets work only because too few others can, though a check speaks against it."""
        return self.share.last_resort or (self.called and self.share.weight == 0.0)

    def fail_streams(self, code: Code, message: str, *, tell_worker: bool, faulty: bool = True) -> None:
        """Every stream on this worker goes elsewhere, the higher tiers first, and of a tier the older ones; not
        `faulty`: because that was decided."""
        self.seen.breath += 1
        for flight in sorted(self.streams.values(), key=lambda flight: (flight.tier, flight.age)):
            self.events.attempt_failed(flight, code, message, tell_worker=tell_worker, faulty=faulty)

    def __repr__(self) -> str:
        return f"<WorkerLink {self.instance.name} {self.reason}, {len(self.streams)} streams>"


class DataConnection(Framed):
    """Requests out, steps in."""

    purpose = "data"

    def __init__(self, link: WorkerLink, peer: str) -> None:
        super().__init__(peer)
        self._link = link
        self._now = link.events.clock
        self.turned_away = 0  # requests
        self.artefacts = Artefacts(self.send)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.artefacts.lost()
        link = self._link
        if link.data is self:
            link.data = None
            link.stop_routing()
            why = f"{link.instance.name}: {self.lost.result()}"
            link.fail_streams(Code.DISCONNECTED, why, tell_worker=False)

    def _first(self, message: object) -> None:
        fresh = not self.welcomed.done()
        super()._first(message)
        if fresh and isinstance(message, Welcome):
            self._link.greeted(message)  # at once: an Active or Draining may stand in the same batch

    def data_received(self, data: bytes) -> None:
        link = self._link
        link.heard = True
        link.seen.breath += 1
        dirty: list[Flight] = []
        try:
            for payload in self._splitter.feed(data):
                message = decode_to_frontend(payload)
                if type(message) is Step:
                    self._take_step(message, dirty)
                else:
                    self._other(message)
        except FrameError as error:
            self._break(f"worker sent what is not our protocol: {error}")
        for flight in dirty:
            flight.consumer.dirty = False
            try:
                flight.consumer.flush()
            except Exception as error:
                link.events.broke(flight, error)

    def _take_step(self, step: Step, dirty: list[Flight]) -> None:
        streams = self._link.streams
        events = self._link.events
        gaps, seen = self._link.gaps, self._link.seen
        now_s = self._now()
        seen.tokens += len(step.outputs)  # mostly one each; what differs is set right below
        since_s, count = 0.0, 0  # of streams in a row, all whose last token came at that time: mostly the whole step
        for output in step.outputs:
            flight = streams.get(output.stream)
            tokens = output.tokens
            if output.finish is not None and flight is not None:
                self._doubt_end(flight, output)
            failure = output.failure
            if failure is not None and not tokens:  # nothing for the consumer: it may yet answer with a status
                seen.tokens -= 1
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
                    if self._link.doubt:
                        flight.ledger.doubt(self._link.doubt)
                    events.output_began(flight, output.cached)
                over = consumer.take(output)
            except Exception as error:
                events.broke(flight, error)
                continue
            if tokens:
                if flight.last_s != since_s:
                    gaps.add(since_s, now_s, count)
                    since_s, count = flight.last_s, 0
                count += 1
                flight.last_s = now_s
                if len(tokens) > 1:
                    seen.tokens += len(tokens) - 1
                    gaps.add_together(len(tokens) - 1)
            if not consumer.dirty:
                consumer.dirty = True
                dirty.append(flight)
            if over or output.finish is not None:
                events.stream_over(flight, tell_worker=output.finish is None and failure is None)
            elif failure is not None:
                events.attempt_failed(flight, failure.code, failure.message)
        gaps.add(since_s, now_s, count)

    @staticmethod
    def _doubt_end(flight: Flight, output: Output) -> None:
        """What is called an end and can be told to be none is a failure like any other."""
        assert output.finish is not None, output
        why = flight.ledger.cut_short(output.tokens, output.finish)
        if why is not None:
            output.finish, output.failure = None, why

    def _other(self, message: object) -> None:
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
            link.reason = f"draining: {message.reason}"
            link.stop_routing()
            # It gives all its streams back one by one; here they leave in the order of their tiers.
            link.fail_streams(Code.ENGINE_SHUTDOWN, f"worker is {link.reason}", tell_worker=False)
        elif isinstance(message, Active):
            link.active, link.epoch, link.draining, link.doubt = True, message.epoch, False, message.doubt
            link.reason = message.doubt or "serving"
            for flight in list(link.streams.values()) if message.doubt else ():
                flight.ledger.doubt(message.doubt)  # what it has shown of them may be wrong as well
            link.on_word()
            link.events.took_over(link)
        elif isinstance(message, ArtefactPart):
            self.artefacts.take(message)
        else:
            self._first(message)


class NoticeConnection(Framed):
    """Opened to say one thing to a worker that gets no link."""

    purpose = "data"
