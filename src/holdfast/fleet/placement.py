"""Decides in one pass which replicas get which devices and which host memory, and which replicas are evicted for them.
Pure.

Missing HOT replicas are placed in the order of their need, then of how long their requests have waited. For each, in
turn: promote a WARM replica of the model whose node has room; start one where there is room; wait for room that others
are leaving; swap with an outdated replica of the same model, one at a time; evict replicas of other models. Those are
evictable replicas of lesser need, or of the same: where two models have requests and there is room for one, they take
turns. They are evicted in the order of `Victim`. A replica that became HOT a moment ago is not evicted, for longer
where the newcomer's need is the same.

A drained replica is demoted to host memory if that has room, and else stopped. To make room there, WARM replicas that
no floor needs are stopped, the oldest and smallest first; the drained one waits for them no longer than its requests
had time.

Always true: nothing is given that a lease, a replica, a pending action or another placement of this pass has; a replica
that serves is only ever told to drain; a replica whose need is KEPT is never evicted; no replica comes to a cordoned
node. A replica that is to come has taken its room before the next one is placed; what a leaving replica holds counts as
room for later at once, as it will in the next pass when its action is pending, and counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from holdfast.fleet.actions import ASK_S, COPY_S, Action, Verb, node_subject, replica_name, subject_of
from holdfast.fleet.counts import IDLE_STEP_S, ModelCount, Need, ReplaceCause, Victim, unfit_s
from holdfast.fleet.desired import Hysteresis, Level, Model
from holdfast.fleet.observed import Replica, ReplicaPhase
from holdfast.fleet.room import HOST, FleetRoom, NodeRoom, is_stuck
from holdfast.fleet.view import FleetView

DRAIN_S = 30.0  # of a model that is no longer desired, whose own time is not known
FAILED = "it failed to start"  # and is not tried again at once
NO_ROOM = "there is no room for it"
NO_HOST = "no host has memory for it"
NO_DEVICE = "its weights come to host memory by way of a device, and none has room for it"
LOOK_AGAIN_S = 5.0  # for models that found no room: replicas that were too new to be evicted may be old enough then
CANDIDATES_MAX = 16  # nodes that are compared for one replica: the tightest that fit are alike


class PlanPass:
    """What one pass has decided: actions with their ids and deadlines, and the room that each takes or frees."""

    def __init__(self, view: FleetView, room: FleetRoom, now_s: float) -> None:
        self.view, self.room, self.now_s = view, room, now_s
        self.actions: dict[str, Action] = {}  # by id
        self.unmet: dict[str, str] = {}  # by model, why it misses a replica
        self.next_s: float | None = None
        self.decided: set[str] = set()  # replicas that an action is about
        self.changed_models: set[str] = set()  # models of those
        self.emptied: set[str] = set()  # nodes that a replica is to leave
        self._added = Counter[tuple[str, str]]()  # HOT replicas that are to come, by model and node
        self._spreads: dict[tuple[str, str], Counter[str]] = {}  # by model and node
        self._used = Counter[str]()  # serials, by model

    def look_again(self, at_s: float) -> None:
        """Plan again at that time at the latest."""
        self.next_s = at_s if self.next_s is None else min(self.next_s, at_s)

    def hot_on(self, count: ModelCount, node: str) -> int:
        """Return how many HOT replicas of a model a node has, with those to come."""
        return count.hot_on[node] + self._added[count.key, node]

    def may_place_on(self, count: ModelCount, model: Model, node: str) -> bool:
        fits = not model.per_node_max or self.hot_on(count, node) < model.per_node_max
        return fits and node not in self.view.cordons and model.may_be_on(node) and self.may_retry(node_subject(node))

    def may_retry(self, subject: str) -> bool:
        """Return False while the back-off after the last failure lasts."""
        return self.view.may_retry(subject, self.now_s)

    # -- up

    def next_serial(self, key: str) -> int:
        """Return a serial that no replica of the model ever had."""
        self._used[key] += 1
        return self.view.serials.get(key, 0) + self._used[key]

    def take_later(self, model: Model, node: str, devices: Sequence[str]) -> None:
        """Reserve devices for a replica that comes when others have left."""
        self._added[model.key, node] += 1
        self.room.take_later(node, devices, model.device_bytes)

    def bring_up(
        self, verb: Verb, model: Model, serial: int, node: str, level: Level = Level.HOT, devices: tuple[str, ...] = ()
    ) -> None:
        """Place or promote a replica; one that is to be WARM is loaded by way of the devices. `devices`: those that it
        must have; empty: the best ones of the node."""
        name, spread = replica_name(model.key, serial), self._spread(model.key, node)
        devices = devices or self.room.nodes[node].choose_devices(model.devices, model.device_bytes, spread)
        self.room.take(node, devices, model.device_bytes)
        if level is Level.HOT:
            spread.update(devices)
            self._added[model.key, node] += 1
        else:
            self.room.take(node, (HOST,), model.host_bytes)
        self._add(
            Action(
                verb=verb,
                model=model.key,
                serial=serial,
                node=node,
                turn=self._turn(name),
                attempt=self.view.next_attempt(verb, name),
                deadline_s=self.now_s + (model.load_s if verb is Verb.PLACE else COPY_S),
                version=model.version,
                level=level,
                devices=devices,
                device_bytes=model.device_bytes,
                host_bytes=model.host_bytes,
            )
        )

    def _spread(self, key: str, node: str) -> Counter[str]:
        """Return how many replicas of a model each device of a node has, with those to come: a device that fails should
        take few of one model. Kept for the pass."""
        spread = self._spreads.get((key, node))
        if spread is None:
            pending = self.view.pending_on.get(node, {}).values()
            coming = {one.action.name: one.action.devices for one in pending if one.action.model == key}
            there = self.view.on_node.get(node, {}).values()
            observed = {one.name: one.devices for one in there if one.model == key and one.on_devices}
            spread = self._spreads[key, node] = Counter()
            for devices in (coming | observed).values():
                spread.update(devices)
        return spread

    # -- down

    def take_down(self, verb: Verb, key: str, serial: int, node: str, why: str, host: int = 0) -> None:
        """Drain, demote or stop a replica."""
        name, model = replica_name(key, serial), self.view.models.get(key)
        one = self.view.replicas.get(name)
        if one is not None and node in self.room.nodes:
            self._release(one, whole=verb is Verb.STOP)
        until_s = self.now_s + (model.drain_s if model is not None else DRAIN_S)
        if one is not None and one.phase in (ReplicaPhase.DRAINING, ReplicaPhase.DEMOTING) and one.drain_until_s:
            until_s = one.drain_until_s
        self._add(
            Action(
                verb=verb,
                model=key,
                serial=serial,
                node=node,
                turn=self._turn(name),
                attempt=self.view.next_attempt(verb, name),
                deadline_s=max(self.now_s, until_s) + (COPY_S if verb is Verb.DEMOTE else ASK_S),
                level=Level.WARM if verb is Verb.DEMOTE else Level.COLD,
                host_bytes=host,
                until_s=until_s,
                why=why,
            )
        )

    def _release(self, one: Replica, *, whole: bool) -> None:
        """Count what a replica holds as free later, unless it is counted so already, or an earlier order to leave came
        to nothing."""
        if is_stuck(one.name, one, self.view.tries) or one.name in self.decided:
            return
        more = self.held_bytes(one) if one.name not in self.room.nodes[one.node].leaving else {}
        if whole and one.in_host:
            more = {**more, HOST: max(one.host_bytes, self.view.nodes[one.node].host.leases.get(one.name, 0))}
        if more:
            self.room.free_later(one.node, more)
            self.emptied.add(one.node)

    def held_bytes(self, one: Replica) -> dict[str, int]:
        """Return what a replica has on each of its devices, promised or granted."""
        devices = self.view.nodes[one.node].devices
        there = {device: devices[device].leases.get(one.name, 0) for device in one.devices if device in devices}
        return {device: max(size, one.device_bytes * one.on_devices) for device, size in there.items()}

    def _turn(self, name: str) -> int:
        one = self.view.replicas.get(name)
        return 0 if one is None else one.turn

    def _add(self, action: Action) -> None:
        self.decided.add(action.name)
        self.changed_models.add(action.model)
        self.actions[action.id] = action


class Placement:
    """One pass over the models that miss a replica or have one to move. `victims` are sorted; `surplus_warm`: by node,
    WARM replicas that no floor needs."""

    def __init__(
        self,
        view: FleetView,
        room: FleetRoom,
        victims: Sequence[Victim],
        surplus_warm: Mapping[str, Mapping[str, Replica]],
        now_s: float,
        hysteresis: Hysteresis,
    ) -> None:
        self.hysteresis = hysteresis
        self.view, self.room, self.now_s = view, room, now_s
        self.victims = victims
        self.planned = PlanPass(view, room, now_s)
        self.host = HostPlacement(view, room, self.planned, surplus_warm)
        self.unplaceable: list[tuple[Need, int, int]] = []  # needs, devices and sizes for which no eviction is enough

    def run(self, active: Sequence[ModelCount]) -> PlanPass:
        """Decide for these models, which are sorted by key."""
        for count in active:
            for intent in count.intents:
                self.planned.take_down(intent.verb, count.key, intent.serial, intent.node, intent.why)
        for count in active:
            self.host.demote_drained(count)
        missing = [
            (-need, count.waiting_since_s or self.now_s, place, count.key)
            for count in active
            for place, need in enumerate(count.needs)
        ]
        by_key, placed = {count.key: count for count in active}, Counter[str]()
        for negative, _, _, key in sorted(missing):
            placed[key] += self._bring_up_one(by_key[key], Need(-negative))
        for count in active:
            for _ in range(count.warm_missing - placed[count.key]):
                self.host.place_warm(count)
        return self.planned

    def _bring_up_one(self, count: ModelCount, need: Need) -> int:
        """Place a missing HOT replica, or make room for it; return 1 if it will be one more than there is now."""
        model = count.model
        assert model is not None, "only what is wanted is missing"
        if self._promote(count, model):
            return 0
        backing_off = not self.planned.may_retry(subject_of(Verb.PLACE, model.key))
        if not backing_off and self._start(count, model):
            return 1
        where = {one.node for one in count.promotable if one.name not in self.planned.decided} if backing_off else None
        if (
            self._wait_for_room(count, model, where)
            or self._swap(count, model)
            or self._evict(count, model, need, where)
        ):
            self.planned.unmet[model.key] = "room is being made for it"
            return 1
        self.planned.unmet[model.key] = FAILED if backing_off else NO_ROOM
        self.planned.look_again(self.now_s + LOOK_AGAIN_S)
        if backing_off:
            self.planned.look_again(self.view.tries[subject_of(Verb.PLACE, model.key)].retry_at_s)
        return 0

    def _promote(self, count: ModelCount, model: Model) -> bool:
        """Make a WARM replica HOT on the devices of its vaults."""
        found: tuple[int, str, Replica] | None = None
        for one in count.promotable:
            node = self.room.nodes.get(one.node)
            if node is None or one.name in self.planned.decided:
                continue
            if not self.planned.may_place_on(count, model, one.node):
                continue
            available = node.available_on(one.devices, model.devices)
            if available >= model.device_bytes and (found is None or (available, one.name) < found[:2]):
                found = available, one.name, one
        if found is None:
            return False
        self.planned.bring_up(Verb.PROMOTE, model, found[2].serial, found[2].node, devices=found[2].devices)
        return True

    def _start(self, count: ModelCount, model: Model) -> bool:
        """Start a replica where there is room: if possible not where one of the model has just failed, on a node that
        has none of it yet, then on one with its files. `PlanPass.bring_up` chooses the devices."""
        disks, best, seen = self.view.on_disk.get(model.key, set()), None, 0
        for node in self._nodes_with_room(model):
            if not self.planned.may_place_on(count, model, node.name):
                continue
            cost = (node.name in count.failed_nodes, self.planned.hot_on(count, node.name), node.name not in disks)
            if best is None or cost < best[0]:
                best = cost, node.name
            seen += 1
            if cost == (False, 0, bool(not disks)) or seen >= CANDIDATES_MAX:
                break
        if best is None:
            return False
        self.planned.bring_up(Verb.PLACE, model, self.planned.next_serial(model.key), best[1])
        return True

    def _nodes_with_room(self, model: Model) -> Iterator[NodeRoom]:
        """Yield nodes that have room for one replica, first those with its files; some may come twice."""
        devices, size = model.devices, model.device_bytes
        named = model.nodes or self.view.on_disk.get(model.key, set())
        yield from (self.room.nodes[name] for name in sorted(named) if self.room.fits(name, devices, size))
        if not model.nodes:
            yield from self.room.fitting(devices, size)

    def _wait_for_room(self, count: ModelCount, model: Model, where: set[str] | None) -> bool:
        """Reserve room that other replicas are leaving."""
        homes = {one.node for one in count.promotable if one.name not in self.planned.decided}
        for name in sorted(self.room.emptying | self.planned.emptied, key=lambda name: (name not in homes, name)):
            if (where is None or name in where) and self.planned.may_place_on(count, model, name):
                devices = self.room.nodes[name].devices_later(model.devices, model.device_bytes, {})
                if devices:
                    self.planned.take_later(model, name, devices)
                    return True
        return False

    def _swap(self, count: ModelCount, model: Model) -> bool:
        """Drain an outdated replica of the model and reserve its room, if no other of the model leaves or comes."""
        if count.hot_leaving or count.hot_coming or model.key in self.planned.changed_models:
            return False
        for one in (one for one in count.outdated_hot if one.serial != count.last_answering):
            more = self.planned.held_bytes(one)
            devices = self.room.nodes[one.node].devices_later(model.devices, model.device_bytes, more)
            may_be = one.node not in self.view.cordons and model.may_be_on(one.node)
            if devices and may_be and self.planned.may_retry(node_subject(one.node)):
                is_unfit = count.replaced[one.serial] is ReplaceCause.UNFIT
                why = "its replacement takes its place" if is_unfit else "the next version needs its place"
                self.planned.take_down(Verb.DRAIN, one.model, one.serial, one.node, why)
                self.planned.take_later(model, one.node, devices)
                return True
        return False

    def _evict(self, count: ModelCount, model: Model, need: Need, where: set[str] | None) -> bool:
        """Evict replicas of other models, on one node and no more than needed, and reserve their room."""
        is_bound = bool(where is not None or model.nodes or model.per_node_max)
        asked = (need, model.devices, model.device_bytes)
        if any(need <= one[0] and asked[1] >= one[1] and asked[2] >= one[2] for one in self.unplaceable):
            return False
        found: dict[str, list[Victim]] = {}
        for victim in self._evictable(model.key, need):
            node = victim.replica.node
            if (where is None or node in where) and self.planned.may_place_on(count, model, node):
                found.setdefault(node, []).append(victim)
                if self._fits_without(model, node, found[node]):
                    self._evict_from(model, node, found[node])
                    return True
        if not is_bound:
            self.unplaceable.append(asked)
        return False

    def _evictable(self, key: str, need: Need) -> Iterator[Victim]:
        for victim in self.victims:
            if victim.need > need or (victim.need == need and need is not Need.FIRST):
                return
            if victim.name in self.planned.decided or victim.replica.model == key:
                continue
            as_much = self.hysteresis.cooldown_s if victim.need == need else 0.0
            settled_s = victim.replica.since_s + max(self.hysteresis.resident_s, as_much)
            # One that does not serve keeps its place for as long as it may still recover: else models that just came
            # up, and were not checked yet, would evict each other.
            unfit_at_s = unfit_s(victim.replica, None, self.hysteresis)
            settled_s = settled_s if unfit_at_s is None else min(settled_s, unfit_at_s)
            if self.now_s < settled_s:
                self.planned.look_again(settled_s)
            elif self.planned.may_retry(subject_of(Verb.DRAIN, victim.name)):
                yield victim

    def _fits_without(self, model: Model, node: str, leavers: Sequence[Victim]) -> bool:
        more = Counter[str]()
        for one in leavers:
            more.update(self.planned.held_bytes(one.replica))
        return bool(self.room.nodes[node].devices_later(model.devices, model.device_bytes, more))

    def _evict_from(self, model: Model, node: str, found: list[Victim]) -> None:
        for one in reversed(found[:-1]):
            rest = [other for other in found if other is not one]
            found = rest if self._fits_without(model, node, rest) else found
        for one in found:
            why = f"{model.key} needs its place"
            self.planned.take_down(Verb.DRAIN, one.replica.model, one.replica.serial, node, why)
        devices = self.room.nodes[node].devices_later(model.devices, model.device_bytes, {})
        self.planned.take_later(model, node, devices)


class HostPlacement:
    """The part of a pass that is about host memory. `surplus_warm`: by node, WARM replicas that no floor needs."""

    def __init__(
        self,
        view: FleetView,
        room: FleetRoom,
        planned: PlanPass,
        surplus_warm: Mapping[str, Mapping[str, Replica]],
    ) -> None:
        self.view, self.room, self.planned, self.surplus_warm = view, room, planned, surplus_warm
        self.now_s = planned.now_s

    def demote_drained(self, count: ModelCount) -> None:
        """Demote the drained replicas of a model, or stop those for which their host has no memory."""
        model = count.model
        if model is None:
            return
        for one in count.draining:
            self._find_host_room(model, one)
        for one in count.drained:
            found = self._find_host_room(model, one)
            if found:
                why = "it has drained"
                self.planned.take_down(Verb.DEMOTE, model.key, one.serial, one.node, why, host=model.host_bytes)
            elif found is None and self.now_s < one.drain_until_s:
                self.planned.look_again(one.drain_until_s)
            else:
                why = "its host has no memory for it" if model.host_bytes else "it has drained, and is never WARM"
                self.planned.take_down(Verb.STOP, model.key, one.serial, one.node, why)

    def _find_host_room(self, model: Model, one: Replica) -> bool | None:
        """Take host memory for a replica; return whether there is any. None: it will be there when others have left."""
        lease = self.view.nodes[one.node].host.leases.get(one.name, 0)
        more, node = model.host_bytes - lease, self.room.nodes[one.node]
        if model.host_bytes == 0:
            return False
        if node.available(HOST) >= more:
            self.room.take(one.node, (HOST,), max(0, more))
            return True
        return None if self._drop_surplus(node, more) else False

    def _drop_surplus(self, node: NodeRoom, size: int) -> bool:
        """Stop surplus WARM replicas of a node, if that frees so much of its host's memory; return whether it does."""
        surplus = [
            one for name, one in self.surplus_warm.get(node.name, {}).items() if name not in self.planned.decided
        ]
        surplus.sort(key=lambda one: (one.since_s // IDLE_STEP_S, one.host_bytes, one.name))
        lacking, dropped = size - node.later[HOST], 0
        while lacking > sum(one.host_bytes for one in surplus[:dropped]):
            if dropped == len(surplus):
                return False
            dropped += 1
        for one in surplus[:dropped]:
            self.planned.take_down(Verb.STOP, one.model, one.serial, one.node, "its host memory is needed")
        self.room.take_later(node.name, (HOST,), size)
        return True

    def place_warm(self, count: ModelCount) -> None:
        """Start a WARM replica that a floor needs, or make room for it."""
        model, planned = count.model, self.planned
        assert model is not None, "only what is wanted has a floor"
        if not model.host_bytes or not planned.may_retry(subject_of(Verb.PLACE, model.key)):
            planned.look_again(self.now_s + LOOK_AGAIN_S)
            if model.host_bytes:
                planned.unmet.setdefault(model.key, FAILED)
            return
        for node in self.room.fitting(0, model.host_bytes):
            fits = node.kth_available(model.devices) >= model.device_bytes  # it is loaded by way of them
            if fits and planned.may_place_on(count, model, node.name):
                planned.bring_up(Verb.PLACE, model, planned.next_serial(model.key), node.name, Level.WARM)
                return
        planned.look_again(self.now_s + LOOK_AGAIN_S)
        hosts = any(planned.may_place_on(count, model, one.name) for one in self.room.fitting(0, model.host_bytes))
        planned.unmet.setdefault(model.key, NO_DEVICE if hosts else NO_HOST)
        for name in sorted(self.surplus_warm) if not hosts else ():
            may_place = planned.may_place_on(count, model, name)
            if may_place and self._drop_surplus(self.room.nodes[name], model.host_bytes):
                return
        self._swap(count, model)

    def _swap(self, count: ModelCount, model: Model) -> None:
        """Stop outdated WARM replicas of the model, no more than one new replica needs, if no other of it leaves or
        comes. Those that an operator evicts by name are stopped in any case."""
        if count.hot_leaving or count.hot_coming or count.warm_changing or model.key in self.planned.changed_models:
            return
        ways: list[tuple[int, str, list[Replica]]] = []
        for name in sorted({one.node for one in count.outdated_warm}):
            node = self.room.nodes[name]
            has_devices = node.kth_available(model.devices) >= model.device_bytes
            if has_devices and self.planned.may_place_on(count, model, name):
                there = [one for one in count.outdated_warm if one.node == name]
                rooms = accumulate((one.host_bytes for one in there), initial=node.later[HOST])
                enough = next((number for number, room in enumerate(rooms) if room >= model.host_bytes), None)
                ways += [(enough, name, there[:enough])] if enough is not None else []
        _, name, leavers = min(ways, default=(0, "", []))
        if not ways:
            leavers = [one for one in count.outdated_warm if count.replaced[one.serial] is ReplaceCause.EVICTED][:1]
        for one in leavers:
            self.planned.take_down(Verb.STOP, one.model, one.serial, one.node, "another one needs its place")
        if ways:
            self.room.take_later(name, (HOST,), model.host_bytes)
