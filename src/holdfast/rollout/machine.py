"""A deployment's way from one revision to the next, one look at a time: it begins, goes on, is undone, and ends.

Theory. It is told what should run and what is seen, all at once (`Look`), and never what changed: so it may be told the
same again, or late, or be another process that goes on after this one died. All that no look can tell is in `Memory`,
which is written down before anything is done about it: above all what each replica is wanted to do, which `moves.py`
decides. What is to be done is the difference between that and what is seen (`DUE`); it is said once, and again only if
nothing has come of it after `RETRY_S`. A name is used once, so whoever is told to start one that is there has done so.

A revision whose new sets show to be bad is undone, once: everything goes back to the revision that was last in place,
by the same rules. Bad is a new replica that cannot ever serve (its card is refused, its canary fails, its settings
cannot be), that crashes again and again, or makes no progress to its deadline; a new set that no device here could
hold; and one of whose requests too many fail while others' do not (`trial.py`). What fails in a set that was in place
before is not the revision's fault, and undoes nothing.
With no way back, and when the way back itself takes too long, it is stuck, and says so; it is worked at all the same,
and ends well whenever it can. A newer revision takes over at any time: what is there is then its own, or old.

Always true: a revision is undone at most once, to one that was in place; what is paused stands still, and so does its
deadline, but the way back is never paused; a new set of workers that no control can judge waits as if it were paused;
whoever is seen and not known is taken in, and leaves by the same rules; a turn that has no entry in the table changes
nothing. No I/O, no clock: `now_s` is wall time and comes in.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec import Struct, structs

from holdfast.health.bounds import Count, UnixS
from holdfast.rollout.moves import move
from holdfast.rollout.replica import CRASHES_MAX, Replica, Seen, Stage, Want
from holdfast.rollout.revision import Revision, changes
from holdfast.rollout.stock import Stock, part_of
from holdfast.rollout.trial import TRIAL_S, Traffic, Trial

VERSION = 1  # of `Memory` as it is written
RETRY_S = 10.0  # long against what carrying something out takes, short against a deadline


class Phase(StrEnum):
    """Where a deployment is."""

    STEADY = "steady"
    ROLLING = "rolling"
    UNDOING = "undoing"
    STUCK = "stuck"


class Turn(StrEnum):
    """What a look shows of the whole."""

    NEWER = "a newer revision is wanted"
    FAILED = "its new sets are bad, and there is a way back"
    BLOCKED = "its time is over, or it is bad and there is no way back"
    WHOLE = "everything is in place"


# -- what is seen


class Look(Struct, frozen=True, kw_only=True):
    """Everything at one moment."""

    wish: Revision
    replicas: dict[str, Seen] = {}
    room: dict[str, int] = {}  # how many more of a service can be placed; not said: as many as it takes
    # By service, and by the set's id. None: nobody listened long enough to say how much is asked for.
    traffic: dict[str, dict[str, Traffic]] | None = {}
    refused: dict[str, str] = {}  # by a set's id: why none of it can ever be started here
    unjudged: frozenset[str] = frozenset()  # services whose new set needs a control's verdict, while no control leads


# -- what is remembered


class Progress(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a service, with its mates, ever was on this way, and since when. Its clock stands still while nothing is
    to come of it: where it is paused, or waits for others, or drains within its bound."""

    best: int
    moved_s: UnixS
    still_s: UnixS | None = None  # since when its clock stands still


class Held(Struct, frozen=True, forbid_unknown_fields=True):
    """How long requests to a service found nobody on this way, at a stretch."""

    longest_s: float = 0.0  # of those that are over
    since_s: UnixS | None = None  # when the one under way began

    def until(self, now_s: float) -> float:
        """The longest, the one under way included."""
        return max(self.longest_s, 0.0 if self.since_s is None else now_s - self.since_s)


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a rollout remembers."""

    version: int = VERSION
    phase: Phase = Phase.STEADY
    target: Revision  # what is worked at
    stable: Revision | None = None  # what was last in place
    wanted: Count = 0  # the newest revision that was heard of
    undone: Count = 0  # that one, if it was undone
    why: str = ""  # it was undone
    stuck: str = ""  # why it is
    replicas: dict[str, Replica] = {}
    serial: Count = 0  # of the last replica that was named
    progress: dict[str, Progress] = {}
    trials: dict[str, UnixS | None] = {}  # by when a service's new set must have been tried; None: it has been
    began_s: UnixS = 0.0
    ended_s: UnixS | None = None
    whole_s: UnixS | None = None  # since when everything is in place
    surged: int = 0  # the most of a service that there were beyond those wanted
    held: dict[str, Held] = {}  # by service; who was never without somebody is not there

    @property
    def tried(self) -> frozenset[str]:
        """Services whose new set has been."""
        return frozenset(service for service, until_s in self.trials.items() if until_s is None)


NOTHING = Memory(target=Revision(number=0, parts={}))


def encode(memory: Memory) -> bytes:
    return msgspec.json.encode(memory)


def decode(data: bytes) -> Memory:
    """ValueError, if another version wrote it, or nobody: whoever reads it then leaves everything as it is."""
    memory = msgspec.json.decode(data, type=Memory)
    if memory.version != VERSION:
        raise ValueError(f"a rollout's memory of version {memory.version}; version {VERSION} is known here")
    return memory


def restore(memory: Memory, now_s: float) -> Memory:
    """To go on from what another process wrote: it may have done what it said or not, and its clock may have been
    ahead."""
    replicas = {}
    for name, one in memory.replicas.items():
        part = part_of(one.service, memory.target, memory.stable)
        until_s = None if one.until_s is None else min(one.until_s, now_s + max(part.drain_s, part.last_drain_s))
        replicas[name] = structs.replace(one, asked_s=None, until_s=until_s)
    progress = {}
    for service, at in memory.progress.items():
        still_s = None if at.still_s is None else min(at.still_s, now_s)
        progress[service] = structs.replace(at, moved_s=min(at.moved_s, now_s), still_s=still_s)
    whole_s = None if memory.whole_s is None else min(memory.whole_s, now_s)
    held = {}
    for service, away in memory.held.items():
        held[service] = structs.replace(away, since_s=None if away.since_s is None else min(away.since_s, now_s))
    trials = {key: None if until_s is None else min(until_s, now_s + TRIAL_S) for key, until_s in memory.trials.items()}
    changed = {"replicas": replicas, "progress": progress, "trials": trials, "held": held}
    return structs.replace(memory, **changed, whole_s=whole_s)


# -- what is to be done


class Start(Struct, frozen=True):
    """Start a replica of this set under this name. `beside`: to stand by on that one's device."""

    name: str
    service: str
    set_id: str
    beside: str = ""


class Wake(Struct, frozen=True):
    """Who stands by is to serve."""

    name: str


class Drain(Struct, frozen=True):
    """Nothing new for it. A worker's streams are handed over; a frontend closes connections after their answers."""

    name: str


class CallOff(Struct, frozen=True):
    """It is to serve again after all."""

    name: str


class Stop(Struct, frozen=True):
    """It is to end."""

    name: str


class Tell(Struct, frozen=True):
    """A line for people."""

    text: str


Deed = Wake | Drain | CallOff | Stop
Act = Start | Deed | Tell
Outcome = tuple[Memory, tuple[Act, ...]]

DUE: dict[Want, dict[Stage, type[Start | Deed]]] = {
    Want.STAND_BY: {Stage.ABSENT: Start},
    Want.SERVE: {Stage.ABSENT: Start, Stage.STANDBY: Wake, Stage.DRAINING: CallOff},
    Want.DRAIN: {Stage.SERVING: Drain},
    Want.STOP: {Stage.STARTING: Stop, Stage.STANDBY: Stop, Stage.SERVING: Stop, Stage.DRAINING: Stop},
}


# -- steps


def step(memory: Memory, look: Look, now_s: float) -> Outcome:
    """The next memory, to be written down first, and then what is to be done, in order."""
    return _Round(memory, look, now_s).run()


def next_deadline_s(memory: Memory) -> float | None:
    """When to look again at the latest; None: when something changes."""
    due = [one.asked_s + RETRY_S for one in memory.replicas.values() if one.asked_s is not None]
    due += [one.until_s for one in memory.replicas.values() if one.until_s is not None]
    trials = [until_s for until_s in memory.trials.values() if until_s is not None]
    due += trials
    if memory.whole_s is not None:
        due.append(max(memory.whole_s + memory.target.watch_s, *trials, 0.0))
    if memory.phase in (Phase.ROLLING, Phase.UNDOING):
        running = {service: at.moved_s for service, at in memory.progress.items() if at.still_s is None}
        bounds_s = {service: part_of(service, memory.target, memory.stable).deadline_s for service in running}
        due += [moved_s + bounds_s[service] for service, moved_s in running.items()]
    return min(due, default=None)


class _Round:
    """One look, and what follows from it."""

    def __init__(self, memory: Memory, look: Look, now_s: float) -> None:
        self.look, self.now_s = look, now_s
        self.acts: list[Act] = []
        self.memory = memory
        replicas, serial = dict(memory.replicas), memory.serial
        self.stock = Stock(memory.target, memory.stable, replicas, look.replicas, look.room, now_s, serial)

    def run(self) -> Outcome:
        self._meet()
        self._hear()
        self._take(Turn.NEWER, self.look.wish.number > self.memory.wanted)
        self._note_progress()
        if why := self._bad():
            self._take(Turn.FAILED if self.memory.stable is not None else Turn.BLOCKED, True, why)
        elif why := self._late():
            self._take(Turn.BLOCKED, True, why)
        self._note_trials()
        move(self.stock)
        self._note_progress()
        self._note_held()
        self._take(Turn.WHOLE, self._is_over())
        self._say_due()
        return structs.replace(self.memory, replicas=self.stock.replicas, serial=self.stock.serial), tuple(self.acts)

    def _take(self, turn: Turn, shown: bool, why: str = "") -> None:
        """What follows from a turn, if the look shows it."""
        become = TABLE.get((self.memory.phase, turn))
        if shown and become is not None:
            become(self, why)

    def _remember(self, memory: Memory) -> None:
        is_rolling = memory.phase is Phase.ROLLING
        held = {service for service, part in memory.target.parts.items() if part.paused and is_rolling}
        if memory.stable is not None:  # else nothing serves that a step forward could harm
            held |= self.look.unjudged & memory.target.parts.keys()
        self.memory = memory
        self.stock.target, self.stock.stable = memory.target, memory.stable
        self.stock.held = frozenset(held)
        self.stock.is_undo = bool(memory.undone)
        self.stock.tried = memory.tried

    def _meet(self) -> None:
        """Take in whoever is there and not known, and note who counts."""
        stock = self.stock
        for name, seen in self.look.replicas.items():
            if name not in stock.replicas and seen.stage is not Stage.ABSENT:
                stock.replicas[name] = self._stray(seen)
                number = name.rpartition("-")[2]
                stock.serial = max(stock.serial, int(number) if number.isdecimal() else 0)
        for name, one in stock.replicas.items():
            if not one.counted and stock.counts(name):
                stock.replicas[name] = structs.replace(one, counted=True)

    def _stray(self, seen: Seen) -> Replica:
        """What to think of one that is not known. It may have counted, unless its set is what is being brought; and who
        stands by for nobody is not kept."""
        want = Want.STOP if seen.stage in (Stage.STANDBY, Stage.LEAVING) else Want.SERVE
        known = (self.memory.stable, self.memory.target, self.look.wish)
        its = [one for one in known if one is not None and one.sets.get(seen.service) == seen.set_id]
        pair = its[0].pair(seen.service) if its else ((seen.service, seen.set_id),)
        counted = seen.set_id != self.look.wish.sets.get(seen.service)
        return Replica(service=seen.service, set_id=seen.set_id, pair=pair, want=want, counted=counted)

    def _hear(self) -> None:
        """The same revision may be wanted in another number or manner."""
        memory, wish = self.memory, self.look.wish
        if wish.number == memory.target.number == memory.wanted and wish.sets == memory.target.sets:
            stable = wish if memory.stable is not None and memory.stable.number == wish.number else memory.stable
            memory = structs.replace(memory, target=wish, stable=stable)
        self._remember(memory)

    # -- how it goes

    def _is_over(self) -> bool:
        """All is in place, and where there is a way back it was judged, watched and tried."""
        memory = self.memory
        if memory.whole_s is None or memory.stable is None or not memory.target.brings(memory.stable):
            return memory.whole_s is not None
        if self.look.unjudged:
            return False
        return memory.tried == memory.trials.keys() and self.now_s >= memory.whole_s + memory.target.watch_s

    def _note_progress(self) -> None:
        """Progress is one more that counts, or one less that is old and not leaving."""
        memory, stock = self.memory, self.stock
        if memory.phase is Phase.STEADY:
            return
        services = sorted({*memory.target.parts, *(one.service for one in stock.replicas.values())})
        progress = {service: self._progress(service, memory.progress.get(service)) for service in services}
        surged = max([memory.surged, *(len(stock.places(name)) - stock.part(name).replicas for name in services)])
        whole_s = (self.now_s if memory.whole_s is None else memory.whole_s) if stock.is_whole() else None
        self._remember(structs.replace(memory, progress=progress, whole_s=whole_s, surged=surged))

    def _progress(self, service: str, last: Progress | None) -> Progress:
        stock, score = self.stock, 0
        for name in {service, *stock.part(service).mates}:
            score += sum(map(stock.counts, stock.of(name, old=False))) - len(stock.of(name, old=True))
        if last is None or score > last.best:
            return Progress(score, self.now_s, None if stock.is_busy(service) else self.now_s)
        if not stock.is_busy(service):
            return structs.replace(last, still_s=self.now_s if last.still_s is None else last.still_s)
        away_s = 0.0 if last.still_s is None else self.now_s - last.still_s
        return structs.replace(last, moved_s=last.moved_s + away_s, still_s=None)

    def _note_trials(self) -> None:
        """A new set's trial begins when one of it counts first, and is over for good when it was tried, or is late."""
        stock, trials = self.stock, dict(self.memory.trials)
        for service in filter(stock.is_new, self.memory.target.parts):
            if service in trials or any(stock.replicas[name].counted for name in stock.of(service, old=False)):
                until_s = trials.get(service, self.now_s + TRIAL_S)
                tried = self.look.traffic is not None and self._is_tried(service, until_s)
                trials[service] = None if tried or until_s is None or self.now_s >= until_s else until_s
        self._remember(structs.replace(self.memory, trials=trials))

    def _is_tried(self, service: str, until_s: float | None) -> bool:
        """Return whether the new set has had enough good requests, or gets none while the old ones are there."""
        trial, part = self._trial(service), self.memory.target.parts[service]
        is_shunned = until_s is not None and self.now_s >= until_s - TRIAL_S + part.shunned_s
        return trial.is_tried or (is_shunned and not trial.own.attempts)

    def _trial(self, service: str) -> Trial:
        part, traffic = self.memory.target.parts[service], (self.look.traffic or {}).get(service, {})
        is_shut = any(self.stock.seen(name).is_shut for name in self.stock.of(service, old=False))
        return Trial.of(traffic, part.set_id, part.errors_percent_max, is_shut=is_shut)

    def _note_held(self) -> None:
        """Of services that had somebody before."""
        memory, held = self.memory, dict(self.memory.held)
        before = memory.stable.parts if memory.stable is not None and memory.phase is not Phase.STEADY else {}
        for service in sorted(before.keys() & memory.target.parts.keys()):
            last = held.get(service, Held())
            if self.stock.is_served(service) or not memory.target.parts[service].replicas:
                last = Held(last.until(self.now_s))
            elif last.since_s is None:
                last = structs.replace(last, since_s=self.now_s)
            if last != Held():
                held[service] = last
        self._remember(structs.replace(memory, held=held))

    def _bad(self) -> str:
        """Why the new sets cannot be, in one line; "": nothing says so."""
        if self.memory.phase is Phase.STEADY:
            return ""
        new = filter(self.stock.is_new, self.memory.target.parts)
        whys = (self._broken(service) or self._failing(service) or self._tardy(service) for service in new)
        return next((why for why in whys if why), "")

    def _broken(self, service: str) -> str:
        if why := self.look.refused.get(self.memory.target.sets[service]):
            return f"{service} cannot be started: {why}"
        for name in self.stock.of(service, old=False):
            seen = self.stock.seen(name)
            if seen.trouble:
                return f"{name} {seen.trouble}"
            if seen.crashes >= CRASHES_MAX:
                return f"{name} crashed {seen.crashes} times in a row" + (f": {seen.how}" if seen.how else "")
        return ""

    def _failing(self, service: str) -> str:
        """Too many of its requests fail, and not so everywhere. Also when its breakers have opened for it."""
        trial = self._trial(service)
        serves = any(self.stock.seen(name).admitted for name in self.stock.of(service, old=False))
        told = f"{trial.own.failed} of {trial.own.attempts} requests to the new {service} failed"
        told += f" (its rollout.errorPercentMax is {trial.percent_max})"
        return told if serves and trial.is_bad else ""

    def _is_overdue(self, service: str) -> bool:
        at = self.memory.progress[service]
        return at.still_s is None and self.now_s >= at.moved_s + self.stock.part(service).deadline_s

    def _tardy(self, service: str) -> str:
        """It makes no progress, for want of a replica that serves."""
        if self.stock.is_up(service) or not self._is_overdue(service):
            return ""
        bound = f"within {self.memory.target.parts[service].deadline_s:g} s"
        waiting = next((name for name in self.stock.of(service, old=False) if not self.stock.counts(name)), "")
        if not waiting:
            return "" if self.stock.leavers(service) else f"there was no room for another {service} {bound}"
        how = self.stock.seen(waiting).how
        return f"{waiting} did not come to serve {bound}" + (f": {how}" if how else "")

    def _late(self) -> str:
        """What is overdue, although nothing is wrong with the new sets."""
        for service in filter(self._is_overdue, self.memory.progress):
            if service in self.memory.target.parts and (tardy := self._tardy(service)):
                return tardy
            if leavers := self.stock.leavers(service):
                return f"{leavers[0]} does not leave"
        return ""

    # -- transitions, named by where they go

    def become_rolling(self, _why: str) -> None:
        wish, before = self.look.wish, self.memory
        instead = "" if before.phase is Phase.STEADY else f" in place of {before.target.number}"
        lines = "; ".join(changes(before.target, wish)) or "nothing is replaced"
        self.acts.append(Tell(f"revision {wish.number} begins{instead}: {lines}"))
        begun = Memory(phase=Phase.ROLLING, target=wish, wanted=wish.number, began_s=self.now_s)
        self._remember(structs.replace(begun, stable=before.stable))

    def become_undoing(self, why: str) -> None:
        memory, back = self.memory, self.memory.stable
        assert back is not None, "only what can be undone is"
        bad = memory.target.number
        self.acts.append(Tell(f"revision {bad} is undone: {why}; going back to revision {back.number}"))
        changed = {"phase": Phase.UNDOING, "target": back, "undone": bad, "why": why, "stuck": ""}
        self._remember(structs.replace(memory, **changed, progress={}, trials={}))

    def become_stuck(self, why: str) -> None:
        memory = self.memory
        self.acts.append(Tell(f"revision {memory.target.number} is stuck: {why}"))
        self._remember(structs.replace(memory, phase=Phase.STUCK, stuck=why))

    def become_steady(self, _why: str) -> None:
        memory = self.memory
        again = " again" if memory.undone else ""
        after_s = self.now_s - memory.began_s
        held = "".join(f"; no {name} served for {one.longest_s:.1f} s" for name, one in memory.held.items())
        self.acts.append(Tell(f"revision {memory.target.number} is in place{again}, after {after_s:.1f} s{held}"))
        changed = {"phase": Phase.STEADY, "stable": memory.target, "stuck": "", "ended_s": self.now_s}
        self._remember(structs.replace(memory, **changed, progress={}, trials={}, whole_s=None))

    # -- what is said

    def _say_due(self) -> None:
        replicas = self.stock.replicas
        for name, one in replicas.items():
            act = DUE[one.want].get(self.stock.seen(name).stage)
            asked_s = one.asked_s if act is not None else None
            if act is not None and (asked_s is None or not asked_s <= self.now_s < asked_s + RETRY_S):
                asked_s = self.now_s
                beside = one.beside if one.beside in replicas else ""
                if issubclass(act, Start):
                    self.acts.append(Start(name, one.service, one.set_id, beside))
                else:
                    self.acts.append(act(name))
            if asked_s != one.asked_s:
                replicas[name] = structs.replace(one, asked_s=asked_s)


TABLE: dict[tuple[Phase, Turn], Callable[[_Round, str], None]] = {
    (Phase.STEADY, Turn.NEWER): _Round.become_rolling,
    (Phase.ROLLING, Turn.NEWER): _Round.become_rolling,
    (Phase.ROLLING, Turn.FAILED): _Round.become_undoing,
    (Phase.ROLLING, Turn.BLOCKED): _Round.become_stuck,
    (Phase.ROLLING, Turn.WHOLE): _Round.become_steady,
    (Phase.UNDOING, Turn.NEWER): _Round.become_rolling,
    (Phase.UNDOING, Turn.BLOCKED): _Round.become_stuck,
    (Phase.UNDOING, Turn.WHOLE): _Round.become_steady,
    (Phase.STUCK, Turn.NEWER): _Round.become_rolling,
    (Phase.STUCK, Turn.FAILED): _Round.become_undoing,
    (Phase.STUCK, Turn.WHOLE): _Round.become_steady,
}
