"""What is written of a fleet, step by step, so that its wishes come to be: the planner, and what must stand before
what. A pure machine.

Theory. A step says what is to be written; `written` says that it stands. Book first, then orders: the serials that are
used, what failed and who gets nothing new are known to whoever comes after before any agent can act. Only what stands
is flying, so a controller that dies anywhere has asked for exactly what it wrote. Whoever begins has read all of it,
and before its first decision it *claims* the book and every node's orders: it writes them as they are, in its own name.
All is swapped from what was read, so whatever an earlier one writes after that is refused, and whatever it wrote before
was read.

Nodes' records that come while something is being written are taken after it: an answer may come before its order is
known to stand. What a record says is seen first and its answers are believed after, so that a failure counts once.

Which nodes are there, lost, waited for or forgotten is for `hearing.py` to say.

Always true: nothing is asked for of which the serial does not stand in the book; nothing is decided while something is
being written; replicas of a model that nobody here ever wished for are left alone, as are those of a wish that cannot
be read: a store that forgot stops nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, structs

from holdfast.fleet import scaling
from holdfast.fleet.actions import COMING, LEAVING, Action, Flying, Verb, subject_of
from holdfast.fleet.desired import HYSTERESIS, Hysteresis, Level
from holdfast.fleet.hearing import GRACE_S, Hearing
from holdfast.fleet.observed import WHY_CHARS_MAX, Health, Observed, Phase, Replica
from holdfast.fleet.orders import FAILED
from holdfast.fleet.planner import Plan, Planner
from holdfast.fleet.prospects import Prospect, Shapes, failed, ill_prospect
from holdfast.fleet.records import Book, NodeRecord, Orders, Wish, process_name
from holdfast.fleet.scaling import Scaled, Signs
from holdfast.fleet.seating import NO_ROOM
from holdfast.fleet.traffic import Load, Traffic
from holdfast.fleet.warming import NO_HOST
from holdfast.health.records import Demand

TOLD_MAX = 10_000  # lines that nobody took: more than one pass over a large fleet says
WAITED_FOR = "requests wait for it, but an operator scaled it to 0"
CRASHED = "it ended before it served, or while it did"
ILL_MAX = 3  # replicas of one model whose trouble is told: what fits into a line or two
_ORDER = {verb: place for place, verb in enumerate(Verb)}
_LEAVES = frozenset({Phase.DRAINING, Phase.DEMOTING})


class Writes(Struct, frozen=True, kw_only=True):
    """What is to be written: the book before the orders. Of wishes those that somebody else changed meanwhile are to
    be left as they are."""

    book: Book | None = None
    orders: Mapping[str, Orders | None] = {}  # by node; None: they are to be removed
    wishes: Mapping[str, Wish] = {}  # by key

    def __bool__(self) -> bool:
        return self.book is not None or bool(self.orders or self.wishes)


class Told(Struct, frozen=True):
    """Something for people: a verb that was asked for, or `failed`, `crashed`, `lost`, `back`, `scaled`."""

    what: str
    text: str


class Controller:
    """Of one deployment's fleet. `by`: the name it writes in, which no other one ever has."""

    def __init__(self, deployment: str, by: str, hysteresis: Hysteresis = HYSTERESIS) -> None:
        self._deployment = deployment
        self._by = by
        self._planner = Planner(hysteresis)
        self._view = self._planner.view
        self._traffic = Traffic()
        self._book = Book()  # as it stands, and so are
        self._orders: dict[str, Orders] = {}
        self._wishes: dict[str, Wish] = {}
        self._unread: set[str] = set()  # models whose wish cannot be read
        self._known: set[str] = set()  # models that were ever wished for
        self._keys: dict[str, set[str]] = {}  # of models, by the name that clients know
        self._elastic: set[str] = set()  # models that are scaled
        self._scaled: dict[str, Scaled] = {}
        self._scaling_to: dict[str, Scaled] = {}  # numbers that are being written
        self._hearing = Hearing()
        self._forgotten: set[str] = set()  # nodes whose orders are to be removed
        self._drains: dict[str, frozenset[str]] = {}  # processes of replicas that leave, by node
        self._claimed = False
        self._asking: tuple[Action, ...] | None = None  # while they are being written
        self._writing = Writes()
        self._late: dict[str, NodeRecord] = {}  # records that came meanwhile
        self._plan = Plan()
        self._prospects: dict[str, Prospect] = {}
        self._whys: dict[str, str] = {}  # why a model last failed to start
        self._stepped_s = 0.0
        self._told: list[Told] = []

    def __repr__(self) -> str:
        state = "is writing" if self._asking is not None else f"misses {len(self._plan.unmet)}"
        return f"<Controller of {self._deployment} {state}, {self._planner!r}>"

    def begin(
        self,
        book: Book,
        orders: Mapping[str, Orders],
        wishes: Mapping[str, Wish],
        nodes: Mapping[str, NodeRecord],
        now_s: float,
        unread: Collection[str] = (),
    ) -> None:
        """Go on from what stands in the store. `unread`: nodes that have a record, which cannot be read."""
        self._book, self._orders = book, dict(orders)
        self._known.update(book.serials)
        self._whys = dict(book.whys)
        asked = [(action, action.id in one.overdue) for one in orders.values() for action in one.actions]
        flying = {action.id: Flying(action, overdue=overdue) for action, overdue in asked}
        # By a clock that is ahead of this one's: it would be waited for.
        tries = {subject: structs.replace(one, at_s=min(one.at_s, now_s)) for subject, one in book.tries.items()}
        self._view.begin((), Observed(flying=flying, tries=tries, serials=book.serials))
        for key, wish in wishes.items():
            self.wish(key, wish)
        self._hearing.begin(orders, nodes, unread, now_s)
        for name, record in nodes.items():
            self.node(name, record, now_s)

    # -- what happens

    def wish(self, key: str, wish: Wish | None) -> None:
        """A model is wanted so from now on; None: it is not any more."""
        before = self._wishes.pop(key, None)
        self._unread.discard(key)
        if before is not None:
            self._keys[before.name].discard(key)
        if wish is None or wish.scaling is None:
            self._elastic.discard(key)
            self._scaled.pop(key, None)
        if wish is None:
            self._view.unwant(key)
            self._view.hear(key, None)
            return
        if wish.scaling is not None:
            self._elastic.add(key)
        self._wishes[key] = wish
        self._known.add(key)
        self._keys.setdefault(wish.name, set()).add(key)
        self._view.want(wish.model)
        self._view.hear(key, self._traffic.demand(wish.name))

    def wish_unread(self, key: str) -> None:
        """What is wanted of a model cannot be read: it stays as it was."""
        if key not in self._wishes:
            self._unread.add(key)

    def node(self, name: str, record: NodeRecord | None, now_s: float) -> None:
        """A node's record; None: it is not there any more."""
        if record is None:
            self._late.pop(name, None)
            self._hearing.miss(name, now_s)
            return
        self._hearing.hear(name, record.again_s, now_s)
        self._forgotten.discard(name)
        if self._asking is not None:
            self._late[name] = record
        else:
            self._see(name, record, now_s)

    def node_unread(self, name: str, now_s: float) -> None:
        """A node told of itself, and what it told cannot be read: it is there, and as it was."""
        self._hearing.hear_unread(name, now_s)
        self._forgotten.discard(name)

    def report(self, frontend: str, demand: Mapping[str, Demand] | None) -> None:
        """Who waits at a frontend, by the name that was asked for; None: it is gone."""
        for name in self._traffic.report(frontend, demand):
            for key in self._keys.get(name, ()):
                self._view.hear(key, self._traffic.demand(name))

    def carry(self, loads: Mapping[str, Load]) -> None:
        """What those carry that serve, by the name that clients know."""
        self._traffic.carry(loads)

    def away(self, now_s: float) -> None:
        """The store was lost, and is back: whoever is missing has its time again, and all are to be heard anew."""
        self._hearing.away((name for name, node in self._view.nodes.items() if node.alive), now_s)

    def _see(self, name: str, record: NodeRecord, now_s: float) -> None:
        view = self._view
        known = view.nodes.get(name)
        if known is not None and not known.alive:
            self._tell("back", f"node {name} is back")
        failed = {one.model for one in self._tell_failed(record)}
        models = {one.model for one in view.on_node.get(name, {}).values()} - failed
        tries = {key: view.tries.get(subject_of(Verb.PLACE, key)) for key in models}
        view.see(record.node, record.replicas, now_s)
        for key in [key for key in models if view.tries.get(subject_of(Verb.PLACE, key)) not in (None, tries[key])]:
            self._whys[key] = CRASHED
            self._tell("crashed", f"a replica of {key} on {name} ended unexpectedly")
        for action_id, why in record.answers.items():
            self._answer(action_id, why, now_s)
        self._forget_unseen(name)
        leaving = [one for one in view.on_node.get(name, {}).values() if one.phase in _LEAVES]
        self._drains[name] = frozenset(self._process(one.model, one.version, one.serial) for one in leaving)

    def _tell_failed(self, record: NodeRecord) -> list[Action]:
        """Of what flies, before it is seen that it is over."""
        flights = [(self._view.flying.get(action_id), why) for action_id, why in record.answers.items() if why]
        found = [(flight.action, why) for flight, why in flights if flight is not None]
        for action, why in found:
            self._tell("failed", f"{_words(action)}: it failed: {why}")
            if action.verb in COMING:
                self._whys[action.model] = why[:WHY_CHARS_MAX]
        return [action for action, _ in found]

    def _answer(self, action_id: str, why: str, now_s: float) -> None:
        flight = self._view.flying.get(action_id)
        if flight is None:
            return
        if why:
            self._view.fail(action_id, now_s)
        elif flight.action.verb is Verb.STOP:
            self._view.stopped(flight.action.name, flight.action.model)

    def _forget_unseen(self, node: str) -> None:
        """Who was asked for something and ended while nobody led: neither here nor to come, it is not waited for."""
        asked = dict[tuple[str, str], set[Verb]]()
        for flight in self._view.asked_on.get(node, {}).values():
            asked.setdefault((flight.action.name, flight.action.model), set()).add(flight.action.verb)
        for (name, model), verbs in asked.items():
            if name not in self._view.replicas and not verbs & {Verb.PLACE, Verb.STOP}:
                self._view.stopped(name, model)

    # -- what is to be written

    def step(self, now_s: float) -> Writes:
        """What is to be written now; if that is anything, it must be `written` before the next step."""
        assert self._asking is None, "one thing is written at a time"
        due_s = self.next_deadline_s()
        if due_s is not None and now_s > due_s + GRACE_S:
            self._hearing.listen_anew(now_s)  # who comes so late may not have heard: it was stopped itself
        self._stepped_s = now_s
        self._lose(now_s)
        if self._hearing.waits:
            return Writes()
        wishes = self._scale(now_s)
        self._tell_late(now_s)
        self._plan = self._planner.plan(now_s)
        self._prospects = self._foresee()
        actions = tuple(action for action in self._plan.actions if self._is_ours(action.model))
        writes = self._writes(actions, wishes)
        if writes and not self._claimed:
            writes, actions, self._scaling_to = self._claim(), (), {}
        if writes:
            self._writing, self._asking = writes, actions
        return writes

    def written(self, now_s: float) -> None:
        """All of what the last step said stands in the store."""
        assert self._asking is not None, "only what was to be written is"
        writes, actions = self._writing, self._asking
        self._writing, self._asking, self._claimed = Writes(), None, True
        self._book = writes.book or self._book
        self._orders = {name: one for name, one in (self._orders | dict(writes.orders)).items() if one is not None}
        self._forgotten &= self._orders.keys()
        for action in actions:
            self._blame(action, now_s)
            self._view.ask(action)
            self._tell(action.verb, f"{_words(action)}: {action.why or 'it is wanted'}")
        for key, state in self._scaling_to.items():
            self._scaled[key] = state
            self._tell("scaled", f"{key}: {state.wanted} are wanted from now on: {state.why}")
        self._scaling_to = {}
        late, self._late = self._late, {}
        for name, record in late.items():
            self._see(name, record, now_s)

    def next_deadline_s(self) -> float | None:
        """When to step again though nothing happens; None: not before something does. What was due at the last step was
        looked at then."""
        due = [self._plan.next_s, *self._hearing.deadlines_s()]
        for key in self._elastic & self._scaled.keys():
            by = self._wishes[key].scaling
            due.append(scaling.next_deadline_s(self._scaled[key], by) if by is not None else None)
        return min((at_s for at_s in due if at_s is not None and at_s > self._stepped_s), default=None)

    def take_told(self) -> list[Told]:
        """What people should know, since the last time."""
        told, self._told = self._told, []
        return told

    def replicas(self) -> Iterable[Replica]:
        """Of nodes that are there."""
        nodes = self._view.nodes
        return (one for one in self._view.replicas.values() if nodes[one.node].alive)

    @property
    def unmet(self) -> dict[str, str]:
        """Models that miss somebody, and why."""
        return {key: one.why for key, one in self._prospects.items()}

    @property
    def is_elastic(self) -> bool:
        """Numbers follow from what those carry that serve, which is nowhere written: somebody must look."""
        return bool(self._elastic)

    @property
    def is_idle(self) -> bool:
        """There is nothing to be done, nor was there ever."""
        return not (self._wishes or self._view.nodes or self._view.flying or self._hearing.is_any_gone)

    def _blame(self, action: Action, now_s: float) -> None:
        """Count a replica that is removed because it did not serve as failed, and tell people."""
        if self._view.has_failed(action):
            one = self._view.replicas[action.name]
            self._view.blame(action, now_s)
            self._whys[action.model] = (one.ill_why or str(one.health))[:WHY_CHARS_MAX]
            self._tell("failed", f"{action.name} on {action.node} is {one.health}: {one.ill_why}; it is replaced")

    def _foresee(self) -> dict[str, Prospect]:
        """Return why models miss a replica, and why those have none that serves whose replicas are in doubt."""
        found = self._missing()
        for key in found.keys() | {one.model for one in self.replicas() if one.is_up and not one.serves}:
            if key in self._wishes and (ill := self._ill(key)):
                found[key] = ill_prospect(ill, found.get(key), self._is_coming(key))
        return found

    def _ill(self, key: str) -> str:
        """Return what is wrong with a model of which no replica serves, and one or more are up; "": nothing is."""
        view = self._view
        up = [one for one in view.of_model.get(key, {}).values() if one.is_up and view.nodes[one.node].alive]
        told = [f"{one.id} on {one.node}: {one.ill_why}" for one in up if one.health is not Health.UNCHECKED]
        return "; ".join(told[:ILL_MAX]) if told and not any(one.serves for one in up) else ""

    def _is_coming(self, key: str) -> bool:
        """Return True if a replica of the model is on its way to be HOT."""
        there = self._view.of_model.get(key, {}).values()
        flights = self._view.asked_of.get(key, {}).values()
        return any(one.level is Level.HOT and one.phase is Phase.PROVISIONING for one in there) or any(
            flight.action.verb in COMING and flight.action.level is Level.HOT for flight in flights
        )

    def _missing(self) -> dict[str, Prospect]:
        """Of all who miss somebody."""
        view, shapes, found = self._view, None, dict[str, Prospect]()
        self._whys = {key: why for key, why in self._whys.items() if subject_of(Verb.PLACE, key) in view.tries}
        for key, why in self._plan.unmet.items():
            tries = view.tries.get(subject_of(Verb.PLACE, key))
            if why == FAILED and tries is not None:
                found[key] = failed(tries, self._whys.get(key, ""))
            elif why in (NO_ROOM, NO_HOST) and key in view.models:
                shapes = shapes or Shapes(view.nodes)
                found[key] = (shapes.without_room if why == NO_ROOM else shapes.without_host)(view.models[key], why)
            else:
                found[key] = Prospect(why)
        asked = {key for key in view.demand if key in self._wishes}
        said = {key for key in asked if not self._wishes[key].model.hot and self._wishes[key].scaling is None}
        return found | dict.fromkeys(sorted(said), Prospect(WAITED_FOR, hopeless=True))

    def _is_ours(self, model: str) -> bool:
        return model in self._known and model not in self._unread

    def _lose(self, now_s: float) -> None:
        view = self._view
        for name, why in self._hearing.lost(now_s):
            if name in view.nodes and view.nodes[name].alive:
                view.lose(name)
                self._tell("lost", f"node {name} is lost: {why}")
        for name in self._hearing.given_up(now_s):
            if name not in view.nodes:
                self._tell("lost", f"node {name} is lost: it was not heard of, or what it says cannot be read")
        for name in self._hearing.forgotten(now_s):
            view.forget(name)
            self._drains.pop(name, None)
            if name in self._orders:
                self._forgotten.add(name)
                self._tell("forgotten", f"node {name} is forgotten, and what was asked of it: it did not come back")

    def _tell_late(self, now_s: float) -> None:
        due_s = self._view.next_due_s()
        if due_s is None or due_s > now_s:
            return
        for flight in self._view.flying.values():
            if not flight.overdue and flight.action.deadline_s <= now_s:
                self._tell("failed", f"{_words(flight.action)}: it was not seen to be done in time")

    def _writes(self, actions: tuple[Action, ...], wishes: Mapping[str, Wish]) -> Writes:
        view, more = self._view, dict[str, list[Action]]()
        for action in actions:
            more.setdefault(action.node, []).append(action)
        book = self._book_with(actions)
        flown = {flight.action.node for flight in view.flying.values()}
        stand = {name for name, one in self._orders.items() if one.actions}
        orders = {name: self._orders_of(name, more.get(name, [])) for name in sorted(flown | stand | more.keys())}
        changed = {
            name: one
            for name, one in orders.items()
            if one != structs.replace(self._orders.get(name, Orders()), by=self._by)
        }
        return Writes(
            book=book if book != structs.replace(self._book, by=self._by) else None,
            orders=changed | dict.fromkeys(sorted(self._forgotten)),
            wishes=wishes,
        )

    def _claim(self) -> Writes:
        """All that stands, in this one's name; where nothing does, too."""
        names = sorted(self._orders.keys() | self._view.nodes.keys())
        stand = {name: structs.replace(self._orders.get(name, Orders()), by=self._by) for name in names}
        return Writes(book=structs.replace(self._book, by=self._by), orders=stand)

    def _book_with(self, actions: tuple[Action, ...]) -> Book:
        serials = {key: serial for key, serial in self._view.serials.items() if key in self._known}
        for action in actions:
            serials[action.model] = max(action.serial, serials.get(action.model, 0))
        leaving = [action for action in actions if action.verb in LEAVING]
        leaving += [one.action for one in self._view.flying.values() if one.action.verb in LEAVING]
        idle = {name for names in self._drains.values() for name in names}
        idle |= {self._process(one.model, self._version(one), one.serial) for one in leaving}
        tries = dict(self._view.tries)
        return Book(
            by=self._by,
            serials=serials,
            tries=tries,
            idle=tuple(sorted(idle)),
            unmet=self.unmet,
            hopeless=tuple(sorted(key for key, one in self._prospects.items() if one.hopeless)),
            lost=tuple(sorted(name for name, node in self._view.nodes.items() if not node.alive)),
            stands=tuple(sorted(key for key, one in self._prospects.items() if one.stands)),
            whys=dict(self._whys),
        )

    def _version(self, action: Action) -> str:
        """Of the replica that it is about, or of the order to place it."""
        one = self._view.replicas.get(action.name)
        if one is not None:
            return one.version
        asked = (flight.action for flight in self._view.asked_of.get(action.model, {}).values())
        return next((each.version for each in asked if each.name == action.name and each.verb is Verb.PLACE), "")

    def _orders_of(self, name: str, more: Iterable[Action]) -> Orders:
        flights = list(self._view.asked_on.get(name, {}).values())
        actions = sorted([*(one.action for one in flights), *more], key=lambda one: (_ORDER[one.verb], one.id))
        overdue = frozenset(one.action.id for one in flights if one.overdue)
        return Orders(by=self._by, actions=tuple(actions), overdue=overdue)

    def _process(self, model: str, version: str, serial: int) -> str:
        return process_name(self._deployment, model, version, serial)

    # -- how many

    def _scale(self, now_s: float) -> dict[str, Wish]:
        """Wishes of which another number is wanted from now on."""
        self._scaling_to = {}
        wishes = {}
        for key in self._elastic:
            wish, state = self._wishes[key], self._scaled.get(key)
            assert wish.scaling is not None, key
            if state is None or state.wanted != wish.model.wanted:  # by a person, or before this one began
                state = Scaled(wanted=wish.model.wanted, stepped_s=now_s)
            after = scaling.step(state, wish.model, wish.scaling, self._signs(key, wish.name, now_s), now_s)
            if after.wanted == wish.model.wanted:
                self._scaled[key] = after
                continue
            self._scaled[key], self._scaling_to[key] = state, after
            model = structs.replace(wish.model, wanted=after.wanted, generation=wish.model.generation + 1)
            wishes[key] = structs.replace(wish, model=model)
        return wishes

    def _signs(self, key: str, name: str, now_s: float) -> Signs:
        there = [one for one in self._view.of_model.get(key, {}).values() if self._view.nodes[one.node].alive]
        demand, load = self._view.demand.get(key), self._traffic.load(name)
        return Signs(
            waiting=demand.waiting if demand is not None else 0,
            wait_s=max(0.0, now_s - demand.since_unix_s) if demand is not None else 0.0,
            running=max(load.running, sum(one.running for one in there)),
            kv_used=load.kv_used,
            ready=sum(one.serves for one in there),
        )

    def _tell(self, what: str, text: str) -> None:
        if len(self._told) < TOLD_MAX:
            self._told.append(Told(what, text))


def _words(action: Action) -> str:
    """As people read it."""
    where = " ".join((action.node, *action.devices))
    level = f" {action.level.word}" if action.verb is Verb.PLACE else ""
    return f"{action.verb} {action.name}{level} on {where}"
