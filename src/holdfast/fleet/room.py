"""Memory on all nodes: what is free, what will be when those have gone who are leaving, and where something fits. Pure.

Theory. Of a device two figures are kept. *Free* is what no lease, no replica and no action in flight has. *Later* is
that and what those hold who are leaving. Whoever is to come now takes of both; whoever waits for others to leave takes
of later only. What the next may have is the smaller of the two: so nobody is put into the room that another waits for.

A node fits k devices of some size if the k-th roomiest of its devices does. For each k in use nodes stand sorted by
that, so the tightest that fits is found without a look at the others.

Always true: what is taken during a pass is given back at its end (`settle`), so between passes the figures say what was
seen and asked for, and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping

from holdfast.fleet.actions import COMING, LEAVING, Action, Tries, Verb, subject_of
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Memory, Node, Phase, Replica

HOST = ""  # as a device's name


class Ground:
    """One node's memory, by device; `HOST` is the host's."""

    __slots__ = ("devices", "free", "going", "later", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.free: dict[str, int] = {}
        self.later: dict[str, int] = {}
        self.devices: tuple[str, ...] = ()
        self.going: Collection[str] = ()  # owners whose memory counts as free later

    def __repr__(self) -> str:
        return f"<Ground {self.name} free {self.free} later {self.later}>"

    def room(self, device: str) -> int:
        """For one that is to come now."""
        return min(self.free[device], self.later[device])

    def kth_room(self, count: int) -> int:
        """Of the k-th roomiest device; -1: there are fewer."""
        if not count:
            return self.room(HOST)
        rooms = sorted(map(self.room, self.devices), reverse=True)
        return rooms[count - 1] if len(rooms) >= count else -1

    def seats(self, count: int, size: int, crowd: Mapping[str, int]) -> tuple[str, ...]:
        """Devices that hold so much now, the least crowded and then the tightest; none, if there are too few. `crowd`:
        how many sit there beside whom it should not."""
        rooms = ((self.room(device), device) for device in self.devices)
        fit = sorted((crowd.get(device, 0), room, device) for room, device in rooms if room >= size)
        return tuple(sorted(device for _, _, device in fit[:count])) if len(fit) >= count else ()

    def room_on(self, devices: Collection[str], count: int) -> int:
        """Of the fullest of these; -1: one is not here. With none said, of the k-th roomiest."""
        if not devices:
            return self.kth_room(count)
        return min(self.room(device) if device in self.devices else -1 for device in devices)

    def seats_later(self, count: int, size: int, more: Mapping[str, int]) -> tuple[str, ...]:
        """Those that will hold so much, with `more` that is to leave, too."""
        later = {device: self.later[device] + more.get(device, 0) for device in self.devices}
        fit = sorted((room, device) for device, room in later.items() if room >= size)
        return tuple(sorted(device for _, device in fit[:count])) if len(fit) >= count else ()


def ground_of(
    node: Node, residents: Iterable[Replica], asked: Iterable[Action], leaving: tuple[Collection[str], Collection[str]]
) -> Ground:
    """A node's memory from all that is known of it. `leaving`: the owners who are, devices and the host."""
    ground = Ground(node.name)
    memories: dict[str, Memory] = {**node.devices, HOST: node.host}
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
    for action in asked:
        if action.verb in COMING:
            promise(action.name, action.devices, action.device_bytes)
        if action.verb in (Verb.PLACE, Verb.DEMOTE) and action.level is Level.WARM:
            promise(action.name, (HOST,), action.host_bytes)
    for device, memory in memories.items():
        owners = held[device]
        ground.free[device] = memory.total_bytes - sum(owners.values())
        ground.later[device] = ground.free[device]
        going = leaving[device == HOST]
        if going:
            ground.later[device] += sum(size for owner, size in owners.items() if owner in going)
    ground.devices, ground.going = tuple(node.devices), leaving[0]
    return ground


def owners_leaving(
    replicas: Iterable[Replica], asked: Iterable[Action], tries: Mapping[str, Tries]
) -> tuple[set[str], set[str]]:
    """Of one node's replicas, those whose memory on devices, and in the host, is about to be free; not who was told to
    go in vain."""
    there = {one.name: one for one in replicas}
    actions = [action for action in asked if action.verb in LEAVING]
    going = {action.name for action in actions}
    going |= {one.name for one in there.values() if one.phase in (Phase.DRAINING, Phase.DEMOTING)}
    moving = {name for name in going if not is_stuck(name, there.get(name), tries)}
    return moving, moving & {action.name for action in actions if action.verb is Verb.STOP}


def is_stuck(name: str, one: Replica | None, tries: Mapping[str, Tries]) -> bool:
    """It was to go, and did not: not in what it has been since. What it did before that says nothing any more. `one`:
    as it was seen, if it was."""
    failed = [tries[subject] for verb in (Verb.STOP, Verb.DEMOTE) if (subject := subject_of(verb, name)) in tries]
    return any(one is None or failure.at_s >= one.since_s for failure in failed)


class Room:
    """Grounds of all nodes that are alive."""

    def __init__(self) -> None:
        self.grounds: dict[str, Ground] = {}
        self.emptying: set[str] = set()  # nodes that somebody is leaving
        self._by_count: dict[int, list[tuple[int, str]]] = {}  # sorted; 0 is host memory
        self._at: dict[str, dict[int, int]] = {}  # by node: the figure under which it stands for each count
        self._before: dict[str, tuple[dict[str, int], dict[str, int]]] = {}  # of those touched in this pass

    def put(self, ground: Ground) -> None:
        """A node as it is now."""
        assert not self._before, "a pass is under way"
        self.drop(ground.name)
        self.grounds[ground.name] = ground
        self._at[ground.name] = {}
        for count in self._by_count:
            self._enter(ground, count)
        if any(ground.later[device] > ground.free[device] for device in ground.free):
            self.emptying.add(ground.name)

    def drop(self, name: str) -> None:
        """It is there no longer."""
        if self.grounds.pop(name, None) is not None:
            for count, figure in self._at.pop(name).items():
                self._leave(name, count, figure)
            self.emptying.discard(name)

    def fitting(self, count: int, size: int) -> Iterator[Ground]:
        """Nodes with so many devices that hold so much now, the tightest first; count 0: whose host memory does. They
        must not be taken of before the last was looked at."""
        if count not in self._by_count:
            self._by_count[count] = []
            for ground in self.grounds.values():
                self._enter(ground, count)
        row = self._by_count[count]
        for place in range(bisect_left(row, (size, "")), len(row)):
            yield self.grounds[row[place][1]]

    def fits(self, name: str, count: int, size: int) -> bool:
        ground = self.grounds.get(name)
        return ground is not None and ground.kth_room(count) >= size

    # -- within a pass

    def take(self, name: str, devices: Iterable[str], size: int) -> None:
        """Somebody is to come now."""
        ground = self._touched(name)
        for device in devices:
            ground.free[device] -= size
            ground.later[device] -= size
            assert ground.free[device] >= 0, ground
        self._stand(ground)

    def await_(self, name: str, devices: Iterable[str], size: int) -> None:
        """Somebody is to come when others have left."""
        ground = self._touched(name)
        for device in devices:
            ground.later[device] -= size
        self._stand(ground)

    def empty(self, name: str, more: Mapping[str, int]) -> None:
        """Somebody is to leave."""
        ground = self._touched(name)
        for device, size in more.items():
            ground.later[device] += size
        self._stand(ground)

    def settle(self) -> None:
        """The pass is over: what was taken in it is an action now, or never was."""
        for name, (free, later) in self._before.items():
            ground = self.grounds[name]
            ground.free, ground.later = free, later
            self._stand(ground)
        self._before.clear()

    def _touched(self, name: str) -> Ground:
        ground = self.grounds[name]
        if name not in self._before:
            self._before[name] = (ground.free, ground.later)
            ground.free, ground.later = dict(ground.free), dict(ground.later)
        return ground

    def _stand(self, ground: Ground) -> None:
        for count, figure in list(self._at[ground.name].items()):
            if ground.kth_room(count) != figure:
                self._leave(ground.name, count, figure)
                self._enter(ground, count)

    def _enter(self, ground: Ground, count: int) -> None:
        figure = self._at[ground.name][count] = ground.kth_room(count)
        insort(self._by_count[count], (figure, ground.name))

    def _leave(self, name: str, count: int, figure: int) -> None:
        row = self._by_count[count]
        del row[bisect_left(row, (figure, name))]
