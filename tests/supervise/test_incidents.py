"""What died, why, and what it cost: written down by the supervisor, filled in from what others know, kept for later."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from holdfast.cli.status import cost, headline, last_failover, steps
from holdfast.core.ports import SystemClock
from holdfast.failover.journal import Term
from holdfast.spec.jobs import Job
from holdfast.supervise.engine_groups import groups_of, timeline, with_groups
from holdfast.supervise.incident_recorder import IncidentRecorder, PartProcesses
from holdfast.supervise.incidents import (
    INCIDENTS_MAX,
    SEEN_LATE_NS,
    Incident,
    complete,
    ended_unix_s,
    fold,
    from_its_end,
    kept_apart,
    led,
    read_incidents,
    read_own,
)
from holdfast.supervise.machine import Fell, Life, Phase
from holdfast.supervise.processes import Processes
from holdfast.supervise.records import Record, read_records, write_record
from holdfast.supervise.slots import Slot
from holdfast.supervise.status import Status, seams_of, shown_state
from holdfast.wire.net import SocketNetwork
from tests.rigs.manual_clock import ManualClock
from tests.rigs.small_disks import BALLAST, fill, small_disk

FIRST, SECOND = 900_000, 1_000_100  # epochs are milliseconds of unix time
TERMS = [Term("worker-1a", FIRST, 7, 1, 2), Term("worker-1b", SECOND, 8, 3, 0)]
DIED = Incident(1000.0, "worker-1a", "worker", 7, "SIGKILL", "active", "worker-1", "abc", FIRST)
TIMELINE: dict[str, Any] = {
    "unix_s": 1000.1,
    "from_epoch": FIRST,
    "from_pid": 7,
    "from_engine": "worker-1a",
    "zero": "the last leader's last token",
    "died_ms": 0.0,
    "lock_ms": 2.0,
    "first_token_ms": 31.0,
    "new_standby_ms": 1500.0,
    "blocks": 12,
}


def frontend(*earlier: dict[str, Any], **last: Any) -> Status:
    plain = {"instance": "abc", "epoch": FIRST, "streams": 0, "lost": 0, "worst_gap_ms": 0.0}
    seams = [plain | seam for seam in (*earlier, last) if seam]
    return Status("frontend", "frontend", 1, "ready", "", 0, seams=seams)


def active(**fields: Any) -> Status:
    more: dict[str, Any] = {"group": "worker-1", "lifecycle": "active", "epoch": SECOND} | fields
    return Status("worker", "worker-1b", 8, "active", "", 0, **more)


def test_an_incident_is_filled_in_by_those_who_know() -> None:
    """Frontends say what streams saw, all of a shared port together; journals who led next; that one how."""
    statuses = [
        active(failover=TIMELINE),
        frontend(streams=2, worst_gap_ms=61.5),
        frontend(streams=1, worst_gap_ms=70.0),
    ]
    told = complete(DIED, statuses, TERMS)
    assert (told.successor, told.streams, told.lost, told.gap_ms) == ("worker-1b", 3, 0, 70.0)
    assert told.failover == TIMELINE
    assert complete(told, [active()], TERMS) == told, "what was heard once stands"


def test_other_workers_failures_are_not_mixed_in() -> None:
    """Neither another instance's seam nor the timeline of one that took over from another."""
    others = [
        frontend(instance="abd", streams=9),
        frontend(epoch=300, streams=9),
        active(failover=TIMELINE | {"from_pid": 9}),
    ]
    told = complete(DIED, others, TERMS[:1])
    assert (told.successor, told.streams, told.gap_ms, told.failover) == ("", 0, None, None)
    assert complete(DIED, [], TERMS).streams is None, "nobody was asked"


def test_what_a_worker_survived_is_no_part_of_its_end() -> None:
    """Each of its failures has its own streams; those of the last, which it did not survive, count, whenever it was and
    was heard of, and none where it died idle. A frontend of an earlier version has one seam for all."""
    survived = {"survived": True, "streams": 9, "lost": 4, "worst_gap_ms": 900.0}
    told = complete(DIED, [frontend(survived, survived, streams=2, worst_gap_ms=61.5)], TERMS)
    assert (told.streams, told.lost, told.gap_ms) == (2, 0, 61.5)
    idle = complete(DIED, [frontend(survived)], TERMS)
    assert (idle.streams, idle.lost, idle.gap_ms) == (0, 0, None)


def test_failures_that_cannot_be_counted_are_left_out() -> None:
    """Whatever a frontend of another version says in their place: an incident has what can be read."""
    whole = {"instance": "abc", "epoch": FIRST, "streams": 2, "lost": 1, "worst_gap_ms": 7.5}
    assert [seams_of(odd) for odd in (None, 7, {"a": 1}, "many")] == [None] * 4
    read = seams_of([None, [], whole | {"streams": "x"}, whole | {"worst_gap_ms": None}, whole, {"instance": "abc"}])
    told = complete(DIED, [Status("frontend", "f", 1, "ready", "", 0, seams=read)], TERMS)
    assert (told.streams, told.lost, told.gap_ms) == (2, 1, 7.5)


def test_who_led_is_the_journals_word() -> None:
    """The last leader's own process; also one whose successor began before its end was seen, and not one that handed
    over long before."""
    assert (led(TERMS, 8, 4), led(TERMS, 9, 4), led([], 7, 4)) == (SECOND, 0, 0)
    assert led(TERMS, 7, 4) == FIRST
    assert led(TERMS, 7, SEEN_LATE_NS + 4) == 0
    assert ended_unix_s(TERMS, FIRST, 1060.0) == SECOND / 1000, "seen a minute late, by one that was stopped"
    assert ended_unix_s(TERMS, SECOND, 1060.0) == ended_unix_s(TERMS, 0, 1060.0) == 1060.0


def test_a_timeline_begins_with_the_end_that_the_supervisor_saw() -> None:
    """Where its successor came later: two seconds here. What streams had last heard counts if it was just before; the
    first new standby stays the one that is shown; and what was moved once is not moved again."""
    late = TIMELINE | {"unix_s": 1002.0, "lock_ms": 0.0, "zero_monotonic_s": 500.0, "new_standby_ms": 100.0}
    told = complete(DIED, [active(failover=late)], TERMS)
    assert told.failover is not None
    shown = {key: told.failover[key] for key in ("zero", "lock_ms", "first_token_ms", "new_standby_ms", "died_ms")}
    assert shown == {
        "zero": "its end, as seen by the supervisor",
        "lock_ms": 2000.0,
        "first_token_ms": 2031.0,
        "new_standby_ms": 2100.0,
        "died_ms": 0.0,
    }
    assert from_its_end(told.failover, DIED, TERMS) == told.failover
    assert complete(told, [active(failover=late | {"new_standby_ms": 9000.0})], TERMS) == told
    streaming = [Term("worker-1a", FIRST, 7, 1, 497_900_000_000), TERMS[1]]
    heard = from_its_end(late, DIED, streaming)
    assert (heard["zero"], heard["lock_ms"]) == ("the last leader's last token", 2100.0)
    on_time = TIMELINE | {"unix_s": 1000.003, "zero_monotonic_s": 500.0}
    assert from_its_end(on_time, DIED, TERMS) == on_time, "its own zero is as good"


def slot(name: str = "worker-1a", group: str = "") -> Slot:
    made = Slot.of(Job(name, "worker", group=group))
    made.record = Record(name, "worker", 7, 1, instance="abc")
    return made


def test_a_loop_is_one_incident(tmp_path: Path) -> None:
    """Who dies again before it is ready is told how often; who was ready is a new one; the last reason counts."""
    witness = IncidentRecorder(tmp_path, ManualClock(50.0))
    witness.fell(slot(), Fell(7, "SIGKILL", was_ready=True))
    for pid in (8, 9):
        witness.fell(slot(), Fell(pid, f"exited with {pid}", was_ready=False))
    (one,) = read_incidents(tmp_path)
    assert (one.pid, one.times, one.why, one.instance, one.back_after_s) == (7, 3, "exited with 9", "abc", None)
    witness.back(slot())
    witness._clock = ManualClock(60.0)
    witness.fell(slot(), Fell(10, "SIGTERM", was_ready=True))
    one, two = read_incidents(tmp_path)
    assert (one.back_after_s, two.times, two.why) == (0.0, 1, "SIGTERM")


def test_the_last_hundred_outlive_the_supervisor(tmp_path: Path) -> None:
    """The next one goes on with them, and the oldest give way. One that was down when a supervisor ended is not
    called back by a start of another day."""
    clock = ManualClock(0.0, step_s=1.0)
    for _ in range(2):
        witness = IncidentRecorder(tmp_path, clock)
        witness.back(slot())
        for pid in range(INCIDENTS_MAX - 30):
            witness.fell(slot(), Fell(pid, "SIGKILL", was_ready=True))
    kept = read_incidents(tmp_path)
    assert [incident.unix_s for incident in kept] == list(range(40, 140))
    assert all(incident.back_after_s is None for incident in kept)


def test_a_disk_that_takes_nothing_costs_the_record_alone(tmp_path: Path) -> None:
    """The supervisor goes on, and still knows."""
    (tmp_path / "incidents.json").mkdir()
    witness = IncidentRecorder(tmp_path, ManualClock(50.0))
    witness.fell(slot(), Fell(7, "SIGKILL", was_ready=True))
    assert len(witness.incidents) == 1


async def test_what_a_full_disk_kept_back_is_written_once_there_is_room() -> None:
    """No other incident has to come first."""
    with small_disk(64 * 1024) as disk:
        witness = IncidentRecorder(disk, SystemClock())
        fill(disk)
        witness.fell(slot(), Fell(7, "SIGKILL", was_ready=True))
        assert read_incidents(disk) == []
        running = asyncio.ensure_future(witness.run(SocketNetwork()))
        (disk / BALLAST).unlink()
        async with asyncio.timeout(60):
            while not read_incidents(disk):
                await asyncio.sleep(0.02)
        running.cancel()
        assert [incident.pid for incident in read_incidents(disk)] == [7]


def test_a_file_that_is_not_ours_is_no_incident(tmp_path: Path) -> None:
    """Garbage reads as nothing."""
    (tmp_path / "incidents.json").write_text("{")
    assert read_incidents(tmp_path) == []


# -- parts of a job, such as a vault's keeper


class Held:
    """Processes that end when the test says so."""

    def __init__(self) -> None:
        self.ends: dict[int, Callable[[int | None], None]] = {}

    def adopt(self, record: Record) -> Any:
        held, pid = self, record.pid

        class Process:
            def on_exit(self, tell: Callable[[int | None], None]) -> None:
                held.ends[pid] = tell

        return Process()


def test_one_whose_successor_is_seen_first_is_back_all_the_same(tmp_path: Path) -> None:
    """A supervisor that was stopped meanwhile finds the new keeper's record before it hears of the old one's end."""
    held, witness = Held(), IncidentRecorder(tmp_path, ManualClock(50.0))
    whole = Slot.of(Job("vault-1", "vault"))
    whole.life = Life(Phase.READY, os.getpid())
    parts = PartProcesses(tmp_path, cast(Processes, held), {"vault-1": whole}, witness)
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        try:
            for keeper in (first, second):
                keeper_record = Record.of_process(keeper.pid, "vault-1-keeper", "keeper", part_of="vault-1")
                write_record(tmp_path, keeper_record)
                parts.look()
            held.ends[first.pid](None)
            parts.look()
        finally:
            first.kill()
            second.kill()
    (incident,) = witness.incidents.values()
    assert (incident.name, incident.pid, incident.back_after_s) == ("vault-1-keeper", first.pid, 0.0)


def test_a_job_that_is_gone_leaves_no_part_behind(tmp_path: Path) -> None:
    """A vault that left, and had to be killed for it, is neither shown with parts that are dead nor missed for ever;
    parts that live, and those of a vault that somebody else started, stay as they are."""
    held, whole = Held(), Slot.of(Job("vault-1", "vault"))
    slots = {"vault-1": whole}
    parts = PartProcesses(tmp_path, cast(Processes, held), slots, IncidentRecorder(tmp_path, ManualClock(50.0)))
    with subprocess.Popen(["sleep", "60"]) as keeper:
        write_record(tmp_path, Record.of_process(keeper.pid, "vault-1-keeper", "keeper", part_of="vault-1"))
        parts.look()
        del slots["vault-1"]
        parts.look()
        assert [record.name for record in read_records(tmp_path)] == ["vault-1-keeper"], "it lives"
        write_record(tmp_path, Record.of_process(os.getpid(), "other", "vault"))
        write_record(tmp_path, Record.of_process(keeper.pid, "other-keeper", "keeper", part_of="other"))
        keeper.kill()
    held.ends[keeper.pid](None)
    assert parts.misses_any
    parts.look()
    assert not parts.misses_any
    assert [record.name for record in read_records(tmp_path)] == ["other", "other-keeper"]


# -- the words


def test_a_failover_is_told_with_its_cause_and_what_streams_saw() -> None:
    """Who died of what, who went on, the gap; then the steps from a zero that is named."""
    (group,) = groups_of([active(failover=TIMELINE)])
    told = last_failover(
        group, [complete(DIED, [active(failover=TIMELINE), frontend(streams=3, worst_gap_ms=70)], TERMS)]
    )
    assert told is not None
    assert told.line.endswith(": worker-1a (active) died: SIGKILL")
    assert told.facts == ["worker-1b took over", "3 streams went on, worst gap 70.0 ms", "12 blocks of KV kept"]
    assert told.steps == ["from its last token: lock 2.0 ms", "first token 31.0 ms", "new standby 1.50 s"]


def test_where_nobody_waited_no_first_token_is_shown() -> None:
    """It came whenever somebody asked again."""
    assert not any("first token" in step for step in steps(TIMELINE, streams=0))
    assert "no stream was on it" in cost(complete(DIED, [frontend()], TERMS))


def test_lost_streams_are_told() -> None:
    """Also where others went on."""
    told = cost(complete(DIED, [frontend(streams=1, lost=2, worst_gap_ms=5.0)], TERMS))
    assert told == ["worker-1b took over", "1 stream went on, worst gap 5.0 ms", "2 streams lost"]


def test_a_change_of_leaders_that_nobody_saw_says_so() -> None:
    """No reason is made up; and the first leader of all did not take over from anybody."""
    (group,) = groups_of([active(failover=TIMELINE | {"from_pid": 2**22 + 5})])
    told = last_failover(group, [])
    assert told is not None
    assert told.line.endswith("worker-1a ended; no supervisor saw why")
    leader = active(failover=TIMELINE | {"from_pid": os.getpid()})  # a pid that lives, and is none of the group's
    for state, ended in (("standby", False), ("dead", True)):
        (group,) = groups_of([leader, Status("worker", "worker-1a", 7, state, "", 0, group="worker-1")])
        told = last_failover(group, [])
        assert told is not None
        assert told.line.endswith("no supervisor saw why"), "another has its pid"
        (group,) = groups_of([active(failover=TIMELINE), group.members[1]])
        told = last_failover(group, [])
        assert told is not None
        assert told.line.endswith("no supervisor saw why" if ended else "worker-1a handed over")
    (group,) = groups_of([active(failover=TIMELINE | {"from_epoch": 0})])
    assert last_failover(group, []) is None


def test_a_wake_is_called_one_and_who_sleeps_is_asleep() -> None:
    """Nobody handed over, no KV was to be kept, and the first token came when somebody asked."""
    woke = {"woke": True, "zero": "it was woken", "from_pid": 8, "from_engine": "worker-1b"}
    (group,) = groups_of([active(failover=TIMELINE | woke)])
    told = last_failover(group, [])
    assert told is not None
    assert (told.line.partition(" ")[0], told.line.rpartition(": ")[2]) == ("woke", "worker-1b leads")
    assert (told.facts, told.steps[0]) == ([], "from when it was woken: lock 2.0 ms")
    assert not any("first token" in step for step in told.steps)
    facts = {"status": "standby", "state": "standby", "group": "worker-1"}
    assert [shown_state(facts | {"asleep": asleep}) for asleep in (True, False)] == ["asleep", "standby"]
    assert shown_state(facts | {"asleep": True, "state": "draining", "status": "draining"}) == "draining"
    sleepers = [Status("worker", f"worker-1{one}", 7, "asleep", "", 0, group="worker-1") for one in "ab"]
    (group,) = groups_of(sleepers)
    assert str(group) == "worker-1: asleep (WARM, or by `/engine/sleep`): worker-1a and worker-1b"


def test_the_next_start_took_nothing_over() -> None:
    """Who leads after everything was stopped and started is nobody's successor, and an old failover is not shown as
    how it came to lead."""
    later = [TERMS[0], Term("worker-1b", 1_000_000 + 86_400_000, 8, 3, 0)]
    assert complete(DIED, [], later).successor == ""
    (group,) = groups_of([active(failover=TIMELINE | {"from_epoch": 0, "unix_s": 90_000.0})])
    assert last_failover(group, [complete(DIED, [], [*TERMS[:1], Term("worker-1c", SECOND, 9, 3, 0)])]) is None


def test_an_end_that_was_clean_is_not_called_a_death() -> None:
    """A process that was asked by somebody else, and left."""
    assert headline(Incident(1.0, "frontend", "frontend", 3, "exited with 0")) == "frontend exited by itself"


def test_an_end_that_nobody_saw_has_no_cause() -> None:
    """Of a process that was another's child only its end is known."""
    assert headline(Incident(1.0, "vault-1-keeper", "keeper", 3, "ended")) == "vault-1-keeper ended; how is not known"


# -- engines that stand in for each other

FAILOVER = {key: value for key, value in TIMELINE.items() if key != "new_standby_ms"} | {"unix_s": 1000.002}


def engine(name: str, state: str, **more: Any) -> Status:
    return Status("worker", name, 7, state, "", 0, **({"group": "worker-1", "lifecycle": state} | more))


def test_the_one_who_is_active_leads() -> None:
    """The line says who is active, with its epoch, and who stands by."""
    (group,) = groups_of([engine("worker-1a", "standby"), engine("worker-1b", "active", epoch=17)])
    assert str(group) == "worker-1: worker-1b is active (epoch 17); worker-1a stands by"


def test_nobody_active_is_said() -> None:
    """While one takes over, or all are dead, nobody is called active."""
    (group,) = groups_of([engine("worker-1a", "waking"), engine("worker-1b", "dead", lifecycle="")])
    assert str(group) == "worker-1: no engine is active; no standby is ready, worker-1a is waking, worker-1b is dead"
    assert group.failover is None


def test_a_standby_with_a_problem_does_not_count() -> None:
    """One that lost its memory is named, not counted on."""
    statuses = [engine("worker-1a", "active"), engine("worker-1b", "standby", note="the vault is gone")]
    assert str(groups_of(statuses)[0]).endswith("; no standby is ready, worker-1b is standby")


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


def test_the_state_that_is_shown() -> None:
    """A process's own word; for an engine of a group its lifecycle, unless the word says more."""
    assert shown_state({"status": "ready"}) == "ready"
    assert shown_state({"status": "ready", "state": "active", "group": ""}) == "ready"
    assert shown_state({"status": "ready", "state": "standby", "group": "g"}) == "standby"
    assert shown_state({"status": "not_admitted", "state": "active", "group": "g"}) == "not_admitted"
    assert shown_state({"status": "silent"}) == "silent"


def test_supervisors_that_share_a_directory_lose_none_of_each_others(tmp_path: Path) -> None:
    """Each has a file of its own, all are read as one; when one is gone its incidents are with the others, and nothing
    else is left of it."""
    witnesses = {name: IncidentRecorder(tmp_path, ManualClock(1000.0 + at), name) for at, name in enumerate("ab")}
    for name, witness in witnesses.items():
        witness.fell(Slot.of(Job(f"{name}-engine-0", "worker")), Fell(7, "SIGKILL", was_ready=True))
    witnesses["a"].fell(Slot.of(Job("a-engine-1", "worker")), Fell(8, "SIGKILL", was_ready=True))
    names = [one.name for one in read_incidents(tmp_path)]
    assert names == ["a-engine-0", "a-engine-1", "b-engine-0"]
    assert kept_apart(tmp_path) == {"a", "b"}
    fold(tmp_path, "a", [Incident(1002.0, "a", "actor", 9, "SIGKILL")])
    assert kept_apart(tmp_path) == {"b"}
    assert [one.name for one in read_own(tmp_path)] == ["a-engine-0", "a-engine-1", "a"]
    assert [one.name for one in read_incidents(tmp_path)] == [*names, "a"]
    fold(tmp_path, "nobody")
    assert len(read_incidents(tmp_path)) == 4
