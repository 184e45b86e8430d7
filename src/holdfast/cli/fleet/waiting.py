"""The end of a command that changed the desired state of a model or a node: with `--wait` it waits until that is
reached, or cannot be.

Always true: a command that stops waiting, by Ctrl-C or its timeout, says that the change continues, and where to look.
JSON shows the state at the end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.cli.fleet.observed import JOIN, FleetStore, ObservedFleet
from holdfast.cli.fleet.words import model_shown
from holdfast.cli.screen import Busy, Screen
from holdfast.cli.status import show_json
from holdfast.cli.terminal import Terminal, write_out
from holdfast.core.errors import UserError
from holdfast.fleet.actions import COPY_S, Tries, Verb, replica_name, subject_of
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Replica, ReplicaPhase
from holdfast.fleet.outlook import FAILED_MAX, too_large
from holdfast.fleet.records import DesiredModel

LOOK_S = 1.0  # between two looks, if the store reports nothing
QUIET_S = 30.0  # without a node, a control or the store: each is back within seconds of a restart
STUCK_S = COPY_S  # the same is missing for so long, and no replica comes or leaves: no step takes longer


def is_in_place(observed: ObservedFleet, desired: DesiredModel) -> bool:
    """Return True if as many replicas serve and are kept as desired, and without autoscaling no more than that."""
    model = desired.model
    hot, warm = (_own(observed.ready(model.key, level), model) for level in (Level.HOT, Level.WARM))
    on_devices = sum(one.on_devices for one in observed.replicas(model.key))
    is_enough = hot >= model.hot and hot + warm >= model.kept
    is_left = not any(one.serial in model.going for one in observed.replicas(model.key))
    return is_enough and is_left and (desired.scaling is not None or on_devices <= model.hot)


def how_far(observed: ObservedFleet, desired: DesiredModel) -> str:
    model = desired.model
    hot = _own(observed.ready(model.key, Level.HOT), model)
    replicas = observed.replicas(model.key)
    moving = [f"{one.id} {one.phase} on {one.node}" for one in replicas if one.phase is not ReplicaPhase.READY]
    moving += [f"{one.id} {one.health} on {one.node}" for one in replicas if one.is_up and not one.serves]
    unmet = observed.record.unmet.get(model.key, "")
    counted = f"{hot} of {model.hot} HOT" if hot <= model.hot and model.hot else f"{hot} HOT, {model.hot} desired"
    return "; ".join(filter(None, (counted, *moving, unmet)))


def _own(found: list[Replica], model: Model) -> int:
    return sum(one.version == model.version for one in found)


def trouble_of(observed: ObservedFleet) -> str:
    """Return why the fleet makes no progress; "": it does."""
    if not observed.nodes:
        return f"no node of {observed.deployment} is there: {JOIN[observed.backend]}"
    if not observed.is_led:
        return f"no control of {observed.deployment} runs: replicas keep serving, but none is started, stopped or moved"
    return ""


class LastingTrouble:
    """A problem that is tolerated for a bounded time."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._trouble, self._since_s = "", 0.0

    def note(self, trouble: str, now_s: float) -> None:
        """Note the present problem ("": none); raise UserError if the same one lasts too long."""
        if trouble != self._trouble:
            self._trouble, self._since_s = trouble, now_s
        if trouble and now_s > self._since_s + self._bound_s:
            raise UserError(trouble)


class Wait(Protocol):
    """What a command waits for, judged from one look at the fleet to the next."""

    def look(self, observed: ObservedFleet, now_s: float, away: str = "") -> str | None:
        """Return what is there, once all of it is; None: not yet. UserError says why it will not be. `away`: why the
        store does not answer."""

    def progress(self, observed: ObservedFleet) -> str:
        """Return how far it is."""

    def goes_on(self, observed: ObservedFleet) -> str:
        """Return what to tell a user who stops waiting."""


class PlacementWait:
    """Decides from one look to the next whether a model's desired state is reached, or cannot be."""

    def __init__(self, desired: DesiredModel, observed: ObservedFleet) -> None:
        self.desired = desired
        self._quiet, self._stuck = LastingTrouble(QUIET_S), LastingTrouble(STUCK_S)
        self._tries = self._tried(observed)  # earlier failures do not count
        self._failed, self._why = 0, ""

    def look(self, observed: ObservedFleet, now_s: float, away: str = "") -> str | None:
        """Return as `Wait.look` does."""
        key = self.desired.model.key
        desired = observed.desired.get(key)
        if desired is None:
            raise UserError(f"{key} was removed from the fleet meanwhile")
        if desired.model.version != self.desired.model.version:
            raise UserError(f"{key} was deployed again meanwhile, as version {desired.model.version}")
        self.desired = desired
        if not away and is_in_place(observed, desired):
            return f"{how_far(observed, desired)}, version {desired.model.version}"
        if lack := too_large((record.node for record in observed.nodes.values()), desired.model):
            raise UserError(f"{key}: {lack}")
        self._count_failures(observed)
        self._quiet.note(away or trouble_of(observed), now_s)
        moves = any(one.phase is not ReplicaPhase.READY for one in observed.replicas(key))
        unmet = observed.record.unmet.get(key, "")
        self._stuck.note(f"{key}: {unmet}" if unmet and not moves else "", now_s)
        return None

    def progress(self, observed: ObservedFleet) -> str:
        return how_far(observed, self.desired)

    def goes_on(self, observed: ObservedFleet) -> str:
        return _goes_on(self.desired.model.key)

    def _count_failures(self, observed: ObservedFleet) -> None:
        key = self.desired.model.key
        mark = replica_name(key, 0).removesuffix("0")
        whys = [
            why for node in observed.nodes.values() for action, why in node.answers.items() if why and mark in action
        ]
        self._why = whys[-1] if whys else self._why
        before, self._tries = self._tries, self._tried(observed)
        if self._tries is not None and self._tries != before:  # the count was reset, or grew
            known = before.failed if before is not None and self._tries.failed > before.failed else 0
            self._failed += self._tries.failed - known
        if self._failed >= FAILED_MAX:
            raise UserError(f"{key} failed to start {self._failed} times: {self._why or 'its node gave no reason'}")

    def _tried(self, observed: ObservedFleet) -> Tries | None:
        return observed.record.tries.get(subject_of(Verb.PLACE, self.desired.model.key))


class RemovalWait:
    """Decides whether all replicas of a removed model have left."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._quiet = LastingTrouble(QUIET_S)

    def look(self, observed: ObservedFleet, now_s: float, away: str = "") -> str | None:
        """Return as `Wait.look` does."""
        if self.key in observed.desired:
            raise UserError(f"{self.key} was deployed again")
        if not away and not observed.replicas(self.key):
            return "nothing of it is left"
        self._quiet.note(away or trouble_of(observed), now_s)
        return None

    def progress(self, observed: ObservedFleet) -> str:
        return f"{len(observed.replicas(self.key))} left"

    def goes_on(self, observed: ObservedFleet) -> str:
        return _goes_on(self.key)


def _goes_on(key: str) -> str:
    return f"it continues in the background: `holdfast get models {key}` shows how far it is"


# -- the command


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """The options of a command that may wait."""

    wait: bool
    timeout_s: float | None
    as_json: bool


async def end(fleet: FleetStore, key: str, desired: DesiredModel | None, told: str, options: WaitOptions) -> int:
    """End a command; return its exit status. `desired`: the new desired state, None of a removed model; `told`: what
    was done."""
    await fleet.known(key, desired)
    if not options.as_json:
        write_out(f"{told}\n")
    try:
        if options.wait:
            screen = Screen(Terminal(sys.stderr) if options.as_json else None)
            wait: Wait = RemovalWait(key) if desired is None else PlacementWait(desired, fleet.observed)
            await wait_for(fleet, key, wait, screen, options.timeout_s)
    finally:
        if options.as_json:
            show_json(model_shown(fleet.observed, key))
    return 0


async def all_in_place(fleet: FleetStore, desired_models: Sequence[DesiredModel], timeout_s: float | None) -> None:
    """Wait for several models, one after the other, within one timeout for all. UserError, once all were waited for,
    says which are not in place, and why."""
    loop, wrong = asyncio.get_running_loop(), []
    until_s = None if timeout_s is None else loop.time() + timeout_s
    for desired in desired_models:
        key, left_s = desired.model.key, None if until_s is None else max(0.001, until_s - loop.time())
        try:
            await fleet.known(key, desired)
            await wait_for(fleet, key, PlacementWait(desired, fleet.observed), Screen(), left_s)
        except UserError as error:
            wrong.append(f"{key}: {error}".replace(f"{key}: {key}", key))
    if wrong:
        raise UserError("; ".join(wrong))


async def wait_for(fleet: FleetStore, name: str, wait: Wait, screen: Screen, timeout_s: float | None) -> None:
    """Wait for a model or node; UserError says why the state is not reached, or not in time."""
    try:
        with screen.busy(f"waiting for {name} …") as busy:
            async with asyncio.timeout(timeout_s):
                done = await _watched(fleet, name, wait, busy)
    except TimeoutError:
        raise UserError(f"timed out after {timeout_s:g} s; {wait.goes_on(fleet.observed)}") from None
    except asyncio.CancelledError:
        screen.line(wait.goes_on(fleet.observed))
        raise
    screen.line(f"{name}: {done}")


async def _watched(fleet: FleetStore, name: str, wait: Wait, busy: Busy) -> str:
    loop, book = asyncio.get_running_loop(), fleet.book
    while True:
        observed = fleet.observed
        away = "" if book.store.state == "connected" else f"{book.store!r} does not answer"
        if (done := wait.look(observed, loop.time(), away)) is not None:
            return done
        busy.show({name: wait.progress(observed)})
        await book.news(LOOK_S)
