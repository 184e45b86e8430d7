"""What a node does about what is asked of it: who is started, who drains, who changes its level, who leaves, and what
is told of each. Pure.

Theory. An agent is told everything at once: the orders that stand, and what its processes are seen to do. An order
stands until the controller has seen what came of it, and processes' names say whose they are; so whoever goes on after
a killed agent reads the same orders, finds the same processes, and does what is left. Nothing else is remembered: who
drained before is seen to serve, and told again. A replica's processes are kept up by the supervisor: one that crashes
and comes back is the same replica.

At which level a replica is, its vaults say. A WARM one has all its processes: the vaults have the weights in host
memory, and the engines sleep with nothing mapped. To demote is to have the engines let go and the vaults move; to
promote, to have the vaults move and the engines woken. Both are said until that is seen, and begun anew change nothing.

Always true: nobody is started whose name an order says to stop, nor anybody a second time; who was told to leave
leaves when nothing runs on it or its requests have had their time; what a replica was promised counts as long as any
process of it is there, on its devices until all its vaults say that nothing is, and in the host's memory until all say
that; a failed order to place is answered when nothing of it is left, one to move when it is as it was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import WHY_CHARS_MAX, Health, Memory, Node, Phase, Replica
from holdfast.fleet.records import Orders
from holdfast.fleet.room import HOST

NOT_THERE = "there is nobody of that name here"
NOT_SO = "it is {level} and {phase}"
NOT_LED = "none of its engines serves"
ELSEWHERE = "its memory is on {devices}, and on no other device"


class House(Struct, frozen=True, kw_only=True):
    """A replica that has its place here."""

    replica: Replica
    leaves: bool = False  # for good
    failed: str = ""  # why it never came up, or cannot go on
    in_host: bool = False  # its vaults had the weights in host memory, when they last said
    placed: bool = False  # by this agent, which therefore knows how long it takes to come up

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
    serves: bool = False  # an engine of it leads
    health: Health = Health.SOUND  # of the one that leads, by control's verdict
    why: str = ""  # it is not SOUND, or no engine leads
    running: int = 0  # requests
    trouble: str = ""  # why it never will
    replica: Replica | None = None  # as its processes' own settings tell it; None: they do not
    # Whether its vaults have the weights in host memory, all of them, or none has; None: they do not say, or differ.
    in_host: bool | None = None
    wrong: tuple[str, str] = ("", "")  # the last order to move it that came to nothing, by its id, and why


NOBODY = Sight()


class Start(Struct, frozen=True):
    action: Action


class Remove(Struct, frozen=True):
    """End its processes. Said until none is there."""

    name: str


class Move(Struct, frozen=True):
    """Have its engines let go and its vaults take the weights to host memory; or have them on the device again and its
    engines woken. Said until that is so."""

    action: Action
    to: Level


Deed = Start | Remove | Move
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
        house, sight = after.get(action.name), seen.get(action.name, NOBODY)
        match action.verb:
            case Verb.PLACE if house is not None:
                after[action.name] = _coming(house, action, sight)
            case Verb.PLACE if action.name not in stopped and action.id not in orders.overdue:
                after[action.name] = House(replica=_placed(action, now_s), placed=True)
            case Verb.DRAIN if house is not None:
                after[action.name] = _drained(house, action.until_s, now_s)
            case Verb.STOP if house is not None:
                after[action.name] = structs.replace(_drained(house, action.until_s, now_s), leaves=True)
            case Verb.PROMOTE | Verb.DEMOTE if action.id not in orders.overdue and action.name not in stopped:
                after, why = _moved(after, action, sight, now_s)
                answers |= {action.id: why} if why else {}
    moving = (Verb.PROMOTE, Verb.DEMOTE)
    moves = {one.name: one for one in orders.actions if one.verb in moving and one.id not in answers}
    after = {name: _looked_at(house, seen.get(name, NOBODY), name in moves, now_s) for name, house in after.items()}
    for name, house in list(after.items()):
        if name not in placed and not seen.get(name, NOBODY).is_there:
            del after[name]  # it left, or somebody took its processes away
        elif house.leaves and not seen.get(name, NOBODY).is_there:
            del after[name]
        elif house.is_over:
            answers[placed[name].id] = house.failed
    answers |= {one.id: "" for one in orders.actions if one.verb is Verb.STOP and one.name not in after}
    return Turn(houses=after, deeds=tuple(_deeds(after, placed | moves, seen, now_s)), answers=answers)


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


def _coming(house: House, action: Action, sight: Sight) -> House:
    """Its order to place still stands. One that is to be WARM has its weights on the devices first."""
    one = house.replica
    if one.phase is Phase.PROVISIONING and one.level is not action.level and not house.is_leaving:
        one = structs.replace(one, level=action.level, host_bytes=action.host_bytes)
    failed = house.failed or (sight.wrong[1] if sight.wrong[0] == action.id else "")
    return structs.replace(house, replica=one, failed=failed)


def _drained(house: House, until_s: float, now_s: float) -> House:
    """It gets nothing new. Who was told so before keeps its time."""
    one = house.replica
    if one.phase in (Phase.DRAINING, Phase.GONE):
        return house
    level = Level.HOT if one.on_devices else one.level
    drains = structs.replace(one, level=level, phase=Phase.DRAINING, since_s=now_s, drain_until_s=until_s)
    return structs.replace(house, replica=drains)


# -- levels


def _moved(houses: Houses, action: Action, sight: Sight, now_s: float) -> tuple[dict[str, House], str]:
    """Somebody is to change its level: on its way there, or why it is not."""
    house = houses.get(action.name)
    if house is None or house.is_leaving:
        return dict(houses), NOT_THERE if house is None else ""
    one, why = house.replica, ""
    if sight.wrong[0] == action.id:
        one, why = _as_before(one, action, now_s), sight.wrong[1]
    elif action.verb is Verb.DEMOTE and one.level is Level.HOT:
        until_s = one.drain_until_s or action.until_s
        if one.phase is not Phase.DEMOTING:
            one = structs.replace(one, phase=Phase.DEMOTING, since_s=now_s, drain_until_s=until_s)
        one = structs.replace(one, host_bytes=action.host_bytes)
    elif action.verb is Verb.PROMOTE and one.level is Level.WARM:
        if one.phase is not Phase.READY:
            why = NOT_SO.format(level=one.level.word, phase=one.phase)
        elif set(action.devices) != set(one.devices):
            why = ELSEWHERE.format(devices=", ".join(one.devices) or "no device")
        else:
            one = _at(one, Level.HOT, Phase.PROVISIONING, now_s)
            one = structs.replace(one, device_bytes=action.device_bytes)
    return {**houses, action.name: structs.replace(house, replica=one)}, why


def _at(one: Replica, level: Level, phase: Phase, now_s: float) -> Replica:
    """It has changed its level, or is to."""
    turn = one.turn + (one.level is not level)
    return structs.replace(one, level=level, phase=phase, turn=turn, since_s=now_s, idle_s=0.0, drain_until_s=0.0)


def _as_before(one: Replica, action: Action, now_s: float) -> Replica:
    """Nothing came of its move."""
    if action.verb is Verb.DEMOTE and one.phase is Phase.DEMOTING:
        return structs.replace(one, phase=Phase.DRAINING, since_s=now_s)
    if action.verb is Verb.PROMOTE and one.level is Level.HOT and one.phase is Phase.PROVISIONING:
        return _at(one, Level.WARM, Phase.READY, now_s)
    return one


def _levelled(one: Replica, in_host: bool, *, told: bool, now_s: float) -> Replica:
    """By what its vaults say. `told`: an order to move it stands, and who comes from host memory is still there."""
    arrived = one.phase is Phase.DEMOTING or (one.level is Level.WARM and one.phase is Phase.PROVISIONING)
    if in_host and (arrived or (one.level is Level.HOT and not told)):
        return _at(one, Level.WARM, Phase.READY, now_s)
    if not in_host and one.level is Level.WARM and one.phase is Phase.READY and not told:
        return _at(one, Level.HOT, Phase.PROVISIONING, now_s)  # somebody else had it moved
    return one


# -- what is seen, and done


def _looked_at(house: House, sight: Sight, told: bool, now_s: float) -> House:
    one = house.replica
    idle_s = 0.0 if sight.running or not sight.serves else one.idle_s or now_s
    one = structs.replace(one, running=sight.running, idle_s=idle_s)
    if sight.in_host is not None:
        house = structs.replace(house, in_host=sight.in_host)
    if house.failed:
        phase = one.phase if sight.is_there else Phase.GONE
        return structs.replace(house, replica=_examined(structs.replace(one, phase=phase), sight, now_s))
    if sight.trouble and not house.leaves:
        return structs.replace(house, replica=_examined(one, sight, now_s), failed=sight.trouble)
    if sight.in_host is not None and not house.leaves:
        one = _levelled(one, sight.in_host, told=told, now_s=now_s)
    if one.level is Level.HOT and one.phase is Phase.PROVISIONING and sight.serves:
        came_s = now_s - one.since_s if house.placed and not one.turn else one.came_s
        one = structs.replace(one, phase=Phase.READY, since_s=now_s, came_s=came_s)
    return structs.replace(house, replica=_examined(one, sight, now_s))


def _examined(one: Replica, sight: Sight, now_s: float) -> Replica:
    """Return the replica with its health: of one that has come up, and since when it is not SOUND."""
    up = one.level is Level.HOT and one.phase in (Phase.READY, Phase.DRAINING)
    health, why = (sight.health, sight.why) if sight.serves else (Health.AWAY, sight.why or NOT_LED)
    if not up or health is Health.SOUND:
        return structs.replace(one, health=Health.SOUND, ill_s=0.0, ill_why="")
    return structs.replace(one, health=health, ill_s=one.ill_s or now_s, ill_why=why[:WHY_CHARS_MAX])


def _deeds(houses: Houses, asked: Mapping[str, Action], seen: Mapping[str, Sight], now_s: float) -> Iterable[Deed]:
    """`asked`: to move each, or else to place it."""
    for name, house in houses.items():
        one, sight = house.replica, seen.get(name, NOBODY)
        is_due = not one.running or now_s >= one.drain_until_s
        if sight.is_there and house.is_leaving:
            if house.failed or is_due:
                yield Remove(name)
        elif not house.is_leaving and not sight.is_there:
            yield Start(asked[name])
        elif not house.is_leaving and name in asked:
            yield from _move(one, asked[name], sight, is_due=is_due)


def _move(one: Replica, action: Action, sight: Sight, *, is_due: bool) -> Iterable[Move]:
    match action.verb, one.level, one.phase:
        case Verb.DEMOTE, Level.HOT, Phase.DEMOTING if is_due:
            yield Move(action, Level.WARM)
        case Verb.PROMOTE, Level.HOT, Phase.PROVISIONING:
            yield Move(action, Level.HOT)
        case Verb.PLACE, Level.WARM, Phase.PROVISIONING if sight.serves:
            yield Move(action, Level.WARM)


def node_of(name: str, totals: Mapping[str, int], houses: Houses, on_disk: Iterable[str] = ()) -> Node:
    """Its memory, with what everybody here was promised of it. `HOST` is the host's."""
    leases: dict[str, dict[str, int]] = {device: {} for device in (*totals, HOST)}
    for whose, house in houses.items():
        one = house.replica
        for device in one.devices if one.on_devices else ():
            if device in leases:
                leases[device][whose] = one.device_bytes
        if (one.in_host or house.in_host) and not house.is_over:
            leases[HOST][whose] = one.host_bytes
    memories = {device: Memory(total, leases[device]) for device, total in totals.items()}
    host = memories.pop(HOST, Memory(0, leases[HOST]))
    return Node(name=name, devices=memories, host=host, on_disk=frozenset(on_disk))
