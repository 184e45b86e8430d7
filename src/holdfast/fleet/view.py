"""The planner's view of a fleet: desired and observed state, updated change by change, and what each change made stale.
Pure.

Always true: it holds what an `Observed` and the desired models would that had all the changes in them, and after a
change every model and node that it could matter to is stale. An action is pending until its effect is observed or it
failed; an overdue one is counted as a failure once. A replica that is missing from its node's snapshot is gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from msgspec import structs

from holdfast.fleet.actions import (
    COMING,
    LEAVING,
    Action,
    PendingAction,
    Tries,
    Verb,
    count_failure,
    node_subject,
    subject_of,
)
from holdfast.fleet.desired import Cordon, Level, Model
from holdfast.fleet.observed import Health, Node, Observed, Replica, ReplicaPhase
from holdfast.health.records import Demand


class FleetView:
    """Desired and observed state of a fleet, with indexes by model and node."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.cordons: dict[str, Cordon] = {}  # by node, whether it is there or not
        self.nodes: dict[str, Node] = {}
        self.replicas: dict[str, Replica] = {}
        self.demand: dict[str, Demand] = {}
        self.pending: dict[str, PendingAction] = {}
        self.tries: dict[str, Tries] = {}
        self.serials: dict[str, int] = {}
        self.of_model: dict[str, dict[str, Replica]] = {}
        self.on_node: dict[str, dict[str, Replica]] = {}
        self.pending_of: dict[str, dict[str, PendingAction]] = {}  # by model
        self.pending_on: dict[str, dict[str, PendingAction]] = {}  # by node
        self.on_disk: dict[str, set[str]] = {}  # by model: nodes with its files
        self.stale_models: set[str] = set()
        self.stale_nodes: set[str] = set()
        self._due: list[tuple[float, str]] = []  # deadlines of actions that are pending, or were

    def __repr__(self) -> str:
        counts = f"{len(self.models)} models, {len(self.replicas)} replicas, {len(self.nodes)} nodes"
        return f"<FleetView of {counts}, {len(self.pending)} actions pending>"

    def observed(self) -> Observed:
        """Return a copy of what is observed."""
        kept = {name: dict(getattr(self, name)) for name in Observed.__struct_fields__}
        return Observed(**kept)

    def load(self, models: Iterable[Model], observed: Observed, cordons: Mapping[str, Cordon] = {}) -> None:
        """Set everything at once."""
        for name, cordon in cordons.items():
            self.set_cordon(name, cordon)
        for model in models:
            self.set_model(model)
        for node in observed.nodes.values():
            self._put_node(node)
        for replica in observed.replicas.values():
            self._put(replica)
        self.tries.update(observed.tries)
        self.serials.update(observed.serials)
        for pending in observed.pending.values():
            self._add_pending(pending)
        for key, demand in observed.demand.items():
            self.set_demand(key, demand)

    # -- desired

    def set_model(self, model: Model) -> None:
        if self.models.get(model.key) != model:
            self.models[model.key] = model
            self.stale_models.add(model.key)

    def remove_model(self, key: str) -> None:
        if self.models.pop(key, None) is not None:
            self.stale_models.add(key)

    def set_cordon(self, node: str, cordon: Cordon | None) -> None:
        """Set whether a node takes new replicas and keeps those that it has; None: it does both."""
        if self.cordons.get(node) == cordon:
            return
        if cordon is None:
            del self.cordons[node]
        else:
            self.cordons[node] = cordon
        self.stale_nodes.add(node)
        self._mark_models_on(node)

    def is_drained(self, node: str) -> bool:
        """Return True if a node's replicas are to be replaced on other nodes."""
        return node in self.cordons and self.cordons[node].drain

    def _mark_models_on(self, node: str) -> None:
        self.stale_models.update(one.model for one in self.on_node.get(node, {}).values())
        self.stale_models.update(one.action.model for one in self.pending_on.get(node, {}).values())

    def set_demand(self, key: str, demand: Demand | None) -> None:
        """Set the requests that wait for a model; None: none does."""
        if demand is not None and demand.waiting <= 0:
            demand = None
        if self.demand.get(key) != demand:
            if demand is None:
                del self.demand[key]
            else:
                self.demand[key] = demand
            self.stale_models.add(key)

    # -- observed

    def observe_node(self, node: Node, replicas: Iterable[Replica], now_s: float) -> None:
        """Apply a node's own snapshot."""
        there = {one.name: one for one in replicas}
        before = dict(self.on_node.get(node.name, {}))
        self._put_node(node)
        for name in before.keys() - there.keys():
            self._on_ended(before[name], now_s)
            self._drop(before[name])
        for one in there.values():
            if before.get(one.name) != one:
                last = self.replicas.get(one.name)
                self._put(one)
                if one.phase is ReplicaPhase.GONE and (last is None or last.phase is not ReplicaPhase.GONE):
                    self._on_ended(last or one, now_s)
                self._finish_actions(one)
                if one.serves and (last is None or not last.serves):
                    self._forget_failed_starts(one)

    def mark_lost(self, name: str) -> None:
        """Mark a node as not alive. Its replicas stay as last observed, in case it comes back."""
        node = self.nodes.get(name)
        if node is not None and node.alive:
            self._put_node(structs.replace(node, alive=False))

    def remove_node(self, name: str) -> None:
        """Remove a node for good, with its replicas and pending actions."""
        for pending in list(self.pending_on.get(name, {}).values()):
            self._remove_pending(pending.action.id)
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
            self._mark_models_on(node.name)
        else:
            gone = [one for one in self.on_node.get(node.name, {}).values() if one.phase is ReplicaPhase.GONE]
            self.stale_models.update(one.model for one in gone)  # their memory may have been freed

    def _put(self, one: Replica) -> None:
        self.replicas[one.name] = one
        self.of_model.setdefault(one.model, {})[one.name] = one
        self.on_node.setdefault(one.node, {})[one.name] = one
        self.serials[one.model] = max(one.serial, self.serials.get(one.model, 0))
        self._mark_stale(one.model, one.node)

    def _drop(self, one: Replica) -> None:
        del self.replicas[one.name], self.of_model[one.model][one.name], self.on_node[one.node][one.name]
        self._forget_failures(one.name)
        self._mark_stale(one.model, one.node)

    def _mark_stale(self, model: str, node: str) -> None:
        self.stale_models.add(model)
        self.stale_nodes.add(node)

    def _on_ended(self, one: Replica, now_s: float) -> None:
        """Finish all actions of a replica that is gone; if none told it to leave, it crashed, which counts once. `one`:
        as it was last observed."""
        actions = [pending.action for pending in self._pending_for(one.model, one.name)]
        verbs = {action.verb for action in actions}
        known = one.phase is ReplicaPhase.GONE and not verbs & COMING
        expected = known or one.phase is ReplicaPhase.DRAINING or bool(verbs & LEAVING)
        for action in actions:
            self._remove_pending(action.id)
        if not expected:
            self._count_failure((subject_of(Verb.PLACE, one.model),), now_s)

    def _finish_actions(self, one: Replica) -> None:
        """Finish the actions whose effect is observed."""
        for action in [pending.action for pending in self._pending_for(one.model, one.name)]:
            if _is_done(action, one):
                self._remove_pending(action.id)
                if action.verb in COMING and one.phase is ReplicaPhase.READY and one.health is Health.SOUND:
                    for subject in (subject_of(Verb.PLACE, one.model), *action.subjects):
                        self.tries.pop(subject, None)

    def _forget_failed_starts(self, one: Replica) -> None:
        """Forget the failed starts of its model and its node: it serves."""
        for subject in (subject_of(Verb.PLACE, one.model), node_subject(one.node)):
            self.tries.pop(subject, None)

    # -- actions

    def add_action(self, action: Action) -> None:
        """Add an action that is stored, and will be carried out."""
        self._add_pending(PendingAction(action))

    def removes_unfit(self, action: Action) -> bool:
        """Return True for the first order to remove a replica that is up and does not serve."""
        one = self.replicas.get(action.name)
        removes = action.verb in (Verb.STOP, Verb.DRAIN) and action.attempt == 1
        return removes and one is not None and one.is_up and not one.serves

    def count_unfit(self, action: Action, now_s: float) -> None:
        """Count the replica that this order removes as a failed start: its model and its node are tried less often."""
        self._count_failure((subject_of(Verb.PLACE, action.model), node_subject(action.node)), now_s)
        self._mark_stale(action.model, action.node)

    def _add_pending(self, pending: PendingAction) -> None:
        action = pending.action
        for index in self._indexes(action):
            index[action.id] = pending
        self.serials[action.model] = max(action.serial, self.serials.get(action.model, 0))
        heapq.heappush(self._due, (action.deadline_s, action.id))
        self._mark_stale(action.model, action.node)

    def _indexes(self, action: Action) -> tuple[dict[str, PendingAction], ...]:
        of_model = self.pending_of.setdefault(action.model, {})
        return self.pending, of_model, self.pending_on.setdefault(action.node, {})

    def _remove_pending(self, action_id: str) -> None:
        pending = self.pending.get(action_id)
        if pending is not None:
            for index in self._indexes(pending.action):
                del index[action_id]
            self._mark_stale(pending.action.model, pending.action.node)

    def on_stopped(self, name: str, model: str) -> None:
        """Remove a replica that its agent reports as stopped, whether it ever ran or not. What it held is free when its
        node's next snapshot says so."""
        for pending in self._pending_for(model, name):
            self._remove_pending(pending.action.id)
        if name in self.replicas:
            self._drop(self.replicas[name])
        self._forget_failures(name)

    def _pending_for(self, model: str, name: str) -> list[PendingAction]:
        return [pending for pending in self.pending_of.get(model, {}).values() if pending.action.name == name]

    def _forget_failures(self, name: str) -> None:
        """Forget the failures of a replica that is gone."""
        for verb in Verb:
            self.tries.pop(subject_of(verb, name), None)

    def on_failed(self, action_id: str, now_s: float) -> None:
        """Count an action that its agent reports as failed; a failed order to place has left nothing behind."""
        pending = self.pending.get(action_id)
        if pending is not None:
            action = pending.action
            self._remove_pending(action_id)
            self._count_failure(action.subjects, now_s)
            if action.name not in self.replicas and not self._pending_for(action.model, action.name):
                self._forget_failures(action.name)

    def expire(self, now_s: float) -> None:
        """Count overdue actions as failed. An order to drain or stop may be given again; of any other the replica must
        be stopped before it counts as not there."""
        while self._due and self._due[0][0] <= now_s:
            pending = self.pending.get(heapq.heappop(self._due)[1])
            if pending is None or pending.overdue or pending.action.deadline_s > now_s:
                continue
            if pending.action.verb in (Verb.DRAIN, Verb.STOP):
                self.on_failed(pending.action.id, now_s)
                continue
            late = structs.replace(pending, overdue=True)
            for index in self._indexes(late.action):
                index[late.action.id] = late
            self._count_failure(late.action.subjects, late.action.deadline_s)
            self._mark_stale(late.action.model, late.action.node)

    def _count_failure(self, subjects: Iterable[str], now_s: float) -> None:
        for subject in subjects:
            self.tries[subject] = count_failure(self.tries.get(subject), now_s)

    def next_deadline_s(self) -> float | None:
        """Return when the next pending action is overdue."""
        while self._due and (self.pending.get(self._due[0][1]) is None or self.pending[self._due[0][1]].overdue):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def next_attempt(self, verb: Verb, name: str) -> int:
        tries = self.tries.get(subject_of(verb, name))
        return 1 if tries is None else tries.failed + 1

    def may_retry(self, subject: str, now_s: float) -> bool:
        tries: Mapping[str, Tries] = self.tries
        return subject not in tries or now_s >= tries[subject].retry_at_s


def _is_done(action: Action, one: Replica) -> bool:
    match action.verb:
        case Verb.PLACE:
            return one.phase is not ReplicaPhase.PROVISIONING
        case Verb.PROMOTE:
            return one.level is Level.HOT and one.phase is not ReplicaPhase.PROVISIONING
        case Verb.DEMOTE:
            return one.level is Level.WARM and one.phase is ReplicaPhase.READY
        case Verb.DRAIN:
            return one.phase is ReplicaPhase.DRAINING or one.level is not Level.HOT
        case Verb.STOP:
            return one.phase is ReplicaPhase.GONE
