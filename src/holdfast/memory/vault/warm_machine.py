"""Where a vault's committed weights are, on the device or in host memory, and how they get from one to the other: a
pure machine, no I/O, no clock.

Theory. Weights are HOT on the device. *Demoted*, they are copied to host memory, and only then is the device's memory
let go of: they are WARM. *Promoted*, they are copied back, the keeper gets their record again, and only then is host
memory let go of: they are HOT, the same generation. So at every instant one whole copy is there, and a copy that is not
whole is in no record: a vault that dies on the way is followed by one with the weights on the device, or with none.

Only weights that nobody reads, writes or works on are moved, one move at a time; one that fails leaves what was before.

`TABLE` says which word is taken at which level. A question that is not in it is refused; a report that is not in it is
a mistake of the shell's.

Always true: what is refused has changed nothing; who asked is answered once, when its move is over or refused; bytes
are taken only within the room that was told; between `Leave` and `Return` nobody gets the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec


class Code(StrEnum):
    """Why something is refused."""

    EMPTY = "empty"  # nothing is committed here
    MAPPED = "mapped"  # somebody reads or writes the weights, or owns the pool
    BUSY = "busy"  # they are on their way already
    WARM = "warm"  # they are in host memory already
    HOT = "hot"  # they are on the device already
    OVER_BUDGET = "over_budget"
    FAILED = "failed"  # it was tried


class Level(StrEnum):
    HOT = "HOT"  # on the device; also where there are none
    DEMOTING = "DEMOTING"
    WARM = "WARM"
    PROMOTING = "PROMOTING"


# -- events


class _Word(msgspec.Struct, frozen=True):
    """What the machine is told, or tells."""


class Demote(_Word, frozen=True):
    """Somebody asks for the device's memory. What the vault knows at that moment comes along."""

    asker: int
    generation: int | None  # what is committed
    size_bytes: int
    users: tuple[str, ...]  # who reads or writes the weights, or works on the pool
    room_bytes: int  # what host memory may still be taken


class Promote(_Word, frozen=True):
    """Somebody asks for the weights to be on the device again."""

    asker: int
    room_bytes: int | None  # what the device may still keep; None: no limit was set


class Copied(_Word, frozen=True):
    """All bytes are there, and were compared as far as they can be."""


class CopyFailed(_Word, frozen=True):
    """Nothing of the copy is left."""

    reason: str


class Settled(_Word, frozen=True):
    """The keeper has let go of the record, or has it again."""


Event = Demote | Promote | Copied | CopyFailed | Settled


# -- effects


class Leave(_Word, frozen=True):
    """From now on nobody gets the weights of the device."""


class CopyOut(_Word, frozen=True):
    """Take host memory and copy the device's slabs there; then `Copied` or `CopyFailed`."""

    generation: int


class FreeDevice(_Word, frozen=True):
    """Let go of the device's slabs, and of a pool that nobody owns; then `Settled`."""

    generation: int


class CopyIn(_Word, frozen=True):
    """Make slabs on the device and copy host memory there; then `Copied` or `CopyFailed`."""

    generation: int


class Record(_Word, frozen=True):
    """Give the new slabs to the keeper, under the old number; then `Settled`."""

    generation: int


class FreeHost(_Word, frozen=True):
    """Let go of host memory."""


class Return(_Word, frozen=True):
    """The weights on the device are whole: whoever waits for them gets them."""


class Done(_Word, frozen=True):
    asker: int


class Refuse(_Word, frozen=True):
    asker: int
    code: Code
    reason: str


Effect = Leave | CopyOut | FreeDevice | CopyIn | Record | FreeHost | Return | Done | Refuse


# -- the state


@dataclass(frozen=True, slots=True)
class Warm:
    """`asker` asked for the move under way."""

    level: Level = Level.HOT
    generation: int = 0
    size_bytes: int = 0
    asker: int = 0
    copied: bool = False  # the move's bytes are there, the keeper does not know yet

    def __repr__(self) -> str:
        return f"{self.level}" + (f" generation {self.generation}" if self.level is not Level.HOT else "")


class Taken(StrEnum):
    """What becomes of a word."""

    DEMOTE = "it is tried to demote"
    PROMOTE = "it is tried to promote"
    COPIED = "the keeper is told"
    BACK = "all is as before"
    ARRIVED = "it is at the other level"
    BUSY = "refused: busy"
    WARM = "refused: warm"
    HOT = "refused: hot"


_COPYING: Mapping[type, Taken] = {Copied: Taken.COPIED, CopyFailed: Taken.BACK, Settled: Taken.ARRIVED}
TABLE: Mapping[Level, Mapping[type, Taken]] = {
    Level.HOT: {Demote: Taken.DEMOTE, Promote: Taken.HOT},
    Level.DEMOTING: {Demote: Taken.BUSY, Promote: Taken.BUSY, **_COPYING},
    Level.WARM: {Demote: Taken.WARM, Promote: Taken.PROMOTE},
    Level.PROMOTING: {Demote: Taken.BUSY, Promote: Taken.BUSY, **_COPYING},
}
_REFUSALS = {
    Taken.BUSY: (Code.BUSY, "the weights are on their way: {level}"),
    Taken.WARM: (Code.WARM, "the weights are in host memory already"),
    Taken.HOT: (Code.HOT, "nothing is in host memory here"),
}

Step = tuple[Warm, tuple[Effect, ...]]


def step(state: Warm, event: Event) -> Step:
    """What becomes of an event. Effects are to be carried out in their order."""
    taken = TABLE[state.level].get(type(event))
    assert taken is not None, f"{event} at {state!r}"
    if isinstance(event, Demote | Promote) and taken in _REFUSALS:
        code, reason = _REFUSALS[taken]
        return state, (Refuse(event.asker, code, reason.format(level=state.level)),)
    match event:
        case Demote():
            return _demote(state, event)
        case Promote():
            return _promote(state, event)
        case Copied():
            assert not state.copied, f"copied twice: {state!r}"
            told = FreeDevice if state.level is Level.DEMOTING else Record
            return replace(state, copied=True), (told(state.generation),)
        case CopyFailed():
            assert not state.copied, f"it was copied: {state!r}"
            return _become_as_before(state, event.reason)
        case Settled():
            assert state.copied, f"nothing was copied: {state!r}"
            return _become_other(state)


def _demote(state: Warm, event: Demote) -> Step:
    refused = _cannot_demote(event)
    if refused is not None or event.generation is None:
        return state, (Refuse(event.asker, *(refused or _NOTHING)),)
    state = Warm(Level.DEMOTING, event.generation, event.size_bytes, event.asker)
    return state, (Leave(), CopyOut(event.generation))


_NOTHING = (Code.EMPTY, "no weights are committed here")


def _cannot_demote(event: Demote) -> tuple[Code, str] | None:
    if event.users:
        return Code.MAPPED, f"in use by {', '.join(event.users)}"
    if event.generation is not None and event.size_bytes > event.room_bytes:
        return Code.OVER_BUDGET, f"{event.size_bytes} bytes do not fit: {event.room_bytes} of host memory may be taken"
    return None


def _promote(state: Warm, event: Promote) -> Step:
    if event.room_bytes is not None and state.size_bytes > event.room_bytes:
        reason = f"{state.size_bytes} bytes do not fit: the device may keep {event.room_bytes} more"
        return state, (Refuse(event.asker, Code.OVER_BUDGET, reason),)
    state = replace(state, level=Level.PROMOTING, asker=event.asker)
    return state, (CopyIn(state.generation),)


def _become_as_before(state: Warm, reason: str) -> Step:
    refused = Refuse(state.asker, Code.FAILED, reason)
    if state.level is Level.DEMOTING:
        return Warm(), (FreeHost(), Return(), refused)
    return replace(state, level=Level.WARM), (refused,)


def _become_other(state: Warm) -> Step:
    if state.level is Level.DEMOTING:
        return replace(state, level=Level.WARM, copied=False), (Done(state.asker),)
    return Warm(), (FreeHost(), Return(), Done(state.asker))
