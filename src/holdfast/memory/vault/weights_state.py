"""What there is to know about the weights on one device, and the table by which a wish is answered (pure).

Always true: `TABLE` is the whole of admission, a wish in a situation has exactly one answer; everything named here as
a phase or a situation is derived from the state, never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.memory.vault.weights_words import Ask


class Situation(StrEnum):
    """What a wish meets."""

    EMPTY = "empty"
    HELD = "held"  # empty after a total loss: whoever still maps the old bytes may yet give them back
    WRITING = "writing"  # a first generation is being written
    COMMITTED = "committed"
    READ = "read"  # committed, and in use
    DROPPING = "dropping"  # in use, and somebody waits for its place
    REPLACING = "replacing"  # committed, and the next generation is being written


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
    #                            EMPTY         HELD          WRITING COMMITTED    READ    DROPPING REPLACING
    Wish.READ:              _row(Answer.EMPTY, _WAIT,        _WAIT,  _READ,       _READ,  _WAIT,   _READ),
    Wish.READ_WHEN_WRITTEN: _row(_WAIT,        _WAIT,        _WAIT,  _READ,       _READ,  _WAIT,   _READ),
    Wish.EITHER:            _row(_WRITE,       _WAIT,        _WAIT,  _READ,       _READ,  _WAIT,   _READ),
    Wish.WRITE:             _row(_WRITE,       _WAIT,        _WAIT,  _TAKEN,      _TAKEN, _TAKEN,  _TAKEN),
    Wish.REPLACE:           _row(_STALE,       _STALE,       _STALE, _WRITE,      _WRITE, _WAIT,   _WAIT),
    Wish.REPLACE_OTHER:     _row(_STALE,       _STALE,       _STALE, _STALE,      _STALE, _STALE,  _STALE),
    Wish.DROP:              _row(_STALE,       _STALE,       _STALE, Answer.DROP, _WAIT,  _WAIT,   _WAIT),
    Wish.DROP_OTHER:        _row(Answer.EMPTY, Answer.EMPTY, _STALE, _STALE,      _STALE, _STALE,  _STALE),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class Writer:
    session: int
    generation: int
    replacing: str | None


@dataclass(frozen=True, slots=True)
class Reader:
    session: int
    generation: int


@dataclass(frozen=True, slots=True, repr=False)
class Weights:
    """The state. `superseded` holds generations that are still read; sessions are connections, by number."""

    last_generation: int = 0
    current: Generation | None = None
    superseded: tuple[Generation, ...] = ()
    writer: Writer | None = None
    readers: tuple[Reader, ...] = ()
    waiters: tuple[Ask, ...] = ()
    refill_from_s: float | None = None  # nothing is written anew before this time; see Donate

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
        """EMPTY, RW, COMMITTED or RO; a replacement at work changes nothing for readers, so it does not show here."""
        if self.current is None:
            return "EMPTY" if self.writer is None else "RW"
        return "RO" if self.readers_of(self.current) else "COMMITTED"

    def generation_of(self, session: int) -> int | None:
        """What a session holds for reading."""
        return next((reader.generation for reader in self.readers if reader.session == session), None)

    def is_waiting(self, session: int) -> bool:
        return any(waiter.session == session for waiter in self.waiters)

    def situation(self) -> Situation:
        if self.current is not None:
            return self._committed(self.current)
        if self.writer is not None:
            return Situation.WRITING
        return Situation.EMPTY if self.refill_from_s is None else Situation.HELD

    def _committed(self, current: Generation) -> Situation:
        if self.writer is not None:
            return Situation.REPLACING
        if not self.readers_of(current):
            return Situation.COMMITTED
        dropping = any(ask.mode == "drop" and ask.replace == current.layout_hash for ask in self.waiters)
        return Situation.DROPPING if dropping else Situation.READ

    def readers_of(self, generation: Generation) -> list[int]:
        return [reader.session for reader in self.readers if reader.generation == generation.number]

    def place_of(self, session: int) -> str:
        """What a session does here, in words; empty: nothing."""
        if self.writer is not None and self.writer.session == session:
            return f"writes generation {self.writer.generation}"
        if (held := self.generation_of(session)) is not None:
            return f"reads generation {held}"
        return "waits" if self.is_waiting(session) else ""


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
