"""Decision: a full worker keeps a line of the frontends it turned away, and alone tells them of room. So whoever waits
there must be in that line, however their messages cross: else it waits for ever beside a free place."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.core.errors import Code
from holdfast.core.requests import Failure, Output
from holdfast.core.tiers import Tier
from holdfast.engines.contract import Limits
from holdfast.routing.degradation import RULES
from holdfast.spec.waits import HoldSettings
from holdfast.wire.frames import encode
from holdfast.wire.messages import Cancel, Generate, Pass, Step
from holdfast.worker.sessions import Sessions
from holdfast.worker.slot_queue import KEEP_S
from tests.rigs.worlds.streams import Cluster, Worker

PLACES = 3
PATIENT = HoldSettings(hold_s=3600.0, queue_s=3600.0)


class Loop:
    """A clock, and who is to be called when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, Any]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call: Any) -> Any:
        self._calls.append(entry := (at_s, call))
        return SimpleNamespace(cancel=lambda: self._calls.remove(entry) if entry in self._calls else None)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for entry in [entry for entry in self._calls if entry[0] <= self.now_s]:
            self._calls.remove(entry)
            entry[1]()


class Session:
    """One frontend's connection at the worker; what is sent either way arrives when the test says so, in order."""

    def __init__(self, sessions: Sessions, far: Worker) -> None:
        self._sessions, self._far = sessions, far
        self.streams: dict[int, int] = {}
        self.turned_away = 0
        self.canary = self.congested = False
        self._back: list[Any] = []
        self._read = 0

    def send(self, message: Any) -> None:
        self._back.append(message)

    def send_failure(self, stream: int, code: Code, message: str) -> None:
        self.send(Step([Output(stream, [], failure=Failure(code, message))]))

    def to_worker(self) -> bool:
        """The next message arrives; False: there is none."""
        if self._read == len(self._far.sent):
            return False
        message = self._far.sent[self._read]
        self._read += 1
        if isinstance(message, Generate):
            self._sessions.generate(self, message)  # type: ignore[arg-type]
        elif isinstance(message, Cancel):
            self._sessions.cancel(self, message.streams)  # type: ignore[arg-type]
        elif isinstance(message, Pass):
            self._sessions.passes(self, message.turned_away)  # type: ignore[arg-type]
        return True

    def to_frontend(self) -> bool:
        if not self._back:
            return False
        self._far.data.data_received(encode(self._back.pop(0)))
        return True


class World:
    """Two frontends and one worker."""

    def __init__(self, rng: random.Random) -> None:
        engine = SimpleNamespace(limits=Limits(2, PLACES - 2, 1000), submit=lambda *_: None, cancel=lambda _: None)
        engine.withdraw = lambda _: True
        host = SimpleNamespace(refusing="", not_taken="")
        self.sessions = asyncio.run(self._made(engine, host))
        self.loop = Loop()
        self.sessions._loop = self.loop  # type: ignore[assignment]
        self.rng = rng
        self.clusters = [Cluster(PATIENT), Cluster(PATIENT)]
        self.far = [Session(self.sessions, cluster.worker("a", PLACES)) for cluster in self.clusters]
        self.asked = 0

    async def _made(self, engine: Any, host: Any) -> Sessions:
        return Sessions(engine, host)

    def act(self, what: str, who: int) -> None:
        cluster, session = self.clusters[who], self.far[who]
        if what in ("ask", "ask for premium"):
            self.asked += 1
            cluster.ask(f"r{self.asked}", tier=Tier.PREMIUM if what == "ask for premium" else Tier.STANDARD)
        elif what == "leave":
            here = [name for name, client in cluster.clients.items() if not client.flight.ledger.ended]
            if here:
                cluster.leave(self.rng.choice(here))
        elif what == "level":
            cluster.set().table.set_rules(RULES[self.rng.choice((0, 3))])
        elif what == "give back":
            if self.sessions._owners:
                self.sessions._give_back_unbegun(self.rng.choice(list(self.sessions._owners)))
        elif what == "time":
            self.loop.wait(KEEP_S)
        elif what == "to worker":
            session.to_worker()
        else:
            session.to_frontend()

    def settle(self) -> None:
        """Every message arrives, at full capacity, and nobody ends."""
        for cluster in self.clusters:
            cluster.set().table.set_rules(RULES[0])
        for _ in range(30):
            for session in self.far:
                while session.to_worker() or session.to_frontend():
                    pass
            self.loop.wait(KEEP_S)
            for cluster in self.clusters:
                cluster.wait(0.1)

    def waiting(self) -> int:
        return sum(len(cluster.set().holds) for cluster in self.clusters)


ACTS = ("ask", "ask for premium", "leave", "leave", "level", "time", "to worker", "to worker", "to frontend")


# The level came back while a request that was bound by it was turned away,
@example(411)
@example(1846)
@example(55179315)
# or its client had left: the worker had its frontend in line for such a one, the frontend itself for any place.
@example(2016)
@example(6039)
@example(8041)
@example(8885)
@example(10933)
@example(13931)
@example(14406)
@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_nobody_waits_before_a_free_place(seed: int) -> None:
    """Whatever two frontends and a worker do and however their messages cross: once all have arrived, whoever waits
    waits for a place that somebody has."""
    must_leave_nobody_waiting(seed, ACTS)


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_requests_that_had_not_begun_are_given_back_and_wait_on(seed: int) -> None:
    """The same where the worker gives requests back that wait in its engine's queue."""
    must_leave_nobody_waiting(seed, (*ACTS, "give back"))


def must_leave_nobody_waiting(seed: int, acts: tuple[str, ...]) -> None:
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(100):
        world.act(rng.choice(acts), rng.randrange(2))
    world.settle()
    assert world.waiting() == 0 or world.sessions.streams == PLACES, world.sessions._slot_queue
