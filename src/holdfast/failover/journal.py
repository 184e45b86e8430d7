"""Keeps the journal of an engine's leaderships: one memory-mapped file per engine, readable after SIGKILL.

A term is one leadership: its epoch, when it began, and when it last sent tokens. The kernel keeps the file's pages, so
the last write of a killed process can be read. From all files of a group `two_leaders` checks the guarantee of the
election: that no older leader sent anything after a newer one had begun.

Always true:

- A term is visible only once it is complete (its epoch is written last).
- One process writes one file; when the file is full, a new term replaces the oldest.
- The file's space is reserved and touched before use: writing to a mapped hole on a full disk would kill the process
  (fact 39). If the space cannot be reserved, terms are kept in memory, where other processes cannot read them, and the
  next term tries the file again.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from holdfast.core.log_files import UNWRITTEN
from holdfast.core.ports import Clock

# Terms kept per engine name: a failover a minute for half a day.
TERMS_MAX = 1024
# A leader with streams sends tokens many times a second; an older token says nothing about when it died.
SILENT_S = 1.0
_WORDS = 4  # epoch, pid, began_ns, last_sent_ns
_EPOCH, _PID, _BEGAN, _SENT = range(_WORDS)
_BYTES = TERMS_MAX * _WORDS * 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Term:
    """One leadership, in times of the machine's monotonic clock (the same for all processes)."""

    engine: str
    epoch: int
    pid: int
    began_ns: int
    last_sent_ns: int  # 0: never


def next_epoch(last: int, unix_ms: int) -> int:
    """Return the next leader's epoch, larger than `last`. The clock keeps epochs distinct if `last` is not known; the
    count keeps them growing if the clock jumps back."""
    return max(last + 1, unix_ms)


class Journal:
    """A journal file that one engine writes."""

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
        """Write a new term; called before any frontend is told of it."""
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
        """Note that tokens are sent now; called in every step, so it must be fast."""
        self._words[self._at + _SENT] = self._now_ns()

    def _now_ns(self) -> int:
        return round(self._clock.monotonic_s() * 1e9)


def _mapped(path: Path) -> memoryview:
    """Map the file with all its pages allocated and return its words; raise OSError if that is not possible."""
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
    """Return all terms of one group's engines, oldest epoch first."""
    terms: list[Term] = []
    for path in sorted(folder.glob("*.journal")):
        try:
            data = path.read_bytes()
        except OSError:  # another user's, or just gone
            continue
        words = memoryview(data[: len(data) // 32 * 32]).cast("Q").tolist()
        rows = (words[at : at + _WORDS] for at in range(0, len(words), _WORDS))
        terms += [Term(path.stem, *row) for row in rows if row[_EPOCH]]
    return sorted(terms, key=lambda term: (term.epoch, term.began_ns))


def two_leaders(terms: Iterable[Term]) -> list[tuple[Term, Term]]:
    """Return pairs of terms that violate the election: the older sent tokens or began after the newer had begun, or
    both have the same epoch."""
    ordered = sorted(terms, key=lambda term: term.epoch)
    wrong: list[tuple[Term, Term]] = []
    for older, newer in pairwise(ordered):
        if older.epoch == newer.epoch or older.last_sent_ns > newer.began_ns or older.began_ns > newer.began_ns:
            wrong.append((older, newer))
    return wrong
