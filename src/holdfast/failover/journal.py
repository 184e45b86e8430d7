"""What each engine process says of its own leadership: one file per engine, mapped into memory, that outlives SIGKILL.

A term is one leadership: its epoch, when it began, and when it last sent tokens. The file's pages belong to the kernel,
so the last store of a killed process is there to be read. From all files of one group `two_leaders` finds whether an
older leader ever sent anything after a newer one had begun: the promise of the whole election, checked from outside.

Always true: a term is visible only once it is whole (its epoch is stored last); one process writes one file; the oldest
term gives way when the file is full. The file's space is reserved and touched before it is relied on: a store to a
mapped hole on a full disk would kill the process (fact 39). Where it cannot be had, the terms are kept in memory, which
nobody else can read, and the file is tried again with the next term: a witness is missed, never fatal.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from holdfast.core.ports import Clock
from holdfast.core.unwritten import UNWRITTEN

# Terms of one engine's name; a failover a minute for half a day. Beyond that the oldest go.
TERMS_MAX = 1024
# A leader with streams sends tokens many times a second; an older token says nothing about when it died.
SILENT_S = 1.0
_WORDS = 4  # epoch, pid, began_ns, last_sent_ns
_EPOCH, _PID, _BEGAN, _SENT = range(_WORDS)
_BYTES = TERMS_MAX * _WORDS * 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Term:
    """One leadership, on the machine's monotonic clock (one for all processes)."""

    engine: str
    epoch: int
    pid: int
    began_ns: int
    last_sent_ns: int  # 0: never


def next_epoch(last: int, unix_ms: int) -> int:
    """A leader's number, larger than every leader's before it. The clock keeps epochs apart that do not know of each
    other; the count keeps them growing if the clock jumps."""
    return max(last + 1, unix_ms)


class Journal:
    """The writer's side."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._on_disk = False
        self._words = memoryview(mmap.mmap(-1, _BYTES)).cast("Q")
        self._at = 0
        self._reserve()

    def _reserve(self) -> None:
        try:
            self._words = _mapped(self._path)
        except OSError as error:
            UNWRITTEN.failed("journal", error)
            log.warning("leads without a journal at %s: %s", self._path, error)
            return
        self._on_disk = True
        UNWRITTEN.written("journal")

    def begin(self, epoch: int) -> None:
        """A term begins: to be stored before anybody is told of it."""
        if not self._on_disk:
            self._reserve()
        epochs = self._words[_EPOCH::_WORDS].tolist()
        at = self._at = epochs.index(min(epochs)) * _WORDS
        words = self._words
        words[at + _EPOCH] = 0
        words[at + _PID] = os.getpid()
        words[at + _BEGAN] = self._now_ns()
        words[at + _SENT] = 0
        words[at + _EPOCH] = epoch

    def sent(self) -> None:
        """Tokens go out now; on the path of every step."""
        self._words[self._at + _SENT] = self._now_ns()

    def _now_ns(self) -> int:
        return round(self._clock.monotonic_s() * 1e9)


def _mapped(path: Path) -> memoryview:
    """The file's words, every page of them there for good; OSError if they cannot be had."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _BYTES)
        os.ftruncate(descriptor, _BYTES)
        words = memoryview(mmap.mmap(descriptor, _BYTES)).cast("Q")
    finally:
        os.close(descriptor)
    for at in range(0, len(words), mmap.PAGESIZE // 8):
        words[at] = words[at]
    return words


def read_terms(folder: Path) -> list[Term]:
    """All terms of one group's engines, oldest epoch first."""
    terms: list[Term] = []
    for path in sorted(folder.glob("*.journal")):
        try:
            data = path.read_bytes()
        except OSError:  # somebody else's, or just gone
            continue
        words = memoryview(data[: len(data) // 32 * 32]).cast("Q").tolist()
        rows = (words[at : at + _WORDS] for at in range(0, len(words), _WORDS))
        terms += [Term(path.stem, *row) for row in rows if row[_EPOCH]]
    return sorted(terms, key=lambda term: (term.epoch, term.began_ns))


def two_leaders(terms: Iterable[Term]) -> list[tuple[Term, Term]]:
    """Pairs of which the older sent tokens after the newer had begun, or that share an epoch. None is right."""
    ordered = sorted(terms, key=lambda term: term.epoch)
    wrong: list[tuple[Term, Term]] = []
    for older, newer in pairwise(ordered):
        if older.epoch == newer.epoch or older.last_sent_ns > newer.began_ns or older.began_ns > newer.began_ns:
            wrong.append((older, newer))
    return wrong
