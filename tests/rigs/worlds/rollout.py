"""A small world that carries out what a rollout says: replicas start, come to serve, drain and end, notch by notch.

It refuses to do anything twice: to start a name that is there, to drain one that drains, to stop one that leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.rollout import machine as m
from holdfast.rollout.machine import ObservedReplica, ReplicaStage
from holdfast.rollout.revision import Part, Revision
from holdfast.rollout.trial import RequestCounts

# From its start to its whole traffic, a notch each; a standby stays at its stage until it is woken.
STARTING_NOTCHES = 2


@dataclass
class Body:
    """A replica as it really is."""

    service: str
    set_id: str
    stage: ReplicaStage = ReplicaStage.STARTING
    beside: str = ""
    notches: int = 0
    admitted: bool = False
    weight: float = 0.0
    streams: int = 0
    crashes: int = 0
    trouble: str = ""
    how: str = ""
    fits_beside: bool = False
    is_shut: bool = False
    earned: bool = False  # its whole traffic, once

    @property
    def counts(self) -> bool:
        return self.stage is ReplicaStage.SERVING and self.admitted and self.weight > 0 and self.earned

    def seen(self) -> ObservedReplica:
        return ObservedReplica(
            service=self.service,
            set_id=self.set_id,
            stage=self.stage,
            admitted=self.admitted,
            weight=self.weight,
            streams=self.streams,
            crashes=self.crashes,
            trouble=self.trouble,
            how=self.how,
            fits_beside=self.fits_beside,
            is_shut=self.is_shut,
        )


@dataclass
class World:
    """Bodies by name. `fates`: sets that are bad, and how. `places`: of a service, where they are bounded."""

    bodies: dict[str, Body] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    roomy: set[str] = field(default_factory=set)  # services whose devices take a second engine
    traffic: dict[str, RequestCounts] = field(default_factory=dict)
    answers: dict[str, RequestCounts] = field(default_factory=dict)  # of frontends' sets
    unchecked: frozenset[str] = frozenset()  # services whose new sets no control checks
    refused: dict[str, str] = field(default_factory=dict)  # sets that no device could hold
    names: set[str] = field(default_factory=set)  # ever used

    def observe(self, desired: Revision) -> m.Observation:
        return m.Observation(
            desired=desired,
            replicas={name: body.seen() for name, body in self.bodies.items()},
            room={service: self.room(service) for service in self.places},
            traffic={"worker": dict(self.traffic), "frontend": dict(self.answers)},
            refused=dict(self.refused),
            unchecked=self.unchecked,
        )

    def room(self, service: str) -> int:
        return self.places[service] - len(self.housed(service))

    def housed(self, service: str) -> list[Body]:
        """Return those with a place of their own."""
        return [one for one in self.bodies.values() if one.service == service and one.beside not in self.bodies]

    def counted(self, service: str) -> int:
        return sum(1 for body in self.bodies.values() if body.service == service and body.counts)

    def carry(self, action: m.RolloutAction) -> None:
        """Do it; AssertionError, if it is done already."""
        match action:
            case m.StartReplica(name, service, set_id, beside):
                assert name not in self.bodies, f"{name} is there already"
                body = Body(service, set_id, beside=beside)
                self.bodies[name] = body
                self.names.add(name)
                if not beside and service in self.places:
                    assert self.room(service) >= 0, f"no place for {name}"
            case m.WakeReplica(name):
                assert self.bodies[name].stage is ReplicaStage.STANDBY, f"{name} does not stand by"
                self.bodies[name].stage = ReplicaStage.SERVING
            case m.DrainReplica(name):
                assert self.bodies[name].stage is ReplicaStage.SERVING, f"{name} does not serve"
                self.bodies[name].stage = ReplicaStage.DRAINING
            case m.ResumeServing(name):
                assert self.bodies[name].stage is ReplicaStage.DRAINING, f"{name} does not drain"
                self.bodies[name].stage = ReplicaStage.SERVING
            case m.StopReplica(name):
                assert self.bodies[name].stage is not ReplicaStage.LEAVING, f"{name} leaves already"
                self.bodies[name].stage = ReplicaStage.LEAVING

    def notch(self, name: str) -> None:
        """Let one replica come a little further, as its set's fate has it."""
        body = self.bodies[name]
        fate = self.fates.get(body.set_id, "good")
        if body.stage is ReplicaStage.STARTING:
            self._start(body, fate)
        elif body.stage is ReplicaStage.STANDBY and fate == "early":
            body.trouble = "failed its canary: another token at 3"
        elif body.stage is ReplicaStage.SERVING:
            self._serve(body, fate)
        elif body.stage is ReplicaStage.DRAINING:
            body.streams = max(0, body.streams - 1)
        elif body.stage is ReplicaStage.LEAVING:
            del self.bodies[name]

    def _start(self, body: Body, fate: str) -> None:
        body.notches = min(body.notches + 1, STARTING_NOTCHES)
        body.how = "it loads"
        if fate == "crashes":
            body.crashes, body.how = min(body.crashes + 1, 5), "exited with 1: no such image"
        elif fate == "never" or body.notches < STARTING_NOTCHES:
            return
        else:
            body.stage, body.how = ReplicaStage.STANDBY if body.beside else ReplicaStage.SERVING, ""
            body.fits_beside = body.service in self.roomy

    def _serve(self, body: Body, fate: str) -> None:
        if fate == "refused":
            body.trouble = "has a card that is refused: another tokenizer"
        elif not body.admitted:
            body.admitted = True
        elif fate == "canary":
            body.trouble = "failed its canary: another token at 3"
        elif body.weight < 1.0 and not (fate == "breaker" and body.earned):
            body.weight += 0.5
            body.streams = 3
            body.earned = body.earned or body.weight >= 1.0
            body.crashes = 0
        if fate in ("errors", "breaker") and body.weight > 0:
            self.traffic[body.set_id] = RequestCounts(50, 12)
        if fate == "breaker" and body.earned:
            body.weight, body.is_shut = 0.0, True

    def kill(self, name: str) -> None:
        """End it; its supervisor starts it again under its name."""
        body = self.bodies[name]
        if body.stage is ReplicaStage.LEAVING:
            del self.bodies[name]
            return
        fresh = Body(body.service, body.set_id, beside=body.beside if body.beside in self.bodies else "")
        self.bodies[name] = fresh
        fresh.crashes, fresh.how, fresh.earned = body.crashes + 1, "SIGKILL", body.earned


class Driver:
    """A process that keeps a rollout going: look, step, write, do. It may die between any two of these."""

    def __init__(self, world: World, written: bytes = b"", now_s: float = 0.0) -> None:
        self.world, self.written, self.now_s = world, written, now_s
        self.state = m.restore(m.decode(written), now_s) if written else m.NOTHING
        self.desired = self.state.target
        self.told: list[str] = []
        self.steps = 0

    def step(self, *, writes: bool = True, carries: int | None = None) -> tuple[m.RolloutAction, ...]:
        """Take one turn. `writes`, `carries`: how far it comes before it dies."""
        self.steps += 1
        state, actions = m.step(self.state, self.world.observe(self.desired), self.now_s)
        if writes:
            self.state = state
            self.written = m.encode(state)
            for action in actions[:carries]:
                self.world.carry(action)
        self.told += [action.text for action in actions if isinstance(action, m.LogLine)]
        return actions

    def next_life(self) -> Driver:
        """The process that goes on after this one."""
        heir = Driver(self.world, self.written, self.now_s)
        heir.desired = self.desired
        return heir

    def seconds(self, count: int) -> Iterator[tuple[m.RolloutAction, ...]]:
        """Let time pass, a second and a notch at a time; what was said each time."""
        for _ in range(count):
            self.now_s += 1.0
            for name in list(self.world.bodies):
                self.world.notch(name)
            yield self.step()


def revision(number: int, *, watch_s: float = 5.0, **parts: Part) -> Revision:
    return Revision(number=number, parts=parts, watch_s=watch_s)


def part(text: str, **changed: object) -> Part:
    """`b*4` is four of set b."""
    set_id, _, replicas = text.partition("*")
    values: dict[str, object] = {"deadline_s": 60.0, "drain_s": 10.0, "last_drain_s": 30.0, **changed}
    return Part(set_id=set_id, replicas=int(replicas or 1), **values)  # type: ignore[arg-type]
