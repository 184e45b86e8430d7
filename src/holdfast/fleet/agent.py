"""What a node does about what is asked of it: who is started, who drains, who leaves, and what is told of each. Pure.

Theory. An agent is told everything at once: the orders that stand, and what its processes are seen to do. An order
stands until the controller has seen what came of it, and processes' names say whose they are; so whoever goes on after
a killed agent reads the same orders, finds the same processes, and does what is left. Nothing else is remembered: who
drained before is seen to serve, and told again. A replica's processes are kept up by the supervisor: one that crashes
and comes back is the same replica.

Always true: nobody is started whose name an order says to stop, nor anybody a second time; who was told to leave
leaves when nothing runs on it or its requests have had their time; what a replica was promised counts as long as any
process of it is there; a failed order to place is answered when nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Memory, Node, Phase, Replica
from holdfast.fleet.records import Orders

NOT_HERE = "this node keeps no weights in host memory"


class House(Struct, frozen=True, kw_only=True):
    """A replica that has its place here."""

    replica: Replica
    leaves: bool = False  # for good
    failed: str = ""  # why it never came up

    @property
    def is_leaving(self) -> bool:
        return self.leaves or bool(self.failed)

    @property
    def is_over(self) -> bool:
        """Nothing is left of it but that it failed."""
        return self.replica.phase is Phase.GONE


class Sight(Struct, frozen=True, kw_only=True):
    """What a replica's processes are seen to do."""

    is_there: bool = False  # any of them is, running or about to
    serves: bool = False
    running: int = 0  # requests
    trouble: str = ""  # why it never will
    replica: Replica | None = None  # as its processes' own settings tell it; None: they do not


NOBODY = Sight()


class Start(Struct, frozen=True):
    action: Action


class Remove(Struct, frozen=True):
    """End its processes. Said until none is there."""

    name: str


Deed = Start | Remove
Houses = Mapping[str, House]


class Turn(Struct, frozen=True, kw_only=True):
    """What is to be written down, then done, and told."""

    houses: dict[str, House]
    deeds: tuple[Deed, ...]
    answers: dict[str, str]


def step(houses: Houses, orders: Orders, seen: Mapping[str, Sight], now_s: float) -> Turn:
    """One look at everything."""
    adopted = {name: House(replica=one.replica) for name, one in seen.items() if one.is_there and one.replica}
    after, answers = adopted | dict(houses), dict[str, str]()
    placed = {action.name: action for action in orders.actions if action.verb is Verb.PLACE}
    stopped = {action.name for action in orders.actions if action.verb is Verb.STOP}
    for action in orders.actions:
        match action.verb:
            case Verb.PLACE if action.name not in after:
                if action.level is not Level.HOT:
                    answers[action.id] = NOT_HERE
                elif action.name not in stopped and action.id not in orders.overdue:
                    after[action.name] = House(replica=_placed(action, now_s))
            case Verb.DRAIN if action.name in after:
                after[action.name] = _drained(after[action.name], action.until_s, now_s)
            case Verb.STOP if action.name in after:
                house = _drained(after[action.name], action.until_s, now_s)
                after[action.name] = structs.replace(house, leaves=True)
            case Verb.PROMOTE | Verb.DEMOTE:
                answers[action.id] = NOT_HERE
    after = {name: _looked_at(house, seen.get(name, NOBODY), now_s) for name, house in after.items()}
    for name, house in list(after.items()):
        if name not in placed and not seen.get(name, NOBODY).is_there:
            del after[name]  # it left, or somebody took its processes away
        elif house.leaves and not seen.get(name, NOBODY).is_there:
            del after[name]
        elif house.is_over:
            answers[placed[name].id] = house.failed
    answers |= {one.id: "" for one in orders.actions if one.verb is Verb.STOP and one.name not in after}
    return Turn(houses=after, deeds=tuple(_deeds(after, placed, seen, now_s)), answers=answers)


def _placed(action: Action, now_s: float) -> Replica:
    return Replica(
        model=action.model,
        version=action.version,
        serial=action.serial,
        node=action.node,
        devices=action.devices,
        level=action.level,
        phase=Phase.PROVISIONING,
        since_s=now_s,
        device_bytes=action.device_bytes,
        host_bytes=action.host_bytes,
    )


def _drained(house: House, until_s: float, now_s: float) -> House:
    """It gets nothing new. Who was told so before keeps its time."""
    one = house.replica
    if one.phase in (Phase.DRAINING, Phase.GONE):
        return house
    drains = structs.replace(one, phase=Phase.DRAINING, since_s=now_s, drain_until_s=until_s)
    return structs.replace(house, replica=drains)


def _looked_at(house: House, sight: Sight, now_s: float) -> House:
    one = house.replica
    idle_s = 0.0 if sight.running or not sight.serves else one.idle_s or now_s
    one = structs.replace(one, running=sight.running, idle_s=idle_s)
    if house.failed:
        phase = one.phase if sight.is_there else Phase.GONE
        return structs.replace(house, replica=structs.replace(one, phase=phase))
    if sight.trouble and not house.leaves:
        return structs.replace(house, replica=one, failed=sight.trouble)
    if one.phase is Phase.PROVISIONING and sight.serves:
        one = structs.replace(one, phase=Phase.READY, since_s=now_s)
    return structs.replace(house, replica=one)


def _deeds(houses: Houses, placed: Mapping[str, Action], seen: Mapping[str, Sight], now_s: float) -> Iterable[Deed]:
    for name, house in houses.items():
        one, is_there = house.replica, seen.get(name, NOBODY).is_there
        if is_there and house.is_leaving:
            if house.failed or not one.running or now_s >= one.drain_until_s:
                yield Remove(name)
        elif not is_there and not house.is_leaving:
            yield Start(placed[name])


def node_of(name: str, totals: Mapping[str, int], houses: Houses, on_disk: Iterable[str] = ()) -> Node:
    """Its memory, with what everybody here was promised of it."""
    leases: dict[str, dict[str, int]] = {device: {} for device in totals}
    for whose, house in houses.items():
        for device in house.replica.devices:
            if device in leases and not house.is_over:
                leases[device][whose] = house.replica.device_bytes
    devices = {device: Memory(total, leases[device]) for device, total in totals.items()}
    return Node(name=name, devices=devices, on_disk=frozenset(on_disk))
