"""Counts the memory of all nodes: what is free, what will be free when leaving replicas have gone, and where a replica
fits. Pure.

Of each device two figures are kept. *Free* is what no lease, no replica and no pending action has. *Later* is that and
what leaving replicas hold. A replica that comes now takes of both; one that waits for others to leave takes of later
only. What the next one may have is the smaller of the two: so no replica is put into the room that another waits for.

A node fits k devices of some size if its k-th roomiest device does. For each k in use nodes are sorted by that, so the
tightest that fits is found without looking at the others.

Always true: what is taken during a pass is given back at its end (`end_pass`), so between passes the figures say what
was observed and ordered, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping

from holdfast.fleet.actions import COMING, LEAVING, Action, Tries, Verb, subject_of
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import LeasedMemory, Node, Replica, ReplicaPhase

HOST = ""  # as a device's name


class NodeRoom:
    """One node's memory, by device; `HOST` is the host's."""

    __slots__ = ("cordoned", "devices", "free", "later", "leaving", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.cordoned = False  # no replica is placed here, whatever is free
        self.free: dict[str, int] = {}
        self.later: dict[str, int] = {}
        self.devices: tuple[str, ...] = ()
        self.leaving: Collection[str] = ()  # owners whose memory counts as free later

    def __repr__(self) -> str:
        return f"<NodeRoom {self.name} free {self.free} later {self.later}>"

    def available(self, device: str) -> int:
        """Return what a replica that comes now may have of a device."""
        return min(self.free[device], self.later[device])

    def kth_available(self, count: int) -> int:
        """Return what the k-th roomiest device has; -1: there are fewer devices. 0 is host memory."""
        if not count:
            return self.available(HOST)
        rooms = sorted(map(self.available, self.devices), reverse=True)
        return rooms[count - 1] if len(rooms) >= count else -1

    def choose_devices(self, count: int, size: int, per_device: Mapping[str, int]) -> tuple[str, ...]:
        """Return devices that hold so much now, those with the fewest replicas of the same model (`per_device`) and
        then the tightest first; none, if there are too few."""
        rooms = ((self.available(device), device) for device in self.devices)
        fit = sorted((per_device.get(device, 0), room, device) for room, device in rooms if room >= size)
        return tuple(sorted(device for _, _, device in fit[:count])) if len(fit) >= count else ()

    def available_on(self, devices: Collection[str], count: int) -> int:
        """Return what the fullest of these devices has, -1 if one is not here; with none given, the k-th roomiest."""
        if not devices:
            return self.kth_available(count)
        return min(self.available(device) if device in self.devices else -1 for device in devices)

    def devices_later(self, count: int, size: int, more: Mapping[str, int]) -> tuple[str, ...]:
        """Return devices that will hold so much later, with `more` freed on each."""
        later = {device: self.later[device] + more.get(device, 0) for device in self.devices}
        fit = sorted((room, device) for device, room in later.items() if room >= size)
        return tuple(sorted(device for _, device in fit[:count])) if len(fit) >= count else ()


def room_of(
    node: Node,
    residents: Iterable[Replica],
    pending: Iterable[Action],
    leaving: tuple[Collection[str], Collection[str]],
) -> NodeRoom:
    """Return a node's memory from its leases, replicas and pending actions. `leaving`: owners that leave its devices,
    and its host memory."""
    room = NodeRoom(node.name)
    memories: dict[str, LeasedMemory] = {**node.devices, HOST: node.host}
    held: dict[str, dict[str, int]] = {device: dict(memory.leases) for device, memory in memories.items()}

    def promise(owner: str, devices: Iterable[str], size: int) -> None:
        for device in devices:
            if device in held:
                held[device][owner] = max(size, held[device].get(owner, 0))

    for one in residents:
        if one.on_devices:
            promise(one.name, one.devices, one.device_bytes)
        if one.in_host:
            promise(one.name, (HOST,), one.host_bytes)
    for action in pending:
        if action.verb in COMING:
            promise(action.name, action.devices, action.device_bytes)
        if action.verb in (Verb.PLACE, Verb.DEMOTE) and action.level is Level.WARM:
            promise(action.name, (HOST,), action.host_bytes)
    for device, memory in memories.items():
        owners = held[device]
        room.free[device] = memory.total_bytes - sum(owners.values())
        room.later[device] = room.free[device]
        owners_gone = leaving[device == HOST]
        if owners_gone:
            room.later[device] += sum(size for owner, size in owners.items() if owner in owners_gone)
    room.devices, room.leaving = tuple(node.devices), leaving[0]
    return room


def owners_leaving(
    replicas: Iterable[Replica], pending: Iterable[Action], tries: Mapping[str, Tries]
) -> tuple[set[str], set[str]]:
    """Return the replicas of one node whose memory on devices, and in the host, is about to be free; without those
    whose order to leave failed."""
    there = {one.name: one for one in replicas}
    actions = [action for action in pending if action.verb in LEAVING]
    leaving = {action.name for action in actions}
    leaving |= {one.name for one in there.values() if one.phase in (ReplicaPhase.DRAINING, ReplicaPhase.DEMOTING)}
    moving = {name for name in leaving if not is_stuck(name, there.get(name), tries)}
    return moving, moving & {action.name for action in actions if action.verb is Verb.STOP}


def is_stuck(name: str, one: Replica | None, tries: Mapping[str, Tries]) -> bool:
    """Return True if an order to leave failed since the replica last changed its level or phase. `one`: as it was last
    observed, if it was."""
    failed = [tries[subject] for verb in (Verb.STOP, Verb.DEMOTE) if (subject := subject_of(verb, name)) in tries]
    return any(one is None or failure.at_s >= one.since_s for failure in failed)


class FleetRoom:
    """The memory of all nodes that are alive."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRoom] = {}
        self.emptying: set[str] = set()  # nodes that a replica is leaving
        self._by_count: dict[int, list[tuple[int, str]]] = {}  # sorted; 0 is host memory
        self._at: dict[str, dict[int, int]] = {}  # by node: the figure under which it is sorted for each count
        self._before: dict[str, tuple[dict[str, int], dict[str, int]]] = {}  # of those changed in this pass

    def put(self, room: NodeRoom) -> None:
        """Add or replace a node."""
        assert not self._before, "a pass is under way"
        self.remove(room.name)
        self.nodes[room.name] = room
        self._at[room.name] = {}
        if room.cordoned:
            return
        for count in self._by_count:
            self._index(room, count)
        if any(room.later[device] > room.free[device] for device in room.free):
            self.emptying.add(room.name)

    def remove(self, name: str) -> None:
        if self.nodes.pop(name, None) is not None:
            for count, figure in self._at.pop(name).items():
                self._unindex(name, count, figure)
            self.emptying.discard(name)

    def fitting(self, count: int, size: int) -> Iterator[NodeRoom]:
        """Yield nodes with so many devices that hold so much now, the tightest first; count 0: whose host memory does.
        Cordoned ones are left out. Nothing may be taken before the last one was yielded."""
        if count not in self._by_count:
            self._by_count[count] = []
            for room in self.nodes.values():
                if not room.cordoned:
                    self._index(room, count)
        row = self._by_count[count]
        for place in range(bisect_left(row, (size, "")), len(row)):
            yield self.nodes[row[place][1]]

    def fits(self, name: str, count: int, size: int) -> bool:
        room = self.nodes.get(name)
        return room is not None and not room.cordoned and room.kth_available(count) >= size

    # -- within a pass

    def take(self, name: str, devices: Iterable[str], size: int) -> None:
        """Take memory for a replica that comes now."""
        room = self._writable(name)
        for device in devices:
            room.free[device] -= size
            room.later[device] -= size
            assert room.free[device] >= 0, room
        self._reindex(room)

    def take_later(self, name: str, devices: Iterable[str], size: int) -> None:
        """Reserve memory for a replica that comes when others have left."""
        room = self._writable(name)
        for device in devices:
            room.later[device] -= size
        self._reindex(room)

    def free_later(self, name: str, more: Mapping[str, int]) -> None:
        """Count memory as free later: a replica is to leave."""
        room = self._writable(name)
        for device, size in more.items():
            room.later[device] += size
        self._reindex(room)

    def end_pass(self) -> None:
        """Give back what the pass took: it is a pending action now, or never was."""
        for name, (free, later) in self._before.items():
            room = self.nodes[name]
            room.free, room.later = free, later
            self._reindex(room)
        self._before.clear()

    def _writable(self, name: str) -> NodeRoom:
        room = self.nodes[name]
        if name not in self._before:
            self._before[name] = (room.free, room.later)
            room.free, room.later = dict(room.free), dict(room.later)
        return room

    def _reindex(self, room: NodeRoom) -> None:
        for count, figure in list(self._at[room.name].items()):
            if room.kth_available(count) != figure:
                self._unindex(room.name, count, figure)
                self._index(room, count)

    def _index(self, room: NodeRoom, count: int) -> None:
        figure = self._at[room.name][count] = room.kth_available(count)
        insort(self._by_count[count], (figure, room.name))

    def _unindex(self, name: str, count: int, figure: int) -> None:
        row = self._by_count[count]
        del row[bisect_left(row, (figure, name))]
