"""Plans a fleet: from desired and observed state to the actions that bring one to the other, and to what must be
written in which order. A pure machine.

A pass counts each stale model by itself (`counts.py`), measures the memory of each stale node (`room.py`), and then
places what is missing beside everything else (`placement.py`). A model at rest costs nothing, so a pass costs as much
as has changed or is unmet. It works from desired and observed state and its own orders, and remembers nothing beyond
that: `plan` from scratch says the same as a `Planner` that was told of every change, and a controller that starts
again adopts whatever runs. An action is planned in every pass, under the same id, until it is pending.

A controller's step returns what is to be written; `written` confirms that it is. The fleet's record comes first, then
orders: serials in use, failures and draining replicas are known to the next controller before any agent can act. Only
what is written is pending, so a controller that dies anywhere has ordered exactly what it wrote. One that begins has
read everything, and before its first decision it *claims* the record and every node's orders: it writes them as they
are, in its own name. All is swapped from what was read, so an earlier controller's later writes are refused, and its
earlier ones were read.

Node records that arrive during a write are applied after it: an answer may come before its order is known to be
written. Of each record the replicas are applied first and its answers after, so that a failure counts once.

Always true: never beyond what leases leave on a device; no replica with running requests is removed before it has
drained or its requests have had their time; the same state gives the same plan; no order names a serial that is not
written in the fleet's record; nothing is decided during a write; replicas of a model that was never desired here are
left alone, as are those of a model whose desired state cannot be read: a store that lost its data stops no replica.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct, structs

from holdfast.fleet import scaling
from holdfast.fleet.actions import COMING, LEAVING, Action, PendingAction, Verb, subject_of
from holdfast.fleet.counts import ModelCount, Victim, count_replicas
from holdfast.fleet.desired import HYSTERESIS, Cordon, Hysteresis, Level, Model
from holdfast.fleet.observed import WHY_CHARS_MAX, Health, Observed, Replica, ReplicaPhase
from holdfast.fleet.outlook import ModelOutlook, NodeKinds, start_failed, unhealthy_outlook
from holdfast.fleet.placement import FAILED, NO_HOST, NO_ROOM, Placement
from holdfast.fleet.records import DesiredModel, FleetRecord, NodeRecord, Orders, process_name
from holdfast.fleet.room import FleetRoom, owners_leaving, room_of
from holdfast.fleet.scaling import ScalingState, Signals
from holdfast.fleet.view import FleetView
from holdfast.health.records import Demand

# A store that restarts is back in a second or two, and its clients' leased keys within another.
GRACE_S = 5.0
# A node whose record cannot be read as a controller begins: its agent writes it again every 5 s, so a torn record is
# whole long before; one that still cannot be read then is of another version, and decisions do not wait for it.
UNREAD_S = 60.0
SILENT_MAX = 3  # missed reports, and the node is lost: its agent is stopped, or its machine thrashes
FORGET_S = 600.0  # a machine that starts again is back sooner
FRONTENDS_MAX = 1024  # whose reports are kept; of more the first ones are
EVENTS_MAX = 10_000  # that were not taken: more than one pass over a large fleet makes
WAITED_FOR = "requests wait for it, but an operator scaled it to 0"
CRASHED = "it ended before it served, or while it did"
UNHEALTHY_MAX = 3  # replicas of one model whose trouble is shown: what fits into a line or two
_ORDER = {verb: place for place, verb in enumerate(Verb)}
_LEAVES = frozenset({ReplicaPhase.DRAINING, ReplicaPhase.DEMOTING})


class Plan(Struct, frozen=True):
    """Actions, those that free memory first; which models miss a replica, and why; when to plan again at the latest
    (None: when something changes)."""

    actions: tuple[Action, ...] = ()
    unmet: dict[str, str] = {}
    next_s: float | None = None


def plan(
    models: Iterable[Model],
    observed: Observed,
    now_s: float,
    hysteresis: Hysteresis = HYSTERESIS,
    cordons: Mapping[str, Cordon] = {},
) -> Plan:
    """Return the actions that bring the observed state to the desired state, computed from scratch."""
    planner = Planner(hysteresis)
    planner.view.load(models, observed, cordons)
    return planner.plan(now_s)


class Planner:
    """Plans incrementally: keeps a view of the fleet and recomputes what changed."""

    def __init__(self, hysteresis: Hysteresis = HYSTERESIS) -> None:
        self._hysteresis = hysteresis
        self.view = FleetView()
        self._room = FleetRoom()
        self._counts: dict[str, ModelCount] = {}
        self._active: set[str] = set()  # models with something to decide
        self._victims: list[Victim] = []  # of all models, sorted
        self._surplus_warm: dict[str, dict[str, Replica]] = {}  # by node
        self._due: list[tuple[float, str]] = []  # when a count expires

    def __repr__(self) -> str:
        return f"<Planner {len(self._active)} models of {len(self._counts)} are not at rest, {self.view!r}>"

    def plan(self, now_s: float) -> Plan:
        """Return what to do now."""
        view = self.view
        view.expire(now_s)
        while self._due and self._due[0][0] <= now_s:
            view.stale_models.add(heapq.heappop(self._due)[1])
        for node in view.stale_nodes:
            self._measure_node(node)
        for key in view.stale_models:
            self._count_model(key, now_s)
        view.stale_nodes.clear()
        view.stale_models.clear()
        active = [self._counts[key] for key in sorted(self._active)]
        decided = Placement(view, self._room, self._victims, self._surplus_warm, now_s, self._hysteresis).run(active)
        self._room.end_pass()
        actions = sorted(decided.actions.values(), key=lambda one: (_ORDER[one.verb], one.id))
        return Plan(tuple(actions), decided.unmet, self._next_s(decided.next_s))

    def _next_s(self, decided_s: float | None) -> float | None:
        while self._due and not self._holds_until(*self._due[0]):
            heapq.heappop(self._due)
        due = (decided_s, self.view.next_deadline_s(), self._due[0][0] if self._due else None)
        return min((at_s for at_s in due if at_s is not None), default=None)

    def _holds_until(self, at_s: float, key: str) -> bool:
        return key in self._counts and self._counts[key].next_s == at_s

    def _measure_node(self, name: str) -> None:
        view, node = self.view, self.view.nodes.get(name)
        if node is None or not node.alive:
            self._room.remove(name)
            return
        residents = view.on_node.get(name, {}).values()
        asked = [pending.action for pending in view.pending_on.get(name, {}).values()]
        room = room_of(node, residents, asked, owners_leaving(residents, asked, view.tries))
        room.cordoned = name in view.cordons
        self._room.put(room)

    def _count_model(self, key: str, now_s: float) -> None:
        view = self.view
        self._drop_count(key)
        replicas, asked = view.of_model.get(key, {}), view.pending_of.get(key, {})
        model = view.models.get(key)
        if model is None and not replicas and not asked:
            return
        count = count_replicas(
            key,
            model,
            replicas.values(),
            asked.values(),
            view.nodes,
            view.tries,
            view.demand.get(key),
            now_s,
            self._hysteresis,
            view.is_drained,
        )
        self._counts[key] = count
        if count.intents or not count.is_settled:
            self._active.add(key)
        for victim in count.victims:
            insort(self._victims, victim)
        for one in count.surplus_warm:
            self._surplus_warm.setdefault(one.node, {})[one.name] = one
        if count.next_s is not None:
            heapq.heappush(self._due, (count.next_s, key))

    def _drop_count(self, key: str) -> None:
        count = self._counts.pop(key, None)
        if count is None:
            return
        self._active.discard(key)
        for victim in count.victims:
            place = bisect_left(self._victims, victim)
            assert self._victims[place] == victim, "victims are sorted"
            del self._victims[place]
        for one in count.surplus_warm:
            del self._surplus_warm[one.node][one.name]
            if not self._surplus_warm[one.node]:
                del self._surplus_warm[one.node]


# -- nodes that report


class NodeHeartbeats:
    """Which nodes report, which are lost, which are waited for, and which are forgotten.

    A node reports by a leased record. Without one for `GRACE_S` it is lost; so it is when its record does not change
    for longer than its agent would leave it: a stopped process keeps its lease where its machine answers for it. It is
    not lost sooner, since leased records vanish with the store that had them and come again. For the same reason
    nothing is decided, after a start or an outage, until each node that has orders has reported, or that time is over.
    A record that cannot be read means that the node is there, unchanged; if its state is not known, since a controller
    begins, it is waited for longer.

    A node without a record for `FORGET_S` is forgotten, with its orders. If it comes back all the same, it is a new
    node that has replicas: names are used once, and an agent without orders keeps all replicas. A node whose record
    exists, readable or not, is never forgotten."""

    def __init__(self) -> None:
        self._gone: dict[str, float] = {}  # nodes without a record that are not lost yet, and since when
        self._absent: dict[str, float] = {}  # all nodes without a record, and since when
        # Of those with one: how long it may be unchanged, and until when.
        self._silent_s: dict[str, tuple[float, float]] = {}
        self._awaited: dict[str, float] = {}  # nodes that are waited for, and until when

    def begin(self, ordered: Collection[str], reported: Collection[str], unread: Collection[str], now_s: float) -> None:
        """Begin with the nodes that have orders, those that have a record, and those whose record cannot be read."""
        missing = [name for name in ordered if name not in reported and name not in unread]
        self._awaited = dict.fromkeys(missing, now_s + GRACE_S) | dict.fromkeys(unread, now_s + UNREAD_S)
        self._absent = dict.fromkeys(missing, now_s)

    @property
    def is_any_missing(self) -> bool:
        return bool(self._gone)

    def on_report(self, name: str, again_s: float, now_s: float) -> None:
        """Note a node's report; the next one comes within `again_s` (0: not known)."""
        self._silent_s[name] = SILENT_MAX * again_s, now_s + SILENT_MAX * again_s
        for kept in (self._gone, self._absent, self._awaited):
            kept.pop(name, None)

    def on_unreadable(self, name: str, now_s: float) -> None:
        """Note a report that cannot be read."""
        self._gone.pop(name, None)
        self._absent.pop(name, None)
        if name in self._silent_s:
            for_s, _ = self._silent_s[name]
            self._silent_s[name] = for_s, now_s + for_s
            self._awaited.pop(name, None)

    def on_removed(self, name: str, now_s: float) -> None:
        """Note that a node's record was removed."""
        self._silent_s.pop(name, None)
        self._gone.setdefault(name, now_s)
        self._absent.setdefault(name, now_s)
        if name in self._awaited:
            self._awaited[name] = min(self._awaited[name], now_s + GRACE_S)

    def restart_deadlines(self, now_s: float) -> None:
        """Give every node its time again: reports were not read for a while."""
        self._silent_s = {name: (for_s, now_s + for_s) for name, (for_s, _) in self._silent_s.items()}

    def on_store_back(self, alive: Iterable[str], now_s: float) -> None:
        """Give missing nodes their time again after the store was lost, and wait for a report of all."""
        self._gone, self._absent = dict.fromkeys(self._gone, now_s), dict.fromkeys(self._absent, now_s)
        self._awaited |= dict.fromkeys(alive, now_s + GRACE_S)
        self.restart_deadlines(now_s)

    # -- deadlines

    def pop_lost(self, now_s: float) -> Iterator[tuple[str, str]]:
        """Yield nodes that missed their report deadline, with the reason."""
        for name in [name for name, since_s in self._gone.items() if now_s >= since_s + GRACE_S]:
            del self._gone[name]
            yield name, f"it was not heard of for {GRACE_S:g} s"
        for name, (for_s, until_s) in self._silent_s.items():
            if for_s and now_s >= until_s:
                yield name, f"its agent told nothing for {for_s:g} s; is it stopped?"

    def pop_given_up(self, now_s: float) -> list[str]:
        """Return nodes that are no longer waited for, each once."""
        due = [name for name, until_s in self._awaited.items() if now_s >= until_s]
        for name in due:
            del self._awaited[name]
        return due

    @property
    def is_waiting(self) -> bool:
        return bool(self._awaited)

    def pop_forgotten(self, now_s: float) -> list[str]:
        """Return nodes that are forgotten, each once."""
        due = [name for name, since_s in self._absent.items() if now_s >= since_s + FORGET_S]
        for name in due:
            del self._absent[name]
        return due

    def deadlines_s(self) -> Iterator[float]:
        yield from (since_s + GRACE_S for since_s in self._gone.values())
        yield from (since_s + FORGET_S for since_s in self._absent.values())
        yield from (until_s for for_s, until_s in self._silent_s.values() if for_s)
        yield from self._awaited.values()


# -- traffic


class ModelLoad(Struct, frozen=True):
    """The load of all engines that serve a model, by their own beats."""

    running: int = 0
    kv_used: float = 0.0  # as a share of all their KV


class FleetTraffic:
    """Waiting requests and load of a deployment, by the name that clients use for a model.

    Of several frontends' waiting requests the sum counts, and the first of them all; a frontend that is gone counts
    no more."""

    def __init__(self) -> None:
        self._reports: dict[str, Mapping[str, Demand]] = {}
        self._loads: Mapping[str, ModelLoad] = {}

    def report(self, frontend: str, demand: Mapping[str, Demand] | None) -> set[str]:
        """Replace one frontend's waiting requests; None: it is gone. Return the names whose demand changed."""
        before = self._reports.pop(frontend, {})
        after = demand or {}
        if after and len(self._reports) < FRONTENDS_MAX:
            self._reports[frontend] = after
        return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    def set_loads(self, loads: Mapping[str, ModelLoad]) -> None:
        self._loads = loads

    def demand(self, name: str) -> Demand | None:
        """Return the requests that wait for a model; None: none does."""
        found = [report[name] for report in self._reports.values() if name in report]
        waiting = sum(one.waiting for one in found)
        since_s = min((one.since_unix_s for one in found if one.waiting), default=0.0)
        return Demand(waiting, since_s) if waiting else None

    def load(self, name: str) -> ModelLoad:
        return self._loads.get(name, ModelLoad())


# -- the controller


class FleetWrites(Struct, frozen=True, kw_only=True):
    """What is to be written: the fleet's record before the orders. A desired model that was changed meanwhile is left
    as it is."""

    record: FleetRecord | None = None
    orders: Mapping[str, Orders | None] = {}  # by node; None: they are to be removed
    desired: Mapping[str, DesiredModel] = {}  # by key

    def __bool__(self) -> bool:
        return self.record is not None or bool(self.orders or self.desired)


class ControllerEvent(Struct, frozen=True):
    """Something for the log and the metrics: a verb that was ordered, or `failed`, `crashed`, `lost`, `back`,
    `scaled`."""

    what: str
    text: str


class FleetController:
    """The controller of one deployment's fleet. `by`: the name under which it writes, which no other ever has."""

    def __init__(self, deployment: str, by: str, hysteresis: Hysteresis = HYSTERESIS) -> None:
        self._deployment = deployment
        self._by = by
        self._planner = Planner(hysteresis)
        self._view = self._planner.view
        self._traffic = FleetTraffic()
        self._record = FleetRecord()  # as last written, and so are
        self._orders: dict[str, Orders] = {}
        self._desired: dict[str, DesiredModel] = {}
        self._unread: set[str] = set()  # models whose desired state cannot be read
        self._known: set[str] = set()  # models that were ever desired
        self._keys: dict[str, set[str]] = {}  # of models, by the name that clients use
        self._autoscaled: set[str] = set()
        self._scaled: dict[str, ScalingState] = {}
        self._scaling_writes: dict[str, ScalingState] = {}  # that are being written
        self._heartbeats = NodeHeartbeats()
        self._forgotten: set[str] = set()  # nodes whose orders are to be removed
        self._drains: dict[str, frozenset[str]] = {}  # processes of replicas that leave, by node
        self._claimed = False
        self._actions: tuple[Action, ...] | None = None  # those that are being written; None: none is
        self._writing = FleetWrites()
        self._deferred: dict[str, NodeRecord] = {}  # records that came during a write
        self._plan = Plan()
        self._outlooks: dict[str, ModelOutlook] = {}
        self._whys: dict[str, str] = {}  # why a model last failed to start
        self._stepped_s = 0.0
        self._events: list[ControllerEvent] = []

    def __repr__(self) -> str:
        state = "is writing" if self._actions is not None else f"misses {len(self._plan.unmet)}"
        return f"<FleetController of {self._deployment} {state}, {self._planner!r}>"

    def begin(
        self,
        record: FleetRecord,
        orders: Mapping[str, Orders],
        desired: Mapping[str, DesiredModel],
        nodes: Mapping[str, NodeRecord],
        now_s: float,
        unread: Collection[str] = (),
        cordons: Mapping[str, Cordon] = {},
    ) -> None:
        """Continue from what is stored. `unread`: nodes whose record cannot be read."""
        self._record, self._orders = record, dict(orders)
        self._known.update(record.serials)
        self._whys = dict(record.whys)
        asked = [(action, action.id in one.overdue) for one in orders.values() for action in one.actions]
        pending = {action.id: PendingAction(action, overdue=overdue) for action, overdue in asked}
        # Times of a clock that is ahead of this one would delay retries.
        tries = {subject: structs.replace(one, at_s=min(one.at_s, now_s)) for subject, one in record.tries.items()}
        self._view.load((), Observed(pending=pending, tries=tries, serials=record.serials), cordons)
        for key, one in desired.items():
            self.set_desired(key, one)
        self._heartbeats.begin(orders, nodes, unread, now_s)
        for name, node in nodes.items():
            self.on_node_record(name, node, now_s)

    # -- events

    def set_desired(self, key: str, desired: DesiredModel | None) -> None:
        """Set a model's desired state; None: it is no longer desired."""
        before = self._desired.pop(key, None)
        self._unread.discard(key)
        if before is not None:
            self._keys[before.name].discard(key)
        if desired is None or desired.scaling is None:
            self._autoscaled.discard(key)
            self._scaled.pop(key, None)
        if desired is None:
            self._view.remove_model(key)
            self._view.set_demand(key, None)
            return
        if desired.scaling is not None:
            self._autoscaled.add(key)
        self._desired[key] = desired
        self._known.add(key)
        self._keys.setdefault(desired.name, set()).add(key)
        self._view.set_model(desired.model)
        self._view.set_demand(key, self._traffic.demand(desired.name))

    def desired_unreadable(self, key: str) -> None:
        """Keep a model as it is: its desired state cannot be read."""
        if key not in self._desired:
            self._unread.add(key)

    def set_cordon(self, node: str, cordon: Cordon | None) -> None:
        """Set a node's desired state; None: it takes replicas, and keeps those that it has."""
        before = self._view.cordons.get(node)
        self._view.set_cordon(node, cordon)
        if cordon is None and before is not None:
            self._event("uncordoned", f"node {node} is used again")
        elif cordon is not None and (before is None or before.drain is not cordon.drain):
            does = "is drained: its replicas are replaced on other nodes" if cordon.drain else "takes no new replicas"
            self._event("cordoned", f"node {node} {does}" + (f" ({cordon.by})" if cordon.by else ""))

    def on_node_record(self, name: str, record: NodeRecord | None, now_s: float) -> None:
        """Apply a node's record; None: it was removed."""
        if record is None:
            self._deferred.pop(name, None)
            self._heartbeats.on_removed(name, now_s)
            return
        self._heartbeats.on_report(name, record.again_s, now_s)
        self._forgotten.discard(name)
        if self._actions is not None:
            self._deferred[name] = record
        else:
            self._observe(name, record, now_s)

    def node_unreadable(self, name: str, now_s: float) -> None:
        """Note a node's report that cannot be read: the node is there, unchanged."""
        self._heartbeats.on_unreadable(name, now_s)
        self._forgotten.discard(name)

    def on_frontend_report(self, frontend: str, demand: Mapping[str, Demand] | None) -> None:
        """Apply a frontend's waiting requests, by the name that clients use; None: the frontend is gone."""
        for name in self._traffic.report(frontend, demand):
            for key in self._keys.get(name, ()):
                self._view.set_demand(key, self._traffic.demand(name))

    def set_loads(self, loads: Mapping[str, ModelLoad]) -> None:
        """Set the load of all models, by the name that clients use."""
        self._traffic.set_loads(loads)

    def on_store_back(self, now_s: float) -> None:
        """Give nodes their time again after the store was lost."""
        self._heartbeats.on_store_back((name for name, node in self._view.nodes.items() if node.alive), now_s)

    def _observe(self, name: str, record: NodeRecord, now_s: float) -> None:
        view = self._view
        known = view.nodes.get(name)
        if known is not None and not known.alive:
            self._event("back", f"node {name} is back")
        failed = {one.model for one in self._note_failures(record)}
        models = {one.model for one in view.on_node.get(name, {}).values()} - failed
        tries = {key: view.tries.get(subject_of(Verb.PLACE, key)) for key in models}
        view.observe_node(record.node, record.replicas, now_s)
        for key in [key for key in models if view.tries.get(subject_of(Verb.PLACE, key)) not in (None, tries[key])]:
            self._whys[key] = CRASHED
            self._event("crashed", f"a replica of {key} on {name} ended unexpectedly")
        for action_id, why in record.answers.items():
            self._answer(action_id, why, now_s)
        self._finish_vanished(name)
        leaving = [one for one in view.on_node.get(name, {}).values() if one.phase in _LEAVES]
        self._drains[name] = frozenset(self._process(one.model, one.version, one.serial) for one in leaving)

    def _note_failures(self, record: NodeRecord) -> list[Action]:
        """Note the pending actions that a record reports as failed, and return them."""
        all_pending = [(self._view.pending.get(action_id), why) for action_id, why in record.answers.items() if why]
        found = [(pending.action, why) for pending, why in all_pending if pending is not None]
        for action, why in found:
            self._event("failed", f"{_words(action)}: it failed: {why}")
            if action.verb in COMING:
                self._whys[action.model] = why[:WHY_CHARS_MAX]
        return [action for action, _ in found]

    def _answer(self, action_id: str, why: str, now_s: float) -> None:
        pending = self._view.pending.get(action_id)
        if pending is None:
            return
        if why:
            self._view.on_failed(action_id, now_s)
        elif pending.action.verb is Verb.STOP:
            self._view.on_stopped(pending.action.name, pending.action.model)

    def _finish_vanished(self, node: str) -> None:
        """Finish the actions of replicas that ended while no control led: they neither exist nor are to come."""
        asked = dict[tuple[str, str], set[Verb]]()
        for pending in self._view.pending_on.get(node, {}).values():
            asked.setdefault((pending.action.name, pending.action.model), set()).add(pending.action.verb)
        for (name, model), verbs in asked.items():
            if name not in self._view.replicas and not verbs & {Verb.PLACE, Verb.STOP}:
                self._view.on_stopped(name, model)

    # -- writes

    def step(self, now_s: float) -> FleetWrites:
        """Return what is to be written now; if it is anything, call `written` before the next step."""
        assert self._actions is None, "one thing is written at a time"
        due_s = self.next_deadline_s()
        if due_s is not None and now_s > due_s + GRACE_S:
            self._heartbeats.restart_deadlines(now_s)  # this process was stopped, and read no reports
        self._stepped_s = now_s
        self._update_nodes(now_s)
        if self._heartbeats.is_waiting:
            return FleetWrites()
        desired = self._scale(now_s)
        self._note_overdue(now_s)
        self._plan = self._planner.plan(now_s)
        self._outlooks = self._find_outlooks()
        actions = tuple(action for action in self._plan.actions if self._is_managed(action.model))
        writes = self._writes(actions, desired)
        if writes and not self._claimed:
            writes, actions, self._scaling_writes = self._claim(), (), {}
        if writes:
            self._writing, self._actions = writes, actions
        return writes

    def written(self, now_s: float) -> None:
        """Note that everything of the last step is stored."""
        assert self._actions is not None, "only what was to be written is"
        writes, actions = self._writing, self._actions
        self._writing, self._actions, self._claimed = FleetWrites(), None, True
        self._record = writes.record or self._record
        self._orders = {name: one for name, one in (self._orders | dict(writes.orders)).items() if one is not None}
        self._forgotten &= self._orders.keys()
        for action in actions:
            self._note_unfit(action, now_s)
            self._view.add_action(action)
            self._event(action.verb, f"{_words(action)}: {action.why or 'it is wanted'}")
        for key, state in self._scaling_writes.items():
            self._scaled[key] = state
            self._event("scaled", f"{key}: {state.wanted} are wanted from now on: {state.why}")
        self._scaling_writes = {}
        late, self._deferred = self._deferred, {}
        for name, record in late.items():
            self._observe(name, record, now_s)

    def next_deadline_s(self) -> float | None:
        """Return when to step again if nothing happens; None: only when something does. What was due at the last step
        was handled then."""
        due = [self._plan.next_s, *self._heartbeats.deadlines_s()]
        for key in self._autoscaled & self._scaled.keys():
            by = self._desired[key].scaling
            due.append(scaling.next_deadline_s(self._scaled[key], by) if by is not None else None)
        return min((at_s for at_s in due if at_s is not None and at_s > self._stepped_s), default=None)

    def take_events(self) -> list[ControllerEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def replicas(self) -> Iterable[Replica]:
        """Return the replicas of nodes that are alive."""
        nodes = self._view.nodes
        return (one for one in self._view.replicas.values() if nodes[one.node].alive)

    @property
    def unmet(self) -> dict[str, str]:
        """Return the models that miss a replica, and why."""
        return {key: one.why for key, one in self._outlooks.items()}

    @property
    def is_autoscaled(self) -> bool:
        """Return True if any model is autoscaled: its load is not in the store and must be polled."""
        return bool(self._autoscaled)

    @property
    def is_idle(self) -> bool:
        """Return True if there is no fleet."""
        return not (self._desired or self._view.nodes or self._view.pending or self._heartbeats.is_any_missing)

    def _note_unfit(self, action: Action, now_s: float) -> None:
        """Count a replica that is removed because it did not serve as failed."""
        if self._view.removes_unfit(action):
            one = self._view.replicas[action.name]
            self._view.count_unfit(action, now_s)
            self._whys[action.model] = (one.ill_why or str(one.health))[:WHY_CHARS_MAX]
            self._event("failed", f"{action.name} on {action.node} is {one.health}: {one.ill_why}; it is replaced")

    def _find_outlooks(self) -> dict[str, ModelOutlook]:
        """Return why models miss a replica, and why those have none that serves whose replicas are in doubt."""
        found = self._missing()
        for key in found.keys() | {one.model for one in self.replicas() if one.is_up and not one.serves}:
            if key in self._desired and (ill := self._unhealthy_words(key)):
                found[key] = unhealthy_outlook(ill, found.get(key), self._is_coming(key))
        return found

    def _unhealthy_words(self, key: str) -> str:
        """Return what is wrong with a model of which no replica serves, and one or more are up; "": nothing is."""
        view = self._view
        up = [one for one in view.of_model.get(key, {}).values() if one.is_up and view.nodes[one.node].alive]
        found = [f"{one.id} on {one.node}: {one.ill_why}" for one in up if one.health is not Health.UNCHECKED]
        return "; ".join(found[:UNHEALTHY_MAX]) if found and not any(one.serves for one in up) else ""

    def _is_coming(self, key: str) -> bool:
        """Return True if a replica of the model is on its way to be HOT."""
        there = self._view.of_model.get(key, {}).values()
        all_pending = self._view.pending_of.get(key, {}).values()
        return any(one.level is Level.HOT and one.phase is ReplicaPhase.PROVISIONING for one in there) or any(
            pending.action.verb in COMING and pending.action.level is Level.HOT for pending in all_pending
        )

    def _missing(self) -> dict[str, ModelOutlook]:
        """Return the outlook of all models that miss a replica."""
        view, kinds, found = self._view, None, dict[str, ModelOutlook]()
        self._whys = {key: why for key, why in self._whys.items() if subject_of(Verb.PLACE, key) in view.tries}
        for key, why in self._plan.unmet.items():
            tries = view.tries.get(subject_of(Verb.PLACE, key))
            if why == FAILED and tries is not None:
                found[key] = start_failed(tries, self._whys.get(key, ""))
            elif why in (NO_ROOM, NO_HOST) and key in view.models:
                kinds = kinds or NodeKinds(view.nodes, view.cordons)
                found[key] = (kinds.without_room if why == NO_ROOM else kinds.without_host)(view.models[key], why)
            else:
                found[key] = ModelOutlook(why)
        asked = {key for key in view.demand if key in self._desired}
        at_zero = {key for key in asked if not self._desired[key].model.hot and self._desired[key].scaling is None}
        return found | dict.fromkeys(sorted(at_zero), ModelOutlook(WAITED_FOR, hopeless=True))

    def _is_managed(self, model: str) -> bool:
        return model in self._known and model not in self._unread

    def _update_nodes(self, now_s: float) -> None:
        view = self._view
        for name, why in self._heartbeats.pop_lost(now_s):
            if name in view.nodes and view.nodes[name].alive:
                view.mark_lost(name)
                self._event("lost", f"node {name} is lost: {why}")
        for name in self._heartbeats.pop_given_up(now_s):
            if name not in view.nodes:
                self._event("lost", f"node {name} is lost: it was not heard of, or what it says cannot be read")
        for name in self._heartbeats.pop_forgotten(now_s):
            view.remove_node(name)
            self._drains.pop(name, None)
            if name in self._orders:
                self._forgotten.add(name)
                self._event("forgotten", f"node {name} is forgotten, and what was asked of it: it did not come back")

    def _note_overdue(self, now_s: float) -> None:
        due_s = self._view.next_deadline_s()
        if due_s is None or due_s > now_s:
            return
        for pending in self._view.pending.values():
            if not pending.overdue and pending.action.deadline_s <= now_s:
                self._event("failed", f"{_words(pending.action)}: it was not seen to be done in time")

    def _writes(self, actions: tuple[Action, ...], desired: Mapping[str, DesiredModel]) -> FleetWrites:
        view, more = self._view, dict[str, list[Action]]()
        for action in actions:
            more.setdefault(action.node, []).append(action)
        record = self._record_with(actions)
        pending_nodes = {pending.action.node for pending in view.pending.values()}
        written = {name for name, one in self._orders.items() if one.actions}
        names = sorted(pending_nodes | written | more.keys())
        orders = {name: self._orders_of(name, more.get(name, [])) for name in names}
        changed = {
            name: one
            for name, one in orders.items()
            if one != structs.replace(self._orders.get(name, Orders()), by=self._by)
        }
        return FleetWrites(
            record=record if record != structs.replace(self._record, by=self._by) else None,
            orders=changed | dict.fromkeys(sorted(self._forgotten)),
            desired=desired,
        )

    def _claim(self) -> FleetWrites:
        """Return everything that is written, under this controller's name; orders also where there are none."""
        names = sorted(self._orders.keys() | self._view.nodes.keys())
        orders = {name: structs.replace(self._orders.get(name, Orders()), by=self._by) for name in names}
        return FleetWrites(record=structs.replace(self._record, by=self._by), orders=orders)

    def _record_with(self, actions: tuple[Action, ...]) -> FleetRecord:
        serials = {key: serial for key, serial in self._view.serials.items() if key in self._known}
        for action in actions:
            serials[action.model] = max(action.serial, serials.get(action.model, 0))
        leaving = [action for action in actions if action.verb in LEAVING]
        leaving += [one.action for one in self._view.pending.values() if one.action.verb in LEAVING]
        idle = {name for names in self._drains.values() for name in names}
        idle |= {self._process(one.model, self._version(one), one.serial) for one in leaving}
        tries = dict(self._view.tries)
        return FleetRecord(
            by=self._by,
            serials=serials,
            tries=tries,
            idle=tuple(sorted(idle)),
            unmet=self.unmet,
            hopeless=tuple(sorted(key for key, one in self._outlooks.items() if one.hopeless)),
            lost=tuple(sorted(name for name, node in self._view.nodes.items() if not node.alive)),
            stands=tuple(sorted(key for key, one in self._outlooks.items() if one.stands)),
            whys=dict(self._whys),
            cordoned=tuple(sorted(self._view.cordons)),
        )

    def _version(self, action: Action) -> str:
        """Return the version of an action's replica, as observed or as ordered."""
        one = self._view.replicas.get(action.name)
        if one is not None:
            return one.version
        asked = (pending.action for pending in self._view.pending_of.get(action.model, {}).values())
        return next((each.version for each in asked if each.name == action.name and each.verb is Verb.PLACE), "")

    def _orders_of(self, name: str, more: Iterable[Action]) -> Orders:
        all_pending = list(self._view.pending_on.get(name, {}).values())
        actions = sorted([*(one.action for one in all_pending), *more], key=lambda one: (_ORDER[one.verb], one.id))
        overdue = frozenset(one.action.id for one in all_pending if one.overdue)
        return Orders(by=self._by, actions=tuple(actions), overdue=overdue)

    def _process(self, model: str, version: str, serial: int) -> str:
        return process_name(self._deployment, model, version, serial)

    # -- autoscaling

    def _scale(self, now_s: float) -> dict[str, DesiredModel]:
        """Return the desired models whose replica count autoscaling changes."""
        self._scaling_writes = {}
        changed = {}
        for key in self._autoscaled:
            desired, state = self._desired[key], self._scaled.get(key)
            assert desired.scaling is not None, key
            if state is None or state.wanted != desired.model.wanted:  # changed by an operator or an earlier controller
                state = ScalingState(wanted=desired.model.wanted, stepped_s=now_s)
            after = scaling.step(state, desired.model, desired.scaling, self._signals(key, desired.name, now_s), now_s)
            if after.wanted == desired.model.wanted:
                self._scaled[key] = after
                continue
            self._scaled[key], self._scaling_writes[key] = state, after
            model = structs.replace(desired.model, wanted=after.wanted, generation=desired.model.generation + 1)
            changed[key] = structs.replace(desired, model=model)
        return changed

    def _signals(self, key: str, name: str, now_s: float) -> Signals:
        there = [one for one in self._view.of_model.get(key, {}).values() if self._view.nodes[one.node].alive]
        demand, load = self._view.demand.get(key), self._traffic.load(name)
        return Signals(
            waiting=demand.waiting if demand is not None else 0,
            wait_s=max(0.0, now_s - demand.since_unix_s) if demand is not None else 0.0,
            running=max(load.running, sum(one.running for one in there)),
            kv_used=load.kv_used,
            ready=sum(one.serves for one in there),
        )

    def _event(self, what: str, text: str) -> None:
        if len(self._events) < EVENTS_MAX:
            self._events.append(ControllerEvent(what, text))


def _words(action: Action) -> str:
    """Return an action as log lines show it."""
    where = " ".join((action.node, *action.devices))
    level = f" {action.level.word}" if action.verb is Verb.PLACE else ""
    return f"{action.verb} {action.name}{level} on {where}"
