"""Moves a vault's committed weights between the device and host memory: a pure machine, no I/O, no clock.

- Weights on the device are HOT.
- *Demote*: copy them to host memory, then free the device's memory. They are WARM.
- *Promote*: copy them back, give the keeper their record again, then free host memory. They are HOT again, as the same
  generation.

So there is a complete copy at every instant, and an incomplete copy is in no record. If the vault dies during a move,
the next vault has the weights on the device or not at all. One move runs at a time, and only while no session reads or
writes the weights or works on the pool.

Always true:
- A refused or failed request changes nothing.
- Each request is answered once, when its move has ended or is refused.
- A move takes no more memory than the request's `room_bytes`.
- Between `HideWeights` and `ShowWeights` no session is granted the weights.
- A report that is not in `TABLE` is a bug in the code that runs this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec


class MoveRefusal(StrEnum):
    EMPTY = "empty"  # nothing is committed here
    MAPPED = "mapped"  # a session reads or writes the weights, or owns the pool
    BUSY = "busy"  # a move is under way
    WARM = "warm"  # they are in host memory already
    HOT = "hot"  # they are on the device already
    OVER_BUDGET = "over_budget"
    FAILED = "failed"  # the copy failed


class WeightsLevel(StrEnum):
    HOT = "HOT"  # on the device; also if there are no weights
    DEMOTING = "DEMOTING"
    WARM = "WARM"
    PROMOTING = "PROMOTING"


# -- events


class _WarmMessage(msgspec.Struct, frozen=True):
    """An event or an effect of this machine."""


class DemoteWeights(_WarmMessage, frozen=True):
    """A request to free the device's memory, with what the vault knows at that moment."""

    asker: int
    generation: int | None  # the committed one
    size_bytes: int
    users: tuple[str, ...]  # sessions that read or write the weights, or work on the pool
    room_bytes: int  # host memory that may still be taken


class PromoteWeights(_WarmMessage, frozen=True):
    """A request to bring the weights back to the device."""

    asker: int
    room_bytes: int | None  # device memory that may still be used; None: no limit was set


class Copied(_WarmMessage, frozen=True):
    """All bytes are copied, and a sample of them was compared."""


class CopyFailed(_WarmMessage, frozen=True):
    """The copy failed, and its memory has been freed."""

    reason: str


class KeeperUpdated(_WarmMessage, frozen=True):
    """The keeper has dropped the record, or has it again."""


Event = DemoteWeights | PromoteWeights | Copied | CopyFailed | KeeperUpdated


# -- effects


class HideWeights(_WarmMessage, frozen=True):
    """Stop granting the weights on the device."""


class CopyOut(_WarmMessage, frozen=True):
    """Allocate host memory and copy the device's slabs there; then report `Copied` or `CopyFailed`."""

    generation: int


class FreeDevice(_WarmMessage, frozen=True):
    """Free the device's slabs, and a pool without owner; then report `KeeperUpdated`."""

    generation: int


class CopyIn(_WarmMessage, frozen=True):
    """Make slabs on the device and copy host memory there; then report `Copied` or `CopyFailed`."""

    generation: int


class RecordSlabs(_WarmMessage, frozen=True):
    """Give the new slabs to the keeper under the same generation; then report `KeeperUpdated`."""

    generation: int


class FreeHost(_WarmMessage, frozen=True):
    """Free the host memory."""


class ShowWeights(_WarmMessage, frozen=True):
    """Grant the weights again: they are complete on the device."""


class MoveDone(_WarmMessage, frozen=True):
    asker: int


class RefuseMove(_WarmMessage, frozen=True):
    asker: int
    code: MoveRefusal
    reason: str


Effect = HideWeights | CopyOut | FreeDevice | CopyIn | RecordSlabs | FreeHost | ShowWeights | MoveDone | RefuseMove


# -- the state


@dataclass(frozen=True, slots=True)
class WarmState:
    """The machine's state; `asker` is the client that asked for the move under way."""

    level: WeightsLevel = WeightsLevel.HOT
    generation: int = 0
    size_bytes: int = 0
    asker: int = 0
    copied: bool = False  # the bytes are copied, the keeper does not have the record yet

    def __repr__(self) -> str:
        return f"{self.level}" + (f" generation {self.generation}" if self.level is not WeightsLevel.HOT else "")


# For each level and event: None accepts it, a refusal rejects it.
_MOVING: Mapping[type, MoveRefusal | None] = {
    DemoteWeights: MoveRefusal.BUSY,
    PromoteWeights: MoveRefusal.BUSY,
    Copied: None,
    CopyFailed: None,
    KeeperUpdated: None,
}
TABLE: Mapping[WeightsLevel, Mapping[type, MoveRefusal | None]] = {
    WeightsLevel.HOT: {DemoteWeights: None, PromoteWeights: MoveRefusal.HOT},
    WeightsLevel.DEMOTING: _MOVING,
    WeightsLevel.WARM: {DemoteWeights: MoveRefusal.WARM, PromoteWeights: None},
    WeightsLevel.PROMOTING: _MOVING,
}
_REASONS = {
    MoveRefusal.BUSY: "the weights are on their way: {level}",
    MoveRefusal.WARM: "the weights are in host memory already",
    MoveRefusal.HOT: "nothing is in host memory here",
}

Step = tuple[WarmState, tuple[Effect, ...]]


def step(state: WarmState, event: Event) -> Step:
    """Return the state after an event, and its effects, to be carried out in order."""
    assert type(event) in TABLE[state.level], f"{event} at {state!r}"
    refused = TABLE[state.level][type(event)]
    match event:
        case DemoteWeights() | PromoteWeights() if refused is not None:
            return state, (RefuseMove(event.asker, refused, _REASONS[refused].format(level=state.level)),)
        case DemoteWeights():
            return _demote(state, event)
        case PromoteWeights():
            return _promote(state, event)
        case Copied():
            assert not state.copied, f"copied twice: {state!r}"
            told = FreeDevice if state.level is WeightsLevel.DEMOTING else RecordSlabs
            return replace(state, copied=True), (told(state.generation),)
        case CopyFailed():
            assert not state.copied, f"it was copied: {state!r}"
            failed = RefuseMove(state.asker, MoveRefusal.FAILED, event.reason)
            if state.level is WeightsLevel.DEMOTING:
                return WarmState(), (FreeHost(), ShowWeights(), failed)
            return replace(state, level=WeightsLevel.WARM), (failed,)
        case KeeperUpdated():
            assert state.copied, f"nothing was copied: {state!r}"
            if state.level is WeightsLevel.DEMOTING:
                return replace(state, level=WeightsLevel.WARM, copied=False), (MoveDone(state.asker),)
            return WarmState(), (FreeHost(), ShowWeights(), MoveDone(state.asker))


def _demote(state: WarmState, event: DemoteWeights) -> Step:
    if event.users:
        refused = MoveRefusal.MAPPED, f"in use by {', '.join(event.users)}"
    elif event.generation is None:
        refused = MoveRefusal.EMPTY, "no weights are committed here"
    elif event.size_bytes > event.room_bytes:
        room = f"{event.room_bytes} of host memory may be taken"
        refused = MoveRefusal.OVER_BUDGET, f"{event.size_bytes} bytes do not fit: {room}"
    else:
        state = WarmState(WeightsLevel.DEMOTING, event.generation, event.size_bytes, event.asker)
        return state, (HideWeights(), CopyOut(event.generation))
    return state, (RefuseMove(event.asker, *refused),)


def _promote(state: WarmState, event: PromoteWeights) -> Step:
    if event.room_bytes is not None and state.size_bytes > event.room_bytes:
        reason = f"{state.size_bytes} bytes do not fit: the device may keep {event.room_bytes} more"
        return state, (RefuseMove(event.asker, MoveRefusal.OVER_BUDGET, reason),)
    state = replace(state, level=WeightsLevel.PROMOTING, asker=event.asker)
    return state, (CopyIn(state.generation),)
