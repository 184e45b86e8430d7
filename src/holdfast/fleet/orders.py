"""What is decided in one pass: actions with their ids and deadlines, and the room that each takes or leaves. Pure.

Always true: whatever is to come has taken its room before the next looks; whatever is to leave counts as room for later
at once, as it will in the next pass when its action flies, and counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.fleet.actions import ASK_S, COPY_S, Action, Verb, node_subject, replica_name
from holdfast.fleet.census import Census
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Phase, Replica
from holdfast.fleet.room import HOST, Room, is_stuck
from holdfast.fleet.view import View

DRAIN_S = 30.0  # of a model that nobody wants any more, whose own time is not known
FAILED = "it failed to start"  # and is not tried again at once
LOOK_AGAIN_S = 5.0  # at those who found no room: who resided for too short a time may do now


class Orders:
    def __init__(self, view: View, room: Room, now_s: float) -> None:
        self.view, self.room, self.now_s = view, room, now_s
        self.actions: dict[str, Action] = {}  # by id
        self.unmet: dict[str, str] = {}  # by model, why it misses somebody
        self.next_s: float | None = None
        self.told: set[str] = set()  # replicas that something was decided about
        self.moved: set[str] = set()  # models of those
        self.emptied: set[str] = set()  # nodes that somebody is to leave
        self._added = Counter[tuple[str, str]]()  # HOT ones that are to come, by model and node
        self._crowds: dict[tuple[str, str], Counter[str]] = {}  # by model and node
        self._used = Counter[str]()  # serials, by model

    def look_again(self, at_s: float) -> None:
        self.next_s = at_s if self.next_s is None else min(self.next_s, at_s)

    def has_on(self, census: Census, node: str) -> int:
        """HOT ones of a model, there or to come."""
        return census.on[node] + self._added[census.key, node]

    def may_be_on(self, census: Census, model: Model, node: str) -> bool:
        fits = not model.per_node_max or self.has_on(census, node) < model.per_node_max
        return fits and model.may_be_on(node) and self.may(node_subject(node))

    def may(self, subject: str) -> bool:
        """Whether it is not too soon after the last failure."""
        return self.view.may(subject, self.now_s)

    # -- up

    def serial(self, key: str) -> int:
        """One that no replica of the model ever had."""
        self._used[key] += 1
        return self.view.serials.get(key, 0) + self._used[key]

    def await_room(self, model: Model, node: str, seats: Sequence[str]) -> None:
        """Keep it for one that comes when others have left."""
        self._added[model.key, node] += 1
        self.room.await_(node, seats, model.device_bytes)

    def come(
        self, verb: Verb, model: Model, serial: int, node: str, level: Level = Level.HOT, seats: tuple[str, ...] = ()
    ) -> None:
        """Somebody is to come; who is to be WARM, by way of the devices. `seats`: those that it must have."""
        name, ground = replica_name(model.key, serial), self.room.grounds[node]
        crowd = self._crowd(model.key, node)
        devices = seats or ground.seats(model.devices, model.device_bytes, crowd)
        self.room.take(node, devices, model.device_bytes)
        if level is Level.HOT:
            crowd.update(devices)
            self._added[model.key, node] += 1
        else:
            self.room.take(node, (HOST,), model.host_bytes)
        self._add(
            Action(
                verb=verb,
                model=model.key,
                serial=serial,
                node=node,
                turn=self._turn(name),
                attempt=self.view.attempt(verb, name),
                deadline_s=self.now_s + (model.load_s if verb is Verb.PLACE else COPY_S),
                version=model.version,
                level=level,
                devices=devices,
                device_bytes=model.device_bytes,
                host_bytes=model.host_bytes,
            )
        )

    def _crowd(self, key: str, node: str) -> Counter[str]:
        """How many of a model are on each device of a node, or are to come there: a device that fails takes few of one
        model. Kept for the pass."""
        crowd = self._crowds.get((key, node))
        if crowd is None:
            flights = self.view.asked_on.get(node, {}).values()
            asked = {one.action.name: one.action.devices for one in flights if one.action.model == key}
            there = self.view.on_node.get(node, {}).values()
            seen = {one.name: one.devices for one in there if one.model == key and one.on_devices}
            crowd = self._crowds[key, node] = Counter()
            for devices in (asked | seen).values():
                crowd.update(devices)
        return crowd

    # -- down

    def tell(self, verb: Verb, key: str, serial: int, node: str, why: str, host: int = 0) -> None:
        """Somebody is to go."""
        name, model = replica_name(key, serial), self.view.models.get(key)
        one = self.view.replicas.get(name)
        if one is not None and node in self.room.grounds:
            self._leave(one, whole=verb is Verb.STOP)
        until_s = self.now_s + (model.drain_s if model is not None else DRAIN_S)
        if one is not None and one.phase in (Phase.DRAINING, Phase.DEMOTING) and one.drain_until_s:
            until_s = one.drain_until_s
        self._add(
            Action(
                verb=verb,
                model=key,
                serial=serial,
                node=node,
                turn=self._turn(name),
                attempt=self.view.attempt(verb, name),
                deadline_s=max(self.now_s, until_s) + (COPY_S if verb is Verb.DEMOTE else ASK_S),
                level=Level.WARM if verb is Verb.DEMOTE else Level.COLD,
                host_bytes=host,
                until_s=until_s,
                why=why,
            )
        )

    def _leave(self, one: Replica, *, whole: bool) -> None:
        """What it holds will be free, unless it is counted so already, or it was told in vain before."""
        if is_stuck(one.name, one, self.view.tries) or one.name in self.told:
            return
        more = self.held(one) if one.name not in self.room.grounds[one.node].going else {}
        if whole and one.in_host:
            more = {**more, HOST: max(one.host_bytes, self.view.nodes[one.node].host.leases.get(one.name, 0))}
        if more:
            self.room.empty(one.node, more)
            self.emptied.add(one.node)

    def held(self, one: Replica) -> dict[str, int]:
        """On its devices, promised or granted."""
        devices = self.view.nodes[one.node].devices
        there = {device: devices[device].leases.get(one.name, 0) for device in one.devices if device in devices}
        return {device: max(size, one.device_bytes * one.on_devices) for device, size in there.items()}

    def _turn(self, name: str) -> int:
        one = self.view.replicas.get(name)
        return 0 if one is None else one.turn

    def _add(self, action: Action) -> None:
        self.told.add(action.name)
        self.moved.add(action.model)
        self.actions[action.id] = action
