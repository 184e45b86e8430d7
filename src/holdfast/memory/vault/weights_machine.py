"""Admission to the weights on one device: decides which session may write and which may read. A pure machine, no I/O,
no clock.

A *generation* is one committed set of slabs with its layout.
- Write: one session at a time writes a generation that no other session can see. Its commit makes this generation the
  *current* one, which new readers get, and makes the writer its first reader. If the writer ends before commit, the
  state stays as before: no weights, or the generation it would have replaced.
- Replace: the new generation is made beside the old one, so no reader is delayed. The old one is kept until its last
  reader has left.
- Drop: if both generations do not fit, the old one is dropped first. Its readers are asked to release it, and no new
  reader is admitted. When the last reader has left, it is dropped. Readers are not forced: the request may time out.
- Wait: a request that cannot be answered yet waits. Every change evaluates all waiters again, oldest first.
- Away: while the current generation is in host memory or being moved (warm_machine.py), no session is granted it.

`TABLE` contains all of admission: the answer for each kind of request in each situation.

Always true:
- There is at most one writer, and a granted generation is a committed one.
- A waiter is granted nothing after it is gone (facts 17) or after its deadline.
- Generation numbers grow.
- A committed generation is dropped only if it has no reader, and is superseded or its memory was requested.
- An event was accepted if its effects contain no `RefuseLock` for its session.
- After a step, `next_deadline_s` is never in the past.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import msgspec

# More than all ranks and standbys of a machine. More waiters mean that a client is looping; keeps each step short.
WAITERS_MAX = 1024
NEVER_S = math.inf  # a time that never comes

Mode = Literal["rw", "ro", "rw_or_ro", "drop"]


class WeightsRefusal(StrEnum):
    COMMITTED = "committed"  # rw without `replace` on committed weights
    STALE = "stale"  # the hash named in the request is not the current one
    BUSY = "busy"  # the session waits or holds something already
    NOT_WRITER = "not_writer"
    TOO_MANY = "too_many"
    BAD_REQUEST = "bad_request"


# -- events


class _WeightsMessage(msgspec.Struct, frozen=True):
    """An event or an effect of this machine."""


class _WeightsSessionMessage(_WeightsMessage, frozen=True):
    session: int


class RequestLock(_WeightsSessionMessage, frozen=True):
    """A session asks for a lock. With `wait_for_writer`, an `ro` request waits for a writer instead of getting
    `AnswerEmpty`. `drop` asks to drop the weights named in `replace`, because new ones do not fit beside them."""

    mode: Mode
    deadline_s: float
    wait_for_writer: bool = False
    replace: str | None = None  # `rw` and `drop`: the hash of the committed weights to replace


class Commit(_WeightsSessionMessage, frozen=True):
    """The writer has finished. Its slabs are already sealed, and the keeper has the record."""

    layout_hash: str


class DonateWeights(_WeightsSessionMessage, frozen=True):
    """After vault and keeper both died, a session that still maps a complete generation donates it.

    The vault has checked the hash against the whole set. If it has the same weights already, the session becomes a
    reader of those.
    """

    layout_hash: str


class ReleaseLock(_WeightsSessionMessage, frozen=True):
    """The session releases what it holds or waits for, on request or because its connection ended.

    Never refused, because the answer may already be on its way.
    """


class WeightsMoved(_WeightsMessage, frozen=True):
    """The current generation leaves the device (`away`) or is back on it. It has no reader and no replacement."""

    away: bool


class WeightsTick(_WeightsMessage, frozen=True):
    """Time has passed."""


Event = RequestLock | Commit | DonateWeights | ReleaseLock | WeightsMoved | WeightsTick


# -- effects


class GrantWrite(_WeightsSessionMessage, frozen=True):
    generation: int
    replacing: str | None


class GrantRead(_WeightsSessionMessage, frozen=True):
    generation: int
    layout_hash: str


class AnswerEmpty(_WeightsSessionMessage, frozen=True):
    """Nothing is committed here, and no session is writing."""


class RefuseLock(_WeightsSessionMessage, frozen=True):
    code: WeightsRefusal
    reason: str


class LockTimedOut(_WeightsSessionMessage, frozen=True):
    """The request's deadline has passed; the session no longer waits."""


class Committed(_WeightsSessionMessage, frozen=True):
    """The session's generation is the current one, and the session reads it from now on."""

    generation: int
    layout_hash: str


class Aborted(_WeightsSessionMessage, frozen=True):
    """The writer ended before commit: drop its slabs. Addressed to the vault, because the writer may be gone."""

    generation: int


class TellSuperseded(_WeightsSessionMessage, frozen=True):
    """Tell a reader that newer weights are committed; its own stay as long as it holds them."""

    by_hash: str


class AskToLetGo(_WeightsSessionMessage, frozen=True):
    """Tell a reader of the current weights that another session needs their memory; it may release them."""


class DropGeneration(_WeightsMessage, frozen=True):
    """Drop slabs and record of a generation that has no reader left, and is superseded or whose memory is needed."""

    generation: int


Answered = GrantWrite | GrantRead | AnswerEmpty | RefuseLock | LockTimedOut | Committed
Effect = Answered | Aborted | TellSuperseded | AskToLetGo | DropGeneration

# -- the state, and the table that answers a request


class WeightsSituation(StrEnum):
    EMPTY = "empty"
    HELD = "held"  # empty after a total loss: an engine that still maps the old bytes may donate them
    WRITING = "writing"  # a first generation is being written
    COMMITTED = "committed"
    READ = "read"  # committed, and in use
    DROPPING = "dropping"  # in use, and another session waits for its memory
    REPLACING = "replacing"  # committed, and the next generation is being written
    AWAY = "away"  # committed, and not on the device


class LockKind(StrEnum):
    READ = "ro"
    READ_WHEN_WRITTEN = "ro, waiting for a writer"
    EITHER = "rw_or_ro"
    WRITE = "rw"
    REPLACE = "rw replacing the current hash"
    REPLACE_OTHER = "rw replacing another hash"
    DROP = "drop the current hash"
    DROP_OTHER = "drop another hash"


class LockAnswer(StrEnum):
    READ = "read"
    WRITE = "write"
    WAIT = "wait"
    EMPTY = "empty"
    DROP = "drop what is here, then empty"
    COMMITTED = "refused: committed"
    STALE = "refused: stale"


def _row(*answers: LockAnswer) -> Mapping[WeightsSituation, LockAnswer]:
    return dict(zip(WeightsSituation, answers, strict=True))


_READ, _WRITE, _WAIT, _EMPTY = LockAnswer.READ, LockAnswer.WRITE, LockAnswer.WAIT, LockAnswer.EMPTY
_DROP, _TAKEN, _STALE = LockAnswer.DROP, LockAnswer.COMMITTED, LockAnswer.STALE
# fmt: off
TABLE: Mapping[LockKind, Mapping[WeightsSituation, LockAnswer]] = {
    #                                EMPTY   HELD    WRITING COMMITTED READ    DROPPING REPLACING AWAY
    LockKind.READ:              _row(_EMPTY, _WAIT,  _WAIT,  _READ,    _READ,  _WAIT,   _READ,    _WAIT),
    LockKind.READ_WHEN_WRITTEN: _row(_WAIT,  _WAIT,  _WAIT,  _READ,    _READ,  _WAIT,   _READ,    _WAIT),
    LockKind.EITHER:            _row(_WRITE, _WAIT,  _WAIT,  _READ,    _READ,  _WAIT,   _READ,    _WAIT),
    LockKind.WRITE:             _row(_WRITE, _WAIT,  _WAIT,  _TAKEN,   _TAKEN, _TAKEN,  _TAKEN,   _TAKEN),
    LockKind.REPLACE:           _row(_STALE, _STALE, _STALE, _WRITE,   _WRITE, _WAIT,   _WAIT,    _WAIT),
    LockKind.REPLACE_OTHER:     _row(_STALE, _STALE, _STALE, _STALE,   _STALE, _STALE,  _STALE,   _STALE),
    LockKind.DROP:              _row(_STALE, _STALE, _STALE, _DROP,    _WAIT,  _WAIT,   _WAIT,    _WAIT),
    LockKind.DROP_OTHER:        _row(_EMPTY, _EMPTY, _STALE, _STALE,   _STALE, _STALE,  _STALE,   _STALE),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class GenerationHolder:
    """A session that writes or reads a generation."""

    session: int
    generation: int


@dataclass(frozen=True, slots=True, repr=False)
class WeightsState:
    """The machine's state. `superseded` has older generations that still have readers; sessions are numbers."""

    last_generation: int = 0
    current: Generation | None = None
    superseded: tuple[Generation, ...] = ()
    writer: GenerationHolder | None = None
    readers: tuple[GenerationHolder, ...] = ()
    waiters: tuple[RequestLock, ...] = ()
    refill_from_s: float | None = None  # no first generation is written before this time (`NEVER_S`: never)
    away: bool = False  # the current generation is not on the device

    def __repr__(self) -> str:
        parts = [self.phase]
        if self.current is not None:
            parts.append(f"generation {self.current.number} ({self.current.layout_hash})")
        if self.writer is not None:
            parts.append(f"session {self.writer.session} writes generation {self.writer.generation}")
        parts.append(f"{len(self.readers)} readers, {len(self.waiters)} waiting")
        if self.superseded:
            parts.append(f"{len(self.superseded)} superseded")
        return ", ".join(parts)

    @property
    def phase(self) -> str:
        """Return EMPTY, LOST, RW, COMMITTED, AWAY or RO. A replacement being written does not change the phase."""
        if self.away:
            return "AWAY"
        if self.current is None and self.writer is None:
            return "LOST" if self.refill_from_s == NEVER_S else "EMPTY"
        if self.current is None:
            return "RW"
        return "RO" if self.readers_of(self.current) else "COMMITTED"

    def generation_of(self, session: int) -> int | None:
        return next((reader.generation for reader in self.readers if reader.session == session), None)

    def situation(self) -> WeightsSituation:
        if self.away:
            return WeightsSituation.AWAY
        if self.current is None and self.writer is None:
            return WeightsSituation.EMPTY if self.refill_from_s is None else WeightsSituation.HELD
        if self.current is None or self.writer is not None:
            return WeightsSituation.WRITING if self.current is None else WeightsSituation.REPLACING
        if not self.readers_of(self.current):
            return WeightsSituation.COMMITTED
        going = self.current.layout_hash
        dropping = any(ask.mode == "drop" and ask.replace == going for ask in self.waiters)
        return WeightsSituation.DROPPING if dropping else WeightsSituation.READ

    def readers_of(self, generation: Generation | None) -> list[int]:
        return [reader.session for reader in self.readers if generation and reader.generation == generation.number]

    def lock_role_of(self, session: int) -> str:
        """Return as text whether a session writes, reads or waits; empty if none of these."""
        if self.writer is not None and self.writer.session == session:
            return f"writes generation {self.writer.generation}"
        if (held := self.generation_of(session)) is not None:
            return f"reads generation {held}"
        return "waits" if any(waiter.session == session for waiter in self.waiters) else ""


def decide_lock(state: WeightsState, ask: RequestLock) -> LockAnswer:
    return TABLE[_kind(state, ask)][state.situation()]


def _kind(state: WeightsState, ask: RequestLock) -> LockKind:
    if ask.replace is not None:
        here = state.current is not None and state.current.layout_hash == ask.replace
        if ask.mode == "drop":
            return LockKind.DROP if here else LockKind.DROP_OTHER
        return LockKind.REPLACE if here else LockKind.REPLACE_OTHER
    if ask.mode == "ro":
        return LockKind.READ_WHEN_WRITTEN if ask.wait_for_writer else LockKind.READ
    return LockKind.WRITE if ask.mode == "rw" else LockKind.EITHER


Step = tuple[WeightsState, tuple[Effect, ...]]


def restore(
    generations: Iterable[Generation],
    readers: Iterable[GenerationHolder] = (),
    last_generation: int = 0,
    refill_from_s: float | None = None,
    gone: int = 0,
) -> Step:
    """Return a new vault's state from the keeper's records. A reader listed here stays one until its `ReleaseLock`.
    Generations up to `gone` are not current: they were dropped. An unfinished writer has no record; the vault tells it
    so when it reconnects."""
    known = sorted(generations, key=lambda generation: generation.number)
    numbers = [generation.number for generation in known]
    assert len(set(numbers)) == len(numbers), f"a generation is recorded twice: {numbers}"
    kept = tuple(readers)
    assert all(reader.generation in numbers for reader in kept), "a reader's generation is not recorded"
    current = known.pop() if known and known[-1].number > gone else None
    state = WeightsState(
        last_generation=max([last_generation, gone, *numbers]),
        current=current,
        superseded=tuple(known),
        readers=kept,
        refill_from_s=refill_from_s if current is None else None,
    )
    return _drop_unread(state)


def next_deadline_s(state: WeightsState) -> float | None:
    """Return when a `WeightsTick` is due, if no other event comes before."""
    refill = (state.refill_from_s,) if state.waiters and state.refill_from_s is not None else ()
    return min((*refill, *(waiter.deadline_s for waiter in state.waiters)), default=None)


def step(state: WeightsState, event: Event, now_s: float) -> Step:
    """Return the state after the event, and its effects, to be carried out in order."""
    if state.refill_from_s is not None and now_s >= state.refill_from_s:
        state = replace(state, refill_from_s=None)
    applied: tuple[Effect, ...] = ()
    match event:
        case RequestLock():
            state, applied = _ask(state, event)
        case Commit():
            state, applied = _commit(state, event)
        case DonateWeights():
            state, applied = _donate(state, event)
        case ReleaseLock():
            state, applied = _leave(state, event.session)
        case WeightsMoved():
            assert state.situation() is (WeightsSituation.COMMITTED if event.away else WeightsSituation.AWAY), (
                f"{event}: {state!r}"
            )
            state = replace(state, away=event.away)
    # Nothing is granted after a request's deadline; a request with a timeout of 0 is still evaluated once.
    state, late = _expire(state, now_s, spare=event if isinstance(event, RequestLock) else None)
    state, settled = _answer_waiters(state)
    state, expired = _expire(state, now_s)
    state, overfull = _bound(state)
    state, dropped = _drop_unread(state)
    return state, applied + late + settled + expired + overfull + dropped


def _ask(state: WeightsState, ask: RequestLock) -> Step:
    if ask.mode not in ("rw", "drop") and ask.replace is not None:
        return state, (RefuseLock(ask.session, WeightsRefusal.BAD_REQUEST, f"{ask.mode} replaces nothing: ask for rw"),)
    if ask.mode == "drop" and ask.replace is None:
        return state, (RefuseLock(ask.session, WeightsRefusal.BAD_REQUEST, "drop takes the hash of what is to go"),)
    if taken := state.lock_role_of(ask.session):
        return state, (RefuseLock(ask.session, WeightsRefusal.BUSY, f"this session {taken} already"),)
    pressed = state.readers_of(state.current) if _kind(state, ask) is LockKind.DROP else ()
    return replace(state, waiters=(*state.waiters, ask)), tuple(AskToLetGo(session) for session in pressed)


def _commit(state: WeightsState, event: Commit) -> Step:
    writer = state.writer
    if writer is None or writer.session != event.session:
        return state, (
            RefuseLock(event.session, WeightsRefusal.NOT_WRITER, "this session holds no write lock: nothing to commit"),
        )
    committed = Generation(writer.generation, event.layout_hash)
    return _become_current(replace(state, writer=None), committed, event.session)


def _become_current(state: WeightsState, committed: Generation, session: int) -> Step:
    superseded = state.superseded if state.current is None else (*state.superseded, state.current)
    told = tuple(TellSuperseded(reader, committed.layout_hash) for reader in state.readers_of(state.current))
    readers = (*state.readers, GenerationHolder(session, committed.number))
    state = replace(state, current=committed, superseded=superseded, readers=readers)
    return state, (Committed(session, committed.number, committed.layout_hash), *told)


def _donate(state: WeightsState, event: DonateWeights) -> Step:
    session = event.session
    if taken := state.lock_role_of(session):
        return state, (RefuseLock(session, WeightsRefusal.BUSY, f"this session {taken} already"),)
    if state.writer is not None and state.current is None:
        return state, (RefuseLock(session, WeightsRefusal.STALE, "too late: new weights are being written"),)
    if state.current is None:
        number = state.last_generation + 1
        donated = Generation(number, event.layout_hash)
        return _become_current(replace(state, last_generation=number), donated, session)
    if state.current.layout_hash != event.layout_hash or state.away:
        return state, (RefuseLock(session, WeightsRefusal.STALE, f"the weights here are {state.current.layout_hash}"),)
    return _grant_read(state, [session], state.current)


def _leave(state: WeightsState, session: int) -> Step:
    effects: tuple[Effect, ...] = ()
    if state.writer is not None and state.writer.session == session:
        effects = (Aborted(session, state.writer.generation),)
        state = replace(state, writer=None)
    readers = tuple(reader for reader in state.readers if reader.session != session)
    waiters = tuple(waiter for waiter in state.waiters if waiter.session != session)
    return replace(state, readers=readers, waiters=waiters), effects


def _without(state: WeightsState, *asks: RequestLock) -> WeightsState:
    """Remove these sessions' waiters: a session has at most one."""
    answered = {ask.session for ask in asks}
    return replace(state, waiters=tuple(waiter for waiter in state.waiters if waiter.session not in answered))


def _expire(state: WeightsState, now_s: float, spare: RequestLock | None = None) -> Step:
    late = tuple(waiter for waiter in state.waiters if waiter.deadline_s <= now_s and waiter is not spare)
    return _without(state, *late), tuple(LockTimedOut(waiter.session) for waiter in late)


def _bound(state: WeightsState) -> Step:
    """Refuse the newest waiter if there are too many: only a `RequestLock` adds one, at the end."""
    if len(state.waiters) <= WAITERS_MAX:
        return state, ()
    extra = state.waiters[-1]
    reason = f"{WAITERS_MAX} sessions wait here already"
    return _without(state, extra), (RefuseLock(extra.session, WeightsRefusal.TOO_MANY, reason),)


def _drop_unread(state: WeightsState) -> Step:
    read = {reader.generation for reader in state.readers}
    unread = tuple(generation for generation in state.superseded if generation.number not in read)
    kept = tuple(generation for generation in state.superseded if generation.number in read)
    return replace(state, superseded=kept), tuple(DropGeneration(generation.number) for generation in unread)


# -- evaluating the waiters again


def _answer_waiters(state: WeightsState) -> Step:
    """Drop the current generation if a waiter may have it dropped, grant the write lock to the oldest waiter that may
    have it, then answer the others from the new state."""
    told: list[Effect] = []
    for answer, grant in ((LockAnswer.DROP, _drop_current), (LockAnswer.WRITE, _grant_write)):
        first = next((ask for ask in state.waiters if decide_lock(state, ask) is answer), None)
        if first is not None:
            state, effects = grant(state, first)
            told += effects
    decided = [(ask, decide_lock(state, ask)) for ask in state.waiters]
    assert all(answer is not LockAnswer.WRITE for _, answer in decided), f"two writers: {state!r}"
    state = replace(state, waiters=tuple(ask for ask, answer in decided if answer is LockAnswer.WAIT))
    if state.current is not None:
        reading = [ask.session for ask, answer in decided if answer is LockAnswer.READ]
        state, effects = _grant_read(state, reading, state.current)
        told += effects
    told += [_deny(state, ask, answer) for ask, answer in decided if answer not in (LockAnswer.WAIT, LockAnswer.READ)]
    return state, tuple(told)


def _drop_current(state: WeightsState, ask: RequestLock) -> Step:
    assert state.current is not None
    effects = (DropGeneration(state.current.number), AnswerEmpty(ask.session))
    return replace(_without(state, ask), current=None), effects


def _grant_write(state: WeightsState, ask: RequestLock) -> Step:
    assert state.writer is None, f"two writers: {state!r}"
    number = state.last_generation + 1
    state = replace(_without(state, ask), last_generation=number, writer=GenerationHolder(ask.session, number))
    return state, (GrantWrite(ask.session, number, ask.replace),)


def _grant_read(state: WeightsState, sessions: Sequence[int], current: Generation) -> Step:
    readers = tuple(GenerationHolder(session, current.number) for session in sessions)
    granted = tuple(GrantRead(session, current.number, current.layout_hash) for session in sessions)
    return replace(state, readers=state.readers + readers), granted


def _deny(state: WeightsState, ask: RequestLock, answer: LockAnswer) -> Effect:
    if answer is LockAnswer.EMPTY:
        return AnswerEmpty(ask.session)
    here = "nothing is" if state.current is None else f"{state.current.layout_hash} is"
    if answer is LockAnswer.STALE:
        return RefuseLock(ask.session, WeightsRefusal.STALE, f"asked to replace {ask.replace}, but {here} here")
    assert answer is LockAnswer.COMMITTED, f"{answer} denies nothing"
    return RefuseLock(ask.session, WeightsRefusal.COMMITTED, f"{here} committed here: replacing it takes its hash")
