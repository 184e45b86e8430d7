"""The rollout machine by its tables: turns and phases, what is due and when it is said again, and what is written."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from holdfast.rollout import machine as m
from holdfast.rollout.machine import (
    NEEDED_ACTIONS,
    RETRY_S,
    TABLE,
    DesiredState,
    ObservedReplica,
    ReplicaStage,
    ReplicaState,
    RolloutPhase,
    Trigger,
)
from holdfast.rollout.revision import Revision, changes
from holdfast.rollout.status import RolloutResult, report, rollout_result
from tests.rigs.worlds.rollout import Driver, World, part, revision

FIRST, SECOND = revision(1, worker=part("a*2")), revision(2, worker=part("b*2"))


def in_place(world: World | None = None, first: Revision = FIRST) -> Driver:
    """Revision 1 is in place."""
    driver = Driver(world or World())
    driver.desired = first
    list(driver.seconds(10))
    assert driver.state.phase is RolloutPhase.STEADY
    return driver


# -- tables

LEADS_TO = {
    "become_rolling": RolloutPhase.ROLLING,
    "become_undoing": RolloutPhase.UNDOING,
    "become_stuck": RolloutPhase.STUCK,
    "become_steady": RolloutPhase.STEADY,
}


def test_the_table_of_phases() -> None:
    """A newer revision takes over anywhere; one that rolls, or is stuck on its way, is undone, and an undo is not; what
    is whole is steady; and what is steady is not judged."""
    leads = {place: LEADS_TO[become.__name__] for place, become in TABLE.items()}
    assert leads == {
        **{(phase, Trigger.NEWER): RolloutPhase.ROLLING for phase in RolloutPhase},
        **{(phase, Trigger.FAILED): RolloutPhase.UNDOING for phase in (RolloutPhase.ROLLING, RolloutPhase.STUCK)},
        **{(phase, Trigger.BLOCKED): RolloutPhase.STUCK for phase in (RolloutPhase.ROLLING, RolloutPhase.UNDOING)},
        **{
            (phase, Trigger.WHOLE): RolloutPhase.STEADY
            for phase in (RolloutPhase.ROLLING, RolloutPhase.UNDOING, RolloutPhase.STUCK)
        },
    }


def test_the_docs_have_the_table() -> None:
    """docs/rollouts.md shows what becomes of a revision: word for word this."""
    rows = [" | ".join(["phase", *Trigger]), "|".join(["---"] * (len(Trigger) + 1))]
    for phase in RolloutPhase:
        becomes = [TABLE.get((phase, turn)) for turn in Trigger]
        cells = [LEADS_TO[become.__name__] if become is not None else "" for become in becomes]
        rows.append(" | ".join([phase, *cells]))
    lines = ["|" + row + "|" if row.startswith("---") else f"| {row} |" for row in rows]
    assert "\n".join(lines) in (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()


DEEDS = {
    (DesiredState.STAND_BY, ReplicaStage.ABSENT): m.StartReplica,
    (DesiredState.SERVE, ReplicaStage.ABSENT): m.StartReplica,
    (DesiredState.SERVE, ReplicaStage.STANDBY): m.WakeReplica,
    (DesiredState.SERVE, ReplicaStage.DRAINING): m.ResumeServing,
    (DesiredState.DRAIN, ReplicaStage.SERVING): m.DrainReplica,
    (DesiredState.STOP, ReplicaStage.STARTING): m.StopReplica,
    (DesiredState.STOP, ReplicaStage.STANDBY): m.StopReplica,
    (DesiredState.STOP, ReplicaStage.SERVING): m.StopReplica,
    (DesiredState.STOP, ReplicaStage.DRAINING): m.StopReplica,
}


@pytest.mark.parametrize(
    ("want", "stage"), list(itertools.product(DesiredState, ReplicaStage)), ids=lambda value: str(value)
)
def test_what_is_due(want: DesiredState, stage: ReplicaStage) -> None:
    """By what is wanted and what is seen, and by nothing else."""
    assert NEEDED_ACTIONS[want].get(stage) is DEEDS.get((want, stage))


def test_what_is_done_leads_to_what_is_wanted() -> None:
    """No deed leads to a stage in which the same want asks for the opposite: every want has an end."""
    after = {
        m.StartReplica: ReplicaStage.STARTING,
        m.WakeReplica: ReplicaStage.SERVING,
        m.DrainReplica: ReplicaStage.DRAINING,
        m.ResumeServing: ReplicaStage.SERVING,
    }
    for want, stages in NEEDED_ACTIONS.items():
        for deed in stages.values():
            led = after.get(deed, ReplicaStage.LEAVING)  # type: ignore[call-overload]
            assert stages.get(led) is None, (want, deed)


# -- said once


def test_what_nothing_comes_of_is_said_again() -> None:
    """Not before its time; and at once by a process that goes on after another, which cannot know."""
    driver = in_place()
    driver.desired = SECOND
    look = driver.world.observe(SECOND)
    memory, acts = m.step(driver.state, look, 10.0)
    assert acts[1:] == (m.StartReplica("worker-3", "worker", "b"),)
    assert m.next_deadline_s(memory) == 10.0 + RETRY_S
    assert m.step(memory, look, 10.0 + RETRY_S - 0.1) == (memory, ())
    again, acts = m.step(memory, look, 10.0 + RETRY_S)
    assert acts == (m.StartReplica("worker-3", "worker", "b"),)
    assert m.step(again, look, 10.1 + RETRY_S) == (again, ())
    assert m.step(m.restore(memory, 11.0), look, 11.0)[1] == acts


def test_a_clock_that_was_ahead() -> None:
    """Whoever goes on after one whose clock was an hour ahead waits no hour for anything."""
    driver = in_place()
    driver.now_s += 3600.0
    driver.desired = SECOND
    list(driver.seconds(6))
    assert any(one.desired is DesiredState.DRAIN for one in driver.state.replicas.values())
    restored = m.restore(m.decode(driver.written), 20.0)
    due_s = m.next_deadline_s(restored)
    assert due_s is not None
    assert due_s <= 20.0 + SECOND.parts["worker"].last_drain_s
    assert all(at.progress_at_s <= 20.0 for at in restored.progress.values())


# -- what is written


def test_memory_is_written_and_read() -> None:
    """All of it comes back, at every step of a rollout with a pair, a swap and an undo."""
    driver = in_place(World(places={"worker": 2}, roomy={"worker"}, fates={"b": "canary"}))
    driver.desired = revision(2, worker=part("b*2"), prefill=part("p*1", peers=("decode",)), decode=part("d*1"))
    for _ in driver.seconds(20):
        assert m.decode(m.encode(driver.state)) == driver.state
    assert driver.state.undone == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"target": {"number": 1, "parts": {}}, "phase": "dancing"}',
        msgspec.json.encode(structs.replace(m.NOTHING, version=m.VERSION + 1)),
        m.encode(m.NOTHING)[:-1] + b', "from_the_future": 1}',
    ],
)
def test_what_another_version_wrote_is_not_guessed_at(data: bytes) -> None:
    """A newer version's memory, or nobody's, is refused: to go on with half of it could do harm."""
    with pytest.raises(ValueError):
        m.decode(data)


# -- who counts, and who is to blame


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({}, True),
        ({"admitted": False}, False),
        ({"weight": 0.0}, False),
        ({"weight": 0.5}, False),
        ({"stage": ReplicaStage.STARTING}, False),
        ({"stage": ReplicaStage.STANDBY}, False),
    ],
    ids=["all of it", "no frontend", "no canary", "half its traffic", "not ready", "stands by"],
)
def test_a_new_worker_counts_when_admitted_and_proven(changed: dict[str, object], counts: bool) -> None:
    """An old one leaves for it when a frontend has admitted it and control gives it its whole traffic; not before."""
    driver = in_place()
    driver.desired = SECOND
    driver.step()
    look = driver.world.observe(SECOND)
    new = ObservedReplica(service="worker", set_id="b", stage=ReplicaStage.SERVING, admitted=True, weight=1.0)
    look.replicas["worker-3"] = structs.replace(new, **changed)
    _, acts = m.step(driver.state, look, driver.now_s)
    assert (m.DrainReplica("worker-1") in acts) is counts


def test_trouble_in_a_set_that_was_in_place_undoes_nothing() -> None:
    """The frontends change; a worker, whose set does not, fails its canaries: that is control's business."""
    driver = in_place(first=revision(1, worker=part("a*2"), frontend=part("f*1")))
    driver.world.bodies["worker-1"].trouble = "failed its canary: another token at 3"
    driver.desired = revision(2, worker=part("a*2"), frontend=part("g*1"))
    list(driver.seconds(20))
    assert driver.state.undone == 0
    driver.world.bodies["worker-1"].trouble = ""
    list(driver.seconds(20))
    assert (driver.state.phase, driver.state.target.number) == (RolloutPhase.STEADY, 2)


def test_what_cannot_be_seen_takes_nobody_away() -> None:
    """All frontends lose sight of all workers for a moment, in mid-rollout: nobody is told to leave for it."""
    driver = in_place()
    driver.desired = SECOND
    list(driver.seconds(5))
    blind = {
        name: structs.replace(seen, admitted=False) for name, seen in driver.world.observe(SECOND).replicas.items()
    }
    memory, acts = m.step(driver.state, structs.replace(driver.world.observe(SECOND), replicas=blind), driver.now_s)
    before = [name for name, one in driver.state.replicas.items() if one.desired is not DesiredState.SERVE]
    after = [name for name, one in memory.replicas.items() if one.desired is not DesiredState.SERVE]
    assert (after, acts) == (before, ())


def test_a_drain_that_was_not_begun_is_thought_of_again() -> None:
    """It was decided and written down, and whoever decided it died; meanwhile another old one is killed: that one
    leaves instead, and who serves goes on."""
    driver = in_place()
    driver.desired = SECOND
    list(driver.seconds(5))
    driver.now_s += 1.0
    driver.world.notch("worker-3")
    assert m.DrainReplica("worker-1") in driver.step(carries=0)
    driver.world.kill("worker-2")
    heir = driver.next_life()
    assert heir.step() == (m.StopReplica("worker-2"),)
    assert heir.state.replicas["worker-1"].desired is DesiredState.SERVE
    list(heir.seconds(60))
    assert (heir.state.phase, heir.state.target.number) == (RolloutPhase.STEADY, 2)


def test_what_was_written_is_lost_and_nobody_can_be_seen() -> None:
    """Who may have counted is not taken for one that never did: it stays until others count."""
    driver = in_place()
    driver.desired = SECOND
    list(driver.seconds(3))
    for body in driver.world.bodies.values():
        body.admitted = False
    driver.written = b""
    heir = driver.next_life()
    heir.step()
    assert all(one.desired is DesiredState.SERVE for one in heir.state.replicas.values())


def test_a_worker_that_comes_and_goes_is_no_progress() -> None:
    """A new worker counts and does not, again and again: that is no progress, and the deadline undoes the revision."""
    driver = in_place()
    driver.desired = SECOND
    list(driver.seconds(6))
    for second in range(3 * 60):
        body = driver.world.bodies.get("worker-3")
        if body is not None and body.stage is ReplicaStage.SERVING:
            body.admitted, body.weight = True, float(second % 6 == 0)
        driver.now_s += 1.0
        driver.step()
    assert driver.state.undone == 2
    assert driver.state.why.startswith("worker-3 did not come to serve within 60 s")


def test_who_does_not_end_makes_it_stuck_and_nothing_else() -> None:
    """An old worker that cannot be stopped is no reason to undo a revision that serves."""
    driver = in_place()
    driver.desired = SECOND
    list(driver.seconds(7))
    driver.world.notch = lambda name: None  # type: ignore[method-assign]
    list(driver.seconds(100))
    assert (driver.state.phase, driver.state.undone) == (RolloutPhase.STUCK, 0)
    assert driver.state.stuck == "worker-1 does not leave"


# -- words


def test_every_phase_has_its_words() -> None:
    """Every phase, paused and undone too, has a verdict and a line that names its revision."""
    look = m.Observation(desired=SECOND)
    here = m.RolloutState(target=SECOND, stable=FIRST, desired_number=2, why="it was bad", stuck="it is late")
    paused = structs.replace(SECOND, parts={"worker": part("b*2", paused=True)})
    cases = [
        (structs.replace(here, phase=RolloutPhase.STEADY), RolloutResult.DONE),
        (structs.replace(here, phase=RolloutPhase.ROLLING), RolloutResult.UNDER_WAY),
        (structs.replace(here, phase=RolloutPhase.ROLLING, target=paused), RolloutResult.PAUSED),
        (structs.replace(here, phase=RolloutPhase.ROLLING, in_place_since_s=1.0), RolloutResult.UNDER_WAY),
        (structs.replace(here, phase=RolloutPhase.STUCK), RolloutResult.STUCK),
        (structs.replace(here, phase=RolloutPhase.UNDOING, target=FIRST, undone=2), RolloutResult.UNDER_WAY),
        (structs.replace(here, phase=RolloutPhase.STUCK, target=FIRST, undone=2), RolloutResult.STUCK),
        (structs.replace(here, phase=RolloutPhase.STEADY, target=FIRST, undone=2), RolloutResult.UNDONE),
    ]
    lines = set()
    for memory, expected in cases:
        told = report(memory, look, 2.0)
        assert (rollout_result(memory), told.state) == (expected, expected)
        assert told.headline.startswith("revision 2 "), told.headline
        assert "\n" not in told.headline
        assert ("it was bad" in told.headline) is bool(memory.undone)
        lines.add(told.headline)
    assert len(lines) == len(cases)
    assert report(m.NOTHING, look, 0.0).headline == "no manifest has been applied yet"


@pytest.mark.parametrize(
    ("want", "stage"), list(itertools.product(DesiredState, ReplicaStage)), ids=lambda value: str(value)
)
def test_every_replica_that_is_waited_for_says_why(want: DesiredState, stage: ReplicaStage) -> None:
    """Whatever one that does not count is wanted to do and seen to do, there are words for it."""
    replica = ReplicaState(service="worker", set_id="b", pair=(("worker", "b"),), desired=want, beside="worker-1")
    seen = ObservedReplica(service="worker", set_id="b", stage=stage)
    target = revision(2, worker=part("b*1"))
    memory = m.RolloutState(target=target, desired_number=2, phase=RolloutPhase.ROLLING, replicas={"worker-2": replica})
    told = report(memory, m.Observation(desired=memory.target, replicas={"worker-2": seen}), 0.0)
    assert told.services[0].waits_for.startswith("worker-2 ")


@pytest.mark.parametrize(
    "how", [{"trouble": "answers wrongly: token 3"}, {"crashes": 3, "stage": ReplicaStage.STARTING}]
)
def test_what_goes_wrong_in_place_is_told_in_one_line(how: dict[str, object]) -> None:
    """It undoes nothing: the line says who it is and why nothing follows; while it rolls, a line is its own."""
    driver = in_place()
    look = driver.world.observe(FIRST)
    look.replicas["worker-2"] = structs.replace(look.replicas["worker-2"], weight=0.0, **how)
    memory, acts = m.step(driver.state, look, driver.now_s)
    told = report(memory, look, driver.now_s)
    assert (acts, told.state, told.is_done, told.is_unwell) == ((), RolloutResult.DONE, False, True)
    assert told.headline.startswith("revision 1 is in place: worker 1 of 2; worker-2 ")
    assert told.headline.endswith("; the revision was in place before that, so nothing is undone")
    assert "\n" not in told.headline
    rolling = structs.replace(memory, phase=RolloutPhase.ROLLING)
    assert not report(rolling, look, driver.now_s).is_unwell


# -- revisions


def test_what_changes_is_told_by_service() -> None:
    """New, removed, replaced and only more or fewer; what stays is not named."""
    before = revision(1, worker=part("a*2"), frontend=part("f*1"), old=part("o*1"), same=part("s*1"))
    after = revision(2, worker=part("b*3"), frontend=part("f*2"), new=part("n*1"), same=part("s*1"))
    assert changes(before, after) == [
        "frontend: 1 become 2, of the same set",
        "new: new, 1 of n",
        "old: removed",
        "worker: 2 of a become 3 of b",
    ]
    assert changes(after, after) == []
