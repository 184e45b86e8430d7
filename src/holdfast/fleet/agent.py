"""What a node's agent does about its orders: which replicas are started, drained, moved to another level or removed,
and what it reports of each. Pure.

An agent is given everything at once: its orders, and what its processes are observed to do. An order stays until the
controller has observed its effect, and names of processes say which replica each is of; so the successor of a killed
agent reads the same orders, finds the same processes, and does what is left. Nothing else is remembered: a replica that
was draining is observed to serve, and is told to drain again. The supervisor keeps up a replica's processes: one that
crashes and comes back is the same replica.

A replica's level is what its vaults say. A WARM one has all its processes: the vaults have the weights in host memory,
and the engines sleep with nothing mapped. To demote is to make the engines let go and the vaults move; to promote, to
make the vaults move and wake the engines. Both are repeated until that is observed, and repeating them is harmless.

Always true: no replica is started that an order says to stop, nor any a second time; one that was told to leave leaves
when nothing runs on it or its requests have had their time; what a replica was promised counts as long as any process
of it exists, on its devices until all its vaults say that nothing is there, and in the host's memory until all say
that; a failed order to place is answered when nothing of it is left, one to move when it is as it was before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import WHY_CHARS_MAX, Health, LeasedMemory, Node, Replica, ReplicaPhase
from holdfast.fleet.records import Orders
from holdfast.fleet.room import HOST

NO_REPLICA = "there is nobody of that name here"
WRONG_STATE = "it is {level} and {phase}"
NO_ENGINE = "none of its engines serves"
ELSEWHERE = "its memory is on {devices}, and on no other device"


class LocalReplica(Struct, frozen=True, kw_only=True):
    """A replica of this node, as its agent knows it."""

    replica: Replica
    stopping: bool = False  # it was told to stop
    failed: str = ""  # why it never came up, or cannot go on
    in_host: bool = False  # its vaults last reported the weights in host memory
    placed: bool = False  # by this agent, which therefore knows how long it takes to come up

    @property
    def is_leaving(self) -> bool:
        return self.stopping or bool(self.failed)

    @property
    def is_gone(self) -> bool:
        """Return True if nothing is left of it but the reason why it failed."""
        return self.replica.phase is ReplicaPhase.GONE


class ObservedProcesses(Struct, frozen=True, kw_only=True):
    """What is observed of a replica's processes."""

    exists: bool = False  # any of them runs or is about to
    serves: bool = False  # an engine of it leads
    health: Health = Health.SOUND  # of the leading engine, by control's verdict
    why: str = ""  # why it is not SOUND, or no engine leads
    running: int = 0  # requests
    fatal: str = ""  # why it will never serve
    replica: Replica | None = None  # as its processes' settings describe it; None: they do not
    # True if all its vaults have the weights in host memory, False if none has; None: they do not answer, or differ.
    in_host: bool | None = None
    failed_move: tuple[str, str] = ("", "")  # id of the last order to move it that failed, and why


NOT_RUNNING = ObservedProcesses()


class StartReplica(Struct, frozen=True):
    """Start its processes."""

    action: Action


class RemoveReplica(Struct, frozen=True):
    """End its processes. Repeated until none is left."""

    name: str


class MoveReplica(Struct, frozen=True):
    """Make its engines let go and its vaults move the weights to host memory; or move them back to the device and wake
    its engines. Repeated until that is so."""

    action: Action
    to: Level


AgentAction = StartReplica | RemoveReplica | MoveReplica
LocalReplicas = Mapping[str, LocalReplica]


class AgentResult(Struct, frozen=True, kw_only=True):
    """What the agent remembers, does and answers after a step."""

    replicas: dict[str, LocalReplica]
    actions: tuple[AgentAction, ...]
    answers: dict[str, str]


def step(
    replicas: LocalReplicas, orders: Orders, observed: Mapping[str, ObservedProcesses], now_s: float
) -> AgentResult:
    """Compare orders and processes once; return what follows."""
    adopted = {name: LocalReplica(replica=one.replica) for name, one in observed.items() if one.exists and one.replica}
    after, answers = adopted | dict(replicas), dict[str, str]()
    placed = {action.name: action for action in orders.actions if action.verb is Verb.PLACE}
    stopped = {action.name for action in orders.actions if action.verb is Verb.STOP}
    for action in orders.actions:
        local, processes = after.get(action.name), observed.get(action.name, NOT_RUNNING)
        match action.verb:
            case Verb.PLACE if local is not None:
                after[action.name] = _continue_place(local, action, processes)
            case Verb.PLACE if action.name not in stopped and action.id not in orders.overdue:
                after[action.name] = LocalReplica(replica=_new_replica(action, now_s), placed=True)
            case Verb.DRAIN if local is not None:
                after[action.name] = _begin_drain(local, action.until_s, now_s)
            case Verb.STOP if local is not None:
                after[action.name] = structs.replace(_begin_drain(local, action.until_s, now_s), stopping=True)
            case Verb.PROMOTE | Verb.DEMOTE if action.id not in orders.overdue and action.name not in stopped:
                after, why = _begin_move(after, action, processes, now_s)
                answers |= {action.id: why} if why else {}
    moving = (Verb.PROMOTE, Verb.DEMOTE)
    moves = {one.name: one for one in orders.actions if one.verb in moving and one.id not in answers}
    after = {
        name: _apply_observed(local, observed.get(name, NOT_RUNNING), name in moves, now_s)
        for name, local in after.items()
    }
    for name, local in list(after.items()):
        if name not in placed and not observed.get(name, NOT_RUNNING).exists:
            del after[name]  # it left, or its processes were removed by hand
        elif local.stopping and not observed.get(name, NOT_RUNNING).exists:
            del after[name]
        elif local.is_gone:
            answers[placed[name].id] = local.failed
    answers |= {one.id: "" for one in orders.actions if one.verb is Verb.STOP and one.name not in after}
    actions = tuple(_actions_for(after, placed | moves, observed, now_s))
    return AgentResult(replicas=after, actions=actions, answers=answers)


def _new_replica(action: Action, now_s: float) -> Replica:
    return Replica(
        model=action.model,
        version=action.version,
        serial=action.serial,
        node=action.node,
        devices=action.devices,
        level=action.level,
        phase=ReplicaPhase.PROVISIONING,
        since_s=now_s,
        device_bytes=action.device_bytes,
        host_bytes=action.host_bytes,
    )


def _continue_place(local: LocalReplica, action: Action, processes: ObservedProcesses) -> LocalReplica:
    """Apply an order to place that stands. A replica that is to be WARM has its weights on the devices first."""
    one = local.replica
    if one.phase is ReplicaPhase.PROVISIONING and one.level is not action.level and not local.is_leaving:
        one = structs.replace(one, level=action.level, host_bytes=action.host_bytes)
    failed = local.failed or (processes.failed_move[1] if processes.failed_move[0] == action.id else "")
    return structs.replace(local, replica=one, failed=failed)


def _begin_drain(local: LocalReplica, until_s: float, now_s: float) -> LocalReplica:
    """Give it no new requests. One that drains already keeps its deadline."""
    one = local.replica
    if one.phase in (ReplicaPhase.DRAINING, ReplicaPhase.GONE):
        return local
    level = Level.HOT if one.on_devices else one.level
    drains = structs.replace(one, level=level, phase=ReplicaPhase.DRAINING, since_s=now_s, drain_until_s=until_s)
    return structs.replace(local, replica=drains)


# -- levels


def _begin_move(
    replicas: LocalReplicas, action: Action, processes: ObservedProcesses, now_s: float
) -> tuple[dict[str, LocalReplica], str]:
    """Begin an order to demote or promote; return all replicas, and why the order fails ("": it does not)."""
    local = replicas.get(action.name)
    if local is None or local.is_leaving:
        return dict(replicas), NO_REPLICA if local is None else ""
    one, why = local.replica, ""
    if processes.failed_move[0] == action.id:
        one, why = _revert_move(one, action, now_s), processes.failed_move[1]
    elif action.verb is Verb.DEMOTE and one.level is Level.HOT:
        until_s = one.drain_until_s or action.until_s
        if one.phase is not ReplicaPhase.DEMOTING:
            one = structs.replace(one, phase=ReplicaPhase.DEMOTING, since_s=now_s, drain_until_s=until_s)
        one = structs.replace(one, host_bytes=action.host_bytes)
    elif action.verb is Verb.PROMOTE and one.level is Level.WARM:
        if one.phase is not ReplicaPhase.READY:
            why = WRONG_STATE.format(level=one.level.word, phase=one.phase)
        elif set(action.devices) != set(one.devices):
            why = ELSEWHERE.format(devices=", ".join(one.devices) or "no device")
        else:
            one = _at_level(one, Level.HOT, ReplicaPhase.PROVISIONING, now_s)
            one = structs.replace(one, device_bytes=action.device_bytes)
    return {**replicas, action.name: structs.replace(local, replica=one)}, why


def _at_level(one: Replica, level: Level, phase: ReplicaPhase, now_s: float) -> Replica:
    """Return a replica that has changed its level, or is on its way there."""
    turn = one.turn + (one.level is not level)
    return structs.replace(one, level=level, phase=phase, turn=turn, since_s=now_s, idle_s=0.0, drain_until_s=0.0)


def _revert_move(one: Replica, action: Action, now_s: float) -> Replica:
    """Return a replica as it was before a move that failed."""
    if action.verb is Verb.DEMOTE and one.phase is ReplicaPhase.DEMOTING:
        return structs.replace(one, phase=ReplicaPhase.DRAINING, since_s=now_s)
    if action.verb is Verb.PROMOTE and one.level is Level.HOT and one.phase is ReplicaPhase.PROVISIONING:
        return _at_level(one, Level.WARM, ReplicaPhase.READY, now_s)
    return one


def _follow_vaults(one: Replica, in_host: bool, *, ordered: bool, now_s: float) -> Replica:
    """Return the replica at the level that its vaults report. `ordered`: an order to move it stands, and one that is
    promoted is still in host memory."""
    arrived = one.phase is ReplicaPhase.DEMOTING or (one.level is Level.WARM and one.phase is ReplicaPhase.PROVISIONING)
    if in_host and (arrived or (one.level is Level.HOT and not ordered)):
        return _at_level(one, Level.WARM, ReplicaPhase.READY, now_s)
    if not in_host and one.level is Level.WARM and one.phase is ReplicaPhase.READY and not ordered:
        return _at_level(one, Level.HOT, ReplicaPhase.PROVISIONING, now_s)  # it was moved by hand
    return one


# -- observed, and done


def _apply_observed(local: LocalReplica, processes: ObservedProcesses, ordered: bool, now_s: float) -> LocalReplica:
    one = local.replica
    idle_s = 0.0 if processes.running or not processes.serves else one.idle_s or now_s
    one = structs.replace(one, running=processes.running, idle_s=idle_s)
    if processes.in_host is not None:
        local = structs.replace(local, in_host=processes.in_host)
    if local.failed:
        phase = one.phase if processes.exists else ReplicaPhase.GONE
        return structs.replace(local, replica=_with_health(structs.replace(one, phase=phase), processes, now_s))
    if processes.fatal and not local.stopping:
        return structs.replace(local, replica=_with_health(one, processes, now_s), failed=processes.fatal)
    if processes.in_host is not None and not local.stopping:
        one = _follow_vaults(one, processes.in_host, ordered=ordered, now_s=now_s)
    if one.level is Level.HOT and one.phase is ReplicaPhase.PROVISIONING and processes.serves:
        came_s = now_s - one.since_s if local.placed and not one.turn else one.came_s
        one = structs.replace(one, phase=ReplicaPhase.READY, since_s=now_s, came_s=came_s)
    return structs.replace(local, replica=_with_health(one, processes, now_s))


def _with_health(one: Replica, processes: ObservedProcesses, now_s: float) -> Replica:
    """Return the replica with its health: of one that has come up, and since when it is not SOUND."""
    up = one.level is Level.HOT and one.phase in (ReplicaPhase.READY, ReplicaPhase.DRAINING)
    health, why = (processes.health, processes.why) if processes.serves else (Health.AWAY, processes.why or NO_ENGINE)
    if not up or health is Health.SOUND:
        return structs.replace(one, health=Health.SOUND, ill_s=0.0, ill_why="")
    return structs.replace(one, health=health, ill_s=one.ill_s or now_s, ill_why=why[:WHY_CHARS_MAX])


def _actions_for(
    replicas: LocalReplicas, orders: Mapping[str, Action], observed: Mapping[str, ObservedProcesses], now_s: float
) -> Iterable[AgentAction]:
    """Yield what is to be done. `orders`: to move each replica, or else to place it."""
    for name, local in replicas.items():
        one, processes = local.replica, observed.get(name, NOT_RUNNING)
        is_due = not one.running or now_s >= one.drain_until_s
        if processes.exists and local.is_leaving:
            if local.failed or is_due:
                yield RemoveReplica(name)
        elif not local.is_leaving and not processes.exists:
            yield StartReplica(orders[name])
        elif not local.is_leaving and name in orders:
            yield from _moves_for(one, orders[name], processes, is_due=is_due)


def _moves_for(one: Replica, action: Action, processes: ObservedProcesses, *, is_due: bool) -> Iterable[MoveReplica]:
    match action.verb, one.level, one.phase:
        case Verb.DEMOTE, Level.HOT, ReplicaPhase.DEMOTING if is_due:
            yield MoveReplica(action, Level.WARM)
        case Verb.PROMOTE, Level.HOT, ReplicaPhase.PROVISIONING:
            yield MoveReplica(action, Level.HOT)
        case Verb.PLACE, Level.WARM, ReplicaPhase.PROVISIONING if processes.serves:
            yield MoveReplica(action, Level.WARM)


def node_of(name: str, totals: Mapping[str, int], replicas: LocalReplicas, on_disk: Iterable[str] = ()) -> Node:
    """Return this node with its memory and what each replica was promised of it. `HOST` is the host's."""
    leases: dict[str, dict[str, int]] = {device: {} for device in (*totals, HOST)}
    for owner, local in replicas.items():
        one = local.replica
        for device in one.devices if one.on_devices else ():
            if device in leases:
                leases[device][owner] = one.device_bytes
        if (one.in_host or local.in_host) and not local.is_gone:
            leases[HOST][owner] = one.host_bytes
    memories = {device: LeasedMemory(total, leases[device]) for device, total in totals.items()}
    host = memories.pop(HOST, LeasedMemory(0, leases[HOST]))
    return Node(name=name, devices=memories, host=host, on_disk=frozenset(on_disk))
