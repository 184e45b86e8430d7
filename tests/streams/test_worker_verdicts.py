"""What a frontend makes of verdicts in the store: shares, first checks, and falls that are told once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.control.store_view import decoded
from holdfast.discovery.keys import CONTROLS, HEALTH, InstanceKey
from holdfast.health.records import ControlRecord, HealthRecord
from holdfast.health.standing import UNCHECKED, WEIGHTS, HealthCause, HealthStatus, WorkerStanding
from holdfast.spec.waits import HoldSettings
from holdfast.store.contract import Deleted, Lost, Put, Snapshot
from holdfast.streams.verdicts import (
    CHECKING_ALONE_S,
    CHECKING_S,
    FIRST_CHECK_S,
    TrafficShare,
    VerdictChange,
    WorkerVerdicts,
)

KEY = InstanceKey("d-00000000", "worker", "generate", 7)
AT = HEALTH + KEY.path
LEADER = f"{CONTROLS}d/control"


def verdict(status: HealthStatus, fall: int = 0, **fields: Any) -> bytes:
    standing = WorkerStanding(status=status, weight=WEIGHTS[status], reason="as decided", fall=fall, causes={})
    return msgspec.json.encode(HealthRecord(name="w", standing=standing, **fields))


def unchecked() -> bytes:
    """As control writes it down when it has seen a worker and not asked it yet."""
    return msgspec.json.encode(HealthRecord(name="w"))


def control(*, leads: bool) -> bytes:
    return msgspec.json.encode(ControlRecord(name="c", leads=leads))


def share_of(verdicts: WorkerVerdicts, known_s: float = 0.0, *, trusted: bool = False) -> TrafficShare:
    return verdicts.share(KEY, trusted=trusted, since_s=100.0, now_s=100.0 + known_s)


def weight_of(verdicts: WorkerVerdicts, known_s: float = 0.0, *, trusted: bool = False) -> float:
    return share_of(verdicts, known_s, trusted=trusted).weight


def led() -> WorkerVerdicts:
    verdicts = WorkerVerdicts("d")
    verdicts.on_store_event(CONTROLS, Put(LEADER, control(leads=True)))
    return verdicts


@pytest.mark.parametrize("status", HealthStatus)
def test_a_share_is_its_records(status: HealthStatus) -> None:
    """Weight, status and reason are control's; who has none gets none, and says why."""
    verdicts = led()
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(status))) == [VerdictChange(KEY)]
    share = share_of(verdicts)
    assert (share.weight, share.status, share.reason) == (WEIGHTS[status], status.name, "as decided")
    assert share.drains is (status is HealthStatus.DRAINING)
    assert bool(share.objection) is (share.weight == 0.0)


JUNK = (
    b"",
    b"{}",
    b'{"name":"\xff"}',
    b'{"name":"w","more":' + b"[" * 100_000,
    b'{"name":"w","standing":{"status":0,"weight":-1}}',
)


@pytest.mark.parametrize("junk", JUNK)
def test_junk_changes_nothing_and_ends_nobody(junk: bytes) -> None:
    """And no frontend ends by it: every one would, and again when it starts."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.SUSPICIOUS)))
    assert verdicts.on_store_event(HEALTH, Put(AT, junk)) == []
    assert verdicts.on_store_event(CONTROLS, Put(LEADER + "2", junk)) == []
    assert verdicts.on_store_event(HEALTH, Snapshot({AT: junk})) == []
    assert share_of(verdicts).weight == 0.5
    assert decoded({AT: junk}, HEALTH, HealthRecord) == {}


def test_a_spare_is_sound_and_gets_nothing() -> None:
    """Its weight is what it would get if it were called."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.HEALTHY, spare=True)))
    assert share_of(verdicts).weight == 1.0
    assert share_of(verdicts).objection == "kept as a spare"


def test_a_first_check_is_waited_for_only_where_somebody_checks() -> None:
    """No control, or one that follows: at once. One that leads: a bounded time. One that is trusted: never."""
    verdicts = WorkerVerdicts("d")
    assert weight_of(verdicts) == 1.0
    verdicts.on_store_event(CONTROLS, Put(LEADER, control(leads=False)))
    assert weight_of(verdicts) == 1.0
    assert verdicts.on_store_event(CONTROLS, Put(LEADER, control(leads=True))) == [VerdictChange(None)]
    assert weight_of(verdicts) == 0.0
    assert share_of(verdicts).until_s == 100.0 + FIRST_CHECK_S
    assert weight_of(verdicts, FIRST_CHECK_S) == 1.0
    assert weight_of(verdicts, trusted=True) == 1.0
    assert verdicts.on_store_event(CONTROLS, Deleted(LEADER)) == [VerdictChange(None)]
    assert weight_of(verdicts) == 1.0


def test_a_check_that_is_under_way_is_waited_for_longer() -> None:
    """Control has written down that it knows the worker: it has the time for a canary and its retries; where control is
    gone meanwhile, only as long as for one that nobody knows. An engine of a group waits for neither."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, unchecked()))
    assert weight_of(verdicts, CHECKING_S - 1) == 0.0
    assert weight_of(verdicts, CHECKING_S) == 1.0
    assert weight_of(verdicts, trusted=True) == 1.0
    verdicts.on_store_event(CONTROLS, Deleted(LEADER))
    assert weight_of(verdicts, FIRST_CHECK_S) == 1.0


def test_who_fell_waits_for_its_canaries_however_long() -> None:
    """After a quarantine and a fresh load it is unchecked, and not as a new one is."""
    fallen = WorkerStanding(fall=1, causes={HealthCause.UNCHECKED: UNCHECKED}, load=2)
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, msgspec.json.encode(HealthRecord(name="w", standing=fallen))))
    verdicts.on_store_event(CONTROLS, Deleted(LEADER))
    assert weight_of(verdicts, 1000 * CHECKING_S, trusted=True) == 0.0


def test_a_fall_is_told_once() -> None:
    """When its number grows; not when it is read again, by whatever way, nor for what happens to it then."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.HEALTHY)))
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY, 1))) == [
        VerdictChange(KEY, "as decided")
    ]
    for again in (Put(AT, verdict(HealthStatus.DEAD, 1)), Snapshot({AT: verdict(HealthStatus.UNHEALTHY, 1)})):
        assert verdicts.on_store_event(HEALTH, again) == [VerdictChange(KEY)]
    assert verdicts.on_store_event(HEALTH, Snapshot({AT: verdict(HealthStatus.UNHEALTHY, 1)})) == []
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.SUSPICIOUS, 1))) == [VerdictChange(KEY)]
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY, 2))) == [
        VerdictChange(KEY, "as decided")
    ]


def test_a_worker_without_a_record_falls_by_its_first() -> None:
    """It served before control wrote anything."""
    verdicts = led()
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY, 1))) == [
        VerdictChange(KEY, "as decided")
    ]


@pytest.mark.parametrize(
    ("status", "told"),
    [(HealthStatus.HEALTHY, ""), (HealthStatus.SUSPICIOUS, ""), (HealthStatus.UNHEALTHY, "as decided")],
)
def test_a_fall_from_before_moves_nothing_unless_it_holds(status: HealthStatus, told: str) -> None:
    """A frontend that begins reads of falls that are over: they are older than its streams. One that holds still takes
    what the worker was given before its verdict was known."""
    verdicts = WorkerVerdicts("d", awaits=(HEALTH, CONTROLS))
    heard = verdicts.on_store_event(HEALTH, Snapshot({AT: verdict(status, 3)}))
    assert heard == [VerdictChange(KEY, told), VerdictChange(None)]


def test_nobody_serves_before_its_verdict_can_be_known() -> None:
    """A frontend that begins waits for what the store says, also with an engine of a group; but not for ever."""
    verdicts = WorkerVerdicts("d", awaits=(HEALTH, CONTROLS))
    assert weight_of(verdicts, trusted=True) == 0.0
    assert weight_of(verdicts, FIRST_CHECK_S) == 1.0
    verdicts.on_store_event(HEALTH, Snapshot({}))
    assert weight_of(verdicts) == 0.0
    assert verdicts.on_store_event(CONTROLS, Snapshot({})) == [VerdictChange(None)]
    assert weight_of(verdicts) == 1.0


def test_a_lost_store_changes_nothing() -> None:
    """What was decided holds; what grew meanwhile is told when it is back, and what is gone is forgotten."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY, 1)))
    for prefix in (HEALTH, CONTROLS):
        assert verdicts.on_store_event(prefix, Lost("away")) == []
    assert weight_of(verdicts) == 0.0
    fell = verdicts.on_store_event(HEALTH, Snapshot({AT: verdict(HealthStatus.SUSPICIOUS, 2)}))
    assert fell == [VerdictChange(KEY, "as decided")]
    assert verdicts.on_store_event(HEALTH, Snapshot({})) == [VerdictChange(KEY)]
    assert verdicts.on_store_event(CONTROLS, Snapshot({})) == [VerdictChange(None)]
    assert weight_of(verdicts) == 1.0


def test_what_cannot_be_read_changes_nothing() -> None:
    """Garbage, or a verdict of another deployment, or a key that is none."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY)))
    other = InstanceKey("d-other-00000000", "worker", "generate", 7)
    sound = verdict(HealthStatus.HEALTHY)
    for key, value in ((AT, b"{"), (HEALTH + other.path, sound), (f"{HEALTH}x", sound)):
        assert verdicts.on_store_event(HEALTH, Put(key, value)) == []
    assert weight_of(verdicts) == 0.0


@pytest.mark.parametrize(
    "junk",
    [
        b'{"name": "\xff"}',
        b'{"name": "w", "of_later": ' + b"[" * 100_000,
        b'{"name": "w", "standing": {"weight": 7.5}}',
        b'{"name": "w", "standing": {"weight": -1}}',
    ],
    ids=["no text", "brackets without end", "more than all", "less than nothing"],
)
def test_junk_in_the_store_ends_no_watch(junk: bytes) -> None:
    """A frontend whose watch ends is over, and so is the next, which reads the same."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY)))
    assert verdicts.on_store_event(HEALTH, Put(AT, junk)) == []
    assert verdicts.on_store_event(CONTROLS, Put(f"{LEADER}2", junk)) == []
    assert weight_of(verdicts) == 0.0


@pytest.mark.parametrize("forgotten", [Snapshot({}), Deleted(AT)])
@pytest.mark.parametrize("status", [HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS])
def test_a_fall_that_is_over_moves_nothing_when_it_is_written_again(
    status: HealthStatus, forgotten: Snapshot | Deleted
) -> None:
    """A store came back without what was written, and control writes it again: all falls of all workers, long over."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY, 3)))
    verdicts.on_store_event(HEALTH, Put(AT, verdict(status, 3)))
    verdicts.on_store_event(HEALTH, forgotten)
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(status, 3))) == [VerdictChange(KEY)]
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(HealthStatus.UNHEALTHY, 4))) == [
        VerdictChange(KEY, "as decided")
    ]


@pytest.mark.parametrize("status", [HealthStatus.UNHEALTHY, HealthStatus.DRAINING])
def test_a_store_that_forgot_revives_nobody(status: HealthStatus) -> None:
    """Until control writes it again, or removes it."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, verdict(status, 1)))
    assert verdicts.on_store_event(HEALTH, Snapshot({})) == []
    assert weight_of(verdicts, trusted=True) == 0.0
    assert verdicts.on_store_event(HEALTH, Put(AT, verdict(status, 1))) == []
    assert verdicts.on_store_event(HEALTH, Deleted(AT)) == [VerdictChange(KEY)]
    assert weight_of(verdicts, trusted=True) == 1.0


def test_a_lone_workers_first_check_does_not_outlast_the_hold() -> None:
    """Where nobody else serves, what is held for it is served before the hold runs out, checked or not."""
    verdicts = led()
    verdicts.on_store_event(HEALTH, Put(AT, unchecked()))

    def weight(known_s: float, *, alone: bool) -> float:
        return verdicts.share(KEY, trusted=False, since_s=100.0, now_s=100.0 + known_s, alone=alone).weight

    assert weight(CHECKING_ALONE_S - 0.1, alone=True) == 0.0
    assert weight(CHECKING_ALONE_S, alone=True) == 1.0
    assert weight(CHECKING_S - 0.1, alone=False) == 0.0
    assert HoldSettings().hold_s / 2 >= CHECKING_ALONE_S
