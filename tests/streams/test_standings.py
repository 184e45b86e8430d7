"""What a frontend makes of verdicts in the store: shares, first checks, and falls that are told once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.control.book import decoded
from holdfast.discovery.keys import CONTROLS, HEALTH, InstanceKey
from holdfast.health.records import ControlRecord, HealthRecord
from holdfast.health.standing import UNCHECKED, WEIGHTS, Cause, Standing, Status
from holdfast.spec.waits import HoldSettings
from holdfast.store.contract import Deleted, Lost, Put, Snapshot
from holdfast.streams.standings import CHECKING_ALONE_S, CHECKING_S, FIRST_CHECK_S, Heard, Share, Standings

KEY = InstanceKey("d-00000000", "worker", "generate", 7)
AT = HEALTH + KEY.path
LEADER = f"{CONTROLS}d/control"


def verdict(status: Status, fall: int = 0, **fields: Any) -> bytes:
    standing = Standing(status=status, weight=WEIGHTS[status], reason="as decided", fall=fall, causes={})
    return msgspec.json.encode(HealthRecord(name="w", standing=standing, **fields))


def unchecked() -> bytes:
    """As control writes it down when it has seen a worker and not asked it yet."""
    return msgspec.json.encode(HealthRecord(name="w"))


def control(*, leads: bool) -> bytes:
    return msgspec.json.encode(ControlRecord(name="c", leads=leads))


def share_of(standings: Standings, known_s: float = 0.0, *, trusted: bool = False) -> Share:
    return standings.share(KEY, trusted=trusted, since_s=100.0, now_s=100.0 + known_s)


def weight_of(standings: Standings, known_s: float = 0.0, *, trusted: bool = False) -> float:
    return share_of(standings, known_s, trusted=trusted).weight


def led() -> Standings:
    standings = Standings("d")
    standings.hear(CONTROLS, Put(LEADER, control(leads=True)))
    return standings


@pytest.mark.parametrize("status", Status)
def test_a_share_is_its_records(status: Status) -> None:
    """Weight, status and reason are control's; who has none gets none, and says why."""
    standings = led()
    assert standings.hear(HEALTH, Put(AT, verdict(status))) == [Heard(KEY)]
    share = share_of(standings)
    assert (share.weight, share.status, share.reason) == (WEIGHTS[status], status.name, "as decided")
    assert share.drains is (status is Status.DRAINING)
    assert bool(share.objection) is (share.weight == 0.0)


JUNK = (
    b"",
    b"{}",
    b'{"name":"\xff"}',
    b'{"name":"w","more":' + b"[" * 100_000,
    b'{"name":"w","standing":{"status":9}}',
    b'{"name":"w","standing":{"status":0,"weight":-1}}',
    b'{"name":"w","breaker":{"state":9}}',
)


@pytest.mark.parametrize("junk", JUNK)
def test_junk_changes_nothing_and_ends_nobody(junk: bytes) -> None:
    """And no frontend ends by it: every one would, and again when it starts."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(Status.SUSPICIOUS)))
    assert standings.hear(HEALTH, Put(AT, junk)) == []
    assert standings.hear(CONTROLS, Put(LEADER + "2", junk)) == []
    assert standings.hear(HEALTH, Snapshot({AT: junk})) == []
    assert share_of(standings).weight == 0.5
    assert decoded({AT: junk}, HEALTH, HealthRecord) == {}


def test_a_spare_is_sound_and_gets_nothing() -> None:
    """Its weight is what it would get if it were called."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(Status.HEALTHY, spare=True)))
    assert share_of(standings).weight == 1.0
    assert share_of(standings).objection == "kept as a spare"


def test_a_first_check_is_waited_for_only_where_somebody_checks() -> None:
    """No control, or one that follows: at once. One that leads: a bounded time. One that is trusted: never."""
    standings = Standings("d")
    assert weight_of(standings) == 1.0
    standings.hear(CONTROLS, Put(LEADER, control(leads=False)))
    assert weight_of(standings) == 1.0
    assert standings.hear(CONTROLS, Put(LEADER, control(leads=True))) == [Heard(None)]
    assert weight_of(standings) == 0.0
    assert share_of(standings).until_s == 100.0 + FIRST_CHECK_S
    assert weight_of(standings, FIRST_CHECK_S) == 1.0
    assert weight_of(standings, trusted=True) == 1.0
    assert standings.hear(CONTROLS, Deleted(LEADER)) == [Heard(None)]
    assert weight_of(standings) == 1.0


def test_a_check_that_is_under_way_is_waited_for_longer() -> None:
    """Control has written down that it knows the worker: it has the time for a canary and its retries; where control is
    gone meanwhile, only as long as for one that nobody knows. An engine of a group waits for neither."""
    standings = led()
    standings.hear(HEALTH, Put(AT, unchecked()))
    assert weight_of(standings, CHECKING_S - 1) == 0.0
    assert weight_of(standings, CHECKING_S) == 1.0
    assert weight_of(standings, trusted=True) == 1.0
    standings.hear(CONTROLS, Deleted(LEADER))
    assert weight_of(standings, FIRST_CHECK_S) == 1.0


def test_who_fell_waits_for_its_canaries_however_long() -> None:
    """After a quarantine and a fresh load it is unchecked, and not as a new one is."""
    fallen = Standing(fall=1, causes={Cause.UNCHECKED: UNCHECKED}, load=2)
    standings = led()
    standings.hear(HEALTH, Put(AT, msgspec.json.encode(HealthRecord(name="w", standing=fallen))))
    standings.hear(CONTROLS, Deleted(LEADER))
    assert weight_of(standings, 1000 * CHECKING_S, trusted=True) == 0.0


def test_a_fall_is_told_once() -> None:
    """When its number grows; not when it is read again, by whatever way, nor for what happens to it then."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(Status.HEALTHY)))
    assert standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY, 1))) == [Heard(KEY, "as decided")]
    for again in (Put(AT, verdict(Status.DEAD, 1)), Snapshot({AT: verdict(Status.UNHEALTHY, 1)})):
        assert standings.hear(HEALTH, again) == [Heard(KEY)]
    assert standings.hear(HEALTH, Snapshot({AT: verdict(Status.UNHEALTHY, 1)})) == []
    assert standings.hear(HEALTH, Put(AT, verdict(Status.SUSPICIOUS, 1))) == [Heard(KEY)]
    assert standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY, 2))) == [Heard(KEY, "as decided")]


def test_a_worker_without_a_record_falls_by_its_first() -> None:
    """It served before control wrote anything."""
    standings = led()
    assert standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY, 1))) == [Heard(KEY, "as decided")]


@pytest.mark.parametrize(
    ("status", "told"), [(Status.HEALTHY, ""), (Status.SUSPICIOUS, ""), (Status.UNHEALTHY, "as decided")]
)
def test_a_fall_from_before_moves_nothing_unless_it_holds(status: Status, told: str) -> None:
    """A frontend that begins reads of falls that are over: they are older than its streams. One that holds still takes
    what the worker was given before its verdict was known."""
    standings = Standings("d", awaits=(HEALTH, CONTROLS))
    heard = standings.hear(HEALTH, Snapshot({AT: verdict(status, 3)}))
    assert heard == [Heard(KEY, told), Heard(None)]


def test_nobody_serves_before_its_verdict_can_be_known() -> None:
    """A frontend that begins waits for what the store says, also with an engine of a group; but not for ever."""
    standings = Standings("d", awaits=(HEALTH, CONTROLS))
    assert weight_of(standings, trusted=True) == 0.0
    assert weight_of(standings, FIRST_CHECK_S) == 1.0
    standings.hear(HEALTH, Snapshot({}))
    assert weight_of(standings) == 0.0
    assert standings.hear(CONTROLS, Snapshot({})) == [Heard(None)]
    assert weight_of(standings) == 1.0


def test_a_lost_store_changes_nothing() -> None:
    """What was decided holds; what grew meanwhile is told when it is back, and what is gone is forgotten."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY, 1)))
    for prefix in (HEALTH, CONTROLS):
        assert standings.hear(prefix, Lost("away")) == []
    assert weight_of(standings) == 0.0
    assert standings.hear(HEALTH, Snapshot({AT: verdict(Status.SUSPICIOUS, 2)})) == [Heard(KEY, "as decided")]
    assert standings.hear(HEALTH, Snapshot({})) == [Heard(KEY)]
    assert standings.hear(CONTROLS, Snapshot({})) == [Heard(None)]
    assert weight_of(standings) == 1.0


def test_what_cannot_be_read_changes_nothing() -> None:
    """Garbage, or a verdict of another deployment, or a key that is none."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY)))
    other = InstanceKey("d-other-00000000", "worker", "generate", 7)
    sound = verdict(Status.HEALTHY)
    for key, value in ((AT, b"{"), (HEALTH + other.path, sound), (f"{HEALTH}x", sound)):
        assert standings.hear(HEALTH, Put(key, value)) == []
    assert weight_of(standings) == 0.0


@pytest.mark.parametrize(
    "junk",
    [
        b'{"name": "\xff"}',
        b'{"name": "w", "of_later": ' + b"[" * 100_000,
        b'{"name": "w", "standing": {"weight": 7.5}}',
        b'{"name": "w", "standing": {"weight": -1}}',
        b'{"name": "w", "standing": {"status": 77}}',
    ],
    ids=["no text", "brackets without end", "more than all", "less than nothing", "a newer version's status"],
)
def test_junk_in_the_store_ends_no_watch(junk: bytes) -> None:
    """A frontend whose watch ends is over, and so is the next, which reads the same."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY)))
    assert standings.hear(HEALTH, Put(AT, junk)) == []
    assert standings.hear(CONTROLS, Put(f"{LEADER}2", junk)) == []
    assert weight_of(standings) == 0.0


@pytest.mark.parametrize("forgotten", [Snapshot({}), Deleted(AT)])
@pytest.mark.parametrize("status", [Status.HEALTHY, Status.SUSPICIOUS])
def test_a_fall_that_is_over_moves_nothing_when_it_is_written_again(
    status: Status, forgotten: Snapshot | Deleted
) -> None:
    """A store came back without what was written, and control writes it again: all falls of all workers, long over."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY, 3)))
    standings.hear(HEALTH, Put(AT, verdict(status, 3)))
    standings.hear(HEALTH, forgotten)
    assert standings.hear(HEALTH, Put(AT, verdict(status, 3))) == [Heard(KEY)]
    assert standings.hear(HEALTH, Put(AT, verdict(Status.UNHEALTHY, 4))) == [Heard(KEY, "as decided")]


@pytest.mark.parametrize("status", [Status.UNHEALTHY, Status.DRAINING])
def test_a_store_that_forgot_revives_nobody(status: Status) -> None:
    """Until control writes it again, or removes it."""
    standings = led()
    standings.hear(HEALTH, Put(AT, verdict(status, 1)))
    assert standings.hear(HEALTH, Snapshot({})) == []
    assert weight_of(standings, trusted=True) == 0.0
    assert standings.hear(HEALTH, Put(AT, verdict(status, 1))) == []
    assert standings.hear(HEALTH, Deleted(AT)) == [Heard(KEY)]
    assert weight_of(standings, trusted=True) == 1.0


def test_a_lone_workers_first_check_does_not_outlast_the_hold() -> None:
    """Where nobody else serves, what is held for it is served before the hold runs out, checked or not."""
    standings = led()
    standings.hear(HEALTH, Put(AT, unchecked()))

    def weight(known_s: float, *, alone: bool) -> float:
        return standings.share(KEY, trusted=False, since_s=100.0, now_s=100.0 + known_s, alone=alone).weight

    assert weight(CHECKING_ALONE_S - 0.1, alone=True) == 0.0
    assert weight(CHECKING_ALONE_S, alone=True) == 1.0
    assert weight(CHECKING_S - 0.1, alone=False) == 0.0
    assert HoldSettings().hold_s / 2 >= CHECKING_ALONE_S
