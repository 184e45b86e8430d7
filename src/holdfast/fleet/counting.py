"""One model looked at by itself: who of it is there, who is coming, who must leave, how many are missing. Pure.

Theory. A replica is counted once, by its name, whether an action or its effect or both are seen. Who is on a node that
is not alive is lost: it is missing, and if its node comes back there is one too many.

Requests end first: a HOT replica that serves is only ever asked to drain, and goes when nothing runs on it or its
requests have had their time. Of another version, or of those that a person sends away, somebody leaves when enough
serve without it, one more than wanted being started for that; from a floor of WARM when enough are HOT or WARM without
it. What has no traffic, because it is WARM or never came up, is stopped.

A replica that is up and does not serve (`Replica.health`) leaves before any other, and no other leaves because it is
there. Past a bound (`unfit_s`) it is missing: one that no engine of leads has failed and is stopped; one that could
still answer is replaced as one of another version is, another coming first, and the last of them stays until it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from holdfast.fleet.actions import COMING, COPY_S, LEAVING, Flying, Tries, Verb, replica_name, subject_of
from holdfast.fleet.census import Census, Intent, Need, Victim
from holdfast.fleet.desired import Hysteresis, Level, Model
from holdfast.fleet.fitness import RANK, leaves_at, unfit_s, worst_first
from holdfast.fleet.observed import Health, Node, Phase, Replica
from holdfast.health.records import Demand

IDLE_GRAIN_S = 60.0  # who is idle since the same minute is alike, and the smaller one goes
FEWER = "fewer are wanted"


def take_census(
    key: str,
    model: Model | None,
    replicas: Iterable[Replica],
    flying: Iterable[Flying],
    nodes: Mapping[str, Node],
    tries: Mapping[str, Tries],
    demand: Demand | None,
    now_s: float,
    hysteresis: Hysteresis,
) -> Census:
    """Of one model, with its own replicas and actions; None: it is not wanted any more."""
    return _Taker(key, model, replicas, flying, nodes, tries, now_s, hysteresis).run(demand)


class _Taker:
    def __init__(
        self,
        key: str,
        model: Model | None,
        replicas: Iterable[Replica],
        flying: Iterable[Flying],
        nodes: Mapping[str, Node],
        tries: Mapping[str, Tries],
        now_s: float,
        hysteresis: Hysteresis,
    ) -> None:
        self.hysteresis = hysteresis
        self.model, self.nodes, self.tries, self.now_s = model, nodes, tries, now_s
        self.census = Census(key, model)
        self.replicas = sorted(replicas, key=lambda one: one.serial)
        self.asked: dict[int, list[Flying]] = {}
        for one in flying:
            self.asked.setdefault(one.action.serial, []).append(one)
        self.hot: list[Replica] = []  # that serve, or are coming to
        self.warm: list[Replica] = []
        self.coming = Counter[Level]()  # asked for and not seen yet
        self.running = 0
        self.falling = 0  # to WARM, and not there yet

    def run(self, demand: Demand | None) -> Census:
        for one in self.replicas:
            if self._is_on(one.node):
                self._count(one)
        self._count_unseen()
        if self.model is None:
            for one in (*self.hot, *self.warm):
                self._send_away(one, "its model is not wanted any more")
            return self.census
        census, waits = self.census, demand is not None and demand.waiting > 0
        census.since_s = demand.since_unix_s if demand is not None and waits else 0.0
        self._balance(self.model, asked=waits or self.running > 0)
        return census

    # -- who is there

    def _is_on(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node].alive

    def _count(self, one: Replica) -> None:
        asked = self.asked.get(one.serial, [])
        verbs = {flight.action.verb for flight in asked}
        self.running += one.running
        if one.phase is Phase.GONE:
            self._clean_up(one)
        elif any(flight.overdue for flight in asked):
            self._intend(Verb.STOP, one.serial, one.node, "it took too long")
        elif verbs & LEAVING:
            self.falling += Verb.DEMOTE in verbs and self._is_current(one)
            self._leaves(one, sinks=Verb.DRAIN in verbs)
        elif one.phase is Phase.DRAINING:
            self._drain_on(one)
        elif one.phase is Phase.DEMOTING:
            self.falling += not self._await(one, one.since_s + COPY_S) and self._is_current(one)
            self._leaves(one, sinks=False)
        elif one.phase is Phase.PROVISIONING and not verbs & COMING and self._await(one, self._due_s(one)):
            return
        elif one.health is Health.AWAY and self._is_unfit(one):
            self._leaves(one, sinks=False)
            self.census.broken.add(one.node)
            self._intend(Verb.STOP, one.serial, one.node, self._words_of(one))
        elif one.level is Level.HOT or Verb.PROMOTE in verbs:
            self.hot.append(one)
            self.census.on[one.node] += 1
        else:
            self.warm.append(one)

    def _due_s(self, one: Replica) -> float:
        return one.since_s + (COPY_S if self.model is None else self.model.load_s)

    def _await(self, one: Replica, until_s: float) -> bool:
        """Stop whoever is late, though nobody knows who asked for it."""
        if self.now_s < until_s:
            self._look_again(until_s)
            return False
        self._intend(Verb.STOP, one.serial, one.node, "it took too long")
        return True

    def _leaves(self, one: Replica, *, sinks: bool) -> None:
        self.census.leaving += one.level is Level.HOT
        self.census.restless += one.level is Level.WARM
        if sinks and self._is_current(one):
            self.census.sinking.append(one)

    def _drain_on(self, one: Replica) -> None:
        self._leaves(one, sinks=False)
        if one.running > 0 and not one.drain_until_s:
            self._intend(Verb.DRAIN, one.serial, one.node, "nobody knows until when it drains")
        elif one.running > 0 and self.now_s < one.drain_until_s:
            self._look_again(one.drain_until_s)
            if self._is_current(one):
                self.census.sinking.append(one)
        elif self._is_current(one) and subject_of(Verb.DEMOTE, one.name) not in self.tries:
            self.census.drained.append(one)
        else:
            self._intend(Verb.STOP, one.serial, one.node, "it has drained")

    def _clean_up(self, one: Replica) -> None:
        """Memory outlives processes, and somebody must say that it is not needed."""
        node = self.nodes[one.node]
        if any(one.name in memory.leases for memory in (node.host, *node.devices.values())):
            self._intend(Verb.STOP, one.serial, one.node, "its process is gone, and its memory is not")

    def _count_unseen(self) -> None:
        seen = {one.serial for one in self.replicas}
        for serial, asked in self.asked.items():
            action = asked[0].action
            if serial in seen or not self._is_on(action.node):
                continue
            placed = next((one for one in asked if one.action.verb is Verb.PLACE), None)
            if placed is None or any(one.action.verb is Verb.STOP for one in asked):
                continue
            if placed.overdue:  # it may be there all the same
                self._intend(Verb.STOP, serial, action.node, "nobody knows whether it was started")
                continue
            self.coming[action.level] += 1
            if action.level is Level.HOT:
                self.census.on[action.node] += 1

    def _is_wanted(self, one: Replica) -> bool:
        return self.model is not None and one.version == self.model.version and one.serial not in self.model.going

    def _is_current(self, one: Replica) -> bool:
        """Whether it may stay: who is to go is replaced as one of another version is, and so is what is unfit."""
        return self._is_wanted(one) and not self._is_unfit(one)

    def _why_not(self, one: Replica) -> str:
        if self._is_wanted(one):
            return self._words_of(one) if self.model is not None and self.model.hot else FEWER
        is_sent = self.model is not None and one.serial in self.model.going
        return "it is to go, by a person's word" if is_sent else "it is of another version"

    def _is_unfit(self, one: Replica) -> bool:
        due_s = unfit_s(one, self.model, self.hysteresis)
        if due_s is None or self.now_s >= due_s:
            return due_s is not None
        self._look_again(due_s)
        return False

    def _words_of(self, one: Replica) -> str:
        """Why a replica that is unfit is replaced."""
        due_s = unfit_s(one, self.model, self.hysteresis) or one.ill_s
        return f"it did not serve for {due_s - one.ill_s:.0f} s: {one.ill_why or one.health}"

    # -- who is missing, and who is too many

    def _balance(self, model: Model, *, asked: bool) -> None:
        census = self.census
        new = [one for one in self.hot if self._is_current(one)]
        others = [one for one in self.hot if not self._is_current(one)]
        census.old = sorted((one for one in others if one.is_up), key=worst_first)
        sound_old = [one for one in census.old if one.serves]
        for one in others:
            if one not in census.old and not self._is_woken(model, one):  # it is not up yet
                self._send_away(one, self._why_not(one))
        have = len(new) + self.coming[Level.HOT]
        missing = max(0, model.hot - have)
        if census.old:
            missing = min(missing, max(0, model.hot + 1 - have - len(census.old)))
        places = range(have, have + missing)
        # While others of it serve, none is the first.
        census.needs = [self._need(model, place, place + len(sound_old), asked=asked) for place in places]
        serving = [one for one in new if one.is_up]
        census.coming = have - len(serving)
        sound = sum(one.serves for one in serving)
        self._retire([one for one in census.old if not one.serves], sound + len(census.old) - model.hot)
        self._thin_out(new, have - model.hot, spare=sound - model.hot)
        staying = sum(one.serves and one.serial not in self._stale() for one in serving)
        self._retire(sound_old, staying + len(sound_old) - model.hot)
        self._spare_last([*serving, *census.old])
        self._line_up(model, [*serving, *census.old], asked=asked)
        self._put_to_sleep(model, have)
        self._keep_floor(model, have, serving)

    def _spare_last(self, there: list[Replica]) -> None:
        """A replica that only health would replace keeps its place, if no other can answer."""
        answering = [one for one in there if one.health is not Health.AWAY and one.serial not in self._stale()]
        if len(answering) == 1 and self._is_wanted(answering[0]) and not answering[0].serves:
            self.census.last = answering[0].serial

    def _need(self, model: Model, place: int, others: int, *, asked: bool) -> Need:
        """Of the replica at that place among its model's, with so many others; the first one matters most."""
        if model.dedicated or (model.floor is Level.HOT and place < model.replicas_min):
            return Need.KEPT
        if not asked:
            return Need.IDLE
        return Need.FIRST if others == 0 else Need.MORE

    def _thin_out(self, new: list[Replica], surplus: int, *, spare: int) -> None:
        """Those go first that cannot answer, then those that are not up yet, that are in doubt, and that have the least
        to do. Who is being promoted is let come up. `spare`: so many of those that serve are more than are wanted; none
        leaves for one that is still coming."""
        there = [one for one in new if one.level is Level.HOT]
        order = sorted(there, key=lambda one: (leaves_at(one), one.running, one.idle_s or one.since_s))
        for one in order[: max(0, surplus)]:
            settled_s = one.since_s + self.hysteresis.resident_s
            if one.serves and spare <= 0:
                continue
            spare -= one.serves
            if one.serves and self.now_s < settled_s:
                self._look_again(settled_s)
            elif not self._is_promoted(one):
                self._send_away(one, FEWER)

    def _retire(self, old: list[Replica], surplus: int) -> None:
        for one in old[: max(0, surplus)]:
            self._send_away(one, self._why_not(one))

    def _line_up(self, model: Model, serving: list[Replica], *, asked: bool) -> None:
        """Those that may have to give way, of whom the last matters most."""
        leaving = self._stale()
        order = sorted(self._victim(model, one) for one in serving if one.serial not in leaving)
        for place, one in enumerate(reversed(order)):
            need = self._need(model, place, place, asked=asked)
            if need is not Need.KEPT:
                size = (one.idle_minute, one.size, one.reload_s, one.name)
                self.census.victims.append(Victim(need, one.health, one.busy, *size, one.replica))

    def _victim(self, model: Model, one: Replica) -> Victim:
        minute, size = int((one.idle_s or one.since_s) // IDLE_GRAIN_S), one.device_bytes * len(one.devices)
        return Victim(Need.IDLE, RANK[one.health], one.running > 0, minute, size, model.reload_s, one.name, one)

    def _put_to_sleep(self, model: Model, have: int) -> None:
        census, now_s = self.census, self.now_s
        warm = [one for one in self.warm if self._is_current(one)]
        needed = max(0, model.kept - have)
        spare = sorted(warm, key=lambda one: (one.since_s, one.serial))[: max(0, len(warm) - needed)]
        census.spare = [one for one in spare if one.phase is Phase.READY]
        for one in census.spare:
            if now_s >= one.since_s + self.hysteresis.linger_s:
                self._intend(Verb.STOP, one.serial, one.node, "nobody wanted it for long")
            else:
                self._look_again(one.since_s + self.hysteresis.linger_s)
        stale = self._stale()
        ready = [one for one in warm if one.phase is Phase.READY and one.serial not in stale]
        census.asleep = [one for one in ready if self._may(Verb.PROMOTE, one.name)]

    def _is_woken(self, model: Model, one: Replica) -> bool:
        """It was WARM and is told to come; a floor lets it, and it leaves as those do that serve."""
        return model.floored > 0 and self._is_promoted(one)

    def _is_promoted(self, one: Replica) -> bool:
        """It was WARM and is told to come: stopped on its way, it would have to be loaded from disk."""
        return Verb.PROMOTE in {flight.action.verb for flight in self.asked.get(one.serial, [])}

    def _keep_floor(self, model: Model, have: int, serving: list[Replica]) -> None:
        """At which as many are kept of any version; those of another go one by one, for one that came."""
        census, floor = self.census, model.floored
        warm = [one for one in self.warm if self._is_current(one)]
        others = [one for one in self.warm if not self._is_current(one)]
        census.outdated = [one for one in others if one.phase is Phase.READY]
        for one in others:
            if one.phase is not Phase.READY:
                self._send_away(one, self._why_not(one))
        falling = self.falling + len(census.drained) + len(census.sinking)
        own = have + len(warm) + self.coming[Level.WARM] + falling
        stale = self._stale()
        ready = [one for one in (*serving, *census.old) if one.serves]
        ready += [one for one in self.warm if one.phase is Phase.READY]
        ready = [one for one in ready if one.serial not in stale]
        self._retire(census.outdated, len(ready) - floor)
        old = sum(not self._is_current(one) for one in ready)
        old += sum(not self._is_current(one) and self._is_woken(model, one) for one in self.hot)
        census.warm_missing = max(0, floor - own if not old else min(floor - own, floor + 1 - own - old))
        census.restless += self.coming[Level.WARM] + falling + sum(one.phase is not Phase.READY for one in self.warm)

    def _stale(self) -> set[int]:
        """Serials of those about whom something was decided already."""
        return {intent.serial for intent in self.census.intents}

    # -- what is to be done

    def _send_away(self, one: Replica, why: str) -> None:
        answers = one.is_up and one.health is not Health.AWAY
        drains = one.level is Level.HOT and (answers or one.running > 0)
        self._intend(Verb.DRAIN if drains else Verb.STOP, one.serial, one.node, why)

    def _intend(self, verb: Verb, serial: int, node: str, why: str) -> None:
        name = replica_name(self.census.key, serial)
        asked = {flight.action.verb for flight in self.asked.get(serial, [])}
        if verb not in asked and Verb.STOP not in asked and self._may(verb, name):
            self.census.intents.append(Intent(verb, serial, node, why))

    def _may(self, verb: Verb, whose: str) -> bool:
        """Whether it is not too soon after the last failure."""
        tries = self.tries.get(subject_of(verb, whose))
        if tries is None or self.now_s >= tries.again_s:
            return True
        self._look_again(tries.again_s)
        return False

    def _look_again(self, at_s: float) -> None:
        self.census.next_s = at_s if self.census.next_s is None else min(self.census.next_s, at_s)
