"""Who is on the roster: what the store says, and what workers' own connections say, which counts for more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from holdfast.discovery.registry import Appeared, Withdrawn
from holdfast.spec.waits import HoldSettings
from holdfast.wire.messages import Draining
from tests.rigs.roster import SILENT, TOKENIZER, roster_rig, until


async def test_a_lost_key_does_not_remove_a_living_worker(tmp_path: Path) -> None:
    """Its stream goes on, new ones still come to it, and its key's return finds the same link."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.serving(1)
        link = rig.link(worker)
        _, reader = rig.ask("s1", worker)
        await until(lambda: worker.generates, "the request")
        rig.withdraw(worker)
        _, second = rig.ask("s2", worker)
        await until(lambda: len(worker.generates) == 2, "the second request")
        worker.say("s1", [10], "length")
        worker.say("s2", [20], "length")
        await until(lambda: reader.finish and second.finish, "both to end")
        assert rig.is_routable(worker)
        rig.appear(worker)
        assert rig.link(worker) is link
        assert not link.withdrawn
        worker.reset("data")
        await until(lambda: worker.connects["data"] == 2, "it to be connected again")


async def test_key_gone_and_connection_down_is_gone(tmp_path: Path) -> None:
    """Whichever comes first; afterwards nothing of it is left: no link, no task, no connection, in time no set."""
    async with roster_rig(tmp_path, HoldSettings(hold_s=0.3)) as rig:
        for number, key_first in ((1, True), (2, False)):
            worker = await rig.serving(number)
            tasks = len(rig.roster._tasks)
            if key_first:
                rig.withdraw(worker)
                await worker.stop()
            else:
                await worker.stop()
                await until(lambda: rig.link(worker).data is None, "the loss to be known")  # noqa: B023
                rig.withdraw(worker)
            await until(lambda: not rig.links(worker), "the link to go")  # noqa: B023
            assert tasks == 1
            await until(lambda: not rig.roster._tasks, "its task to end")
            await until(lambda: not rig.directory.sets, "its set to be forgotten")


async def test_a_worker_whose_connection_is_reset_is_connected_again(tmp_path: Path) -> None:
    """Its key is there, so it is: the same link, a new connection; its stream moved at the moment of the loss."""
    async with roster_rig(tmp_path) as rig:
        first = await rig.serving(1)
        flight, reader = await rig.ask_and_begin(first)
        second = await rig.serving(2)
        link = rig.link(first)
        first.reset("data")
        await until(lambda: second.generates, "the stream to move")
        assert second.generates[0].request.tokens == [1, 2, 3, 10]
        assert flight.ledger.resumed == 1
        assert await rig.joined(first) is link
        await rig.finish(second, reader)


async def test_streams_fail_over_in_the_callback_that_reports_the_loss(tmp_path: Path) -> None:
    """No task has to wake first: right after `connection_lost` the stream is with the other worker."""
    async with roster_rig(tmp_path) as rig:
        first = await rig.serving(1)
        flight, _ = rig.ask("s1", first)
        second = await rig.serving(2)
        data = rig.link(first).data
        assert data is not None
        data.connection_lost(ConnectionResetError("by test"))
        assert flight.slot is rig.link(second).slot
        assert not rig.link(first).slot.routable
        data.close()


async def test_a_worker_withdrawn_while_it_is_connected_to_is_gone_at_once(tmp_path: Path) -> None:
    """It accepted and says nothing: with its key gone nobody waits for the timeout."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        worker.silent = SILENT
        rig.appear(worker)
        await until(lambda: worker.connects["data"], "the connection")
        rig.withdraw(worker)
        assert not rig.links(worker)
        await until(lambda: not rig.roster._tasks and not worker.peers, "task and connection to end")


async def test_a_key_that_goes_and_comes_in_one_breath_is_kept(tmp_path: Path) -> None:
    """A store's restart shows both at once; a worker that was not connected just then must not be forgotten."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        worker.silent = SILENT
        rig.appear(worker)
        await until(lambda: worker.connects["data"], "the connection")
        rig.roster.apply([Withdrawn(worker.instance), Appeared(worker.instance)])
        worker.silent = frozenset()
        await rig.joined(worker)
        assert len(rig.roster.watchers) == len(rig.roster._tasks) == 1


async def test_a_lost_worker_whose_key_goes_and_comes_in_one_breath_is_kept(tmp_path: Path) -> None:
    """The same in the moment after its connection broke, with a stream on it."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.serving(1)
        flight, reader = rig.ask("s1", worker)
        data = rig.link(worker).data
        assert data is not None
        data.connection_lost(ConnectionResetError("by test"))
        rig.roster.apply([Withdrawn(worker.instance), Appeared(worker.instance)])
        data.close()
        await rig.joined(worker)
        await until(lambda: len(worker.generates) == 2, "the stream to be resumed there")
        await rig.finish(worker, reader, 10)
        assert flight.ledger.resumed == 1


async def test_the_same_worker_at_another_address_takes_over_from_itself(tmp_path: Path) -> None:
    """A changed record is a new link under the old name: the old one hands over, and counts stay right."""
    async with roster_rig(tmp_path) as rig:
        old = await rig.serving(1)
        _, reader = rig.ask("s1", old)
        await until(lambda: old.generates, "the request")
        new = await rig.worker(1, at="moved")
        rig.roster.apply([Withdrawn(old.instance), Appeared(new.instance)])
        assert rig.links(old), "its connection is alive"
        await rig.joined(new)
        await until(lambda: new.generates, "the stream to move")
        await until(lambda: not rig.links(old) and not old.peers, "the old link to go")
        await rig.finish(new, reader, 10)
        [workers] = rig.directory.sets.values()
        assert list(rig.dispatcher.links._by_slot) == list(workers.table.slots.values())
        assert list(workers.table.slots) == [1]
        assert workers.table.slots[1].inflight == 0
        assert workers.sessions == 1


async def test_a_draining_worker_gets_nothing_more(tmp_path: Path) -> None:
    """From the message on, whatever its beats say; once it is gone and withdrawn it is forgotten."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.serving(1)
        worker.send(Draining("asked to stop"))
        await until(lambda: not rig.is_routable(worker), "the route to end")
        worker.reset("beat")
        await until(lambda: worker.connects["beat"] == 2, "the beats to be back")
        flight, _ = rig.ask("s1", worker)
        assert flight in flight.workers.holds
        assert not worker.generates
        rig.withdraw(worker)
        await worker.stop()
        await until(lambda: not rig.roster.watchers, "it to be forgotten")


async def test_closing_ends_everything_in_the_middle_of_anything(tmp_path: Path) -> None:
    """One worker serving, one silent, one unreachable, one sending no tokenizer: close leaves nothing (the rig
    looks)."""
    async with roster_rig(tmp_path) as rig:
        await rig.serving(1)
        silent = await rig.worker(2)
        silent.silent = SILENT
        other = await rig.worker(3, card=msgspec.structs.replace(silent.card, block_size=32))
        other.tokenizer = None
        unreachable = await rig.worker(4)
        await unreachable.stop()
        for worker in (silent, other, unreachable):
            rig.appear(worker)
        await until(lambda: silent.connects["data"] and other.received, "both to be under way")
        await asyncio.wait_for(rig.roster.close(), 60.0)
        assert not rig.roster.watchers


async def test_a_connection_lost_on_the_way_to_serving_never_serves(tmp_path: Path) -> None:
    """The data connection breaks while the beat connection is opened: what waits is not thrown at it."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        worker.silent = frozenset({"beat"})
        rig.appear(worker)
        await until(lambda: worker.connects["beat"], "the beat connection")
        flight, _ = rig.ask("s1", worker)
        worker.reset("data")
        await until(lambda: rig.link(worker).data is None, "the loss to be known")
        [beat] = worker.peers
        beat.greet(worker.welcome)
        worker.silent = frozenset()
        await rig.joined(worker)
        await until(lambda: worker.generates, "the request")
        assert flight.ledger.resumed == 0
        assert len(worker.generates) == 1


async def test_a_set_is_not_forgotten_while_its_first_worker_brings_its_tokenizer(tmp_path: Path) -> None:
    """That may take longer than a set without workers is kept; the worker must not join what nobody can find."""
    async with roster_rig(tmp_path, HoldSettings(hold_s=0.1)) as rig:
        worker = await rig.worker(1)
        worker.tokenizer = None
        rig.appear(worker)
        await until(lambda: rig.directory.sets, "the set")
        ticks = rig.roster._ticks
        await until(lambda: rig.roster._ticks > ticks + 4, "four ticks, several times the hold")
        worker.tokenizer = TOKENIZER
        for part in worker.artefact_parts(worker.card.tokenizer_sha256):
            worker.send(part)
        await rig.joined(worker)
        assert list(rig.directory.models()) == ["m"]
