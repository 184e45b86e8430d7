"""The journal of leaderships: it survives its writer, and finds two leaders if there ever were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.ports import SystemClock
from holdfast.failover.journal import TERMS_MAX, Journal, Term, read_terms, two_leaders
from tests.rigs.small_disks import BALLAST, fill, small_disk

LEADER = """
import sys, time
from pathlib import Path
from holdfast.core.ports import SystemClock
from holdfast.failover.journal import Journal
journal = Journal(Path(sys.argv[1]), SystemClock())
journal.begin(7)
journal.sent()
print("leading", flush=True)
while True:
    journal.sent()
"""


def test_the_last_store_of_a_killed_leader_is_there(tmp_path: Path) -> None:
    """A leader that is killed between two tokens has left when it last sent."""
    child = subprocess.Popen([sys.executable, "-c", LEADER, str(tmp_path / "a.journal")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"leading\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    (term,) = read_terms(tmp_path)
    assert (term.engine, term.epoch, term.pid) == ("a", 7, child.pid)
    assert term.last_sent_ns >= term.began_ns > 0


def test_a_successor_adds_to_what_its_predecessor_wrote(tmp_path: Path) -> None:
    """The next process of the same name keeps the terms before it; other engines' terms are found beside them."""
    for name, epoch in (("a", 1), ("b", 2), ("a", 3)):
        journal = Journal(tmp_path / f"{name}.journal", SystemClock())
        journal.begin(epoch)
        journal.sent()
    assert [(term.engine, term.epoch) for term in read_terms(tmp_path)] == [("a", 1), ("b", 2), ("a", 3)]
    assert two_leaders(read_terms(tmp_path)) == []


def test_a_full_journal_forgets_its_oldest_term(tmp_path: Path) -> None:
    """A journal never grows: the oldest term makes room."""
    journal = Journal(tmp_path / "a.journal", SystemClock())
    for epoch in range(1, TERMS_MAX + 3):
        journal.begin(epoch)
    epochs = [term.epoch for term in read_terms(tmp_path)]
    assert len(epochs) == TERMS_MAX
    assert (epochs[0], epochs[-1]) == (3, TERMS_MAX + 2)


RIGHT = (Term("a", 1, 10, began_ns=100, last_sent_ns=200), Term("b", 2, 11, began_ns=300, last_sent_ns=400))


@pytest.mark.parametrize(
    "newer",
    [
        replace(RIGHT[1], began_ns=150),  # the older one sent after the newer had begun
        replace(RIGHT[1], epoch=1),  # two leaders under one epoch
        replace(RIGHT[1], began_ns=50, last_sent_ns=60),  # the newer began before the older
    ],
)
def test_two_leaders_are_found(newer: Term) -> None:
    """Whoever sent after a newer leader had begun, or shares its epoch, is found; an orderly change is not."""
    assert two_leaders(RIGHT) == []
    assert len(two_leaders([RIGHT[0], newer])) == 1


FULL = """
import sys
from pathlib import Path
from holdfast.core.ports import SystemClock
from holdfast.failover.journal import Journal
journal = Journal(Path(sys.argv[1]), SystemClock())
print("stands by", flush=True)
sys.stdin.readline()
for epoch in (7, 8):
    journal.begin(epoch)
    journal.sent()
print("led", flush=True)
sys.stdin.readline()
journal.begin(9)
journal.sent()
print("led", flush=True)
"""


@pytest.mark.parametrize("full_from_the_start", [False, True])
def test_a_full_disk_ends_no_leader(full_from_the_start: bool) -> None:
    """A leader that reserved its journal has its terms in it, one that could not leads without; with room again
    the next term is there."""
    with small_disk(256 * 1024) as disk:
        if full_from_the_start:
            fill(disk)
        child = subprocess.Popen(
            [sys.executable, "-c", FULL, str(disk / "a.journal")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with child:
            assert child.stdout.readline() == b"stands by\n"
            fill(disk)
            child.stdin.write(b"lead\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"led\n", "it died of its own journal"
            assert [term.epoch for term in read_terms(disk)] == ([] if full_from_the_start else [7, 8])
            (disk / BALLAST).unlink()
            child.stdin.write(b"lead\n")
            child.stdin.close()
            assert child.stdout.readline() == b"led\n"
            assert child.wait(60) == 0
        assert [term.epoch for term in read_terms(disk)][-1] == 9
