"""Who may write and who may read the weights on one device: a pure machine, no I/O, no clock.

Theory. A *generation* is one committed set of slabs with its layout. One session at a time *writes* a generation
that nobody else can see; its commit makes it the *current* one, which new readers get, and makes the writer its first
reader. A writer that ends before commit leaves what was there before it: nothing, or the committed generation it meant
to replace. Replacing makes a generation beside the old one, so it never delays a reader; the old one is kept until its
last reader has left. Where both do not fit, the old one is *dropped* first: its readers are asked to let go, nobody new
gets it meanwhile, and it goes when the last has; a reader that cannot do without it is not pressed, the wish times out.
Whoever cannot be answered yet waits, and every waiter is judged anew on each change, oldest first. While the current
generation is *away* (in host memory, or on its way; see warm_machine.py) nobody gets it, and whoever wants it waits.

`TABLE` is the whole of admission: what is wished, in which situation, gets which answer.

Always true: at most one writer; a granted generation is a committed one; a waiter that is gone is granted nothing
(facts 17); a waiter is never granted after its deadline; generation numbers grow; a committed generation is dropped
only unread, and superseded or asked to go; an event with no `Refuse` for its session among the effects was accepted;
`next_deadline_s` is never in the past after a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import msgspec

# More than all ranks and standbys a machine can run; past a thousand something is looping, and each step stays short.
WAITERS_MAX = 1024
NEVER_S = math.inf  # as a time

Mode = Literal["rw", "ro", "rw_or_ro", "drop"]


class Code(StrEnum):
    """Why something is refused."""

    COMMITTED = "committed"  # rw without `replace` on committed weights
    STALE = "stale"  # the hash it was about is not, or no longer, the current one
    BUSY = "busy"  # the session waits or holds something already
    NOT_WRITER = "not_writer"
    TOO_MANY = "too_many"
    BAD_REQUEST = "bad_request"


# -- events


class _Word(msgspec.Struct, frozen=True):
    """What the machine is told, or tells."""


class _OfSession(_Word, frozen=True):
    session: int


class Ask(_OfSession, frozen=True):
    """A session asks for a lock. `wait_for_writer`: an `ro` stays where it would else be answered EMPTY. With `drop` it
    asks for an empty device instead: what is named in `replace` is to go, since a new one does not fit beside it."""

    mode: Mode
    deadline_s: float
    wait_for_writer: bool = False
    replace: str | None = None  # `rw` and `drop`: the hash of the committed weights it means to replace


class Commit(_OfSession, frozen=True):
    """The writer is done. By now its slabs are sealed and the keeper has the record."""

    layout_hash: str


class Donate(_OfSession, frozen=True):
    """After vault and keeper both died: a session that still maps a complete generation gives it back.

    The hash was checked against the whole set. With the same weights here already it becomes one more reader.
    """

    layout_hash: str


class Leave(_OfSession, frozen=True):
    """The session gives up whatever it holds or waits for, by its word or because its connection ended.

    Never refused: its word may cross an answer on its way.
    """


class Move(_Word, frozen=True):
    """The current generation, which nobody reads or replaces, leaves the device (`away`) or is whole there again."""

    away: bool


class Tick(_Word, frozen=True):
    """Time has passed."""


Event = Ask | Commit | Donate | Leave | Move | Tick


# -- effects


class GrantWrite(_OfSession, frozen=True):
    generation: int
    replacing: str | None


class GrantRead(_OfSession, frozen=True):
    generation: int
    layout_hash: str


class AnswerEmpty(_OfSession, frozen=True):
    """Nothing is here, and nobody is writing."""


class Refuse(_OfSession, frozen=True):
    code: Code
    reason: str


class TimedOut(_OfSession, frozen=True):
    """Its deadline has come, and it waits no longer."""


class Committed(_OfSession, frozen=True):
    """The session's generation is the current one, and the session reads it from now on."""

    generation: int
    layout_hash: str


class Aborted(_OfSession, frozen=True):
    """The writer ended before commit: drop its slabs. It may be gone, so this is news for the vault, not for it."""

    generation: int


class Superseded(_OfSession, frozen=True):
    """To a reader of what was current until now: newer weights are here, yours stay as long as you hold them."""

    by_hash: str


class LetGo(_OfSession, frozen=True):
    """To a reader of the current weights: somebody waits for their place. Whoever can do without them lets go."""


class DropGeneration(_Word, frozen=True):
    """Superseded or asked to go, and nobody reads it any more: drop its slabs and its record."""

    generation: int


Answered = GrantWrite | GrantRead | AnswerEmpty | Refuse | TimedOut | Committed
Effect = Answered | Aborted | Superseded | LetGo | DropGeneration

# -- the state, and the table by which a wish is answered


class Situation(StrEnum):
    """What a wish meets."""

    EMPTY = "empty"
    HELD = "held"  # empty after a total loss: whoever still maps the old bytes may yet give them back
    WRITING = "writing"  # a first generation is being written
    COMMITTED = "committed"
    READ = "read"  # committed, and in use
    DROPPING = "dropping"  # in use, and somebody waits for its place
    REPLACING = "replacing"  # committed, and the next generation is being written
    AWAY = "away"  # committed, and not on the device


class Wish(StrEnum):
    READ = "ro"
    READ_WHEN_WRITTEN = "ro, waiting for a writer"
    EITHER = "rw_or_ro"
    WRITE = "rw"
    REPLACE = "rw replacing the current hash"
    REPLACE_OTHER = "rw replacing another hash"
    DROP = "drop the current hash"
    DROP_OTHER = "drop another hash"


class Answer(StrEnum):
    READ = "read"
    WRITE = "write"
    WAIT = "wait"
    EMPTY = "empty"
    DROP = "drop what is here, then empty"
    COMMITTED = "refused: committed"
    STALE = "refused: stale"


def _row(*answers: Answer) -> Mapping[Situation, Answer]:
    return dict(zip(Situation, answers, strict=True))


_READ, _WRITE, _WAIT, _STALE, _TAKEN = Answer.READ, Answer.WRITE, Answer.WAIT, Answer.STALE, Answer.COMMITTED
# fmt: off
TABLE: Mapping[Wish, Mapping[Situation, Answer]] = {
    #                            EMPTY         HELD          WRITING COMMITTED    READ    DROPPING REPLACING AWAY
    Wish.READ:              _row(Answer.EMPTY, _WAIT,        _WAIT,  _READ,       _READ,  _WAIT,   _READ,    _WAIT),
    Wish.READ_WHEN_WRITTEN: _row(_WAIT,        _WAIT,        _WAIT,  _READ,       _READ,  _WAIT,   _READ,    _WAIT),
    Wish.EITHER:            _row(_WRITE,       _WAIT,        _WAIT,  _READ,       _READ,  _WAIT,   _READ,    _WAIT),
    Wish.WRITE:             _row(_WRITE,       _WAIT,        _WAIT,  _TAKEN,      _TAKEN, _TAKEN,  _TAKEN,   _TAKEN),
    Wish.REPLACE:           _row(_STALE,       _STALE,       _STALE, _WRITE,      _WRITE, _WAIT,   _WAIT,    _WAIT),
    Wish.REPLACE_OTHER:     _row(_STALE,       _STALE,       _STALE, _STALE,      _STALE, _STALE,  _STALE,   _STALE),
    Wish.DROP:              _row(_STALE,       _STALE,       _STALE, Answer.DROP, _WAIT,  _WAIT,   _WAIT,    _WAIT),
    Wish.DROP_OTHER:        _row(Answer.EMPTY, Answer.EMPTY, _STALE, _STALE,      _STALE, _STALE,  _STALE,   _STALE),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Holder:
    """Who writes a generation, or reads it."""

    session: int
    generation: int


@dataclass(frozen=True, slots=True, repr=False)
class Weights:
    """The state. `superseded` holds generations that are still read; sessions are connections, by number."""

    last_generation: int = 0
    current: Generation | None = None
    superseded: tuple[Generation, ...] = ()
    writer: Holder | None = None
    readers: tuple[Holder, ...] = ()
    waiters: tuple[Ask, ...] = ()
    refill_from_s: float | None = None  # nothing is written anew before this time (`NEVER_S`: at all); see Donate
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
        """EMPTY, LOST, RW, COMMITTED, AWAY or RO; a replacement at work changes nothing for readers: not shown."""
        if self.away:
            return "AWAY"
        if self.current is None and self.writer is None:
            return "LOST" if self.refill_from_s == NEVER_S else "EMPTY"
        if self.current is None:
            return "RW"
        return "RO" if self.readers_of(self.current) else "COMMITTED"

    def generation_of(self, session: int) -> int | None:
        """What a session holds for reading."""
        return next((reader.generation for reader in self.readers if reader.session == session), None)

    def situation(self) -> Situation:
        if self.away:
            return Situation.AWAY
        if self.current is None and self.writer is None:
            return Situation.EMPTY if self.refill_from_s is None else Situation.HELD
        if self.current is None or self.writer is not None:
            return Situation.WRITING if self.current is None else Situation.REPLACING
        if not self.readers_of(self.current):
            return Situation.COMMITTED
        going = self.current.layout_hash
        dropping = any(ask.mode == "drop" and ask.replace == going for ask in self.waiters)
        return Situation.DROPPING if dropping else Situation.READ

    def readers_of(self, generation: Generation | None) -> list[int]:
        return [reader.session for reader in self.readers if generation and reader.generation == generation.number]

    def place_of(self, session: int) -> str:
        """What a session does here, in words; empty: nothing."""
        if self.writer is not None and self.writer.session == session:
            return f"writes generation {self.writer.generation}"
        if (held := self.generation_of(session)) is not None:
            return f"reads generation {held}"
        return "waits" if any(waiter.session == session for waiter in self.waiters) else ""


def judge(state: Weights, ask: Ask) -> Answer:
    return TABLE[_wish(state, ask)][state.situation()]


def _wish(state: Weights, ask: Ask) -> Wish:
    if ask.replace is not None:
        here = state.current is not None and state.current.layout_hash == ask.replace
        if ask.mode == "drop":
            return Wish.DROP if here else Wish.DROP_OTHER
        return Wish.REPLACE if here else Wish.REPLACE_OTHER
    if ask.mode == "ro":
        return Wish.READ_WHEN_WRITTEN if ask.wait_for_writer else Wish.READ
    return Wish.WRITE if ask.mode == "rw" else Wish.EITHER


Step = tuple[Weights, tuple[Effect, ...]]


def restore(
    generations: Iterable[Generation],
    readers: Iterable[Holder] = (),
    last_generation: int = 0,
    refill_from_s: float | None = None,
    gone: int = 0,
) -> Step:
    """A new vault's state from the keeper's records; a reader listed here keeps its seat until its `Leave`. None up to
    `gone` is current: what was had to go. An unfinished writer has no record, and is told so when it comes back."""
    known = sorted(generations, key=lambda generation: generation.number)
    numbers = [generation.number for generation in known]
    assert len(set(numbers)) == len(numbers), f"a generation is recorded twice: {numbers}"
    seats = tuple(readers)
    assert all(reader.generation in numbers for reader in seats), "a reader's generation is not recorded"
    current = known.pop() if known and known[-1].number > gone else None
    state = Weights(
        last_generation=max([last_generation, gone, *numbers]),
        current=current,
        superseded=tuple(known),
        readers=seats,
        refill_from_s=refill_from_s if current is None else None,
    )
    return _drop_unread(state)


def next_deadline_s(state: Weights) -> float | None:
    """When a `Tick` is due, if nothing else happens before."""
    refill = (state.refill_from_s,) if state.waiters and state.refill_from_s is not None else ()
    return min((*refill, *(waiter.deadline_s for waiter in state.waiters)), default=None)


def step(state: Weights, event: Event, now_s: float) -> Step:
    """What becomes of an event. Effects are to be carried out in their order."""
    if state.refill_from_s is not None and now_s >= state.refill_from_s:
        state = replace(state, refill_from_s=None)
    applied: tuple[Effect, ...] = ()
    match event:
        case Ask():
            state, applied = _ask(state, event)
        case Commit():
            state, applied = _commit(state, event)
        case Donate():
            state, applied = _donate(state, event)
        case Leave():
            state, applied = _leave(state, event.session)
        case Move():
            assert state.situation() is (Situation.COMMITTED if event.away else Situation.AWAY), f"{event}: {state!r}"
            state = replace(state, away=event.away)
    # Past its deadline nobody is granted anything; but who asks with no time at all is still judged once.
    state, late = _expire(state, now_s, spare=event if isinstance(event, Ask) else None)
    state, settled = _settle(state)
    state, expired = _expire(state, now_s)
    state, overfull = _bound(state)
    state, dropped = _drop_unread(state)
    return state, applied + late + settled + expired + overfull + dropped


def _ask(state: Weights, ask: Ask) -> Step:
    if ask.mode not in ("rw", "drop") and ask.replace is not None:
        return state, (Refuse(ask.session, Code.BAD_REQUEST, f"{ask.mode} replaces nothing: ask for rw"),)
    if ask.mode == "drop" and ask.replace is None:
        return state, (Refuse(ask.session, Code.BAD_REQUEST, "drop takes the hash of what is to go"),)
    if taken := state.place_of(ask.session):
        return state, (Refuse(ask.session, Code.BUSY, f"this session {taken} already"),)
    pressed = state.readers_of(state.current) if _wish(state, ask) is Wish.DROP else ()
    return replace(state, waiters=(*state.waiters, ask)), tuple(LetGo(session) for session in pressed)


def _commit(state: Weights, event: Commit) -> Step:
    writer = state.writer
    if writer is None or writer.session != event.session:
        return state, (Refuse(event.session, Code.NOT_WRITER, "this session holds no write lock: nothing to commit"),)
    committed = Generation(writer.generation, event.layout_hash)
    return _become_current(replace(state, writer=None), committed, event.session)


def _become_current(state: Weights, committed: Generation, session: int) -> Step:
    superseded = state.superseded if state.current is None else (*state.superseded, state.current)
    told = tuple(Superseded(reader, committed.layout_hash) for reader in state.readers_of(state.current))
    readers = (*state.readers, Holder(session, committed.number))
    state = replace(state, current=committed, superseded=superseded, readers=readers)
    return state, (Committed(session, committed.number, committed.layout_hash), *told)


def _donate(state: Weights, event: Donate) -> Step:
    session = event.session
    if taken := state.place_of(session):
        return state, (Refuse(session, Code.BUSY, f"this session {taken} already"),)
    if state.writer is not None and state.current is None:
        return state, (Refuse(session, Code.STALE, "too late: the weights are being written anew"),)
    if state.current is None:
        number = state.last_generation + 1
        donated = Generation(number, event.layout_hash)
        return _become_current(replace(state, last_generation=number), donated, session)
    if state.current.layout_hash != event.layout_hash or state.away:
        return state, (Refuse(session, Code.STALE, f"the weights here are {state.current.layout_hash}"),)
    return _grant_read(state, [session], state.current)


def _leave(state: Weights, session: int) -> Step:
    effects: tuple[Effect, ...] = ()
    if state.writer is not None and state.writer.session == session:
        effects = (Aborted(session, state.writer.generation),)
        state = replace(state, writer=None)
    readers = tuple(reader for reader in state.readers if reader.session != session)
    waiters = tuple(waiter for waiter in state.waiters if waiter.session != session)
    return replace(state, readers=readers, waiters=waiters), effects


def _without(state: Weights, *asks: Ask) -> Weights:
    """A session waits once."""
    answered = {ask.session for ask in asks}
    return replace(state, waiters=tuple(waiter for waiter in state.waiters if waiter.session not in answered))


def _expire(state: Weights, now_s: float, spare: Ask | None = None) -> Step:
    late = tuple(waiter for waiter in state.waiters if waiter.deadline_s <= now_s and waiter is not spare)
    return _without(state, *late), tuple(TimedOut(waiter.session) for waiter in late)


def _bound(state: Weights) -> Step:
    """Only an `Ask` adds a waiter, at the end: it is the one there is no room for."""
    if len(state.waiters) <= WAITERS_MAX:
        return state, ()
    extra = state.waiters[-1]
    reason = f"{WAITERS_MAX} sessions wait here already"
    return _without(state, extra), (Refuse(extra.session, Code.TOO_MANY, reason),)


def _drop_unread(state: Weights) -> Step:
    read = {reader.generation for reader in state.readers}
    unread = tuple(generation for generation in state.superseded if generation.number not in read)
    kept = tuple(generation for generation in state.superseded if generation.number in read)
    return replace(state, superseded=kept), tuple(DropGeneration(generation.number) for generation in unread)


# -- the waiters, judged anew


def _settle(state: Weights) -> Step:
    """What is to go, goes; the oldest who may write, writes; everyone else is judged by what that made of it."""
    told: list[Effect] = []
    for answer, grant in ((Answer.DROP, _drop_current), (Answer.WRITE, _grant_write)):
        first = next((ask for ask in state.waiters if judge(state, ask) is answer), None)
        if first is not None:
            state, effects = grant(state, first)
            told += effects
    judged = [(ask, judge(state, ask)) for ask in state.waiters]
    assert all(answer is not Answer.WRITE for _, answer in judged), f"two writers: {state!r}"
    state = replace(state, waiters=tuple(ask for ask, answer in judged if answer is Answer.WAIT))
    if state.current is not None:
        reading = [ask.session for ask, answer in judged if answer is Answer.READ]
        state, effects = _grant_read(state, reading, state.current)
        told += effects
    told += [_deny(state, ask, answer) for ask, answer in judged if answer not in (Answer.WAIT, Answer.READ)]
    return state, tuple(told)


def _drop_current(state: Weights, ask: Ask) -> Step:
    assert state.current is not None
    effects = (DropGeneration(state.current.number), AnswerEmpty(ask.session))
    return replace(_without(state, ask), current=None), effects


def _grant_write(state: Weights, ask: Ask) -> Step:
    assert state.writer is None, f"two writers: {state!r}"
    number = state.last_generation + 1
    state = replace(_without(state, ask), last_generation=number, writer=Holder(ask.session, number))
    return state, (GrantWrite(ask.session, number, ask.replace),)


def _grant_read(state: Weights, sessions: Sequence[int], current: Generation) -> Step:
    readers = tuple(Holder(session, current.number) for session in sessions)
    granted = tuple(GrantRead(session, current.number, current.layout_hash) for session in sessions)
    return replace(state, readers=state.readers + readers), granted


def _deny(state: Weights, ask: Ask, answer: Answer) -> Effect:
    if answer is Answer.EMPTY:
        return AnswerEmpty(ask.session)
    here = "nothing is" if state.current is None else f"{state.current.layout_hash} is"
    if answer is Answer.STALE:
        return Refuse(ask.session, Code.STALE, f"asked to replace {ask.replace}, but {here} here")
    assert answer is Answer.COMMITTED, f"{answer} denies nothing"
    return Refuse(ask.session, Code.COMMITTED, f"{here} committed here: replacing it takes its hash")
