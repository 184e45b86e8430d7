"""Nodes with vaults that grant leases, agents that carry out a fleet's actions, and a controller that plans.

An agent does each thing once, by its id; starts nobody whom it was told to stop; lets nothing new to whoever drains,
and ends nobody that has requests before their time. Whatever the planner must never cause is an assertion here: a vault
over its bytes, a name that is started twice, work that is cut short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import HYSTERESIS, Hysteresis, Level, Model
from holdfast.fleet.observed import Demand, Memory, Node, Observed, Phase, Replica
from holdfast.fleet.planner import Plan, Planner, plan
from holdfast.fleet.room import HOST

COPY_S = 2.0  # between a device and its host, here


@dataclass(slots=True)
class Body:
    """A replica as it really is."""

    action: Action  # that placed it
    level: Level
    phase: Phase
    since_s: float
    due_s: float | None  # when it is where it is going
    devices: tuple[str, ...] = ()
    running: int = 0
    idle_s: float = 0.0
    until_s: float = 0.0
    device_bytes: int = 0  # that it was promised
    stops: bool = False  # as soon as it may
    turn: int = 0  # how often it changed its level

    @property
    def serves(self) -> bool:
        return self.level is Level.HOT and self.phase is Phase.READY

    def seen(self) -> Replica:
        action = self.action
        return Replica(
            model=action.model,
            version=action.version,
            serial=action.serial,
            node=action.node,
            devices=self.devices,
            level=self.level,
            phase=self.phase,
            turn=self.turn,
            running=self.running,
            since_s=self.since_s,
            idle_s=self.idle_s,
            drain_until_s=self.until_s,
            device_bytes=self.device_bytes,
            host_bytes=action.host_bytes,
        )


@dataclass
class Machine:
    """A node, its vaults and its agent. `host` is under the name that room gives it."""

    name: str
    totals: dict[str, int]
    on_disk: set[str] = field(default_factory=set)
    up: bool = True  # it runs
    near: bool = True  # it is reached
    keeps_memory: bool = False  # its vaults keep what crashed processes had, until somebody is stopped by name
    leases: dict[str, dict[str, int]] = field(default_factory=dict)
    bodies: dict[str, Body] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # ids
    buried: set[str] = field(default_factory=set)  # names
    changed: bool = True

    def __post_init__(self) -> None:
        self.leases = {device: {} for device in self.totals}

    def snapshot(self) -> tuple[Node, list[Replica]]:
        memories = {device: Memory(total, dict(self.leases[device])) for device, total in self.totals.items()}
        host = memories.pop(HOST)
        node = Node(name=self.name, devices=memories, host=host, on_disk=frozenset(self.on_disk))
        return node, [body.seen() for body in self.bodies.values()]

    def grant(self, owner: str, devices: tuple[str, ...], size: int) -> None:
        for device in devices:
            self.leases[device][owner] = max(size, self.leases[device].get(owner, 0))
            used = sum(self.leases[device].values())
            assert used <= self.totals[device], f"{self.name} {device}: {used} of {self.totals[device]} for {owner}"

    def free(self, owner: str, *, host: bool = True, devices: bool = True) -> None:
        for device, leases in self.leases.items():
            if (host if device == HOST else devices):
                leases.pop(owner, None)

    # -- the agent

    def carry_out(self, action: Action, now_s: float, *, fails: bool = False) -> str:
        """What it answers: "", "failed" or "stopped"."""
        body, name = self.bodies.get(action.name), action.name
        self.changed = True
        if action.verb is Verb.STOP:
            self.buried.add(name)
            if body is None or body.phase is Phase.GONE:
                self.end(name)
                return "stopped"
            body.stops, body.until_s = True, action.until_s
            if body.serves or (body.level is Level.HOT and body.phase is Phase.PROVISIONING):
                body.phase, body.due_s = Phase.DRAINING, None
            return self.end_if_due(name, now_s)
        if action.id in self.done or (name in self.buried and action.verb is Verb.PLACE):
            return ""
        self.done.add(action.id)
        return DOES[action.verb](self, action, body, now_s, fails)

    def do_place(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        assert body is None, f"{action.name} is started twice"
        if fails:
            return "failed"
        hot = action.level is Level.HOT
        self.grant(action.name, action.devices if hot else (HOST,), action.device_bytes if hot else action.host_bytes)
        due_s = now_s + (3.0 if action.model in self.on_disk else 8.0)
        body = Body(action, action.level, Phase.PROVISIONING, now_s, due_s, action.devices)
        body.device_bytes = action.device_bytes
        self.bodies[action.name] = body
        self.on_disk.add(action.model)
        return ""

    def do_promote(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        if fails or body is None or body.phase is not Phase.READY or body.level is not Level.WARM:
            return "failed"
        self.grant(action.name, action.devices, action.device_bytes)
        body.turn += 1
        body.level, body.phase, body.since_s, body.due_s = Level.HOT, Phase.PROVISIONING, now_s, now_s + COPY_S
        body.devices, body.device_bytes = action.devices, action.device_bytes
        return ""

    def do_drain(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        if fails or body is None:
            return "failed"
        if body.serves or (body.level is Level.HOT and body.phase is Phase.PROVISIONING):
            body.phase, body.until_s, body.due_s = Phase.DRAINING, action.until_s, None
        return ""

    def do_demote(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        if fails or body is None or body.phase is not Phase.DRAINING:
            return "failed"
        assert body.running == 0 or now_s >= body.until_s, f"{action.name} is demoted with {body.running} running"
        self.grant(action.name, (HOST,), action.host_bytes)
        body.running, body.phase, body.since_s, body.due_s = 0, Phase.DEMOTING, now_s, now_s + COPY_S
        return ""

    def end_if_due(self, name: str, now_s: float) -> str:
        body = self.bodies[name]
        if body.stops and (body.running == 0 or now_s >= body.until_s):
            self.end(name)
            return "stopped"
        return ""

    def end(self, name: str) -> None:
        self.bodies.pop(name, None)
        self.free(name)

    def crash(self, name: str) -> None:
        self.changed = True
        if self.keeps_memory:
            body = self.bodies[name]
            body.phase, body.running, body.due_s = Phase.GONE, 0, None
        else:
            self.end(name)

    def reboot(self) -> None:
        self.bodies.clear()
        self.leases = {device: {} for device in self.totals}
        self.changed = True

    def tick(self, now_s: float) -> Iterator[str]:
        """Whatever is due; names of those that were stopped."""
        for name, body in list(self.bodies.items()):
            if body.stops and self.end_if_due(name, now_s):
                self.changed = True
                yield name
            elif body.due_s is not None and now_s >= body.due_s:
                self.changed = True
                if body.phase is Phase.DEMOTING:
                    self.free(name, host=False)
                    body.level, body.devices, body.turn = Level.WARM, (), body.turn + 1
                if body.level is Level.HOT:
                    self.free(name, devices=False)
                    body.idle_s = now_s
                body.phase, body.since_s, body.due_s, body.until_s = Phase.READY, now_s, None, 0.0


DOES: dict[Verb, Callable[[Machine, Action, Body | None, float, bool], str]] = {
    Verb.PLACE: Machine.do_place,
    Verb.PROMOTE: Machine.do_promote,
    Verb.DRAIN: Machine.do_drain,
    Verb.DEMOTE: Machine.do_demote,
}


@dataclass
class World:
    """Machines, and the controller's planner. What the controller knows are snapshots, and its own actions, which it
    writes down before it sends them."""

    models: dict[str, Model] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    now_s: float = 1000.0
    planner: Planner = field(init=False)
    waiting: dict[str, Demand] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # ids
    counts: Counter[str] = field(default_factory=Counter)
    last: Plan = field(default_factory=Plan)
    hysteresis: Hysteresis = HYSTERESIS

    def __post_init__(self) -> None:
        self.planner = Planner(self.hysteresis)

    # -- the controller

    def want(self, model: Model) -> None:
        self.models[model.key] = model
        self.planner.view.want(model)

    def unwant(self, key: str) -> None:
        del self.models[key]
        self.planner.view.unwant(key)

    def look(self, machine: Machine) -> None:
        """Its snapshot comes."""
        if machine.up and machine.near and machine.changed:
            machine.changed = False
            self.planner.view.see(*machine.snapshot(), self.now_s)

    def look_at_all(self) -> None:
        for machine in self.machines.values():
            self.look(machine)

    def ask_for(self, key: str, waiting: int) -> None:
        if waiting:
            self.waiting[key] = Demand(waiting, self.now_s)
        else:
            self.waiting.pop(key, None)
        self.planner.view.hear(key, self.waiting.get(key))

    def observed(self) -> Observed:
        return self.planner.view.observed()

    def plan(self, *, compared: bool = False) -> tuple[Action, ...]:
        """What is to be done now. `compared`: with what is planned from scratch."""
        fresh = plan(self.models.values(), self.observed(), self.now_s, self.hysteresis) if compared else None
        self.last = self.planner.plan(self.now_s)
        if fresh is not None:
            assert fresh.actions == self.last.actions, difference(fresh, self.last)
            assert fresh.unmet == self.last.unmet
        for action in self.last.actions:
            self._check(action)
        return self.last.actions

    def _check(self, action: Action) -> None:
        """What the planner promises of each action, by what it was told."""
        one, model = self.planner.view.replicas.get(action.name), self.models.get(action.model)
        if action.verb is Verb.DRAIN and action.why.endswith("needs its place") and one is not None:
            assert model is None or not model.dedicated or "version" in action.why, action
            assert "version" in action.why or self.now_s - one.since_s >= self.hysteresis.resident_s, action
            self.counts["evictions"] += "version" not in action.why
        if action.verb in (Verb.STOP, Verb.DEMOTE) and one is not None and one.running:
            assert one.phase is Phase.DRAINING, action
            assert self.now_s >= one.drain_until_s, action
        if action.verb is Verb.PLACE and model is not None:
            assert model.may_be_on(action.node), action

    def restart(self) -> None:
        """Another controller goes on from what is written down."""
        before = self.observed()
        self.planner = Planner(self.hysteresis)
        self.planner.view.begin(self.models.values(), before)
        self.counts["restarts"] += 1

    # -- the way between

    def ask(self, action: Action) -> None:
        """It is written down. What is asked for once is not asked for again under the same id: it would not be done."""
        assert action.verb is Verb.STOP or action.id not in self.asked, f"{action.id} is asked for twice"
        self.asked.add(action.id)
        self.planner.view.ask(action)

    def send(self, action: Action, *, fails: bool = False, reply_lost: bool = False) -> None:
        machine = self.machines.get(action.node)
        if machine is None or not (machine.up and machine.near):
            return
        answer = machine.carry_out(action, self.now_s, fails=fails)
        self.counts[action.verb] += 1
        if reply_lost or not answer:
            return
        if answer == "failed":
            self.planner.view.fail(action.id, self.now_s)
        else:
            self.planner.view.stopped(action.name, action.model)

    def tick(self) -> None:
        for machine in self.machines.values():
            if machine.up:
                for name in machine.tick(self.now_s):
                    if machine.near:
                        self.planner.view.stopped(name, name.split(":")[1])

    def bodies(self) -> Iterator[tuple[str, Body]]:
        for machine in self.machines.values():
            if machine.up:
                yield from machine.bodies.items()

    def hot(self, key: str) -> int:
        """How many serve."""
        return sum(body.serves and body.action.model == key for _, body in self.bodies())

    def next_s(self) -> float:
        """When something happens, or is to be looked at."""
        due = [body.due_s for _, body in self.bodies() if body.due_s is not None]
        due += [body.until_s for _, body in self.bodies() if body.stops]
        due += [self.last.next_s] if self.last.next_s is not None else []
        return max(self.now_s + 0.1, min(due, default=self.now_s + 60.0))


def difference(one: Plan, other: Plan) -> str:
    lines = [f"from scratch only: {action}" for action in one.actions if action not in other.actions]
    return "\n".join(lines + [f"kept up only: {action}" for action in other.actions if action not in one.actions])
