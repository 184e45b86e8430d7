"""The lock server's record: room for the next one is kept, so that a full disk does not stop an election."""

from __future__ import annotations

from pathlib import Path

from holdfast.failover.lock_server.machine import Client, Grant, Record
from holdfast.failover.lock_server.record import LockRecord
from holdfast.testing.disks import fill
from small_disks import small_disk


def test_a_grant_is_recorded_on_a_full_disk() -> None:
    """Again and again, each replacing the one before, whatever others take of the room that comes free."""
    with small_disk(64 * 1024) as disk:
        record = LockRecord(disk / "lock.state")
        record.open()
        fill(disk)
        for number in range(1, 4):
            wanted = Record(number, Grant(number, Client("id", "engine", 1, 2), 3.0, 3.0))
            record.save(wanted)
            assert record.load().record == wanted
        record.close()


def test_a_record_keeps_nothing_of_a_longer_one(tmp_path: Path) -> None:
    """Room that was reserved and is not used is not part of it."""
    record = LockRecord(tmp_path / "lock.state")
    record.open()
    for who in ("a name that is rather long", "b"):
        wanted = Record(1, Grant(1, Client("id", who, 1, 2), 3.0, 3.0))
        record.save(wanted)
        assert record.load().record == wanted
        assert record.load().trouble == ""
    record.close()
