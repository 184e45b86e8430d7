"""`holdfast drain` on a real store, in which the test tells what nodes and control would."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.fleet import drain
from holdfast.core.errors import UserError
from holdfast.fleet.actions import Action, Verb
from holdfast.fleet.desired import Cordon
from holdfast.fleet.observed import ReplicaPhase
from holdfast.fleet.records import Orders, cordon_key, orders_key
from tests.rigs.cli.fleet_terminal import DEPLOYMENT, SIM, Desk, desk_at, eventually, replica

SIZE = ("--memory-gib", "1")


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """With two nodes, and one replica of a model on the first."""
    async with desk_at(tmp_path) as made:
        done = await made.say("deploy", "tiny", *SIM, *SIZE)
        assert done.returncode == 0, done
        await made.node("n1", [replica(await made.desired("tiny"), 1, running=2)])
        await made.node("n2")
        yield made


async def started(desk: Desk) -> tuple[asyncio.subprocess.Process, Path]:
    """Return a command that drains n1, in a process of its own, and the file with what it says."""
    command = (sys.executable, "-m", "holdfast", "drain", "n1", "--timeout", "3m", "--store", desk.url)
    out, env = desk.folder / "drained", {name: os.environ[name] for name in os.environ if name == "PYTHONPATH"}
    with out.open("wb") as to_out:
        process = await asyncio.create_subprocess_exec(*command, stdout=to_out, stderr=to_out, env={**desk.env, **env})
    return process, out


async def shows(out: Path, text: str) -> None:
    """Return when the command has said this."""

    async def is_there() -> bool:
        return text in await asyncio.to_thread(out.read_text)

    await eventually(is_there, f"the command to show {text!r}")


async def cordon_of(desk: Desk, node: str) -> Cordon | None:
    held = await desk.store.get(cordon_key(DEPLOYMENT, node), 10.0)
    return None if held is None else msgspec.json.decode(held, type=Cordon)


async def test_a_node_is_drained_and_used_again(desk: Desk) -> None:
    """What will move is told; the record names who asked for it, and is gone after --undo."""
    done = await desk.say("drain", "n1", "--no-wait")
    assert done.returncode == 0, done
    first, second = done.stdout.splitlines()
    assert first == "node n1 takes no new replicas; 1 of it are replaced on other nodes, and leave then:"
    assert second == "  tiny r1 (HOT, 2 running)"
    cordon = await cordon_of(desk, "n1")
    assert cordon is not None
    assert (cordon.drain, cordon.at > 0, "@" in cordon.by) == (True, True, True)
    again = await desk.say("drain", "n1", "--no-wait", "-o", "json")
    assert again.object["stay"] == {"ModelActor:tiny:r1": "it is about to leave"}
    assert (again.object["empty"], again.object["node"]["cordon"]["drain"]) == (False, True)
    assert await cordon_of(desk, "n1") == cordon, "who drained it first stands there"
    assert "n1 (draining)" in (await desk.say("get", "nodes")).stdout
    undone = await desk.say("drain", "n1", "--undo")
    assert (undone.returncode, undone.stdout) == (0, "node n1 takes replicas again\n")
    assert await cordon_of(desk, "n1") is None
    assert (await desk.say("drain", "n1", "--undo")).stdout == "node n1 is not drained\n"
    assert "(draining)" not in (await desk.say("get", "nodes")).stdout


async def test_a_dry_run_changes_nothing_and_says_what_fits_nowhere_else(desk: Desk) -> None:
    """A replica that no other node has room for stays for now."""
    assert (await desk.say("deploy", "big", *SIM, "--memory-gib", "6")).returncode == 0
    await desk.node("n2", gib=4)
    there = [replica(await desk.desired(key), 1) for key in ("tiny", "big")]
    await desk.node("n1", there)
    done = await desk.say("drain", "n1", "--dry-run")
    assert done.returncode == 0, done
    assert "  tiny r1 (HOT)\n" in done.stdout
    assert "  big r1 (HOT); it stays for now: there is no room for it (dry run)\n" in done.stdout
    assert await cordon_of(desk, "n1") is None
    assert (await desk.say("drain", "n1", "--undo", "--dry-run")).stdout == "node n1 is not drained (dry run)\n"


async def test_wrong_names_are_refused_with_those_that_there_are(desk: Desk) -> None:
    """A node that is gone and cordoned is listed, and can be undone."""
    wrong = await desk.say("drain", "host-7")
    assert (wrong.returncode, "local has no node 'host-7'; there are n1, n2" in wrong.stderr) == (1, True), wrong
    assert "did you mean n1?" in (await desk.say("drain", "n11")).stderr
    assert (await desk.say("drain", "a/b")).returncode == 2
    assert (await desk.say("drain")).returncode == 2
    await desk.store.put(cordon_key(DEPLOYMENT, "n9"), msgspec.json.encode(Cordon(by="ops@desk")), 10.0)
    assert "n9 (gone, drained)" in (await desk.say("get", "nodes")).stdout
    assert (await desk.say("drain", "n9", "--undo")).stdout == "node n9 takes replicas again\n"
    assert "n9" not in (await desk.say("get", "nodes")).stdout


async def test_the_only_node_is_not_drained(desk: Desk) -> None:
    """Nothing could move, so nothing is changed: not with one node, nor where the others are lost or drained."""
    assert (await desk.say("drain", "n2", "--no-wait")).returncode == 0
    last = await desk.say("drain", "n1")
    assert last.returncode == 1
    assert "nothing can move from n1: no other node takes replicas (n2 is drained); its 1 replica stays" in last.stderr
    assert "`holdfast node join --node NAME` adds a node; then drain n1" in last.stderr
    assert await cordon_of(desk, "n1") is None
    assert (await desk.say("drain", "n2", "--undo")).returncode == 0
    await desk.write_record(lost=("n2",))
    assert "(n2 is lost)" in (await desk.say("drain", "n1")).stderr


async def test_it_waits_until_control_knows_and_nothing_is_there_or_ordered(desk: Desk) -> None:
    """An empty node is not enough: control may just have ordered a replica that it does not report yet."""
    process, out = await started(desk)

    async def until(text: str) -> None:
        await shows(out, text)

    await until("tiny r1: it is about to leave")
    coming = replica(await desk.desired("tiny"), 2, ReplicaPhase.PROVISIONING, node="n2")
    await desk.node("n2", [coming])
    await until("tiny r1: its replacement r2 is coming up on n2")
    ordered = Orders(actions=(Action(verb=Verb.PLACE, model="tiny", serial=3, node="n1"),))
    await desk.store.put(orders_key(DEPLOYMENT, "n1"), msgspec.json.encode(ordered), 10.0)
    await desk.node("n1")
    await until("0 left")
    await desk.write_record(cordoned=("n1",), unmet={"tiny": "a mark that it was read"})
    assert process.returncode is None
    await desk.store.put(orders_key(DEPLOYMENT, "n1"), msgspec.json.encode(Orders()), 10.0)
    await until("it is empty and can be stopped; `holdfast drain n1 --undo` uses it again")
    async with asyncio.timeout(60.0):
        assert await process.wait() == 0


async def test_who_stops_waiting_is_told_what_stays_and_that_it_goes_on(desk: Desk) -> None:
    """After --timeout with status 1, and at Ctrl-C."""
    await desk.write_record(cordoned=("n1",), unmet={"tiny": "only drained nodes could hold it: n1"})
    late = await desk.say("drain", "n1", "--timeout", "500ms")
    assert late.returncode == 1
    stays = "node n1: 1 left; tiny r1: only drained nodes could hold it: n1. The drain goes on: "
    assert f"timed out after 0.5 s; {stays}" in late.stderr, late
    assert "`holdfast drain n1 --undo` ends it" in late.stderr
    process, out = await started(desk)
    await shows(out, "tiny r1: only drained")
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60.0):
        assert await process.wait() != 0
    await shows(out, "The drain goes on: `holdfast get nodes` shows how far it is")
    assert await cordon_of(desk, "n1") is not None


async def test_trouble_and_an_undo_by_others_end_the_wait(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is gone or lost, no control, and a cordon that is removed meanwhile."""
    monkeypatch.setattr(drain, "QUIET_S", 0.0)
    await desk.write_record(lost=("n1",))
    assert "node n1 does not report: what runs there is not known" in (await desk.say("drain", "n1")).stderr
    await desk.write_record()
    await desk.store.delete(f"v1/controls/{DEPLOYMENT}/control-1-1", 10.0)
    assert "no control of local runs" in (await desk.say("drain", "n1")).stderr
    await desk.store.delete(f"v1/nodes/{DEPLOYMENT}/n1", 10.0)
    gone = await desk.say("drain", "n1")
    assert "node n1 is gone; it stays cordoned until `holdfast drain n1 --undo`" in gone.stderr, gone
    wait, observed = drain.DrainWait("n2"), drain.ObservedFleet.of(DEPLOYMENT, {})
    with pytest.raises(UserError, match="the drain of n2 was undone meanwhile"):
        wait.look(observed, 0.0)
    assert wait.look(observed, 0.0, "the store is away") is None


async def test_a_cordon_that_cannot_be_read_can_be_undone(desk: Desk) -> None:
    """A newer or torn record."""
    await desk.store.put(cordon_key(DEPLOYMENT, "n1"), b"{", 10.0)
    assert "cannot be read" in (await desk.say("drain", "n1")).stderr
    assert (await desk.say("drain", "n1", "--undo")).stdout == "node n1 takes replicas again\n"
