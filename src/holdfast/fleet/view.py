"""All that is wanted and seen, told change by change, with what must be looked at again because of each. Pure.

Always true: it holds what an `Observed` and the wishes would that had all the changes in it, and after a change of
something every model and node that it could matter to is stale. An action is flying until its effect is seen or it
failed; what is overdue is counted as a failure once. Who is missing from its node's snapshot is gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from msgspec import structs

from holdfast.fleet.actions import COMING, LEAVING, Action, Flying, Tries, Verb, node_subject, one_more, subject_of
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Health, Node, Observed, Phase, Replica
from holdfast.health.records import Demand


class View:
    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.nodes: dict[str, Node] = {}
        self.replicas: dict[str, Replica] = {}
        self.demand: dict[str, Demand] = {}
        self.flying: dict[str, Flying] = {}
        self.tries: dict[str, Tries] = {}
        self.serials: dict[str, int] = {}
        self.of_model: dict[str, dict[str, Replica]] = {}
        self.on_node: dict[str, dict[str, Replica]] = {}
        self.asked_of: dict[str, dict[str, Flying]] = {}  # by model
        self.asked_on: dict[str, dict[str, Flying]] = {}  # by node
        self.on_disk: dict[str, set[str]] = {}  # by model: nodes with its files
        self.stale_models: set[str] = set()
        self.stale_nodes: set[str] = set()
        self._due: list[tuple[float, str]] = []  # deadlines of what flies, and perhaps of what did

    def __repr__(self) -> str:
        counts = f"{len(self.models)} models, {len(self.replicas)} replicas, {len(self.nodes)} nodes"
        return f"<View of {counts}, {len(self.flying)} actions in flight>"

    def observed(self) -> Observed:
        """As it is to be written down."""
        kept = {name: dict(getattr(self, name)) for name in Observed.__struct_fields__}
        return Observed(**kept)

    def begin(self, models: Iterable[Model], observed: Observed) -> None:
        """Take in everything at once."""
        for model in models:
            self.want(model)
        for node in observed.nodes.values():
            self._put_node(node)
        for replica in observed.replicas.values():
            self._put(replica)
        self.tries.update(observed.tries)
        self.serials.update(observed.serials)
        for flight in observed.flying.values():
            self._fly(flight)
        for key, demand in observed.demand.items():
            self.hear(key, demand)

    # -- what is wanted

    def want(self, model: Model) -> None:
        if self.models.get(model.key) != model:
            self.models[model.key] = model
            self.stale_models.add(model.key)

    def unwant(self, key: str) -> None:
        if self.models.pop(key, None) is not None:
            self.stale_models.add(key)

    def hear(self, key: str, demand: Demand | None) -> None:
        """Requests for a model wait, or none does any more."""
        if demand is not None and demand.waiting <= 0:
            demand = None
        if self.demand.get(key) != demand:
            if demand is None:
                del self.demand[key]
            else:
                self.demand[key] = demand
            self.stale_models.add(key)

    # -- what is seen

    def see(self, node: Node, replicas: Iterable[Replica], now_s: float) -> None:
        """A node's own snapshot."""
        there = {one.name: one for one in replicas}
        before = dict(self.on_node.get(node.name, {}))
        self._put_node(node)
        for name in before.keys() - there.keys():
            self._ended(before[name], now_s)
            self._drop(before[name])
        for one in there.values():
            if before.get(one.name) != one:
                last = self.replicas.get(one.name)
                self._put(one)
                if one.phase is Phase.GONE and (last is None or last.phase is not Phase.GONE):
                    self._ended(last or one, now_s)
                self._settle(one)
                if one.serves and (last is None or not last.serves):
                    self._forgive_start(one)

    def lose(self, name: str) -> None:
        """A node does not answer any more. What it had stays as it was last seen, in case it comes back."""
        node = self.nodes.get(name)
        if node is not None and node.alive:
            self._put_node(structs.replace(node, alive=False))

    def forget(self, name: str) -> None:
        """A node was taken away for good, and everything on it."""
        for flight in list(self.asked_on.get(name, {}).values()):
            self._land(flight.action.id)
        for one in list(self.on_node.get(name, {}).values()):
            self._drop(one)
        node = self.nodes.pop(name, None)
        if node is not None:
            for key in node.on_disk:
                self.on_disk[key].discard(name)
        self.tries.pop(f"node/{name}", None)
        self.stale_nodes.add(name)

    def _put_node(self, node: Node) -> None:
        before = self.nodes.get(node.name)
        if before == node:
            return
        self.nodes[node.name] = node
        self.stale_nodes.add(node.name)
        for key in before.on_disk - node.on_disk if before is not None else ():
            self.on_disk[key].discard(node.name)
        for key in node.on_disk - before.on_disk if before is not None else node.on_disk:
            self.on_disk.setdefault(key, set()).add(node.name)
        if before is None or before.alive is not node.alive:
            self.stale_models.update(one.model for one in self.on_node.get(node.name, {}).values())
            self.stale_models.update(one.action.model for one in self.asked_on.get(node.name, {}).values())
        else:
            gone = [one for one in self.on_node.get(node.name, {}).values() if one.phase is Phase.GONE]
            self.stale_models.update(one.model for one in gone)  # whether its memory is there still

    def _put(self, one: Replica) -> None:
        self.replicas[one.name] = one
        self.of_model.setdefault(one.model, {})[one.name] = one
        self.on_node.setdefault(one.node, {})[one.name] = one
        self.serials[one.model] = max(one.serial, self.serials.get(one.model, 0))
        self._touch(one.model, one.node)

    def _drop(self, one: Replica) -> None:
        del self.replicas[one.name], self.of_model[one.model][one.name], self.on_node[one.node][one.name]
        self._forgive(one.name)
        self._touch(one.model, one.node)

    def _touch(self, model: str, node: str) -> None:
        self.stale_models.add(model)
        self.stale_nodes.add(node)

    def _ended(self, one: Replica, now_s: float) -> None:
        """It is not there any more: whatever was asked of it is over, and if nobody told it to go, it crashed, which
        counts once. `one`: as it was last seen."""
        flights = self._asked(one.model, one.name)
        verbs = {flight.action.verb for flight in flights}
        known = one.phase is Phase.GONE and not verbs & COMING
        told = known or one.phase is Phase.DRAINING or bool(verbs & LEAVING)
        for flight in flights:
            self._land(flight.action.id)
        if not told:
            self._failed((subject_of(Verb.PLACE, one.model),), now_s)

    def _settle(self, one: Replica) -> None:
        """What was asked of it, and is seen to be so, is done."""
        for action in [flight.action for flight in self._asked(one.model, one.name)]:
            if _is_done(action, one):
                self._land(action.id)
                if action.verb in COMING and one.phase is Phase.READY and one.health is Health.SOUND:
                    for subject in (subject_of(Verb.PLACE, one.model), *action.subjects):
                        self.tries.pop(subject, None)

    def _forgive_start(self, one: Replica) -> None:
        """It serves at last: what failed before says nothing of its model, nor of its node."""
        for subject in (subject_of(Verb.PLACE, one.model), node_subject(one.node)):
            self.tries.pop(subject, None)

    # -- what is asked for

    def ask(self, action: Action) -> None:
        """It is written down, and will be carried out."""
        self._fly(Flying(action))

    def has_failed(self, action: Action) -> bool:
        """Return True for the first order to remove a replica that is up and does not serve."""
        one = self.replicas.get(action.name)
        removes = action.verb in (Verb.STOP, Verb.DRAIN) and action.attempt == 1
        return removes and one is not None and one.is_up and not one.serves

    def blame(self, action: Action, now_s: float) -> None:
        """Count the replica that this order removes as a failed start: its model and its node are tried less often."""
        self._failed((subject_of(Verb.PLACE, action.model), node_subject(action.node)), now_s)
        self._touch(action.model, action.node)

    def _fly(self, flight: Flying) -> None:
        action = flight.action
        for book in self._books(action):
            book[action.id] = flight
        self.serials[action.model] = max(action.serial, self.serials.get(action.model, 0))
        heapq.heappush(self._due, (action.deadline_s, action.id))
        self._touch(action.model, action.node)

    def _books(self, action: Action) -> tuple[dict[str, Flying], ...]:
        of_model = self.asked_of.setdefault(action.model, {})
        return self.flying, of_model, self.asked_on.setdefault(action.node, {})

    def _land(self, action_id: str) -> None:
        flight = self.flying.get(action_id)
        if flight is not None:
            for book in self._books(flight.action):
                del book[action_id]
            self._touch(flight.action.model, flight.action.node)

    def stopped(self, name: str, model: str) -> None:
        """Whoever was told to stop a replica answers that it is not there, whether it ever was or not. What it held is
        free when its node's next snapshot says so."""
        for flight in self._asked(model, name):
            self._land(flight.action.id)
        if name in self.replicas:
            self._drop(self.replicas[name])
        self._forgive(name)

    def _asked(self, model: str, name: str) -> list[Flying]:
        return [flight for flight in self.asked_of.get(model, {}).values() if flight.action.name == name]

    def _forgive(self, name: str) -> None:
        """There is nobody of that name any more whose failures would matter."""
        for verb in Verb:
            self.tries.pop(subject_of(verb, name), None)

    def fail(self, action_id: str, now_s: float) -> None:
        """Whoever carries it out says that it came to nothing; one to place has left nothing behind."""
        flight = self.flying.get(action_id)
        if flight is not None:
            action = flight.action
            self._land(action_id)
            self._failed(action.subjects, now_s)
            if action.name not in self.replicas and not self._asked(action.model, action.name):
                self._forgive(action.name)

    def expire(self, now_s: float) -> None:
        """Count what is overdue as failed. What only drains or stops may be asked for again; else the replica must be
        stopped before anybody believes that it is not there."""
        while self._due and self._due[0][0] <= now_s:
            flight = self.flying.get(heapq.heappop(self._due)[1])
            if flight is None or flight.overdue or flight.action.deadline_s > now_s:
                continue
            if flight.action.verb in (Verb.DRAIN, Verb.STOP):
                self.fail(flight.action.id, now_s)
                continue
            late = structs.replace(flight, overdue=True)
            for book in self._books(late.action):
                book[late.action.id] = late
            self._failed(late.action.subjects, late.action.deadline_s)
            self._touch(late.action.model, late.action.node)

    def _failed(self, subjects: Iterable[str], now_s: float) -> None:
        for subject in subjects:
            self.tries[subject] = one_more(self.tries.get(subject), now_s)

    def next_due_s(self) -> float | None:
        while self._due and (self.flying.get(self._due[0][1]) is None or self.flying[self._due[0][1]].overdue):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def attempt(self, verb: Verb, name: str) -> int:
        tries = self.tries.get(subject_of(verb, name))
        return 1 if tries is None else tries.failed + 1

    def may(self, subject: str, now_s: float) -> bool:
        tries: Mapping[str, Tries] = self.tries
        return subject not in tries or now_s >= tries[subject].again_s


def _is_done(action: Action, one: Replica) -> bool:
    match action.verb:
        case Verb.PLACE:
            return one.phase is not Phase.PROVISIONING
        case Verb.PROMOTE:
            return one.level is Level.HOT and one.phase is not Phase.PROVISIONING
        case Verb.DEMOTE:
            return one.level is Level.WARM and one.phase is Phase.READY
        case Verb.DRAIN:
            return one.phase is Phase.DRAINING or one.level is not Level.HOT
        case Verb.STOP:
            return one.phase is Phase.GONE
