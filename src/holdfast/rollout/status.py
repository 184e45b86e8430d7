"""A rollout in plain words: one line for the whole, one for each service, and whether it is over. Pure.

Always true: every phase has its line, and says what it waits for where it waits; nothing is stored that is said here.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from holdfast.rollout.machine import Held, Look, Memory, Phase
from holdfast.rollout.replica import COMING, Replica, Seen, Stage, Want
from holdfast.rollout.stock import Stock


class RolloutState(StrEnum):
    """Whether what was asked for is there; a command that waits ends with any but `UNDER_WAY` and `PAUSED`."""

    DONE = "done"
    UNDER_WAY = "under way"
    PAUSED = "paused"
    UNDONE = "undone"
    STUCK = "stuck"


class Service(Struct, frozen=True):
    """How far one service is."""

    name: str
    wanted: int
    new: int  # of the wanted set, that count
    old: int  # of other sets, that count
    there: int  # in all
    waits_for: str = ""
    held_s: float = 0.0  # how long requests found nobody on the way to this revision, at a stretch
    is_unwell: bool = False  # one of the wanted set is broken, and what is waited for says which

    def __str__(self) -> str:
        old = f", {self.old} of an earlier set" if self.old else ""
        waits = f"; {self.waits_for}" if self.waits_for else ""
        held = f"; none did for {self.held_s:.1f} s" if self.held_s else ""
        return f"{self.name}: {self.new} of {self.wanted} serve{old}{held}{waits}"


class Report(Struct, frozen=True):
    """All that is said of a rollout."""

    state: RolloutState = field(name="verdict")  # as records have it
    revision: int  # the newest that was asked for
    headline: str
    services: tuple[Service, ...] = ()

    @property
    def is_done(self) -> bool:
        """What was asked for is there, and nothing else: also a number that changed while nothing was replaced."""
        return self.state is RolloutState.DONE and all(one.new == one.wanted == one.there for one in self.services)

    @property
    def is_unwell(self) -> bool:
        """What was asked for is in place, and something is wrong with it that nothing here will undo."""
        return self.state is RolloutState.DONE and any(one.is_unwell for one in self.services)

    @property
    def serves(self) -> bool:
        """Of everything that is wanted somebody serves."""
        return bool(self.services) and all(one.new + one.old > 0 for one in self.services if one.wanted)


def report(memory: Memory, look: Look, now_s: float) -> Report:
    replicas = dict(memory.replicas)
    stock = Stock(memory.target, memory.stable, replicas, look.replicas, look.room, now_s, memory.serial)
    stock.tried = memory.tried
    names = sorted({*memory.target.parts, *(one.service for one in memory.replicas.values())})
    services = tuple(_service(stock, name, memory.held.get(name, Held())) for name in names)
    headline = _unjudged(memory, look) or _headline(memory, services, now_s)
    return Report(rollout_state(memory), memory.wanted, headline, services)


def rollout_state(memory: Memory) -> RolloutState:
    if memory.phase is Phase.STUCK:
        return RolloutState.STUCK
    if memory.undone:
        return RolloutState.UNDONE if memory.phase is Phase.STEADY else RolloutState.UNDER_WAY
    if memory.phase is Phase.STEADY:
        return RolloutState.DONE
    return RolloutState.PAUSED if is_paused(memory) else RolloutState.UNDER_WAY


def is_paused(memory: Memory) -> bool:
    return memory.phase is Phase.ROLLING and any(part.paused for part in memory.target.parts.values())


def _unjudged(memory: Memory, look: Look) -> str:
    """Return what a rollout waits for that no control can judge, with the remedy; "": it does not."""
    new = sorted(look.unjudged & memory.target.parts.keys())
    if not new or memory.phase is not Phase.ROLLING or is_paused(memory):
        return ""
    waits = f"revision {memory.target.number} waits for a control: none leads that could check the new {', '.join(new)}"
    return f"{waits}; `holdfast status` shows whether one runs, and its log in the state directory why it does not lead"


def _headline(memory: Memory, services: tuple[Service, ...], now_s: float) -> str:
    number, undone = memory.target.number, memory.undone
    counts = ", ".join(f"{one.name} {one.new} of {one.wanted}" for one in services) or "nothing runs"
    first = sorted(services, key=lambda one: not one.is_unwell)
    waits = next((f"; {one.waits_for}" for one in first if one.waits_for), "")
    if memory.wanted == 0:
        return "no manifest has been applied yet"
    match memory.phase:
        case Phase.STEADY if undone:
            return f"revision {undone} was undone: {memory.why}; revision {number} is in place: {counts}{waits}"
        case Phase.STEADY:
            stays = "; the revision was in place before that, so nothing is undone" if _is_unwell(services) else ""
            return f"revision {number} is in place: {counts}{waits}{stays}"
        case Phase.UNDOING:
            return f"revision {undone} is being undone: {memory.why}; back to revision {number}: {counts}{waits}"
        case Phase.STUCK if undone:
            back = f"back to revision {number}, which is stuck: {memory.stuck}"
            return f"revision {undone} is being undone: {memory.why}; {back}; {counts}{waits}"
        case Phase.STUCK:
            same = waits.startswith(f"; {memory.stuck.partition(' ')[0]} ")
            return f"revision {number} is stuck: {memory.stuck}; {counts}{'' if same else waits}"
        case Phase.ROLLING if is_paused(memory):
            return f"revision {number} is paused: {counts}{waits}"
        case Phase.ROLLING if memory.whole_s is not None:
            watched_s = memory.whole_s + memory.target.watch_s
            tried_s = max((until_s for until_s in memory.trials.values() if until_s is not None), default=0.0)
            most = "up to " if tried_s > watched_s else ""
            left_s = max(0.0, watched_s - now_s, tried_s - now_s)
            return f"revision {number} is all there and watched for {most}{left_s:.0f} s more: {counts}"
        case Phase.ROLLING:
            return f"revision {number} is rolling out: {counts}{waits}"


def _is_unwell(services: tuple[Service, ...]) -> bool:
    return any(one.is_unwell for one in services)


def _service(stock: Stock, name: str, held: Held) -> Service:
    wanted = stock.target.parts[name].replicas if name in stock.target.parts else 0
    new = sum(map(stock.counts, stock.of(name, old=False)))
    old = sum(map(stock.counts, stock.of(name, old=True)))
    own = [key for key, one in stock.replicas.items() if one.service == name]
    coming = [key for key in own if not stock.is_old(key) and not stock.counts(key)]
    coming.sort(key=lambda key: not stock.seen(key).is_broken)
    leaving = [key for key in own if stock.replicas[key].want not in COMING]
    waits = next((f"{key} {_waits(stock.replicas[key], stock.seen(key))}" for key in coming + leaving), "")
    if wanted and stock.is_watched(name):
        tried = next(key for key in stock.of(name, old=False) if stock.counts(key))
        waits = f"{tried} is tried with customers' requests before others leave"
    elif not waits and wanted and stock.missing(name) > 0:
        no_room = stock.room.get(name, 1) <= 0
        waits = f"there is no room for another {name}" if no_room else f"another {name} is to be started"
    # One that is under way in whole seconds: a report that is the same is not written again.
    held_s = held.longest_s if held.since_s is None else float(int(held.until(stock.now_s)))
    unwell = bool(coming) and stock.seen(coming[0]).is_broken
    return Service(name, wanted, new, old, len(own), waits, held_s, unwell)


def _waits(one: Replica, seen: Seen) -> str:
    """What a replica that does not count, or leaves, is doing; reads after its name."""
    why = f": {seen.how}" if seen.how else ""
    if seen.is_broken:
        return seen.trouble or f"crashed {seen.crashes} times in a row{why}"
    match one.want, seen.stage:
        case Want.STOP, _:
            return "is being stopped"
        case Want.DRAIN, Stage.DRAINING if one.until_s is None:
            return "is kept until the one that took over is proven"
        case Want.DRAIN, Stage.DRAINING:
            return f"drains, {seen.streams} {'stream is' if seen.streams == 1 else 'streams are'} left"
        case Want.DRAIN, _:
            return "is to drain"
        case _, Stage.ABSENT:
            return f"is to be started{why}"
        case _, Stage.STARTING:
            return f"is starting{why}"
        case Want.STAND_BY, _:
            return f"stands by beside {one.beside}"
        case _, Stage.STANDBY:
            return "is waking"
        case _, Stage.DRAINING | Stage.LEAVING:
            return f"is {seen.stage}"
    if not seen.admitted:
        return f"is not admitted by a frontend yet{why}"
    if seen.weight <= 0.0:
        return f"gets no traffic before its canary has passed{why}"
    return f"gets a part of its traffic until it is proven{why}"
