"""A node's agent: what is started, what leaves, what is answered. Its stories, and what holds whatever happens.

Run with HOLDFAST_WRITE_TRANSCRIPTS=1 to write the new outcomes, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.fleet.actions import Action, Verb, replica_name
from holdfast.fleet.agent import (
    AgentResult,
    LocalReplica,
    MoveReplica,
    ObservedProcesses,
    RemoveReplica,
    StartReplica,
    node_of,
    step,
)
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Replica, ReplicaPhase
from holdfast.fleet.records import Orders
from holdfast.fleet.room import HOST
from tests.rigs.transcripts import must_go_as_written, stories

NAME = replica_name("chat", 1)
TOTALS = {"host-1": 500, HOST: 300}
FOUND = Replica(
    model="chat",
    serial=1,
    node="n",
    phase=ReplicaPhase.PROVISIONING,
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


def processes_of(words: list[str]) -> ObservedProcesses:
    """Return what is seen: words of SEEN, `running=3`, `fatal=WHY`, `failed_move=ORDER:WHY`."""
    fields: dict[str, object] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name == "running":
            fields["running"] = int(value)
        elif name == "trouble":
            fields["fatal"] = value.replace("-", " ")
        elif name == "wrong":
            failed, _, why = value.partition(":")
            fields["failed_move"] = (ACTIONS[failed].id, why.replace("-", " "))
        else:
            fields |= SEEN[name]
    return ObservedProcesses(exists=True, **fields)  # type: ignore[arg-type]


def leases(one: AgentResult) -> tuple[int, int]:
    node = node_of("n", TOTALS, one.replicas)
    return node.devices["host-1"].leases.get(NAME, 0), node.host.leases.get(NAME, 0)


class Story:
    """One replica on a node. `> 3 drain; serves running=2`: at that time, with those orders, that is seen of it."""

    def __init__(self) -> None:
        self.replicas: dict[str, LocalReplica] = {}

    def play(self, command: str) -> list[str]:
        if command in ("begin", "another agent"):
            self.replicas = {}
            return []
        said, _, seen = command.partition(";")
        at, *words = said.split()
        observed = {} if seen.strip() == "nothing" else {NAME: processes_of(seen.split())}
        result = step(self.replicas, orders_of(words), observed, float(at))
        self.replicas = result.replicas
        lines = [self._action(one) for one in result.actions]
        lines += [f"r{local.replica.serial}: {self._state(local.replica)}" for local in result.replicas.values()]
        device, host = leases(result)
        lines += [f"memory: {device} on its device, {host} in its host"] if device or host else []
        lines += [f"answer to {name}: {why or 'done'}" for name, why in result.answers.items()]
        return [f"  {at:>4}  {line}" for line in lines or ["nothing"]]

    def _action(self, action: StartReplica | RemoveReplica | MoveReplica) -> str:
        match action:
            case StartReplica(order):
                return f"(start {order.id})"
            case MoveReplica(order, to):
                return f"(move to {to.word} for {order.id})"
        return f"(remove {action.name})"

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
    replicas: dict[str, LocalReplica] = {}
    there = False
    for now_s, (actions, forgets, dies, serves) in enumerate(moments, 1):
        replicas = {} if forgets else replicas
        there = there and not dies
        processes = {NAME: ObservedProcesses(exists=True, serves=serves, replica=FOUND)} if there else {}
        one = step(replicas, Orders(actions=tuple(actions)), processes, float(now_s))
        replicas = one.replicas
        if there:
            assert node_of("n", {"host-1": 500}, replicas).devices["host-1"].leases == {NAME: 100}
        for action in one.actions:
            match action:
                case StartReplica():
                    assert not there
                    assert STOP not in actions
                    assert PLACE in actions
                    there = True
                case RemoveReplica():
                    assert (there and STOP in actions) or replicas[NAME].stopping
                    there = False
        if one.answers.get(STOP.id) == "":
            assert not there
            assert NAME not in replicas


MOVES = st.lists(st.sampled_from([DEMOTE, PROMOTE, DRAIN, STOP]), unique_by=lambda one: one.id)


@given(st.lists(st.tuples(MOVES, st.sampled_from(["", "forgets", "lost", "moves", "silent"])), max_size=30))
def test_memory_is_counted_wherever_it_is(moments: list[tuple[list[Action], str]]) -> None:
    """Whatever is asked, agents forget, vaults say nothing or lose what they had, moves are done or not: what is on a
    device or in host memory is counted there, and one that has lost its weights leaves."""
    seen = ObservedProcesses(exists=True, serves=True, in_host=False, replica=FOUND)
    one = step({}, Orders(), {NAME: seen}, 1.0)
    where, moving = "device", False
    for now_s, (actions, happens) in enumerate(moments, 2):
        if happens == "moves" and moving:
            where = "host" if where == "device" else "device"
        lost = happens == "lost" and where == "host"
        known = None if happens == "silent" else where == "host"
        processes = ObservedProcesses(exists=True, in_host=known, fatal="lost" if lost else "", replica=FOUND)
        replicas = {} if happens == "forgets" else one.replicas
        one = step(replicas, Orders(actions=tuple(actions)), {NAME: processes}, float(now_s))
        device, host = leases(one)
        assert device == 100 or (where == "host" and device == 0)
        assert host == 80 or where == "device" or known is None
        moving = any(
            isinstance(action, MoveReplica) and (action.to is Level.WARM) is (where == "device")
            for action in one.actions
        )
        if RemoveReplica(NAME) in one.actions:
            assert STOP in actions or lost or one.replicas[NAME].is_leaving
            return
