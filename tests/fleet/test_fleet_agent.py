"""A node's agent: what is started, what leaves, what is answered. Its stories, and what holds whatever happens.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the new outcomes, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.fleet.actions import Action, Verb, replica_name
from holdfast.fleet.agent import House, Move, Remove, Sight, Start, Turn, node_of, step
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Phase, Replica
from holdfast.fleet.records import Orders
from holdfast.fleet.room import HOST
from tests.rigs.transcripts import must_go_as_written, stories

NAME = replica_name("chat", 1)
TOTALS = {"host-1": 500, HOST: 300}
FOUND = Replica(
    model="chat",
    serial=1,
    node="n",
    phase=Phase.PROVISIONING,
    devices=("host-1",),
    device_bytes=100,
    host_bytes=80,
)


def order(verb: Verb, **more: object) -> Action:
    placed = {"version": "v", "devices": ("host-1",), "device_bytes": 100} if verb is Verb.PLACE else {}
    return Action(verb=verb, model="chat", serial=1, node="n", **(placed | more))


PLACE, DRAIN, STOP = order(Verb.PLACE), order(Verb.DRAIN, until_s=60.0), order(Verb.STOP, until_s=60.0)
DEMOTE = order(Verb.DEMOTE, until_s=60.0, host_bytes=80, level=Level.WARM)
PROMOTE = order(Verb.PROMOTE, turn=1, devices=("host-1",), device_bytes=100)
ACTIONS = {
    "place": PLACE,
    "place-warm": order(Verb.PLACE, level=Level.WARM, host_bytes=80),
    "drain": DRAIN,
    "stop": STOP,
    "stop-later": order(Verb.STOP, until_s=90.0),
    "demote": DEMOTE,
    "demote-again": order(Verb.DEMOTE, attempt=2, until_s=60.0, host_bytes=80),
    "promote": PROMOTE,
    "promote-elsewhere": order(Verb.PROMOTE, turn=1, devices=("host-2",), device_bytes=100),
}
SEEN: dict[str, dict[str, object]] = {
    "there": {},
    "serves": {"serves": True},
    "hot": {"in_host": False},
    "asleep": {"in_host": True},
    "found": {"replica": FOUND},
}


def orders_of(words: list[str]) -> Orders:
    """Return the orders of these names; `overdue:NAME` is one whose time is over."""
    actions = tuple(ACTIONS[word.removeprefix("overdue:")] for word in words)
    late = frozenset(one.id for one, word in zip(actions, words, strict=True) if word.startswith("overdue:"))
    return Orders(actions=actions, overdue=late)


def sight_of(words: list[str]) -> Sight:
    """Return what is seen: words of SEEN, `running=3`, `trouble=WHY`, `wrong=ORDER:WHY`."""
    fields: dict[str, object] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name == "running":
            fields["running"] = int(value)
        elif name == "trouble":
            fields["trouble"] = value.replace("-", " ")
        elif name == "wrong":
            failed, _, why = value.partition(":")
            fields["wrong"] = (ACTIONS[failed].id, why.replace("-", " "))
        else:
            fields |= SEEN[name]
    return Sight(is_there=True, **fields)  # type: ignore[arg-type]


def leases(one: Turn) -> tuple[int, int]:
    node = node_of("n", TOTALS, one.houses)
    return node.devices["host-1"].leases.get(NAME, 0), node.host.leases.get(NAME, 0)


class Story:
    """One replica on a node. `> 3 drain; serves running=2`: at that time, with those orders, that is seen of it."""

    def __init__(self) -> None:
        self.houses: dict[str, House] = {}

    def play(self, command: str) -> list[str]:
        if command in ("begin", "another agent"):
            self.houses = {}
            return []
        said, _, seen = command.partition(";")
        at, *words = said.split()
        sights = {} if seen.strip() == "nothing" else {NAME: sight_of(seen.split())}
        turn = step(self.houses, orders_of(words), sights, float(at))
        self.houses = turn.houses
        lines = [self._deed(one) for one in turn.deeds]
        lines += [f"r{house.replica.serial}: {self._state(house.replica)}" for house in turn.houses.values()]
        device, host = leases(turn)
        lines += [f"memory: {device} on its device, {host} in its host"] if device or host else []
        lines += [f"answer to {name}: {why or 'done'}" for name, why in turn.answers.items()]
        return [f"  {at:>4}  {line}" for line in lines or ["nothing"]]

    def _deed(self, deed: Start | Remove | Move) -> str:
        match deed:
            case Start(action):
                return f"(start {action.id})"
            case Move(action, to):
                return f"(move to {to.word} for {action.id})"
        return f"(remove {deed.name})"

    def _state(self, one: Replica) -> str:
        words = [f"{one.level.word} {one.phase}", f"turn {one.turn}", f"since {one.since_s:g}"]
        words += [f"idle since {one.idle_s:g}"] if one.idle_s else []
        words += [f"{one.running} running"] if one.running else []
        words += [f"drains until {one.drain_until_s:g}"] if one.drain_until_s else []
        return ", ".join(words)


@stories("agent", least=4)
def test_an_agent_does_as_written(path: Path) -> None:
    """Each story comes out as its transcript says."""
    must_go_as_written(path, Story)


# -- whatever happens

ORDERS = st.lists(st.sampled_from([PLACE, DRAIN, STOP]), unique_by=lambda one: one.id)


@given(st.lists(st.tuples(ORDERS, st.booleans(), st.booleans(), st.booleans()), max_size=30))
def test_whatever_is_asked_and_happens(moments: list[tuple[list[Action], bool, bool, bool]]) -> None:
    """Processes are there from when they are started until they are removed or killed; agents may forget
    everything. None is started that is there or is to be stopped, and what is there counts."""
    houses: dict[str, House] = {}
    there = False
    for now_s, (actions, forgets, dies, serves) in enumerate(moments, 1):
        houses = {} if forgets else houses
        there = there and not dies
        sight = {NAME: Sight(is_there=True, serves=serves, replica=FOUND)} if there else {}
        one = step(houses, Orders(actions=tuple(actions)), sight, float(now_s))
        houses = one.houses
        if there:
            assert node_of("n", {"host-1": 500}, houses).devices["host-1"].leases == {NAME: 100}
        for deed in one.deeds:
            match deed:
                case Start():
                    assert not there
                    assert STOP not in actions
                    assert PLACE in actions
                    there = True
                case Remove():
                    assert (there and STOP in actions) or houses[NAME].leaves
                    there = False
        if one.answers.get(STOP.id) == "":
            assert not there
            assert NAME not in houses


MOVES = st.lists(st.sampled_from([DEMOTE, PROMOTE, DRAIN, STOP]), unique_by=lambda one: one.id)


@given(st.lists(st.tuples(MOVES, st.sampled_from(["", "forgets", "lost", "moves", "silent"])), max_size=30))
def test_memory_is_counted_wherever_it_is(moments: list[tuple[list[Action], str]]) -> None:
    """Whatever is asked, agents forget, vaults say nothing or lose what they had, moves are done or not: what is on a
    device or in host memory is counted there, and one that has lost its weights leaves."""
    seen = Sight(is_there=True, serves=True, in_host=False, replica=FOUND)
    one = step({}, Orders(), {NAME: seen}, 1.0)
    where, moving = "device", False
    for now_s, (actions, happens) in enumerate(moments, 2):
        if happens == "moves" and moving:
            where = "host" if where == "device" else "device"
        lost = happens == "lost" and where == "host"
        known = None if happens == "silent" else where == "host"
        sight = Sight(is_there=True, in_host=known, trouble="lost" if lost else "", replica=FOUND)
        houses = {} if happens == "forgets" else one.houses
        one = step(houses, Orders(actions=tuple(actions)), {NAME: sight}, float(now_s))
        device, host = leases(one)
        assert device == 100 or (where == "host" and device == 0)
        assert host == 80 or where == "device" or known is None
        moving = any(isinstance(deed, Move) and (deed.to is Level.WARM) is (where == "device") for deed in one.deeds)
        if Remove(NAME) in one.deeds:
            assert STOP in actions or lost or one.houses[NAME].is_leaving
            return
