"""Standbys: connected ahead of time, never routed to, and serving in the moment they say that they are active."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.frontend.metrics import FrontendMetrics
from holdfast.frontend.pages import StatusPages
from holdfast.health.liveness import Liveness
from holdfast.spec.waits import HoldSettings
from holdfast.wire.frames import encode
from holdfast.wire.messages import Active, Cancel, Draining
from tests.rigs.roster import RosterRig, ScriptedWorker, roster_rig, until


async def standing_by(rig: RosterRig, number: int, group: str = "g") -> ScriptedWorker:
    """A standby that is connected and judged."""
    worker = await rig.worker(number)
    worker.welcome = msgspec.structs.replace(worker.welcome, active=False, group=group)
    rig.appear(worker)
    await until(lambda: rig.link(worker).workers is not None, "the standby to be connected")
    return worker


async def leading(rig: RosterRig, number: int, epoch: int, group: str = "g") -> ScriptedWorker:
    worker = await rig.worker(number)
    worker.welcome = msgspec.structs.replace(worker.welcome, epoch=epoch, group=group)
    rig.appear(worker)
    await rig.joined(worker)
    return worker


def pages(rig: RosterRig) -> StatusPages:
    shown = FrontendMetrics(rig.dispatcher.stats)
    return StatusPages(rig.directory, rig.dispatcher, rig.roster, lambda: 0.0, lambda: "connected", shown)


def shown(rig: RosterRig, worker: ScriptedWorker) -> dict[str, Any]:
    [facts] = [w for w in pages(rig).facts()["workers"] if w["instance"] == f"{worker.key.instance:x}"]
    return dict(facts)


async def test_a_standby_is_ready_in_all_but_its_word(tmp_path: Path) -> None:
    """Its set's text side is made from it, its beats are watched, and what is asked for is held, not failed."""
    async with roster_rig(tmp_path) as rig:
        worker = await standing_by(rig, 0x1F)
        assert rig.prepared == 1
        assert list(rig.directory.models()) == ["m"]
        assert rig.roster.watchers[rig.link(worker)].liveness.state is Liveness.ALIVE
        assert not rig.is_routable(worker)
        flight, _ = rig.ask("s1", worker)
        assert flight in flight.workers.holds
        facts = pages(rig).facts()
        assert facts["status"] == "no_worker"
        assert facts["reason"] == "no active worker; worker 1f stands by to take over"
        assert shown(rig, worker) | {"active": False, "epoch": 0, "group": "g"} == shown(rig, worker)
        assert shown(rig, worker)["reason"] == "standing by"
        page = pages(rig).metrics.page(rig.roster, {}).decode()
        assert "holdfast_frontend_standbys 1.0" in page
        assert "holdfast_frontend_takeovers_total 0.0" in page
        assert not worker.generates


async def test_active_sends_what_is_held_before_it_returns(tmp_path: Path) -> None:
    """No task and no timer between the announcement's frame and the held requests."""
    async with roster_rig(tmp_path) as rig:
        worker = await standing_by(rig, 1)
        flight, reader = rig.ask("s1", worker)
        link = rig.link(worker)
        assert link.data is not None
        link.data.data_received(encode(Active(7)))
        assert flight.slot is link.slot
        assert (link.active, link.epoch) == (True, 7)
        await until(lambda: worker.generates, "the request")
        await rig.finish(worker, reader, 10)
        assert pages(rig).facts()["status"] == "ready"
        assert pages(rig).facts()["reason"] == ""
        assert shown(rig, worker) | {"active": True, "epoch": 7} == shown(rig, worker)
        page = pages(rig).metrics.page(rig.roster, {}).decode()
        assert "holdfast_frontend_standbys 0.0" in page
        assert "holdfast_frontend_takeovers_total 1.0" in page


async def test_a_doubted_standby_that_takes_over_is_trusted_in_that_moment(tmp_path: Path) -> None:
    """Its beats were late on a busy machine; the announcement is itself a sign of life, heard before the next tick."""
    async with roster_rig(tmp_path) as rig:
        worker = await standing_by(rig, 1)
        flight, _ = rig.ask("s1", worker)
        link = rig.link(worker)
        worker.beating = False
        liveness = rig.roster.watchers[link].liveness
        await until(lambda: liveness.state is Liveness.SUSPECT, "the doubt")
        assert link.data is not None
        link.data.data_received(encode(Active(7)))
        assert liveness.state is Liveness.ALIVE
        assert flight.slot is link.slot


async def test_the_stream_of_a_dead_leader_is_with_its_standby(tmp_path: Path) -> None:
    """Held between the loss and the announcement, resumed with every token it had shown; also where the next leaders
    are killed as soon as they lead."""
    async with roster_rig(tmp_path) as rig:
        leader = await leading(rig, 1, epoch=5)
        standbys = [await standing_by(rig, number) for number in (2, 3, 4)]
        flight, reader = await rig.ask_and_begin(leader)
        for epoch, standby in enumerate(standbys, 6):
            await leader.stop()
            await until(lambda: flight in flight.workers.holds, "the stream to be held")
            leader = standby
            leader.send(Active(epoch))
            await until(lambda: leader.generates, "the stream to be resumed")  # noqa: B023
            assert leader.generates[0].request.tokens == [1, 2, 3, 10]
        await rig.finish(leader, reader)


async def test_a_leader_that_was_superseded_loses_its_streams(tmp_path: Path) -> None:
    """It never noticed: its connection stands and it beats. It is told to cancel, and a new connection of it under the
    old epoch gets nothing, with the reason in sight."""
    async with roster_rig(tmp_path) as rig:
        old = await leading(rig, 1, epoch=5)
        new = await standing_by(rig, 2)
        flight, _ = rig.ask("s1", old)
        await until(lambda: old.generates, "the request")
        new.send(Active(6))
        await until(lambda: new.generates, "the stream to move")
        assert flight.slot is rig.link(new).slot
        await until(lambda: any(isinstance(message, Cancel) for message in old.received), "the cancel")
        assert shown(rig, old)["reason"] == "superseded by epoch 6"
        old.reset("data")
        await until(lambda: old.connects["data"] == 2 and rig.link(old).workers is not None, "it to be back")
        assert not rig.is_routable(old)
        assert (shown(rig, old)["active"], shown(rig, old)["reason"]) == (False, "superseded by epoch 6")
        await new.stop()
        await until(lambda: flight in flight.workers.holds, "the stream to be held")
        assert not rig.is_routable(old), "the newest epoch is known also without its leader"


async def test_a_new_leader_that_is_found_by_its_greeting_supersedes_too(tmp_path: Path) -> None:
    """This frontend met it only after it had taken over."""
    async with roster_rig(tmp_path) as rig:
        old = await leading(rig, 1, epoch=5)
        flight, _ = rig.ask("s1", old)
        new = await leading(rig, 2, epoch=6)
        await until(lambda: new.generates, "the stream to move")
        assert flight.slot is rig.link(new).slot
        assert not rig.is_routable(old)


async def test_whoever_drained_and_leads_again_serves_again(tmp_path: Path) -> None:
    """A handover and back, on the same connection."""
    async with roster_rig(tmp_path) as rig:
        worker = await leading(rig, 1, epoch=5)
        worker.send(Draining("handed over"))
        await until(lambda: not rig.is_routable(worker), "the route to end")
        assert shown(rig, worker)["reason"] == "draining: handed over"
        flight, _ = rig.ask("s1", worker)
        worker.send(Active(7))
        await until(lambda: worker.generates, "the request")
        assert flight.slot is rig.link(worker).slot
        assert worker.connects["data"] == 1


@pytest.mark.parametrize("word", [Active(7), Draining("asked to stop")])
async def test_a_word_right_behind_the_greeting_is_not_lost(tmp_path: Path, word: msgspec.Struct) -> None:
    """Both frames come in one piece, before anyone who waits for the greeting has woken."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        standby = isinstance(word, Active)
        worker.welcome = msgspec.structs.replace(worker.welcome, active=not standby, group="g")
        worker.silent = frozenset({"data"})
        rig.appear(worker)
        await until(lambda: worker.peers and worker.received, "the Hello")
        [peer] = worker.peers
        peer.transport.write(encode(worker.welcome) + encode(word))
        await until(lambda: rig.link(worker).workers is not None, "it to join")
        assert rig.is_routable(worker) is standby


async def test_standbys_do_not_keep_a_stream_for_longer_than_the_hold(tmp_path: Path) -> None:
    """Nobody takes over: the stream is failed by name when its time is up, as without a standby."""
    async with roster_rig(tmp_path, HoldSettings(hold_s=0.3)) as rig:
        worker = await standing_by(rig, 1)
        _, reader = rig.ask("s1", worker)
        await until(lambda: reader.failure, "the failure")
        assert reader.failure == ("NoWorker", "no worker could take it within 0.3 s")
        assert rig.directory.sets, "the set of a connected standby is kept"
