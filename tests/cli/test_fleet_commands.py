"""`holdfast scale`, `evict`, `models` and `nodes` on a real store, in which the test tells what nodes would; and what
`--wait` waits for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.cli.fleet import waiting as fleet_waiting
from holdfast.cli.fleet.observed import ObservedFleet
from holdfast.cli.fleet.words import model_shown
from holdfast.cli.requests import RequestRow
from holdfast.core.errors import REFUSED
from holdfast.fleet.actions import Tries
from holdfast.fleet.desired import Level
from holdfast.fleet.observed import Node, ReplicaPhase
from holdfast.fleet.records import FleetRecord, NodeRecord
from tests.rigs.cli.fleet_terminal import DEPLOYMENT, GIB, SIM, Desk, Told, desk_at, eventually, replica

SIZE = ("--memory-gib", "1")


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """With a model of which two are wanted."""
    async with desk_at(tmp_path) as made:
        done = await made.say("deploy", "tiny", *SIM, *SIZE, "--max", "4", "--wanted", "2")
        assert done.returncode == 0, done
        yield made


async def test_a_model_is_scaled_within_its_bounds(desk: Desk) -> None:
    """Only the number is another; who wants more is told what to ask for."""
    before = await desk.desired("tiny")
    done = await desk.say("scale", "tiny", "4")
    assert (done.returncode, done.stdout) == (0, "model tiny: 4 desired\n"), done
    after = await desk.desired("tiny")
    assert (after.model.wanted, after.model.version, after.model.generation) == (4, before.model.version, 2)
    more = await desk.say("scale", "tiny", "5")
    assert more.returncode == 1
    assert "tiny has 4 replicas at most; deploy it with --max 5 for more" in more.stderr
    negative = await desk.say("scale", "tiny", "257")
    assert (negative.returncode, "must be 0 to 256" in negative.stderr) == (REFUSED, True), negative
    missing = await desk.say("scale", "tiny")
    assert (missing.returncode, "needs replicas" in missing.stderr) == (2, True), missing
    wrong = await desk.say("scale", "tny", "1")
    assert (wrong.returncode, "there is no model 'tny'; did you mean tiny?" in wrong.stderr) == (1, True), wrong
    kept = await desk.say("deploy", "kept", *SIM, *SIZE, "--min", "1", "--max", "2")
    assert kept.returncode == 0, kept
    fewer = await desk.say("scale", "kept", "0")
    assert "kept has 1 HOT replicas at least; deploy it with --min 0 for fewer" in fewer.stderr
    warm = ("--min", "1", "--max", "2", "--floor", "warm", "--host-gib", "1", "--autoscale")
    assert (await desk.say("deploy", "kept", *SIM, *SIZE, *warm)).returncode == 0
    none = await desk.say("scale", "kept", "0")
    assert none.stdout == "model kept: 0 desired; autoscaling may change that\n"


async def test_an_evicted_model_stays_known(desk: Desk) -> None:
    """None is wanted and none is kept; it can be asked for again, until it is forgotten."""
    desired = await desk.desired("tiny")
    await desk.node("n1", [replica(desired, 1)])
    done = await desk.say("evict", "tiny")
    told = "model tiny evicted: 0 desired, none kept; its 1 replica leaves when requests have ended\n"
    assert (done.returncode, done.stdout) == (0, told), done
    model = (await desk.desired("tiny")).model
    assert (model.wanted, model.floor, model.kept) == (0, Level.COLD, 0)
    assert (await desk.say("scale", "tiny", "1")).returncode == 0
    gone = await desk.say("evict", "tiny", "--forget", "--json")
    assert (gone.returncode, gone.object["wanted"], gone.object["hot"]) == (0, None, 1), gone
    assert await desk.find_desired("tiny") is None
    assert "tiny   removed; its replicas leave" in (await desk.say("models")).stdout
    again = await desk.say("scale", "tiny", "1")
    assert (again.returncode, "there is no model 'tiny'" in again.stderr) == (1, True), again
    await desk.node("n1")
    assert "there is no model 'tiny'; `holdfast deploy` asks for one" in (await desk.say("evict", "tiny")).stderr


async def test_one_replica_is_evicted_by_its_name(desk: Desk) -> None:
    """As many are wanted as before, so that another comes, or with --shrink one fewer; it is waited for."""
    assert (await desk.say("scale", "tiny", "2")).returncode == 0
    desired = await desk.desired("tiny")
    await desk.node("n1", [replica(desired, 1), replica(desired, 2)])
    done = await desk.say("evict", "tiny", "r2")
    told = "replica r2 of tiny on n1 leaves when its requests have ended; another will be started in its place\n"
    assert (done.returncode, done.stdout) == (0, told), done
    model = (await desk.desired("tiny")).model
    assert (model.wanted, model.going) == (2, {2})
    await desk.node("n1", [replica(desired, 1), replica(desired, 3)])
    async with waiting(desk, "evict", "tiny", replica(desired, 3).name, "--shrink") as ended:
        await desk.node("n1", [replica(desired, 1)])
        assert (await ended).returncode == 0
    model = (await desk.desired("tiny")).model
    assert (model.wanted, model.going) == (1, {3}), "who is gone is not kept in mind"
    wrong = await desk.say("evict", "tiny", "r7")
    assert (wrong.returncode, "tiny has no replica 'r7'; it has r1" in wrong.stderr) == (1, True), wrong
    for words in (("evict", "tiny", "--shrink"), ("evict", "tiny", "r1", "--forget")):
        assert (await desk.say(*words)).returncode == 2


async def test_whether_another_comes_for_one_that_is_evicted_is_what_is_so(desk: Desk) -> None:
    """Not for a WARM one that no floor needs, nor where as many are left as are wanted."""
    assert (await desk.say("scale", "tiny", "1")).returncode == 0
    desired = await desk.desired("tiny")
    warm = replica(desired, 3, level=Level.WARM, devices=())
    await desk.node("n1", [replica(desired, 1), replica(desired, 2), warm])
    for one, told in (
        ("r3", "leaves host memory; not replaced: 1 desired, 2 HOT without it"),
        ("r2", "leaves when its requests have ended; not replaced: 1 desired, 1 HOT without it"),
        ("r1", "leaves when its requests have ended; another will be started in its place"),
    ):
        done = await desk.say("evict", "tiny", one)
        assert (done.returncode, done.stdout) == (0, f"replica {one} of tiny on n1 {told}\n"), done
    shrunk = await desk.say("evict", "tiny", "r3", "--shrink")
    assert (shrunk.returncode, "r3 is WARM and does not count as one" in shrunk.stderr) == (1, True), shrunk
    assert (await desk.say("scale", "tiny", "0")).returncode == 0
    await desk.node("n1", [replica(desired, 4)])
    assert "not replaced: 0 desired\n" in (await desk.say("evict", "tiny", "r4")).stdout
    shrunk = await desk.say("evict", "tiny", "r4", "--shrink")
    assert (shrunk.returncode, "none of tiny is wanted; leave --shrink out" in shrunk.stderr) == (1, True), shrunk
    floor = ("--min", "1", "--max", "2", "--floor", "warm", "--host-gib", "1", "--wanted", "0")
    assert (await desk.say("deploy", "tiny", *SIM, *SIZE, *floor)).returncode == 0
    kept = await desk.desired("tiny")
    await desk.node("n1", [replica(kept, 5, level=Level.WARM, devices=())])
    assert "leaves host memory; another will be started in its place" in (await desk.say("evict", "tiny", "r5")).stdout


async def test_models_are_shown_with_their_replicas(desk: Desk) -> None:
    """What is wanted, what is there by name, and what is missing; one alone, and as JSON."""
    desired = await desk.desired("tiny")
    assert (await desk.say("deploy", "other", *SIM, *SIZE)).returncode == 0
    other = replica(await desk.desired("other"), 4, running=3, version="00000000")
    warm = replica(desired, 2, level=Level.WARM, devices=())
    await desk.node("n1", [replica(desired, 1), other, warm])
    await desk.write_record(unmet={"tiny": "there is no room for it"})
    shown = (await desk.say("models")).stdout.splitlines()
    assert shown[0].split() == ["model", "name", "version", "desired", "hot", "warm", "floor", "age"]
    assert shown[1].split()[:6] == ["other", "other", (await desk.desired("other")).model.version, "1", "1", "0"]
    assert shown[2].split()[:7] == ["tiny", "tiny", desired.model.version, "2", "1", "1", "COLD"]
    assert shown[3] == "  tiny: there is no room for it"
    assert shown[5].split() == ["replica", "node", "level", "phase", "running", "since", "version"]
    assert shown[6].split()[:6] == ["ModelActor:other:r4", "n1", "host-1", "HOT", "ready", "3"]
    assert shown[8].split()[:4] == ["ModelActor:tiny:r2", "n1", "WARM", "ready"]
    one = (await desk.say("models", "tiny", "--json")).object
    assert (one["hot"], one["warm"], one["wanted"], one["unmet"]) == (1, 1, 2, "there is no room for it")
    assert [each["name"] for each in one["replicas"]] == ["ModelActor:tiny:r1", "ModelActor:tiny:r2"]
    assert [each["key"] for each in (await desk.say("models", "--json")).object] == ["other", "tiny"]
    wrong = await desk.say("models", "nobody")
    assert "there is no model 'nobody'; there are other, tiny" in wrong.stderr


async def test_models_are_shown_with_their_requests(desk: Desk) -> None:
    """Wide: BUSY, READY, or what else, and counts; without a frontend on this machine the requests are unknown."""
    desired = await desk.desired("tiny")
    await desk.node("n1", [replica(desired, 1, running=2)])
    shown = (await desk.say("get", "models", "-o", "wide")).stdout.splitlines()
    assert shown[0].split()[-3:] == ["state", "running", "waiting"]
    assert shown[1].split()[-3:] == ["BUSY", "2", "–"]
    assert [line.split()[-1] for line in shown if line.startswith("replica")] == ["requests"]
    one = (await desk.say("get", "models", "tiny", "-o", "json")).object
    assert (one["state"], one["running"], one["waiting"], one["replicas"][0]["requests"]) == ("BUSY", 2, None, None)
    await desk.node("n1", [replica(desired, 1)])
    assert (await desk.say("get", "models", "tiny", "-o", "json")).object["state"] == "READY"
    await desk.node("n1", [])
    assert (await desk.say("get", "models", "tiny", "-o", "json")).object["state"] == "PROVISIONING"
    assert (await desk.say("scale", "tiny", "0")).returncode == 0
    assert (await desk.say("get", "models", "tiny", "-o", "json")).object["state"] == "STOPPED"


async def test_requests_are_on_the_replica_whose_processes_run_them(desk: Desk) -> None:
    """By their model's name and the serial at the end of the group's; those that wait are counted, on no replica."""
    desired = await desk.desired("tiny")
    node = NodeRecord(node=Node(name="n1"), replicas=(replica(desired, 1), replica(desired, 11)))
    observed = ObservedFleet("local", {"tiny": desired}, {"n1": node}, FleetRecord(), True)
    rows = [
        RequestRow(id="a", model="tiny", state="RUNNING", replica="local-tiny-00-11", started=5.0),
        RequestRow(id="b", model="tiny", state="DISPATCHED", replica="local-tiny-00-1", started=6.0),
        RequestRow(id="c", model="tiny", state="QUEUED"),
        RequestRow(id="d", model="other", state="RUNNING", replica="local-other-00-1", started=7.0),
    ]
    one = model_shown(observed, "tiny", rows)
    assert (one.state, one.running, one.waiting) == ("BUSY", 2, 1)
    named = {each.id: [(each.id, each.started_unix_s) for each in each.requests or ()] for each in one.replicas}
    assert named == {"r1": [("b", 6.0)], "r11": [("a", 5.0)]}


async def test_nodes_are_shown_with_their_leases(desk: Desk) -> None:
    """Each device and the host: what it has, what was leased, to how many; and who tells it."""
    desired = await desk.desired("tiny")
    await desk.node("n1", [replica(desired, 1)])
    await desk.node("n2", gib=2)
    shown = (await desk.say("nodes")).stdout.splitlines()
    assert shown[0].split() == ["node", "device", "leased", "total", "replicas", "agent", "reported"]
    assert shown[1].split() == ["n1", "host-1", "1.00", "GiB", "8.00", "GiB", "1", "here", "pid", "7"]
    assert shown[2].split() == ["host", "0.00", "GiB", "16.00", "GiB", "0"]
    assert shown[3].split()[:6] == ["n2", "host-1", "0.00", "GiB", "2.00", "GiB"]
    first, second = (await desk.say("nodes", "--json")).object
    assert first["devices"][0]["leases"] == {"ModelActor:tiny:r1": GIB}
    assert (first["agent_pid"], first["agent_host"], second["devices"][0]["total_bytes"]) == (7, "here", 2 * GIB)
    assert [one["id"] for one in first["replicas"]] == ["r1"]


async def test_nobody_to_carry_it_out_is_told(desk: Desk) -> None:
    """No node, or nobody who decides."""
    await desk.store.delete(f"v1/controls/{DEPLOYMENT}/control-1-1", 10.0)
    assert "no control of local runs" in (await desk.say("models")).stdout
    await desk.store.delete(f"v1/nodes/{DEPLOYMENT}/n1", 10.0)
    assert "no node of local is there: `holdfast up --backend local`" in (await desk.say("nodes")).stdout
    late = await desk.say("deploy", "late", *SIM)
    assert late.returncode == 0, "the fleet is known, and its nodes may come back"
    assert "late: warning: no node of local is there" in late.stderr


async def test_which_fleet_is_asked_where_there_are_several(desk: Desk) -> None:
    """The usual one, the one that is named, or the only one."""
    assert (await desk.say("models", "tiny")).returncode == 0
    await desk.store.put("v1/models/a/x", b"{}", 10.0)
    assert (await desk.say("models", "tiny")).returncode == 0, "by $DYN_NAMESPACE, which is local by default"
    desk.env["DYN_NAMESPACE"] = "nobody"
    assert "which fleet? There are a, local; say it with --deployment" in (await desk.say("models")).stderr
    assert (await desk.say("models", "tiny", "--deployment", "local")).returncode == 0


# -- waiting


@contextlib.asynccontextmanager
async def waiting(desk: Desk, *words: str) -> AsyncIterator[asyncio.Task[Told]]:
    """A command that waits, in a process of its own; from when it does."""
    command = (sys.executable, "-m", "holdfast", *words, "--wait", "--store", desk.url)
    out, err = desk.folder / "out", desk.folder / "err"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        process = await asyncio.create_subprocess_exec(*command, stdout=to_out, stderr=to_err, env=desk.env)

    async def told() -> Told:
        async with asyncio.timeout(60.0):
            await process.wait()
        assert process.returncode is not None
        return Told(words, process.returncode, out.read_text(), err.read_text())

    try:
        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(told())
            await shows(desk, "waiting for", "err" if "--json" in words else "out")
            yield ended
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def shows(desk: Desk, text: str, where: str = "out") -> None:
    """Return when the command that waits has shown this."""

    async def is_there() -> bool:
        return text in (desk.folder / where).read_text()

    await eventually(is_there, f"the command to show {text!r}")


async def test_it_waits_until_as_many_are_hot(desk: Desk) -> None:
    """Of this version, ready, and no more than are wanted."""
    async with waiting(desk, "scale", "tiny", "1", "--json") as ended:
        desired = await desk.desired("tiny")
        await desk.node("n1", [replica(desired, 1, ReplicaPhase.PROVISIONING)])
        await desk.node("n1", [replica(desired, 1), replica(desired, 2, ReplicaPhase.DRAINING)])
        await desk.node("n1", [replica(desired, 1, version="00000000")])
        assert not ended.done()
        await desk.node("n1", [replica(desired, 1)])
        done = await ended
    assert (done.returncode, done.object["hot"]) == (0, 1), done
    assert done.stderr.endswith(f"tiny: 1 of 1 HOT, version {desired.model.version}\n"), done


async def test_an_eviction_is_waited_for(desk: Desk) -> None:
    """Until none is HOT, or of one that was forgotten none is left at all."""
    desired = await desk.desired("tiny")
    warm = replica(desired, 2, level=Level.WARM, devices=())
    await desk.node("n1", [replica(desired, 1), warm])
    async with waiting(desk, "evict", "tiny") as ended:
        await desk.node("n1", [warm])
        assert (await ended).returncode == 0
    async with waiting(desk, "evict", "tiny", "--forget") as ended:
        await desk.node("n1")
        done = await ended
    assert (done.returncode, done.stdout.endswith("tiny: nothing of it is left\n")) == (0, True), done


async def test_what_cannot_be_is_told_at_once(desk: Desk) -> None:
    """Memory that no node has, however long one waits; for programs with how it is."""
    large = await desk.say("deploy", "large", *SIM, "--memory-gib", "6", "--wanted", "2", "--wait", "--json")
    assert (large.returncode, large.object["hot"]) == (1, 0)
    assert "2 replicas are desired, and all nodes together could hold 1, of 6.00 GiB" in large.stderr


async def test_what_fails_again_and_again_is_told_with_why(desk: Desk) -> None:
    """As its node says it; what failed before is not counted. The store keeps the last of two values, so each one is
    shown before the next is written."""
    await desk.write_record(tries={"place/tiny": Tries(7, 1.0)})
    async with waiting(desk, "scale", "tiny", "3") as ended:
        await desk.write_record(tries={"place/tiny": Tries(9, 3.0)}, unmet={"tiny": "two more failures"})
        await shows(desk, "two more failures")
        answers = {"place/ModelActor:tiny:r9/0.1": "cannot be started: no such model"}
        await desk.node("n1", [replica(await desk.desired("tiny"), 9, ReplicaPhase.PROVISIONING)], answers=answers)
        await shows(desk, "r9 provisioning on n1")
        assert not ended.done()
        await desk.write_record(tries={"place/tiny": Tries(1, 4.0)})
        done = await ended
    assert done.returncode == 1
    assert "tiny failed to start 3 times: cannot be started: no such model" in done.stderr, done


async def test_what_stays_as_it_is_is_told_after_a_while(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reason with nobody on the way, or nobody there to carry it out."""
    monkeypatch.setattr(fleet_waiting, "STUCK_S", 0.0)
    await desk.write_record(unmet={"tiny": "there is no room for it"})
    stuck = await desk.say("scale", "tiny", "3", "--wait")
    assert (stuck.returncode, stuck.stderr) == (1, "holdfast: tiny: there is no room for it\n"), stuck
    monkeypatch.setattr(fleet_waiting, "QUIET_S", 0.0)
    await desk.write_record()
    await desk.store.delete(f"v1/controls/{DEPLOYMENT}/control-1-1", 10.0)
    quiet = await desk.say("scale", "tiny", "2", "--wait")
    assert (quiet.returncode, "no control of local runs" in quiet.stderr) == (1, True), quiet


async def test_who_waits_hears_of_others(desk: Desk) -> None:
    """One that was forgotten, or is another version by now, will not come."""
    async with waiting(desk, "scale", "tiny", "1") as ended:
        assert (await desk.say("deploy", "tiny", *SIM, "--memory-gib", "2")).returncode == 0
        assert "tiny was deployed again meanwhile, as version " in (await ended).stderr
    async with waiting(desk, "scale", "tiny", "1", "--timeout", "0") as ended:
        assert (await desk.say("evict", "tiny", "--forget")).returncode == 0
        assert "tiny was removed from the fleet meanwhile" in (await ended).stderr


async def test_waiting_has_an_end(desk: Desk) -> None:
    """After its time it says that it goes on without us; so does Ctrl-C, and the desired model stands."""
    late = await desk.say("scale", "tiny", "1", "--wait", "--timeout", "100ms")
    assert late.returncode == 1
    assert "timed out after 0.1 s; it continues in the background: `holdfast get models tiny` shows " in late.stderr
    words = (sys.executable, "-m", "holdfast", "scale", "tiny", "2", "--wait", "--store", desk.url)
    how = {"stdout": asyncio.subprocess.PIPE, "env": desk.env, "preexec_fn": _heeds_ctrl_c}
    process = await asyncio.create_subprocess_exec(*words, **how)
    assert process.stdout is not None
    async with asyncio.timeout(60.0):
        while b"waiting for tiny" not in (line := await process.stdout.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
    assert process.returncode == 130
    assert b"it continues in the background" in rest
    assert (await desk.desired("tiny")).model.wanted == 2


def _heeds_ctrl_c() -> None:
    """Who runs tests in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


async def test_models_are_watched(desk: Desk) -> None:
    """As JSON a line for every change."""
    words = (sys.executable, "-m", "holdfast", "models", "tiny", "--watch", "--json", "--store", desk.url)
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=desk.env)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60.0):
            assert json.loads(await process.stdout.readline())["wanted"] == 2
            assert (await desk.say("scale", "tiny", "3")).returncode == 0
            assert json.loads(await process.stdout.readline())["wanted"] == 3
    finally:
        process.kill()
        await process.wait()


async def test_events_are_shown_and_followed(desk: Desk) -> None:
    """What stands, and with --follow what happens: the same words as a Redis is told, without one."""
    await desk.node("n1", [replica(await desk.desired("tiny"), 1)])
    shown = await desk.say("events")
    assert [line.split()[1:3] for line in shown.stdout.splitlines()] == [["deploy", "tiny"], ["replica", "tiny"]]
    words = (sys.executable, "-m", "holdfast", "events", "--follow", "--json", "--store", desk.url)
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=desk.env)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60.0):
            first = [json.loads(await process.stdout.readline()) for _ in range(2)]
            assert [(one["event_type"], one["model_key"]) for one in first] == [("deploy", "tiny"), ("replica", "tiny")]
            assert (await desk.say("scale", "tiny", "3")).returncode == 0
            scaled = json.loads(await process.stdout.readline())
            assert (scaled["event_type"], scaled["data"]["before"], scaled["data"]["wanted"]) == ("scale", 2, 3)
            assert len({one["id"] for one in (*first, scaled)}) == 3
    finally:
        process.kill()
        await process.wait()


async def test_a_redis_that_cannot_be_one_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The process would find out alone, and nobody would lead."""
    async with desk_at(tmp_path) as desk:
        told = await desk.say("up", "--engine", "sim", "--redis", "http://x", store=False)
    assert told.returncode == REFUSED
    assert "--redis: " in told.stderr
