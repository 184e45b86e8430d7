"""Host memory in one pass: who goes there from its devices, who is started there, and who must leave for them. Pure.

Theory. Whoever leaves its devices goes to host memory if that holds it, and else to disk. For that WARM replicas that
no floor needs are dropped, the oldest and smallest first. It waits for them no longer than its requests had time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from holdfast.fleet.actions import Verb, subject_of
from holdfast.fleet.census import Census
from holdfast.fleet.counting import IDLE_GRAIN_S
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Replica
from holdfast.fleet.orders import FAILED, LOOK_AGAIN_S, Orders
from holdfast.fleet.room import HOST, Ground, Room
from holdfast.fleet.view import View

NO_HOST = "no host has memory for it"
NO_DEVICE = "its weights come to host memory by way of a device, and none has room for it"


class Warming:
    """`spares`: by node, WARM replicas that no floor needs."""

    def __init__(self, view: View, room: Room, orders: Orders, spares: Mapping[str, Mapping[str, Replica]]) -> None:
        self.view, self.room, self.orders, self.spares = view, room, orders, spares
        self.now_s = orders.now_s

    def lower(self, census: Census) -> None:
        """Those who leave their devices, to host memory or to disk."""
        model = census.model
        if model is None:
            return
        for one in census.sinking:
            self._find_host_room(model, one)
        for one in census.drained:
            found = self._find_host_room(model, one)
            if found:
                self.orders.tell(Verb.DEMOTE, model.key, one.serial, one.node, "it has drained", host=model.host_bytes)
            elif found is None and self.now_s < one.drain_until_s:
                self.orders.look_again(one.drain_until_s)
            else:
                why = "its host has no memory for it" if model.host_bytes else "it has drained, and is never WARM"
                self.orders.tell(Verb.STOP, model.key, one.serial, one.node, why)

    def _find_host_room(self, model: Model, one: Replica) -> bool | None:
        """Whether its host has memory for it; None: it will, when others have left."""
        lease = self.view.nodes[one.node].host.leases.get(one.name, 0)
        more, ground = model.host_bytes - lease, self.room.grounds[one.node]
        if model.host_bytes == 0:
            return False
        if ground.room(HOST) >= more:
            self.room.take(one.node, (HOST,), max(0, more))
            return True
        return None if self._drop_spares(ground, more) else False

    def _drop_spares(self, ground: Ground, size: int) -> bool:
        """Whether so much of a host's memory will be free, if WARM replicas leave; then they do."""
        spares = [one for name, one in self.spares.get(ground.name, {}).items() if name not in self.orders.told]
        spares.sort(key=lambda one: (one.since_s // IDLE_GRAIN_S, one.host_bytes, one.name))
        lacking, dropped = size - ground.later[HOST], 0
        while lacking > sum(one.host_bytes for one in spares[:dropped]):
            if dropped == len(spares):
                return False
            dropped += 1
        for one in spares[:dropped]:
            self.orders.tell(Verb.STOP, one.model, one.serial, one.node, "its host memory is needed")
        self.room.await_(ground.name, (HOST,), size)
        return True

    def place(self, census: Census) -> None:
        """A floor needs one more in some host's memory."""
        model = census.model
        assert model is not None, "only what is wanted has a floor"
        if not model.host_bytes or not self.orders.may(subject_of(Verb.PLACE, model.key)):
            self.orders.look_again(self.now_s + LOOK_AGAIN_S)
            if model.host_bytes:
                self.orders.unmet.setdefault(model.key, FAILED)
            return
        for ground in self.room.fitting(0, model.host_bytes):
            fits = ground.kth_room(model.devices) >= model.device_bytes  # it is loaded by way of them
            if fits and self.orders.may_be_on(census, model, ground.name):
                self.orders.come(Verb.PLACE, model, self.orders.serial(model.key), ground.name, Level.WARM)
                return
        self.orders.look_again(self.now_s + LOOK_AGAIN_S)
        hosts = any(self.orders.may_be_on(census, model, one.name) for one in self.room.fitting(0, model.host_bytes))
        self.orders.unmet.setdefault(model.key, NO_DEVICE if hosts else NO_HOST)
        for node in sorted(self.spares) if not hosts else ():
            ground = self.room.grounds[node]
            if self.orders.may_be_on(census, model, node) and self._drop_spares(ground, model.host_bytes):
                return
        self._swap(census, model)

    def _swap(self, census: Census, model: Model) -> None:
        """Have the places of its own old version, no more of them than must go for one, if nobody else of it is leaving
        or coming. Who is to go by a person's word does so in any case."""
        if census.leaving or census.coming or census.restless or model.key in self.orders.moved:
            return
        ways: list[tuple[int, str, list[Replica]]] = []
        for node in sorted({one.node for one in census.outdated}):
            ground = self.room.grounds[node]
            if self.orders.may_be_on(census, model, node) and ground.kth_room(model.devices) >= model.device_bytes:
                there = [one for one in census.outdated if one.node == node]
                rooms = accumulate((one.host_bytes for one in there), initial=ground.later[HOST])
                count = next((number for number, room in enumerate(rooms) if room >= model.host_bytes), None)
                ways += [(count, node, there[:count])] if count is not None else []
        _, node, leavers = min(ways, default=(0, "", []))
        if not ways:
            leavers = [one for one in census.outdated if one.serial in model.going][:1]
        for one in leavers:
            self.orders.tell(Verb.STOP, one.model, one.serial, one.node, "another one needs its place")
        if ways:
            self.room.await_(node, (HOST,), model.host_bytes)
