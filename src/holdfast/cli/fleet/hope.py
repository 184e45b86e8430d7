"""Whether as many of a model are HOT as are wanted, and whether they may yet be, from what the store says. Pure."""

from __future__ import annotations

from holdfast.cli.fleet.seen import JOIN, FleetSeen
from holdfast.core.errors import UserError
from holdfast.fleet.actions import COPY_S, Tries, Verb, replica_name, subject_of
from holdfast.fleet.desired import Level, Model
from holdfast.fleet.observed import Phase, Replica
from holdfast.fleet.prospects import FAILED_MAX, too_large
from holdfast.fleet.records import Wish

QUIET_S = 30.0  # without a node, a control or the store: each is back within seconds of a restart
STUCK_S = COPY_S  # the same is missing for so long, and nobody comes or leaves: no step of others takes longer


def is_in_place(seen: FleetSeen, wish: Wish) -> bool:
    """As many as are wanted serve, and as many as are kept are there; without scaling no more than that."""
    model = wish.model
    hot, warm = (_own(seen.ready(model.key, level), model) for level in (Level.HOT, Level.WARM))
    on_devices = sum(one.on_devices for one in seen.replicas(model.key))
    is_enough = hot >= model.hot and hot + warm >= model.kept
    is_left = not any(one.serial in model.going for one in seen.replicas(model.key))
    return is_enough and is_left and (wish.scaling is not None or on_devices <= model.hot)


def how_far(seen: FleetSeen, wish: Wish) -> str:
    model = wish.model
    hot = _own(seen.ready(model.key, Level.HOT), model)
    replicas = seen.replicas(model.key)
    moving = [f"{one.id} {one.phase} on {one.node}" for one in replicas if one.phase is not Phase.READY]
    moving += [f"{one.id} {one.health} on {one.node}" for one in replicas if one.is_up and not one.serves]
    unmet = seen.book.unmet.get(model.key, "")
    counted = f"{hot} of {model.hot} HOT" if hot <= model.hot and model.hot else f"{hot} HOT, {model.hot} desired"
    return "; ".join(filter(None, (counted, *moving, unmet)))


def _own(found: list[Replica], model: Model) -> int:
    return sum(one.version == model.version for one in found)


def trouble_of(seen: FleetSeen) -> str:
    """Why nothing comes of what is wanted; "": something does."""
    if not seen.nodes:
        return f"no node of {seen.deployment} is there: {JOIN[seen.backend]}"
    if not seen.is_led:
        return f"no control of {seen.deployment} runs: replicas keep serving, but none is started, stopped or moved"
    return ""


class Lasting:
    """Something that is amiss, and may be for a while."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._amiss, self._since_s = "", 0.0

    def hear(self, amiss: str, now_s: float) -> None:
        """UserError, if the same is amiss for too long."""
        if amiss != self._amiss:
            self._amiss, self._since_s = amiss, now_s
        if amiss and now_s > self._since_s + self._bound_s:
            raise UserError(amiss)


class Hope:
    """Whether what is wanted may yet come, from one look to the next."""

    def __init__(self, wish: Wish, seen: FleetSeen) -> None:
        self.wish = wish
        self._quiet, self._stuck = Lasting(QUIET_S), Lasting(STUCK_S)
        self._tries = self._tried(seen)  # what failed before is not ours
        self._failed, self._why = 0, ""

    def look(self, seen: FleetSeen, now_s: float, away: str = "") -> str | None:
        """What is there, once all of it is; None: not yet. UserError says why it will not be. `away`: the store is."""
        key = self.wish.model.key
        wish = seen.wishes.get(key)
        if wish is None:
            raise UserError(f"{key} was removed from the fleet meanwhile")
        if wish.model.version != self.wish.model.version:
            raise UserError(f"{key} was deployed again meanwhile, as version {wish.model.version}")
        self.wish = wish
        if not away and is_in_place(seen, wish):
            return f"{how_far(seen, wish)}, version {wish.model.version}"
        if lack := too_large((record.node for record in seen.nodes.values()), wish.model):
            raise UserError(f"{key}: {lack}")
        self._count_failures(seen)
        self._quiet.hear(away or trouble_of(seen), now_s)
        moves = any(one.phase is not Phase.READY for one in seen.replicas(key))
        unmet = seen.book.unmet.get(key, "")
        self._stuck.hear(f"{key}: {unmet}" if unmet and not moves else "", now_s)
        return None

    def _count_failures(self, seen: FleetSeen) -> None:
        key = self.wish.model.key
        mark = replica_name(key, 0).removesuffix("0")
        whys = [why for node in seen.nodes.values() for action, why in node.answers.items() if why and mark in action]
        self._why = whys[-1] if whys else self._why
        before, self._tries = self._tries, self._tried(seen)
        if self._tries is not None and self._tries != before:  # it began anew, or went on
            known = before.failed if before is not None and self._tries.failed > before.failed else 0
            self._failed += self._tries.failed - known
        if self._failed >= FAILED_MAX:
            raise UserError(f"{key} failed to start {self._failed} times: {self._why or 'its node gave no reason'}")

    def _tried(self, seen: FleetSeen) -> Tries | None:
        return seen.book.tries.get(subject_of(Verb.PLACE, self.wish.model.key))


class Parting:
    """Whether all replicas of a model that was forgotten have left."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._quiet = Lasting(QUIET_S)

    def look(self, seen: FleetSeen, now_s: float, away: str = "") -> str | None:
        """As `Hope.look`."""
        if self.key in seen.wishes:
            raise UserError(f"{self.key} was deployed again")
        if not away and not seen.replicas(self.key):
            return "nothing of it is left"
        self._quiet.hear(away or trouble_of(seen), now_s)
        return None
