"""Counts one model by itself: which of its replicas are there, which are coming, which must leave, how many are
missing, and how much each matters. Pure.

A count holds until something of its model changes, or its `next_s` comes. What the model may take from others is
decided by `placement.py`.

A replica is counted once, by its name, whether its action or its effect or both are observed. A replica on a node that
is not alive is lost: it is missing, and if its node comes back there is one too many.

Requests end first: a HOT replica that serves is only ever told to drain, and leaves when nothing runs on it or its
requests have had their time. One that is to be replaced, for whichever `ReplaceCause`, leaves when enough serve without
it: one more than desired is started for that, or a quarter of them where the version is not the cause. One below a
floor of WARM leaves when enough are HOT or WARM without it. What has no traffic, because it is WARM or never came up,
is stopped; but on a drained node it stays until another takes its part.

A replica that is up and does not serve (`Replica.health`) leaves before any other, and no other leaves because it is
there. When control asks for another in its place, or past a bound (`unfit_s`), it is missing: one without a leading
engine has failed and is stopped; one that could still answer is replaced, and the last of them stays until its
replacement has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from holdfast.fleet.actions import COMING, COPY_S, LEAVING, PendingAction, Tries, Verb, replica_name, subject_of
from holdfast.fleet.desired import Hysteresis, Level, Model
from holdfast.fleet.observed import Health, Node, Replica, ReplicaPhase
from holdfast.health.records import Demand

IDLE_STEP_S = 60.0  # replicas that are idle since the same minute count as equally idle, and the smaller one leaves
FEWER = "fewer are wanted"
SURGE_SHARE = 4  # one in so many of a model is replaced at a time: the rest serves if the replacements turn out bad


class ReplaceCause(StrEnum):
    """Why a replica is to be replaced, or ended; the first that holds."""

    UNWANTED = "its model is not wanted any more"
    EVICTED = "an operator evicted it"
    VERSION = "it is of another version"
    DRAINED = "its node is drained"
    UNFIT = "it does not serve"


class Need(IntEnum):
    """How much a HOT replica matters; only a greater need evicts another, but see `cooldown_s`."""

    IDLE = 0  # it is desired, and has no requests
    MORE = 1  # it has requests, and others serve too
    FIRST = 2  # it has requests, and no other serves
    KEPT = 3  # dedicated, or within a floor that is HOT


@dataclass(frozen=True, slots=True)
class Intent:
    """An action that takes no other's room, on a replica that may never have been observed."""

    verb: Verb
    serial: int
    node: str
    why: str


class Victim(NamedTuple):
    """A HOT replica that may be evicted; the order of the fields is the order of eviction."""

    need: Need
    health: int  # `RANK`: the less it can do, the lower
    busy: bool
    idle_minute: int
    size: int
    reload_s: float
    name: str
    replica: Replica


@dataclass(slots=True)
class ModelCount:
    """One model's replicas, counted, and what follows from that for this model alone."""

    key: str
    model: Model | None
    replaced: dict[int, ReplaceCause] = field(default_factory=dict)  # serials of replicas that must not stay, and why
    intents: list[Intent] = field(default_factory=list)
    drained: list[Replica] = field(default_factory=list)  # to be demoted or stopped now
    draining: list[Replica] = field(default_factory=list)  # to be so when their requests have ended
    promotable: list[Replica] = field(default_factory=list)  # WARM replicas that could be made HOT
    surplus_warm: list[Replica] = field(default_factory=list)  # WARM replicas that no floor needs
    needs: list[Need] = field(default_factory=list)  # of each missing HOT replica
    warm_missing: int = 0  # WARM replicas, besides those
    outdated_hot: list[Replica] = field(default_factory=list)  # up, and to be replaced
    outdated_warm: list[Replica] = field(default_factory=list)  # WARM, to be replaced, and still counted by a floor
    warm_changing: int = 0  # WARM replicas that come or leave
    hot_leaving: int = 0
    hot_coming: int = 0
    failed_nodes: set[str] = field(default_factory=set)  # where a replica of it has just failed: to be avoided
    last_answering: int = 0  # serial of an unfit replica that is the only one to answer; 0: there is none
    hot_on: Counter[str] = field(default_factory=Counter)  # HOT replicas, there or coming, by node
    victims: list[Victim] = field(default_factory=list)
    waiting_since_s: float = 0.0  # of the first waiting request; 0: none waits
    next_s: float | None = None

    @property
    def is_settled(self) -> bool:
        """Return True if placement has nothing to decide for it."""
        return not (self.needs or self.drained or self.draining or self.warm_missing)


# -- which replicas are unfit, and the order in which replicas leave

_HAS_HEALTH = (ReplicaPhase.READY, ReplicaPhase.DRAINING)  # phases in which a HOT replica's health means anything
# By how much a replica can do, least first.
RANK = {
    health: place
    for place, health in enumerate((Health.AWAY, Health.UNCHECKED, Health.UNFIT, Health.DOUBTED, Health.SOUND))
}


def unfit_s(one: Replica, model: Model | None, hysteresis: Hysteresis) -> float | None:
    """Return when a replica that is not SOUND must be replaced; None: not as things are.

    Control says which are UNFIT, and how long doubts may last. What is away, or was never checked, has the time of a
    takeover and of a load: as its first one took, twice, or as long as the model may take."""
    if one.health in (Health.SOUND, Health.DOUBTED) or one.level is not Level.HOT or one.phase not in _HAS_HEALTH:
        return None
    if one.health is Health.UNFIT:
        return one.ill_s
    load_s = COPY_S if model is None else model.load_s
    return one.ill_s + hysteresis.takeover_s + (min(load_s, 2 * one.came_s) if one.came_s > 0 else load_s)


def removal_order(one: Replica) -> int:
    """Return a place in the order in which replicas leave; one that is not up yet stands behind what cannot answer."""
    if not one.is_up:
        return 1
    return 0 if one.health is Health.AWAY else 1 + RANK[one.health]


def least_fit_first(one: Replica) -> tuple[int, int, int]:
    """Return a key that puts replicas first that serve least; of equals the oldest, as versions are replaced."""
    return RANK[one.health], 0 if one.serves else one.running, one.serial


# -- counting


def count_replicas(
    key: str,
    model: Model | None,
    replicas: Iterable[Replica],
    pending: Iterable[PendingAction],
    nodes: Mapping[str, Node],
    tries: Mapping[str, Tries],
    demand: Demand | None,
    now_s: float,
    hysteresis: Hysteresis,
    is_drained: Callable[[str], bool],
) -> ModelCount:
    """Count one model from its own replicas and actions. `model` None: it is no longer desired. `is_drained`: whether
    the replicas of a node are to be replaced on others."""
    counter = _Counter(key, model, replicas, pending, nodes, tries, now_s, hysteresis)
    return counter.run(demand, is_drained)


class _Counter:
    def __init__(
        self,
        key: str,
        model: Model | None,
        replicas: Iterable[Replica],
        pending: Iterable[PendingAction],
        nodes: Mapping[str, Node],
        tries: Mapping[str, Tries],
        now_s: float,
        hysteresis: Hysteresis,
    ) -> None:
        self.hysteresis = hysteresis
        self.model, self.nodes, self.tries, self.now_s = model, nodes, tries, now_s
        self.count = ModelCount(key, model)
        self.replicas = sorted(replicas, key=lambda one: one.serial)
        self.pending: dict[int, list[PendingAction]] = {}
        for one in pending:
            self.pending.setdefault(one.action.serial, []).append(one)
        self.hot: list[Replica] = []  # that serve, or are coming up
        self.warm: list[Replica] = []
        self.coming = Counter[Level]()  # placed and not observed yet
        self.running = 0
        self.demoting = 0  # replicas on their way to WARM

    def run(self, demand: Demand | None, is_drained: Callable[[str], bool]) -> ModelCount:
        there = [one for one in self.replicas if self._is_alive(one.node)]
        causes = ((one.serial, self._cause(one, is_drained)) for one in there)
        self.count.replaced = {serial: cause for serial, cause in causes if cause is not None}
        for one in there:
            self._count(one)
        self._count_not_observed()
        if self.model is None:
            for one in (*self.hot, *self.warm):
                self._remove(one, ReplaceCause.UNWANTED)
            return self.count
        count, waits = self.count, demand is not None and demand.waiting > 0
        count.waiting_since_s = demand.since_unix_s if demand is not None and waits else 0.0
        self._balance(self.model, asked=waits or self.running > 0)
        return count

    # -- what is there

    def _is_alive(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node].alive

    def _count(self, one: Replica) -> None:
        asked = self.pending.get(one.serial, [])
        verbs = {pending.action.verb for pending in asked}
        self.running += one.running
        if one.phase is ReplicaPhase.GONE:
            self._free_memory(one)
        elif any(pending.overdue for pending in asked):
            self._intend(Verb.STOP, one.serial, one.node, "it took too long")
        elif verbs & LEAVING:
            self.demoting += Verb.DEMOTE in verbs and self._is_current(one)
            self._count_leaving(one, is_draining=Verb.DRAIN in verbs)
        elif one.phase is ReplicaPhase.DRAINING:
            self._continue_drain(one)
        elif one.phase is ReplicaPhase.DEMOTING:
            self.demoting += not self._stop_if_late(one, one.since_s + COPY_S) and self._is_current(one)
            self._count_leaving(one, is_draining=False)
        elif (
            one.phase is ReplicaPhase.PROVISIONING and not verbs & COMING and self._stop_if_late(one, self._due_s(one))
        ):
            return
        elif one.health is Health.AWAY and self._is_unfit(one):
            self._count_leaving(one, is_draining=False)
            self.count.failed_nodes.add(one.node)
            self._intend(Verb.STOP, one.serial, one.node, self._unfit_reason(one))
        elif one.level is Level.HOT or Verb.PROMOTE in verbs:
            self.hot.append(one)
            self.count.hot_on[one.node] += 1
        else:
            self.warm.append(one)

    def _due_s(self, one: Replica) -> float:
        return one.since_s + (COPY_S if self.model is None else self.model.load_s)

    def _stop_if_late(self, one: Replica, until_s: float) -> bool:
        """Stop a replica that is late though no pending action explains it; return whether it was."""
        if self.now_s < until_s:
            self._look_again(until_s)
            return False
        self._intend(Verb.STOP, one.serial, one.node, "it took too long")
        return True

    def _count_leaving(self, one: Replica, *, is_draining: bool) -> None:
        self.count.hot_leaving += one.level is Level.HOT
        self.count.warm_changing += one.level is Level.WARM
        if is_draining and self._is_current(one):
            self.count.draining.append(one)

    def _continue_drain(self, one: Replica) -> None:
        self._count_leaving(one, is_draining=False)
        if one.running > 0 and not one.drain_until_s:
            self._intend(Verb.DRAIN, one.serial, one.node, "nobody knows until when it drains")
        elif one.running > 0 and self.now_s < one.drain_until_s:
            self._look_again(one.drain_until_s)
            if self._is_current(one):
                self.count.draining.append(one)
        elif self._is_current(one) and subject_of(Verb.DEMOTE, one.name) not in self.tries:
            self.count.drained.append(one)
        else:
            self._intend(Verb.STOP, one.serial, one.node, "it has drained")

    def _free_memory(self, one: Replica) -> None:
        """Stop a replica whose processes are gone and whose memory is still leased: memory outlives processes."""
        node = self.nodes[one.node]
        if any(one.name in memory.leases for memory in (node.host, *node.devices.values())):
            self._intend(Verb.STOP, one.serial, one.node, "its process is gone, and its memory is not")

    def _count_not_observed(self) -> None:
        observed = {one.serial for one in self.replicas}
        for serial, asked in self.pending.items():
            action = asked[0].action
            if serial in observed or not self._is_alive(action.node):
                continue
            placed = next((one for one in asked if one.action.verb is Verb.PLACE), None)
            if placed is None or any(one.action.verb is Verb.STOP for one in asked):
                continue
            if placed.overdue:  # it may be there all the same
                self._intend(Verb.STOP, serial, action.node, "nobody knows whether it was started")
                continue
            self.coming[action.level] += 1
            if action.level is Level.HOT:
                self.count.hot_on[action.node] += 1

    def _cause(self, one: Replica, is_drained: Callable[[str], bool]) -> ReplaceCause | None:
        """Return why a replica is to be replaced; None: it may stay."""
        if self.model is None:
            return ReplaceCause.UNWANTED
        if one.serial in self.model.going:
            return ReplaceCause.EVICTED
        if one.version != self.model.version:
            return ReplaceCause.VERSION
        if is_drained(one.node):
            return ReplaceCause.DRAINED
        return ReplaceCause.UNFIT if self._is_unfit(one) else None

    def _is_current(self, one: Replica) -> bool:
        """Return True if it may stay."""
        return one.serial not in self.count.replaced

    def _why_replaced(self, one: Replica) -> str:
        cause = self.count.replaced[one.serial]
        if cause is not ReplaceCause.UNFIT:
            return cause
        return self._unfit_reason(one) if self.model is not None and self.model.hot else FEWER

    def _is_unfit(self, one: Replica) -> bool:
        due_s = unfit_s(one, self.model, self.hysteresis)
        if due_s is None or self.now_s >= due_s:
            return due_s is not None
        self._look_again(due_s)
        return False

    def _unfit_reason(self, one: Replica) -> str:
        """Return why an unfit replica is replaced."""
        if one.health is Health.UNFIT:
            return f"control asks for another in its place: {one.ill_why or one.health}"
        due_s = unfit_s(one, self.model, self.hysteresis) or one.ill_s
        return f"it did not serve for {due_s - one.ill_s:.0f} s: {one.ill_why or one.health}"

    # -- what is missing, and what is surplus

    def _balance(self, model: Model, *, asked: bool) -> None:
        count = self.count
        new = [one for one in self.hot if self._is_current(one)]
        others = [one for one in self.hot if not self._is_current(one)]
        count.outdated_hot = sorted((one for one in others if one.is_up), key=least_fit_first)
        serving_outdated = [one for one in count.outdated_hot if one.serves]
        have = len(new) + self.coming[Level.HOT]
        self._remove_unready(model, [one for one in others if not one.is_up], have + len(count.outdated_hot))
        missing = max(0, model.hot - have)
        if count.outdated_hot:
            missing = min(missing, max(0, model.hot + self._surge(model) - have - len(count.outdated_hot)))
        places = range(have, have + missing)
        # While others of the model serve, none is the first.
        count.needs = [self._need(model, place, place + len(serving_outdated), asked=asked) for place in places]
        serving = [one for one in new if one.is_up]
        count.hot_coming = have - len(serving)
        sound = sum(one.serves for one in serving)
        self._retire([one for one in count.outdated_hot if not one.serves], sound + len(count.outdated_hot) - model.hot)
        self._remove_surplus(new, have - model.hot, spare=sound - model.hot)
        staying = sum(one.serves and one.serial not in self._decided() for one in serving)
        self._retire(serving_outdated, staying + len(serving_outdated) - model.hot)
        self._keep_last([*serving, *count.outdated_hot])
        self._rank_victims(model, [*serving, *count.outdated_hot], asked=asked)
        self._count_warm(model, have)
        self._keep_floor(model, have, serving)

    def _remove_unready(self, model: Model, outdated: list[Replica], others: int) -> None:
        """Remove replicas that are to be replaced and are not up yet. On a drained node one goes on as long as it is
        needed beside `others`: there may be no room anywhere else."""
        outdated = [one for one in outdated if not self._may_come_up(model, one)]
        moving = [one for one in outdated if self.count.replaced[one.serial] is ReplaceCause.DRAINED]
        leaving = [one for one in outdated if one not in moving]
        for one in (*leaving, *moving[: max(0, others + len(moving) - model.hot)]):
            self._remove(one, self._why_replaced(one))

    def _surge(self, model: Model) -> int:
        """Return how many more than desired may be started to replace others."""
        asked = sum(self.count.replaced[one.serial] is not ReplaceCause.VERSION for one in self.count.outdated_hot)
        return max(1, min(asked, model.hot // SURGE_SHARE))

    def _keep_last(self, there: list[Replica]) -> None:
        """Note the replica that only its health would remove, if it is the only one that can answer."""
        answering = [one for one in there if one.health is not Health.AWAY and one.serial not in self._decided()]
        if len(answering) == 1 and not answering[0].serves and self._is_blameless(answering[0]):
            self.count.last_answering = answering[0].serial

    def _is_blameless(self, one: Replica) -> bool:
        """Return True if neither an operator nor another version wants it to leave."""
        return self.count.replaced.get(one.serial) not in (ReplaceCause.EVICTED, ReplaceCause.VERSION)

    def _need(self, model: Model, place: int, others: int, *, asked: bool) -> Need:
        """Return the need of the replica at that place among its model's, with so many others; the first matters
        most."""
        if model.dedicated or (model.floor is Level.HOT and place < model.replicas_min):
            return Need.KEPT
        if not asked:
            return Need.IDLE
        return Need.FIRST if others == 0 else Need.MORE

    def _remove_surplus(self, new: list[Replica], surplus: int, *, spare: int) -> None:
        """Remove surplus replicas: first those that cannot answer, then those that are not up yet, that are in doubt,
        and that have the least to do. One that is being promoted is let come up. `spare`: so many of those that serve
        are surplus; none leaves for one that is still coming."""
        there = [one for one in new if one.level is Level.HOT]
        order = sorted(there, key=lambda one: (removal_order(one), one.running, one.idle_s or one.since_s))
        for one in order[: max(0, surplus)]:
            settled_s = one.since_s + self.hysteresis.resident_s
            if one.serves and spare <= 0:
                continue
            spare -= one.serves
            if one.serves and self.now_s < settled_s:
                self._look_again(settled_s)
            elif not self._is_being_promoted(one):
                self._remove(one, FEWER)

    def _retire(self, outdated: list[Replica], surplus: int) -> None:
        for one in outdated[: max(0, surplus)]:
            self._remove(one, self._why_replaced(one))

    def _rank_victims(self, model: Model, serving: list[Replica], *, asked: bool) -> None:
        """List the replicas that may be evicted; the last matters most."""
        decided = self._decided()
        order = sorted(self._victim(model, one) for one in serving if one.serial not in decided)
        for place, one in enumerate(reversed(order)):
            need = self._need(model, place, place, asked=asked)
            if need is not Need.KEPT:
                size = (one.idle_minute, one.size, one.reload_s, one.name)
                self.count.victims.append(Victim(need, one.health, one.busy, *size, one.replica))

    def _victim(self, model: Model, one: Replica) -> Victim:
        minute, size = int((one.idle_s or one.since_s) // IDLE_STEP_S), one.device_bytes * len(one.devices)
        return Victim(Need.IDLE, RANK[one.health], one.running > 0, minute, size, model.reload_s, one.name, one)

    def _count_warm(self, model: Model, have: int) -> None:
        count, now_s = self.count, self.now_s
        warm = [one for one in self.warm if self._is_current(one)]
        needed = max(0, model.kept - have)
        surplus = sorted(warm, key=lambda one: (one.since_s, one.serial))[: max(0, len(warm) - needed)]
        count.surplus_warm = [one for one in surplus if one.phase is ReplicaPhase.READY]
        for one in count.surplus_warm:
            if now_s >= one.since_s + self.hysteresis.linger_s:
                self._intend(Verb.STOP, one.serial, one.node, "nobody wanted it for long")
            else:
                self._look_again(one.since_s + self.hysteresis.linger_s)
        decided = self._decided()
        ready = [one for one in warm if one.phase is ReplicaPhase.READY and one.serial not in decided]
        count.promotable = [one for one in ready if self._may_retry(Verb.PROMOTE, one.name)]

    def _may_come_up(self, model: Model, one: Replica) -> bool:
        """Return True if it is being promoted and a floor lets it come up; it then leaves as one that serves does."""
        return model.floored > 0 and self._is_being_promoted(one)

    def _is_being_promoted(self, one: Replica) -> bool:
        """Return True if it comes from WARM: stopped on its way, it would have to be loaded from disk."""
        return Verb.PROMOTE in {pending.action.verb for pending in self.pending.get(one.serial, [])}

    def _keep_floor(self, model: Model, have: int, serving: list[Replica]) -> None:
        """Count what a floor misses. It counts replicas of any version; outdated ones leave one by one, each for one
        that came."""
        count, floor = self.count, model.floored
        warm = [one for one in self.warm if self._is_current(one)]
        others = [one for one in self.warm if not self._is_current(one)]
        count.outdated_warm = [one for one in others if one.phase is ReplicaPhase.READY]
        for one in others:
            if one.phase is not ReplicaPhase.READY and count.replaced[one.serial] is not ReplaceCause.DRAINED:
                self._remove(one, self._why_replaced(one))
        demoting = self.demoting + len(count.drained) + len(count.draining)
        own = have + len(warm) + self.coming[Level.WARM] + demoting
        decided = self._decided()
        ready = [one for one in (*serving, *count.outdated_hot) if one.serves]
        ready += [one for one in self.warm if one.phase is ReplicaPhase.READY]
        ready = [one for one in ready if one.serial not in decided]
        self._retire(count.outdated_warm, len(ready) - floor)
        old = sum(not self._is_current(one) for one in ready)
        old += sum(not self._is_current(one) and self._may_come_up(model, one) for one in self.hot)
        count.warm_missing = max(0, floor - own if not old else min(floor - own, floor + 1 - own - old))
        count.warm_changing += (
            self.coming[Level.WARM] + demoting + sum(one.phase is not ReplicaPhase.READY for one in self.warm)
        )

    def _decided(self) -> set[int]:
        """Return the serials of replicas for which an action is decided."""
        return {intent.serial for intent in self.count.intents}

    # -- decisions

    def _remove(self, one: Replica, why: str) -> None:
        answers = one.is_up and one.health is not Health.AWAY
        drains = one.level is Level.HOT and (answers or one.running > 0)
        self._intend(Verb.DRAIN if drains else Verb.STOP, one.serial, one.node, why)

    def _intend(self, verb: Verb, serial: int, node: str, why: str) -> None:
        name = replica_name(self.count.key, serial)
        asked = {pending.action.verb for pending in self.pending.get(serial, [])}
        if verb not in asked and Verb.STOP not in asked and self._may_retry(verb, name):
            self.count.intents.append(Intent(verb, serial, node, why))

    def _may_retry(self, verb: Verb, whose: str) -> bool:
        """Return False while the back-off after the last failure lasts."""
        tries = self.tries.get(subject_of(verb, whose))
        if tries is None or self.now_s >= tries.retry_at_s:
            return True
        self._look_again(tries.retry_at_s)
        return False

    def _look_again(self, at_s: float) -> None:
        self.count.next_s = at_s if self.count.next_s is None else min(self.count.next_s, at_s)
