"""When a replica that is up and does not serve must be replaced, and in which order replicas leave. Pure."""

from __future__ import annotations

from holdfast.fleet.actions import COPY_S
from holdfast.fleet.desired import Hysteresis, Level, Model
from holdfast.fleet.observed import Health, Phase, Replica

_SEEN_ILL = (Phase.READY, Phase.DRAINING)  # where a HOT replica's health means anything
# What is not SOUND, that which can do least first.
RANK = {health: place for place, health in enumerate((Health.AWAY, Health.UNCHECKED, Health.DOUBTED, Health.SOUND))}


def unfit_s(one: Replica, model: Model | None, hysteresis: Hysteresis) -> float | None:
    """Return when a replica that is not SOUND must be replaced; None: it serves, or is not up yet.

    Doubts have `doubt_s`. What is away, or was never checked, has the time of a takeover and of a load: as its first
    one took, twice, or as long as the model may take."""
    if one.health is Health.SOUND or one.level is not Level.HOT or one.phase not in _SEEN_ILL:
        return None
    if one.health is Health.DOUBTED:
        return one.ill_s + hysteresis.doubt_s
    load_s = COPY_S if model is None else model.load_s
    return one.ill_s + hysteresis.takeover_s + (min(load_s, 2 * one.came_s) if one.came_s > 0 else load_s)


def leaves_at(one: Replica) -> int:
    """Return a place in the order in which replicas leave; one that is not up yet stands behind what cannot answer."""
    if not one.is_up:
        return 1
    return 0 if one.health is Health.AWAY else 1 + RANK[one.health]


def worst_first(one: Replica) -> tuple[int, int, int]:
    """Return a key that puts replicas first that serve least; of equals the oldest, as versions are replaced."""
    return RANK[one.health], 0 if one.serves else one.running, one.serial
