"""Who leads a group, who stands by, and the last failover, made from one look at the statuses."""

from __future__ import annotations

from typing import Any

from holdfast.supervise.standing import groups_of, timeline, with_groups
from holdfast.supervise.status import Status, shown_state

FAILOVER: dict[str, Any] = {
    "epoch": 1700,
    "from_epoch": 1600,
    "unix_s": 1000.002,
    "died_ms": 0.0,
    "eof_ms": 0.5,
    "lock_ms": 2.0,
    "fence_ms": 2.5,
    "adopted_ms": 4.0,
    "announced_ms": 5.0,
    "first_token_ms": 31.0,
    "blocks": 12,
}


def engine(name: str, state: str, **more: Any) -> Status:
    return Status("worker", name, 7, state, "", 0, **({"group": "worker-1", "lifecycle": state} | more))


def test_the_one_who_is_active_leads() -> None:
    """The line says who is active, with its epoch, and who stands by."""
    (group,) = groups_of([engine("worker-1a", "standby"), engine("worker-1b", "active", epoch=17)])
    assert str(group) == "worker-1: worker-1b is active (epoch 17); worker-1a stands by"


def test_nobody_active_is_said() -> None:
    """While one takes over, or all are dead, nobody is called active."""
    (group,) = groups_of([engine("worker-1a", "waking"), engine("worker-1b", "dead", lifecycle="")])
    assert str(group) == "worker-1: nobody is active; nobody stands by, worker-1a is waking, worker-1b is dead"
    assert group.failover is None


def test_a_standby_with_a_problem_does_not_count() -> None:
    """One that lost its memory is named, not counted on."""
    statuses = [engine("worker-1a", "active"), engine("worker-1b", "standby", note="the vault is gone")]
    assert str(groups_of(statuses)[0]).endswith("; nobody stands by, worker-1b is standby")


def test_an_unwell_active_is_still_the_active() -> None:
    """Its state says what is wrong, its lifecycle that it leads."""
    (group,) = groups_of([engine("worker-1a", "not_admitted", lifecycle="active")])
    assert group.active is not None


def test_a_dead_one_keeps_its_group() -> None:
    """Who cannot be asked belongs where it was started; who never had a group gets none."""
    dead = Status("worker", "worker-1a", 0, "crash loop", "", 0)
    plain = Status("worker", "worker-2", 9, "ready", "", 0)
    known = with_groups([dead, plain], {"worker-1a": "worker-1", "worker-2": ""})
    assert [status.group for status in known] == ["worker-1", ""]


def test_the_timeline_ends_with_the_new_standby() -> None:
    """It is counted from the same zero; one that stood by all along is not the new one."""
    active = engine("worker-1b", "active", failover=FAILOVER)
    old = engine("worker-1c", "standby", entered_unix_s=900.0)
    new = engine("worker-1a", "standby", entered_unix_s=1001.5)
    shown = with_groups([active, old, new], {})[0].failover
    assert shown is not None
    assert timeline(shown)[-1] == ("new standby", 1500.0)
    before = with_groups([active, old], {})[0].failover
    assert before is not None
    assert "new_standby_ms" not in before


def test_what_has_not_happened_is_not_told() -> None:
    """Steps come in the order of time, and only those that happened."""
    assert timeline({"died_ms": 0, "gpu_fence_ms": 3.0, "first_token_ms": 20.0, "why": "x"}) == [
        ("died", 0.0),
        ("GPU fence", 3.0),
        ("first token", 20.0),
    ]


def test_the_first_active_did_not_fail_over() -> None:
    """Whoever had no predecessor has no failover to show."""
    (group,) = groups_of([engine("worker-1a", "active", failover=FAILOVER | {"from_epoch": 0})])
    assert group.failover is None


def test_the_state_that_is_shown() -> None:
    """A process's own word; for an engine of a group its lifecycle, unless the word says more."""
    assert shown_state({"status": "ready"}) == "ready"
    assert shown_state({"status": "ready", "state": "active", "group": ""}) == "ready"
    assert shown_state({"status": "ready", "state": "standby", "group": "g"}) == "standby"
    assert shown_state({"status": "not_admitted", "state": "active", "group": "g"}) == "not_admitted"
    assert shown_state({"status": "silent"}) == "silent"
