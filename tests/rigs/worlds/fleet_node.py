"""A node with vaults that grant leases, and the agent there that carries out a fleet's actions.

An agent does each thing once, by its id; starts none that it was told to stop; lets nothing new to one that drains,
and ends none that has requests before their time. What must never be asked of it is an assertion: a vault over its
bytes, a name that is started twice, work that is cut short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Health, LeasedMemory, Node, Replica, ReplicaPhase
from holdfast.fleet.room import HOST

COPY_S = 2.0  # between a device and its host, here


@dataclass(slots=True)
class Body:
    """A replica as it really is."""

    action: Action  # that placed it
    level: Level
    phase: ReplicaPhase
    since_s: float
    due_s: float | None  # when it is where it is going
    devices: tuple[str, ...] = ()
    running: int = 0
    idle_s: float = 0.0
    until_s: float = 0.0
    device_bytes: int = 0  # that it was promised
    host_bytes: int = 0
    stops: bool = False  # as soon as it may
    turn: int = 0  # how often it changed its level
    health: Health = Health.SOUND
    ill_s: float = 0.0

    @property
    def serves(self) -> bool:
        return self.level is Level.HOT and self.phase is ReplicaPhase.READY

    @property
    def is_sound(self) -> bool:
        return self.health is Health.SOUND

    def become(self, health: Health, now_s: float) -> None:
        self.ill_s = 0.0 if health is Health.SOUND else self.ill_s or now_s
        self.health, self.running = health, 0 if health is Health.AWAY else self.running

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
            host_bytes=self.host_bytes,
            came_s=3.0,
            health=self.health,
            ill_s=self.ill_s,
        )


@dataclass
class Machine:
    """A node, its vaults and its agent. `host` is under the name that room gives it."""

    name: str
    totals: dict[str, int]
    on_disk: set[str] = field(default_factory=set)
    up: bool = True  # it runs
    near: bool = True  # it is reached
    keeps_memory: bool = False  # its vaults keep what crashed processes had, until one is stopped by name
    leases: dict[str, dict[str, int]] = field(default_factory=dict)
    bodies: dict[str, Body] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)  # ids
    buried: set[str] = field(default_factory=set)  # names
    changed: bool = True
    shrank: bool = False  # what was decided before that may not fit, and is refused

    def __post_init__(self) -> None:
        self.leases = {device: {} for device in self.totals}

    def snapshot(self) -> tuple[Node, list[Replica]]:
        memories = {device: LeasedMemory(total, dict(self.leases[device])) for device, total in self.totals.items()}
        host = memories.pop(HOST)
        node = Node(name=self.name, devices=memories, host=host, on_disk=frozenset(self.on_disk))
        return node, [body.seen() for body in self.bodies.values()]

    def grant(self, owner: str, devices: tuple[str, ...], size: int) -> None:
        for device in devices:
            self.leases[device][owner] = max(size, self.leases[device].get(owner, 0))
            used = sum(self.leases[device].values())
            assert used <= self.totals[device], f"{self.name} {device}: {used} of {self.totals[device]} for {owner}"

    def refuses(self, devices: tuple[str, ...], size: int) -> bool:
        """What does not fit since it has less."""
        used = {device: sum(self.leases[device].values()) for device in devices}
        return self.shrank and any(used[device] + size > self.totals[device] for device in devices)

    def free(self, owner: str, *, host: bool = True, devices: bool = True) -> None:
        for device, leases in self.leases.items():
            if host if device == HOST else devices:
                leases.pop(owner, None)

    # -- the agent

    def carry_out(self, action: Action, now_s: float, *, fails: bool = False) -> str:
        """What it answers: "", "failed" or "stopped"."""
        body, name = self.bodies.get(action.name), action.name
        self.changed = True
        if action.verb is Verb.STOP:
            self.buried.add(name)
            if body is None or body.phase is ReplicaPhase.GONE:
                self.end(name)
                return "stopped"
            body.stops, body.until_s = True, action.until_s
            if body.serves or (body.level is Level.HOT and body.phase is ReplicaPhase.PROVISIONING):
                body.phase, body.due_s = ReplicaPhase.DRAINING, None
            return self.end_if_due(name, now_s)
        if action.id in self.done or (name in self.buried and action.verb is Verb.PLACE):
            return ""
        self.done.add(action.id)
        return DOES[action.verb](self, action, body, now_s, fails)

    def do_place(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        assert body is None, f"{action.name} is started twice"
        is_warm = action.level is Level.WARM
        if fails or self.refuses(action.devices, action.device_bytes):
            return "failed"
        if is_warm and self.refuses((HOST,), action.host_bytes):
            return "failed"
        self.grant(action.name, action.devices, action.device_bytes)
        if is_warm:
            self.grant(action.name, (HOST,), action.host_bytes)
        due_s = now_s + (3.0 if action.model in self.on_disk else 8.0)
        body = Body(action, action.level, ReplicaPhase.PROVISIONING, now_s, due_s, action.devices)
        body.device_bytes, body.host_bytes = action.device_bytes, action.host_bytes
        self.bodies[action.name] = body
        self.on_disk.add(action.model)
        return ""

    def do_promote(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        if fails or body is None or body.phase is not ReplicaPhase.READY or body.level is not Level.WARM:
            return "failed"
        if self.refuses(action.devices, action.device_bytes):
            return "failed"
        assert action.devices == body.devices, f"{action.name} is on {body.devices}, not on {action.devices}"
        self.grant(action.name, action.devices, action.device_bytes)
        body.turn += 1
        body.level, body.phase, body.since_s, body.due_s = Level.HOT, ReplicaPhase.PROVISIONING, now_s, now_s + COPY_S
        body.device_bytes = action.device_bytes
        return ""

    def do_drain(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        if fails or body is None:
            return "failed"
        if body.serves or (body.level is Level.HOT and body.phase is ReplicaPhase.PROVISIONING):
            body.phase, body.until_s, body.due_s = ReplicaPhase.DRAINING, action.until_s, None
        return ""

    def do_demote(self, action: Action, body: Body | None, now_s: float, fails: bool) -> str:
        if fails or body is None or body.phase is not ReplicaPhase.DRAINING or self.refuses((HOST,), action.host_bytes):
            return "failed"
        assert body.running == 0 or now_s >= body.until_s, f"{action.name} is demoted with {body.running} running"
        self.grant(action.name, (HOST,), action.host_bytes)
        body.host_bytes = action.host_bytes
        body.running, body.phase, body.since_s, body.due_s = 0, ReplicaPhase.DEMOTING, now_s, now_s + COPY_S
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
            body.phase, body.running, body.due_s = ReplicaPhase.GONE, 0, None
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
                if body.phase is ReplicaPhase.DEMOTING:
                    body.level, body.turn = Level.WARM, body.turn + 1
                    body.become(Health.SOUND, now_s)
                if body.level is Level.WARM:
                    self.free(name, host=False)
                if body.level is Level.HOT:
                    self.free(name, devices=False)
                    body.idle_s = now_s
                body.phase, body.since_s, body.due_s, body.until_s = ReplicaPhase.READY, now_s, None, 0.0


DOES: dict[Verb, Callable[[Machine, Action, Body | None, float, bool], str]] = {
    Verb.PLACE: Machine.do_place,
    Verb.PROMOTE: Machine.do_promote,
    Verb.DRAIN: Machine.do_drain,
    Verb.DEMOTE: Machine.do_demote,
}
