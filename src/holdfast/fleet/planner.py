"""What to do next so that what is wanted comes to be: from everything at once, or kept up change by change. Pure.

Theory. A pass takes a census of each model that is stale (`counting.py`), counts the memory of each node that is
(`room.py`), and then seats those that miss something, beside all others (`seating.py`). A model at rest costs nothing,
so a pass costs as much as changed, and as is unmet. It is told what is wanted and seen, and what it asked for itself:
nothing is remembered beyond that, so `plan` from scratch says the same as a `Planner` that was told of every change,
and a controller that starts again adopts whatever is there.

An action is said in every pass until it flies (`View.ask`), under the same id. To be written down before it is carried
out: what is in flight, and the serials that were used.

Always true: never beyond what leases leave on a device; nobody with running work leaves before it has drained or its
requests have had their time; asked twice of the same, the same is answered.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable

from msgspec import Struct

from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.census import Census, Victim
from holdfast.fleet.counting import take_census
from holdfast.fleet.desired import HYSTERESIS, Hysteresis, Model
from holdfast.fleet.observed import Observed, Replica
from holdfast.fleet.room import Room, ground_of, owners_leaving
from holdfast.fleet.seating import Seating
from holdfast.fleet.view import View

_ORDER = {verb: place for place, verb in enumerate(Verb)}


class Plan(Struct, frozen=True):
    """What is to be done, those who leave first; which models miss somebody, and why; when to look again at the latest
    (None: when something changes)."""

    actions: tuple[Action, ...] = ()
    unmet: dict[str, str] = {}
    next_s: float | None = None


def plan(
    models: Iterable[Model], observed: Observed, now_s: float, hysteresis: Hysteresis = HYSTERESIS
) -> Plan:
    """What to do, from everything at once."""
    planner = Planner(hysteresis)
    planner.view.begin(models, observed)
    return planner.plan(now_s)


class Planner:
    """A view, and what follows from it, kept up."""

    def __init__(self, hysteresis: Hysteresis = HYSTERESIS) -> None:
        self._hysteresis = hysteresis
        self.view = View()
        self._room = Room()
        self._censuses: dict[str, Census] = {}
        self._active: set[str] = set()  # models whose census asks for something
        self._victims: list[Victim] = []  # of all models, in order
        self._spares: dict[str, dict[str, Replica]] = {}  # by node
        self._due: list[tuple[float, str]] = []  # when a census does not hold any more

    def __repr__(self) -> str:
        return f"<Planner {len(self._active)} models of {len(self._censuses)} are not at rest, {self.view!r}>"

    def plan(self, now_s: float) -> Plan:
        """What to do now."""
        view = self.view
        view.expire(now_s)
        while self._due and self._due[0][0] <= now_s:
            view.stale_models.add(heapq.heappop(self._due)[1])
        for node in view.stale_nodes:
            self._survey(node)
        for key in view.stale_models:
            self._take(key, now_s)
        view.stale_nodes.clear()
        view.stale_models.clear()
        active = [self._censuses[key] for key in sorted(self._active)]
        seated = Seating(view, self._room, self._victims, self._spares, now_s, self._hysteresis).run(active)
        self._room.settle()
        actions = sorted(seated.actions.values(), key=lambda one: (_ORDER[one.verb], one.id))
        return Plan(tuple(actions), seated.unmet, self._next_s(seated.next_s))

    def _next_s(self, seated_s: float | None) -> float | None:
        while self._due and not self._holds_until(*self._due[0]):
            heapq.heappop(self._due)
        due = (seated_s, self.view.next_due_s(), self._due[0][0] if self._due else None)
        return min((at_s for at_s in due if at_s is not None), default=None)

    def _holds_until(self, at_s: float, key: str) -> bool:
        return key in self._censuses and self._censuses[key].next_s == at_s

    def _survey(self, name: str) -> None:
        view, node = self.view, self.view.nodes.get(name)
        if node is None or not node.alive:
            self._room.drop(name)
            return
        residents = view.on_node.get(name, {}).values()
        asked = [flight.action for flight in view.asked_on.get(name, {}).values()]
        self._room.put(ground_of(node, residents, asked, owners_leaving(residents, asked, view.tries)))

    def _take(self, key: str, now_s: float) -> None:
        view = self.view
        self._forget(key)
        replicas, asked = view.of_model.get(key, {}), view.asked_of.get(key, {})
        model = view.models.get(key)
        if model is None and not replicas and not asked:
            return
        census = take_census(
            key,
            model,
            replicas.values(),
            asked.values(),
            view.nodes,
            view.tries,
            view.demand.get(key),
            now_s,
            self._hysteresis,
        )
        self._censuses[key] = census
        if census.intents or not census.is_done:
            self._active.add(key)
        for victim in census.victims:
            insort(self._victims, victim)
        for one in census.spare:
            self._spares.setdefault(one.node, {})[one.name] = one
        if census.next_s is not None:
            heapq.heappush(self._due, (census.next_s, key))

    def _forget(self, key: str) -> None:
        census = self._censuses.pop(key, None)
        if census is None:
            return
        self._active.discard(key)
        for victim in census.victims:
            place = bisect_left(self._victims, victim)
            assert self._victims[place] == victim, "victims stand in order"
            del self._victims[place]
        for one in census.spare:
            del self._spares[one.node][one.name]
            if not self._spares[one.node]:
                del self._spares[one.node]
