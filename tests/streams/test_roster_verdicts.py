"""A worker's liveness, and what becomes of its streams."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec

from holdfast.health.liveness import Liveness
from holdfast.health.watcher import own_identity
from holdfast.wire.messages import Beat, Cancel
from tests.rigs.roster import roster_rig, until


async def test_a_silent_host_loses_its_streams_and_returns_on_probation(tmp_path: Path) -> None:
    """Its connections stand all the while: streams move with a cancel, and its late tokens are dropped."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.serving(1)
        flight, reader = await rig.ask_and_begin(worker)
        other = await rig.serving(2)
        watch = rig.roster.watchers[rig.link(worker)]
        worker.beating = False
        await until(lambda: watch.liveness.state is Liveness.SUSPECT, "the suspicion")
        assert not rig.is_routable(worker)
        assert flight.slot is rig.link(worker).slot, "a suspect keeps its streams"
        await until(lambda: watch.liveness.state is Liveness.GONE, "the verdict")
        assert flight.slot is rig.link(other).slot
        await until(lambda: any(isinstance(message, Cancel) for message in worker.received), "the cancel")
        worker.say("s1", [99])
        worker.beating = True
        await until(lambda: watch.liveness.state is Liveness.PROBATION, "its return")
        assert rig.link(worker).slot.admit_max == watch.liveness.admit_max == 2
        await until(lambda: other.generates, "the resumed request")
        await rig.finish(other, reader)
        assert rig.roster.verdicts["gone"] == 1


async def test_a_broken_beat_connection_is_opened_again(tmp_path: Path) -> None:
    """The data connection stands: the worker is doubted for a moment and loses nothing."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.serving(1)
        flight, _ = rig.ask("s1", worker)
        watch = rig.roster.watchers[rig.link(worker)]
        worker.reset("beat")
        await until(lambda: watch.liveness.state is Liveness.SUSPECT, "the doubt")
        await until(lambda: watch.liveness.state is Liveness.ALIVE, "the trust")
        assert worker.connects == {"data": 1, "beat": 2}
        assert flight.slot is rig.link(worker).slot
        assert flight.ledger.resumed == 0


async def test_a_new_connection_begins_with_a_new_judge(tmp_path: Path) -> None:
    """What was doubted about the old one, and the looking at its process, ends with it."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        identity = own_identity(threading.get_native_id())
        worker.welcome = msgspec.structs.replace(worker.welcome, process=identity)
        rig.appear(worker)
        link = await rig.joined(worker)
        watch = rig.roster.watchers[link]
        liveness = watch.liveness
        worker.beating = False
        rig.ask("s1", worker)
        await until(lambda: watch._probing, "it to be looked at")
        worker.beating = True
        worker.reset("data")
        await until(lambda: watch.liveness is not liveness, "the new state")
        assert not watch._probing
        await rig.joined(worker)
        assert watch.liveness.state is Liveness.ALIVE


async def test_a_late_beat_does_not_revive_a_lost_connection(tmp_path: Path) -> None:
    """A suspect's data connection breaks and a beat comes before anyone has noticed: no work may go there."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.serving(1)
        link = rig.link(worker)
        watch = rig.roster.watchers[link]
        rig.ask("s1", worker)
        worker.beating = False
        await until(lambda: watch.liveness.state is Liveness.SUSPECT, "the suspicion")
        assert link.data is not None
        link.data.connection_lost(None)
        assert watch._beat is not None
        watch._beat.beats.append(Beat(1, 1, 0.0, 1.0, 0.0, 0, 0))
        watch.tick(asyncio.get_running_loop().time())
        assert watch.liveness.routable
        assert not link.slot.routable
        worker.reset("data")
