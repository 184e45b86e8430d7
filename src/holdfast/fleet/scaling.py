"""How many replicas of a model should be HOT, from how long its requests wait and how full its KV is. A pure machine.

Theory. Too few is seen by either of two signs: requests wait for longer than they may, or the KV of those that serve is
nearly full, so that they will. A sign must last before one more is wanted, and the last one must have had time to come
up before the next is: else every load would ask for many at once. Too many is seen by what would be if one less served:
nobody waits, and the KV that is used would fit into one less with room to spare. That must last for longer, for to take
one away too soon costs more than to keep it. Between the two signs nothing changes.

To none: when nothing was asked for so long, if no floor forbids it; what is HOT then falls to WARM. From none: one is
wanted at once when a request is held, whatever changed before.

Always true: never beyond the model's bounds or its budget; from zero only for a request that is held, or for a bound;
one step at a time, but to a bound or to none; never to none while a request waits or runs.
"""

from __future__ import annotations

from msgspec import Struct, structs

from holdfast.fleet.desired import Level, Model
from holdfast.health.bounds import UnixS


class Scaling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to want one more or one less."""

    wait_s_max: float = 2.0  # that the first in line may wait
    kv_high: float = 0.9  # the share of KV that is used: one more
    kv_low: float = 0.6  # one less, if it were no more than this without it
    high_s: float = 3.0  # that a sign of too few must last: longer than a burst's prefill
    low_s: float = 60.0  # that a sign of too many must
    step_up_s: float = 30.0  # between two more: about what a promotion or a load takes
    step_down_s: float = 60.0  # between two less
    idle_s: float = 300.0  # without a request, to none; 0: never
    devices_max: int = 0  # the model's budget: devices that it may have in all; 0: as many as its replicas need


class Signs(Struct, frozen=True, kw_only=True):
    """A model's traffic at one moment."""

    waiting: int = 0  # requests in line, or held
    wait_s: float = 0.0  # of the first of them
    running: int = 0
    kv_used: float = 0.0  # of all replicas that serve, as a share
    ready: int = 0  # replicas that serve


class Scaled(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered between moments."""

    wanted: int = 0
    why: str = ""
    short_since_s: UnixS | None = None  # there are too few
    ample_since_s: UnixS | None = None  # there are too many
    quiet_since_s: UnixS | None = None  # nothing is asked for
    stepped_s: UnixS = 0.0  # when the number last changed


def bounds(model: Model, scaling: Scaling) -> tuple[int, int]:
    """The least and the most that may be HOT."""
    most = model.replicas_max
    if scaling.devices_max:
        most = min(most, scaling.devices_max // model.devices)
    least = model.replicas_min if model.floor is Level.HOT else 0
    return min(least, most), most


def step(state: Scaled, model: Model, scaling: Scaling, signs: Signs, now_s: float) -> Scaled:
    """What is wanted from now on."""
    least, most = bounds(model, scaling)
    state = _note(state, scaling, signs, now_s)
    held = min(max(state.wanted, least), most)
    if held != state.wanted:
        return _become(state, held, "its bounds changed", now_s)
    if state.wanted == 0:
        return _become(state, 1, "a request is held", now_s) if signs.waiting and most else state
    if _lasts(state.short_since_s, scaling.high_s, now_s) and now_s >= state.stepped_s + scaling.step_up_s:
        if state.wanted < most:
            return _become(state, state.wanted + 1, _too_few(scaling, signs), now_s)
        return state
    if scaling.idle_s and least == 0 and _lasts(state.quiet_since_s, scaling.idle_s, now_s):
        return _become(state, 0, f"nothing was asked for in {scaling.idle_s:g} s", now_s)
    floor = max(least, 1)
    steady = now_s >= state.stepped_s + scaling.step_down_s
    if state.wanted > floor and steady and _lasts(state.ample_since_s, scaling.low_s, now_s):
        return _become(state, state.wanted - 1, "fewer are enough", now_s)
    return state


def next_deadline_s(state: Scaled, scaling: Scaling) -> float | None:
    """When the number may change though the signs do not; None: not before they do."""
    due = []
    if state.short_since_s is not None:
        due.append(max(state.short_since_s + scaling.high_s, state.stepped_s + scaling.step_up_s))
    if state.ample_since_s is not None and state.wanted > 1:
        due.append(max(state.ample_since_s + scaling.low_s, state.stepped_s + scaling.step_down_s))
    if state.quiet_since_s is not None and state.wanted and scaling.idle_s:
        due.append(state.quiet_since_s + scaling.idle_s)
    return min(due, default=None)


def _note(state: Scaled, scaling: Scaling, signs: Signs, now_s: float) -> Scaled:
    """Since when each sign is seen."""
    short = bool(_too_few(scaling, signs))
    # Of those that serve, not of those that were asked for: who is still coming carries nothing yet.
    rest = min(state.wanted, signs.ready) - 1
    ample = not short and not signs.waiting and rest >= 1 and signs.kv_used * signs.ready / rest <= scaling.kv_low
    quiet = not signs.waiting and not signs.running
    return structs.replace(
        state,
        short_since_s=_since(state.short_since_s, short, now_s),
        ample_since_s=_since(state.ample_since_s, ample, now_s),
        quiet_since_s=_since(state.quiet_since_s, quiet, now_s),
    )


def _too_few(scaling: Scaling, signs: Signs) -> str:
    if signs.waiting and signs.wait_s > scaling.wait_s_max:
        return f"requests wait for {signs.wait_s:.1f} s"
    if signs.ready and signs.kv_used >= scaling.kv_high:
        return f"{signs.kv_used:.0%} of its KV is used"
    return ""


def _since(before_s: float | None, seen: bool, now_s: float) -> float | None:
    if not seen:
        return None
    return now_s if before_s is None else before_s


def _lasts(since_s: float | None, for_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + for_s


def _become(state: Scaled, wanted: int, why: str, now_s: float) -> Scaled:
    """Another number, and what was seen before counts no more."""
    fresh = {"short_since_s": None, "ample_since_s": None, "quiet_since_s": state.quiet_since_s}
    return structs.replace(state, wanted=wanted, why=why, stepped_s=now_s, **fresh)
