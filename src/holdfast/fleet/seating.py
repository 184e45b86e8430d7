"""Who gets which devices, beside all others: one pass over the models that miss something or have somebody to move.

Theory. Whoever is missing stands in line by need, then by how long its requests have waited. Each looks in turn for: a
WARM replica of its own whose node has room; room anywhere; room that will be there when those have left who leave now;
an old version of its own to swap with, one at a time; and last for others who must give way. Those are replicas that
are evictable and matter less, or as much: where two models have requests and there is room for one, they take turns.
They give way in the order of `Victim`: who matters least, runs nothing, is idle for longest, is smallest, is cheapest
to load again. Who was made HOT a moment ago is left alone, for longer where the newcomer matters no more.

Always true: nothing is given that a lease, a replica, an action in flight or another in this pass has; nobody who
serves is told more than to drain; who is KEPT never gives way. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from holdfast.fleet.actions import Verb, node_subject, subject_of
from holdfast.fleet.census import Census, Need, Victim
from holdfast.fleet.desired import Hysteresis, Model
from holdfast.fleet.fitness import unfit_s
from holdfast.fleet.observed import Replica
from holdfast.fleet.orders import FAILED, LOOK_AGAIN_S, Orders
from holdfast.fleet.room import Ground, Room
from holdfast.fleet.view import View
from holdfast.fleet.warming import Warming

NO_ROOM = "there is no room for it"
CANDIDATES_MAX = 16  # nodes that are compared for one replica: the tightest that fit are alike


class Seating:
    """One pass. `victims` stand in order; `spares`: by node, WARM replicas that no floor needs."""

    def __init__(
        self,
        view: View,
        room: Room,
        victims: Sequence[Victim],
        spares: Mapping[str, Mapping[str, Replica]],
        now_s: float,
        hysteresis: Hysteresis,
    ) -> None:
        self.hysteresis = hysteresis
        self.view, self.room, self.now_s = view, room, now_s
        self.victims = victims
        self.orders = Orders(view, room, now_s)
        self.warming = Warming(view, room, self.orders, spares)
        self.hopeless: list[tuple[Need, int, int]] = []  # needs, devices and sizes that found nobody to give way

    def run(self, active: Sequence[Census]) -> Orders:
        """For these models, which come in the order of their keys."""
        for census in active:
            for intent in census.intents:
                self.orders.tell(intent.verb, census.key, intent.serial, intent.node, intent.why)
        for census in active:
            self.warming.lower(census)
        wants = [
            (-need, census.since_s or self.now_s, place, census.key)
            for census in active
            for place, need in enumerate(census.needs)
        ]
        by_key, placed = {census.key: census for census in active}, Counter[str]()
        for negative, _, _, key in sorted(wants):
            placed[key] += self._seat(by_key[key], Need(-negative))
        for census in active:
            for _ in range(census.warm_missing - placed[census.key]):
                self.warming.place(census)
        return self.orders

    # -- up

    def _seat(self, census: Census, need: Need) -> int:
        """Somebody is missing. How many will be there that are nowhere yet."""
        model = census.model
        assert model is not None, "only what is wanted is missing"
        if self._promote(census, model):
            return 0
        backing_off = not self.orders.may(subject_of(Verb.PLACE, model.key))
        if not backing_off and self._place(census, model):
            return 1
        where = {one.node for one in census.asleep if one.name not in self.orders.told} if backing_off else None
        if self._wait(census, model, where) or self._swap(census, model) or self._evict(census, model, need, where):
            self.orders.unmet[model.key] = "room is being made for it"
            return 1
        self.orders.unmet[model.key] = FAILED if backing_off else NO_ROOM
        self.orders.look_again(self.now_s + LOOK_AGAIN_S)
        if backing_off:
            self.orders.look_again(self.view.tries[subject_of(Verb.PLACE, model.key)].again_s)
        return 0

    def _promote(self, census: Census, model: Model) -> bool:
        """Make a WARM one HOT on the devices that its vaults are of."""
        found: tuple[int, str, Replica] | None = None
        for one in census.asleep:
            ground = self.room.grounds.get(one.node)
            if ground is None or one.name in self.orders.told or not self.orders.may_be_on(census, model, one.node):
                continue
            room = ground.room_on(one.devices, model.devices)
            if room >= model.device_bytes and (found is None or (room, one.name) < found[:2]):
                found = room, one.name, one
        if found is None:
            return False
        self.orders.come(Verb.PROMOTE, model, found[2].serial, found[2].node, seats=found[2].devices)
        return True

    def _place(self, census: Census, model: Model) -> bool:
        """Start one where there is room: not where one of it has just failed, if it can be; on a node that has none of
        it yet, then where its files are. Its devices are for `Orders.come` to say."""
        disks, best, seen = self.view.on_disk.get(model.key, set()), None, 0
        for ground in self._roomy(model):
            if not self.orders.may_be_on(census, model, ground.name):
                continue
            rank = (ground.name in census.broken, self.orders.has_on(census, ground.name), ground.name not in disks)
            if best is None or rank < best[0]:
                best = rank, ground.name
            seen += 1
            if rank == (False, 0, bool(not disks)) or seen >= CANDIDATES_MAX:
                break
        if best is None:
            return False
        self.orders.come(Verb.PLACE, model, self.orders.serial(model.key), best[1])
        return True

    def _roomy(self, model: Model) -> Iterator[Ground]:
        """Nodes that have room for one; first those with its files, of which some may come twice."""
        count, size = model.devices, model.device_bytes
        named = model.nodes or self.view.on_disk.get(model.key, set())
        yield from (self.room.grounds[node] for node in sorted(named) if self.room.fits(node, count, size))
        if not model.nodes:
            yield from self.room.fitting(count, size)

    def _wait(self, census: Census, model: Model, where: set[str] | None) -> bool:
        """Have the room that others are leaving."""
        homes = {one.node for one in census.asleep if one.name not in self.orders.told}
        for node in sorted(self.room.emptying | self.orders.emptied, key=lambda node: (node not in homes, node)):
            if (where is None or node in where) and self.orders.may_be_on(census, model, node):
                seats = self.room.grounds[node].seats_later(model.devices, model.device_bytes, {})
                if seats:
                    self.orders.await_room(model, node, seats)
                    return True
        return False

    def _swap(self, census: Census, model: Model) -> bool:
        """Have the room of one of its own old version, if nobody else of it is leaving or coming."""
        if census.leaving or census.coming or model.key in self.orders.moved:
            return False
        for one in (one for one in census.old if one.serial != census.last):
            ground, more = self.room.grounds[one.node], self.orders.held(one)
            seats = ground.seats_later(model.devices, model.device_bytes, more)
            if seats and model.may_be_on(one.node) and self.orders.may(node_subject(one.node)):
                is_unfit = one.version == model.version and one.serial not in model.going
                why = "its replacement takes its place" if is_unfit else "the next version needs its place"
                self.orders.tell(Verb.DRAIN, one.model, one.serial, one.node, why)
                self.orders.await_room(model, one.node, seats)
                return True
        return False

    def _evict(self, census: Census, model: Model, need: Need, where: set[str] | None) -> bool:
        """Have others give way, on one node, and no more of them than must."""
        is_bound = bool(where is not None or model.nodes or model.per_node_max)
        asked = (need, model.devices, model.device_bytes)
        if any(need <= one[0] and asked[1] >= one[1] and asked[2] >= one[2] for one in self.hopeless):
            return False
        found: dict[str, list[Victim]] = {}
        for victim in self._may_give_way(model.key, need):
            node = victim.replica.node
            if (where is None or node in where) and self.orders.may_be_on(census, model, node):
                found.setdefault(node, []).append(victim)
                if self._fits_without(model, node, found[node]):
                    self._give_way(model, node, found[node])
                    return True
        if not is_bound:
            self.hopeless.append(asked)
        return False

    def _may_give_way(self, key: str, need: Need) -> Iterator[Victim]:
        for victim in self.victims:
            if victim.need > need or (victim.need == need and need is not Need.FIRST):
                return
            if victim.name in self.orders.told or victim.replica.model == key:
                continue
            as_much = self.hysteresis.cooldown_s if victim.need == need else 0.0
            settled_s = victim.replica.since_s + max(self.hysteresis.resident_s, as_much)
            # One that does not serve keeps its place for as long as it may still recover: else models that just came
            # up, and were not checked yet, would push each other out.
            unfit_at_s = unfit_s(victim.replica, None, self.hysteresis)
            settled_s = settled_s if unfit_at_s is None else min(settled_s, unfit_at_s)
            if self.now_s < settled_s:
                self.orders.look_again(settled_s)
            elif self.orders.may(subject_of(Verb.DRAIN, victim.name)):
                yield victim

    def _fits_without(self, model: Model, node: str, leavers: Sequence[Victim]) -> bool:
        more = Counter[str]()
        for one in leavers:
            more.update(self.orders.held(one.replica))
        return bool(self.room.grounds[node].seats_later(model.devices, model.device_bytes, more))

    def _give_way(self, model: Model, node: str, found: list[Victim]) -> None:
        for one in reversed(found[:-1]):
            rest = [other for other in found if other is not one]
            found = rest if self._fits_without(model, node, rest) else found
        for one in found:
            why = f"{model.key} needs its place"
            self.orders.tell(Verb.DRAIN, one.replica.model, one.replica.serial, node, why)
        self.orders.await_room(model, node, self.room.grounds[node].seats_later(model.devices, model.device_bytes, {}))
