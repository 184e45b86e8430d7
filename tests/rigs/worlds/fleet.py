"""Machines, and a controller that plans for them: what it is told, what it asks for, and what the planner must never
say. Messages, replies and snapshots may be lost on the way between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.fleet.actions import LEAVING, Action, Verb
from holdfast.fleet.counts import FEWER, ReplaceCause
from holdfast.fleet.desired import HYSTERESIS, Cordon, Hysteresis, Level, Model
from holdfast.fleet.observed import Health, Observed, Replica, ReplicaPhase
from holdfast.fleet.planner import Plan, Planner, plan
from holdfast.health.records import Demand
from tests.rigs.worlds.fleet_node import Body, Machine

ROLLOUT = (ReplaceCause.VERSION, ReplaceCause.EVICTED, ReplaceCause.DRAINED)  # why one leaves for another
CHOSEN = (*ROLLOUT, FEWER)
# How a reason begins for which health is to blame.
UNFIT = ("it did not serve for", "control asks for another", "its replacement takes")


@dataclass
class World:
    """Machines, and the controller's planner. What the controller knows are snapshots, and its own actions, which it
    writes down before it sends them."""

    models: dict[str, Model] = field(default_factory=dict)
    cordons: dict[str, Cordon] = field(default_factory=dict)
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
        self.planner.view.set_model(model)

    def unwant(self, key: str) -> None:
        del self.models[key]
        self.planner.view.remove_model(key)

    def cordon(self, node: str, cordon: Cordon | None) -> None:
        if cordon is None:
            self.cordons.pop(node, None)
        else:
            self.cordons[node] = cordon
        self.planner.view.set_cordon(node, cordon)

    def is_drained(self, node: str) -> bool:
        return node in self.cordons and self.cordons[node].drain

    def add(self, machine: Machine) -> None:
        self.machines[machine.name] = machine
        self.look(machine)

    def look(self, machine: Machine) -> None:
        """Its snapshot comes."""
        if machine.up and machine.near and machine.changed:
            machine.changed = False
            self.planner.view.observe_node(*machine.snapshot(), self.now_s)

    def look_at_all(self) -> None:
        for machine in self.machines.values():
            self.look(machine)

    def ask_for(self, key: str, waiting: int) -> None:
        if waiting:
            self.waiting[key] = Demand(waiting, self.now_s)
        else:
            self.waiting.pop(key, None)
        self.planner.view.set_demand(key, self.waiting.get(key))

    def observed(self) -> Observed:
        return self.planner.view.observed()

    def plan(self, *, compared: bool = False) -> tuple[Action, ...]:
        """What is to be done now. `compared`: with what is planned from scratch."""
        everything = self.models.values(), self.observed(), self.now_s, self.hysteresis, self.cordons
        fresh = plan(*everything) if compared else None
        self.last = self.planner.plan(self.now_s)
        if fresh is not None:
            assert fresh.actions == self.last.actions, difference(fresh, self.last)
            assert fresh.unmet == self.last.unmet
        for action in self.last.actions:
            self._check(action)
        for key in {action.model for action in self.last.actions if action.verb in LEAVING and action.why in ROLLOUT}:
            self._check_floor(key)
        for key in {action.model for action in self.last.actions if action.verb in LEAVING}:
            self._check_health(key)
        return self.last.actions

    def _check_floor(self, key: str) -> None:
        """Another version, a person's word, or a drained node takes none that serves or is WARM while no other has
        come; where there is no room, one after the other."""
        view, model = self.planner.view, self.models.get(key)
        if model is None:
            return
        whys = {one.name: one.why for one in self.last.actions if one.verb in LEAVING and one.why in CHOSEN}
        leaving = {one.action.name for one in view.pending_of.get(key, {}).values() if one.action.verb in LEAVING}
        there = [one for one in view.of_model[key].values() if view.nodes[one.node].alive and one.name not in leaving]
        ready = [one for one in there if one.phase is ReplicaPhase.READY]
        for level, least in ((Level.HOT, model.hot), (Level.WARM, model.floored)):
            gone = [one for one in ready if one.level is level and whys.get(one.name) in ROLLOUT]
            self.counts[f"drained {level.word}"] += sum(whys[one.name] == ReplaceCause.DRAINED for one in gone)
            left = sum(one.level >= level and one.name not in whys for one in ready)
            self.counts[f"outdated {level.word}"] += len(gone)
            assert not gone or left >= least, f"{left} of {model} are left without {gone}"

    def _check_health(self, key: str) -> None:
        """Health ends no replica that could answer unless another is left that can; and where fewer are wanted, none
        that serves leaves while one stays that does not."""
        view = self.planner.view
        whys = {one.name: one.why for one in self.last.actions if one.verb in LEAVING}
        leaving = {one.action.name for one in view.pending_of.get(key, {}).values() if one.action.verb in LEAVING}
        there = [one for one in view.of_model.get(key, {}).values() if view.nodes[one.node].alive]
        # What another model needs the place of was there when health was looked at.
        gone = leaving | {name for name, why in whys.items() if not why.endswith("needs its place")}
        staying = [one for one in there if one.is_up and one.name not in gone]
        for one in (one for one in there if one.name in whys):
            if whys[one.name].startswith(UNFIT):
                self.counts[f"unfit {one.health}"] += 1
                assert not one.serves, f"{one} leaves: {whys[one.name]}"
                assert one.health is Health.AWAY or any(map(_answers, staying)), f"{one} is the last that answers"
            if whys[one.name] == FEWER and one.serves:
                told = [other for other in staying if not any(name.endswith(other.name) for name in view.tries)]
                assert all(other.serves for other in told), f"{one} leaves before one of {staying}"

    def _check(self, action: Action) -> None:
        """What the planner promises of each action, by what it was told."""
        one, model = self.planner.view.replicas.get(action.name), self.models.get(action.model)
        if action.verb is Verb.DRAIN and action.why.endswith("needs its place") and one is not None:
            assert model is None or not model.dedicated or "version" in action.why, action
            settled = self.now_s - one.since_s >= self.hysteresis.resident_s
            assert "version" in action.why or settled or not one.serves, action
            self.counts["evictions"] += "version" not in action.why
        if action.verb in (Verb.STOP, Verb.DEMOTE) and one is not None and one.running:
            assert one.phase is ReplicaPhase.DRAINING, action
            assert self.now_s >= one.drain_until_s, action
        if action.verb is Verb.PLACE and model is not None:
            assert model.may_be_on(action.node), action
        if action.verb in (Verb.PLACE, Verb.PROMOTE):
            assert action.node not in self.cordons, action
        assert action.verb is not Verb.DEMOTE or not self.is_drained(action.node), action

    def restart(self) -> None:
        """Another controller goes on from what is written down."""
        before = self.observed()
        self.planner = Planner(self.hysteresis)
        self.planner.view.load(self.models.values(), before, self.cordons)
        self.counts["restarts"] += 1

    # -- the way between

    def ask(self, action: Action) -> None:
        """It is written down. What is asked for once is not asked for again under the same id: it would not be done."""
        assert action.verb is Verb.STOP or action.id not in self.asked, f"{action.id} is asked for twice"
        self.asked.add(action.id)
        if self.planner.view.removes_unfit(action):
            self.planner.view.count_unfit(action, self.now_s)
        self.planner.view.add_action(action)

    def send(self, action: Action, *, fails: bool = False, reply_lost: bool = False) -> None:
        machine = self.machines.get(action.node)
        if machine is None or not (machine.up and machine.near):
            return
        answer = machine.carry_out(action, self.now_s, fails=fails)
        self.counts[action.verb] += 1
        if reply_lost or not answer:
            return
        if answer == "failed":
            self.planner.view.on_failed(action.id, self.now_s)
        else:
            self.planner.view.on_stopped(action.name, action.model)

    def tick(self) -> None:
        for machine in self.machines.values():
            if machine.up:
                for name in machine.tick(self.now_s):
                    if machine.near:
                        self.planner.view.on_stopped(name, name.split(":")[1])

    def bodies(self) -> Iterator[tuple[str, Body]]:
        for machine in self.machines.values():
            if machine.up:
                yield from machine.bodies.items()

    def hot(self, key: str) -> int:
        """Return how many serve."""
        return sum(body.serves and body.action.model == key for _, body in self.bodies())

    def next_s(self) -> float:
        """When something happens, or is to be looked at."""
        due = [body.due_s for _, body in self.bodies() if body.due_s is not None]
        due += [body.until_s for _, body in self.bodies() if body.stops]
        due += [self.last.next_s] if self.last.next_s is not None else []
        return max(self.now_s + 0.1, min(due, default=self.now_s + 60.0))


def _answers(one: Replica) -> bool:
    return one.health is not Health.AWAY


def difference(one: Plan, other: Plan) -> str:
    lines = [f"from scratch only: {action}" for action in one.actions if action not in other.actions]
    return "\n".join(lines + [f"kept up only: {action}" for action in other.actions if action not in one.actions])
