"""Workers that a rollout replaces: nothing more for them; their streams leave where they can, and stay where not."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.rigs.roster import RosterRig, ScriptedWorker, roster_rig, until

NAME = "chat-worker-0123abcd-7"


async def serving(rig: RosterRig, number: int, name: str) -> ScriptedWorker:
    worker = await rig.worker(number)
    worker.record = msgspec.structs.replace(worker.record, name=name)
    rig.appear(worker)
    await rig.joined(worker)
    return worker


async def test_who_is_replaced_gets_nothing_more_and_gives_its_streams_away(tmp_path: Path) -> None:
    """By plan, to another of its set: no failure is counted, and its answer goes on where it was."""
    async with roster_rig(tmp_path) as rig:
        old = await serving(rig, 1, NAME)
        _, reader = await rig.ask_and_begin(old)
        new = await serving(rig, 2, "chat-worker-0123abcd-70")
        rig.roster.weights.set_idle("d", [NAME])
        assert (rig.is_routable(old), rig.is_routable(new)) == (False, True)
        assert rig.roster.admitted("d") == ("2",)
        await until(lambda: new.generates, "the stream to be handed over")
        await rig.finish(new, reader)
        assert rig.link(old).counts.failed == {}


async def test_the_last_of_its_set_keeps_its_streams(tmp_path: Path) -> None:
    """Nobody else could go on with them exactly: they end where they are, and new requests wait for another."""
    async with roster_rig(tmp_path) as rig:
        last = await serving(rig, 1, f"{NAME}-engine-1")
        _, reader = await rig.ask_and_begin(last)
        rig.roster.weights.set_idle("d", [NAME])
        held, _ = rig.ask("s2", last)
        await rig.finish(last, reader)
        assert held in held.workers.holds
        assert len(last.generates) == 1
        rig.roster.weights.set_idle("d", [])
        await until(lambda: len(last.generates) == 2, "the held request, as it was called back")


async def test_what_had_begun_waits_for_one_that_is_replaced_and_back(tmp_path: Path) -> None:
    """The last of a set dies while its streams end there, and is started again: they go on in it, and nothing new
    does."""
    async with roster_rig(tmp_path) as rig:
        last = await serving(rig, 1, NAME)
        _, reader = await rig.ask_and_begin(last)
        rig.roster.weights.set_idle("d", [NAME])
        fresh, _ = rig.ask("s2", last)
        await last.stop()
        await until(lambda: fresh.workers.held == 1, "the stream to be held")
        again = await rig.worker(2)
        again.record = msgspec.structs.replace(again.record, name=NAME)
        rig.appear(again)
        await until(lambda: again.generates, "the stream to come back")
        assert (rig.is_routable(again), len(again.generates)) == (False, 1)
        await rig.finish(again, reader)
        assert fresh in fresh.workers.holds


async def test_only_who_is_named_leaves(tmp_path: Path) -> None:
    """A name that another's begins with, or one like an engine's in the middle, is another's."""
    async with roster_rig(tmp_path) as rig:
        for number, name in enumerate((NAME, f"{NAME}1", f"{NAME}-engine-0-x", "chat-engine-1-0123abcd-7"), 1):
            await serving(rig, number, name)
        rig.roster.weights.set_idle("d", ["chat-worker-0123abcd", "chat"])
        assert rig.roster.admitted("d") == ("1", "2", "3", "4")
        rig.roster.weights.set_idle("d", [NAME])
        assert rig.roster.admitted("d") == ("2", "3", "4")


async def test_a_rollout_and_a_fleet_have_each_their_say(tmp_path: Path) -> None:
    """Whoever either of them gives nothing gets nothing, until neither does."""
    async with roster_rig(tmp_path) as rig:
        worker = await serving(rig, 1, NAME)
        idle = rig.roster.weights.set_idle
        for rollout, fleet, routable in (
            ([NAME], [], False),
            ([NAME], [NAME], False),
            ([], [NAME], False),
            ([], [], True),
            ([], [NAME], False),
        ):
            idle("d", rollout)
            idle("d", fleet, "fleet")
            assert rig.is_routable(worker) is routable, (rollout, fleet)
