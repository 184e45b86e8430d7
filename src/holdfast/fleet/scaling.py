"""Autoscaling: how many replicas of a model should be HOT, from how long its requests wait and how full its KV is. A
pure machine.

Too few replicas show by either of two signals: requests wait for longer than they may, or the KV of those that serve is
nearly full, so that they will. A signal must last before one more is wanted, and the last one must have had time to
come up before the next is: else every load would ask for many at once. Too many show by what one less would mean: no
request waits, and the KV in use would fit into one less with room to spare. That must last for longer, since removing
one too soon costs more than keeping it. Between the two signals nothing changes.

To zero: when no request came for so long, if no floor forbids it; HOT replicas are then demoted to WARM. From zero: one
is wanted at once when a request is held, whatever changed before.

Always true: never beyond the model's bounds or its budget; from zero only for a request that is held, or for a bound;
one step at a time, except to a bound or to zero; never to zero while a request waits or runs.
"""

from __future__ import annotations

from msgspec import Struct, structs

from holdfast.fleet.desired import Level, Model
from holdfast.health.bounds import UnixS


class Scaling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to add or remove a replica."""

    wait_s_max: float = 2.0  # that the first in the queue may wait
    kv_high: float = 0.9  # share of KV in use from which one is added
    kv_low: float = 0.6  # one is removed, if the rest would use no more than this
    high_s: float = 3.0  # that the signal of too few must last: longer than a burst's prefill
    low_s: float = 60.0  # that the signal of too many must last
    step_up_s: float = 30.0  # between two scale-ups: about what a promotion or a load takes
    step_down_s: float = 60.0  # between two scale-downs
    idle_s: float = 300.0  # without a request, to zero; 0: never
    devices_max: int = 0  # the model's budget: devices that it may have in all; 0: as many as its replicas need


class Signals(Struct, frozen=True, kw_only=True):
    """A model's traffic at one moment."""

    waiting: int = 0  # requests queued or held
    wait_s: float = 0.0  # of the first of them
    running: int = 0
    kv_used: float = 0.0  # of all replicas that serve, as a share
    ready: int = 0  # replicas that serve


class ScalingState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is remembered between two steps."""

    wanted: int = 0
    why: str = ""
    short_since_s: UnixS | None = None  # since when there are too few
    ample_since_s: UnixS | None = None  # since when there are too many
    quiet_since_s: UnixS | None = None  # since when there is no request
    stepped_s: UnixS = 0.0  # when the number last changed


def bounds(model: Model, scaling: Scaling) -> tuple[int, int]:
    """Return the least and the most replicas that may be HOT."""
    most = model.replicas_max
    if scaling.devices_max:
        most = min(most, scaling.devices_max // model.devices)
    least = model.replicas_min if model.floor is Level.HOT else 0
    return min(least, most), most


def step(state: ScalingState, model: Model, scaling: Scaling, signals: Signals, now_s: float) -> ScalingState:
    """Return the state with the number of replicas wanted from now on."""
    least, most = bounds(model, scaling)
    state = _note(state, scaling, signals, now_s)
    held = min(max(state.wanted, least), most)
    if held != state.wanted:
        return _become(state, held, "its bounds changed", now_s)
    if state.wanted == 0:
        return _become(state, 1, "a request is held", now_s) if signals.waiting and most else state
    if _lasts(state.short_since_s, scaling.high_s, now_s) and now_s >= state.stepped_s + scaling.step_up_s:
        if state.wanted < most:
            return _become(state, state.wanted + 1, _too_few(scaling, signals), now_s)
        return state
    if scaling.idle_s and least == 0 and _lasts(state.quiet_since_s, scaling.idle_s, now_s):
        return _become(state, 0, f"nothing was asked for in {scaling.idle_s:g} s", now_s)
    floor = max(least, 1)
    steady = now_s >= state.stepped_s + scaling.step_down_s
    if state.wanted > floor and steady and _lasts(state.ample_since_s, scaling.low_s, now_s):
        return _become(state, state.wanted - 1, "fewer are enough", now_s)
    return state


def next_deadline_s(state: ScalingState, scaling: Scaling) -> float | None:
    """Return when the number may change though the signals do not; None: only when they do."""
    due = []
    if state.short_since_s is not None:
        due.append(max(state.short_since_s + scaling.high_s, state.stepped_s + scaling.step_up_s))
    if state.ample_since_s is not None and state.wanted > 1:
        due.append(max(state.ample_since_s + scaling.low_s, state.stepped_s + scaling.step_down_s))
    if state.quiet_since_s is not None and state.wanted and scaling.idle_s:
        due.append(state.quiet_since_s + scaling.idle_s)
    return min(due, default=None)


def _note(state: ScalingState, scaling: Scaling, signals: Signals, now_s: float) -> ScalingState:
    """Return the state with since when each signal is seen."""
    short = bool(_too_few(scaling, signals))
    # Of those that serve, not of those that are wanted: a replica that is still coming carries nothing yet.
    rest = min(state.wanted, signals.ready) - 1
    ample = not short and not signals.waiting and rest >= 1 and signals.kv_used * signals.ready / rest <= scaling.kv_low
    quiet = not signals.waiting and not signals.running
    return structs.replace(
        state,
        short_since_s=_since(state.short_since_s, short, now_s),
        ample_since_s=_since(state.ample_since_s, ample, now_s),
        quiet_since_s=_since(state.quiet_since_s, quiet, now_s),
    )


def _too_few(scaling: Scaling, signals: Signals) -> str:
    if signals.waiting and signals.wait_s > scaling.wait_s_max:
        return f"requests wait for {signals.wait_s:.1f} s"
    if signals.ready and signals.kv_used >= scaling.kv_high:
        return f"{signals.kv_used:.0%} of its KV is used"
    return ""


def _since(before_s: float | None, seen: bool, now_s: float) -> float | None:
    if not seen:
        return None
    return now_s if before_s is None else before_s


def _lasts(since_s: float | None, for_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + for_s


def _become(state: ScalingState, wanted: int, why: str, now_s: float) -> ScalingState:
    """Return the state with another number; signals seen before count no more."""
    fresh = {"short_since_s": None, "ample_since_s": None, "quiet_since_s": state.quiet_since_s}
    return structs.replace(state, wanted=wanted, why=why, stepped_s=now_s, **fresh)
