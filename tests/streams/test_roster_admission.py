"""Who gets work: the right process, the right version, the right artefact; and whoever does not is told why."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import uvloop

from holdfast.core.errors import Code
from holdfast.discovery.registry import NotAdmitted
from holdfast.spec.waits import HoldSettings
from holdfast.wire.messages import VERSION, Refused, Welcome
from tests.rigs.roster import ScriptedWorker, make_roster_card, roster_rig, until


@pytest.mark.parametrize("change", [{"instance": 9}, {"namespace": "d-11111111"}, {"checksum": "other"}])
@pytest.mark.parametrize("socket", ["data", "beat"])
async def test_another_worker_at_the_address_gets_no_work(
    tmp_path: Path, change: dict[str, object], socket: str
) -> None:
    """Neither connection may belong to another process than the store spoke of; the right one is taken later."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        right = worker.welcome
        wrong: Welcome = msgspec.structs.replace(right, **change)
        if socket == "data":
            worker.welcome = wrong
        else:
            worker.beat_welcome = wrong
        rig.appear(worker)
        await rig.reason(worker, "another worker answers at its address")
        assert not rig.is_routable(worker)
        worker.welcome, worker.beat_welcome = right, None
        await rig.joined(worker)


async def test_a_refusal_is_shown_with_its_reason(tmp_path: Path) -> None:
    """A worker that refuses this frontend's version says so, and so does the link."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        worker.refusal = Refused(Code.INVALID_REQUEST, "wire version 1 is spoken to a worker of version 9")
        rig.appear(worker)
        await rig.reason(worker, "worker refused the connection: wire version 1")
        worker.refusal = None
        await rig.joined(worker)


async def test_another_wire_version_is_not_talked_to(tmp_path: Path) -> None:
    """A worker that welcomes with another version gets no request."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        worker.welcome = msgspec.structs.replace(worker.welcome, version=9)
        rig.appear(worker)
        why = f"the worker speaks wire version 9, this process speaks version {VERSION}; upgrade the older one"
        await rig.reason(worker, why)
        assert not rig.is_routable(worker)


@pytest.mark.parametrize(
    ("tokenizer", "reason"), [(b"other bytes", "arrived with other content"), (b"", "does not have the artefact")]
)
async def test_a_wrong_artefact_is_not_used(tmp_path: Path, tokenizer: bytes, reason: str) -> None:
    """Text is never made with another tokenizer than the card names; a set that came to nothing is forgotten."""
    async with roster_rig(tmp_path, HoldSettings(hold_s=0.2)) as rig:
        worker = await rig.worker(1)
        worker.tokenizer = tokenizer
        rig.appear(worker)
        await rig.reason(worker, reason)
        assert rig.prepared == 0
        assert not rig.directory.models()
        rig.withdraw(worker)
        await until(lambda: not rig.roster._tasks and not rig.directory.sets, "link and set to go")


async def test_text_is_made_once_for_a_set(tmp_path: Path) -> None:
    """Three workers of one set arriving together bring one tokenizer."""
    async with roster_rig(tmp_path) as rig:
        workers = [await rig.worker(number) for number in (1, 2, 3)]
        for worker in workers:
            rig.appear(worker)
        for worker in workers:
            await rig.joined(worker)
        assert rig.prepared == 1
        assert list(rig.directory.models()) == ["m"]


async def test_a_worker_that_dies_while_it_sends_its_tokenizer_delays_nobody(tmp_path: Path) -> None:
    """The next worker of the set brings it at once, not after a timeout."""
    async with roster_rig(tmp_path) as rig:
        dying = await rig.worker(1)
        dying.tokenizer = None
        rig.appear(dying)
        await until(lambda: len(dying.received) == 2, "its tokenizer to be asked for")
        second = await rig.worker(2)
        rig.appear(second)
        await until(lambda: second.connects["data"], "the second to be connected")
        assert not rig.is_routable(second)
        await dying.stop()
        await rig.joined(second)


async def test_a_worker_that_is_not_admitted_is_told_so(tmp_path: Path) -> None:
    """On a connection of its own, with the reason."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.worker(1)
        rig.roster.apply([NotAdmitted(worker.key, worker.record, "card has no model name")])
        await until(lambda: worker.not_taken == ["card has no model name"], "the notice")
        await until(lambda: not rig.roster._notices and not worker.peers, "task and connection to end")


async def test_one_that_cannot_be_told_is_no_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody listens there, or the address is none, or there is no record: a log line, and that is all."""
    async with roster_rig(tmp_path) as rig:
        absent = ScriptedWorker(tmp_path, 1)
        nonsense = msgspec.structs.replace(absent.record, address="nowhere")
        for record in (absent.record, nonsense, None):
            rig.roster.apply([NotAdmitted(absent.key, record, "why")])
        await until(lambda: not rig.roster._notices, "the notices to end")
    assert caplog.text.count("cannot tell the worker") == 2


async def tell_text_error(folder: Path) -> None:
    async with roster_rig(folder) as rig:
        rig.prepare_error = ValueError("chat_template does not compile")
        worker = await rig.worker(1)
        rig.appear(worker)
        await until(lambda: worker.not_taken, "the notice")
        assert worker.not_taken[0] == "chat_template does not compile"
        await rig.reason(worker, "chat_template does not compile")
        rig.prepare_error = None
        await rig.joined(worker)


async def test_a_card_whose_text_side_cannot_be_made_is_told(tmp_path: Path) -> None:
    """The worker hears the reason; mended, it is taken."""
    await tell_text_error(tmp_path)


def test_it_is_told_on_uvloop_too(tmp_path: Path) -> None:
    """There a write leaves at the end of the loop's turn, and the connection is closed before that."""
    uvloop.run(tell_text_error(tmp_path))


async def test_our_own_bug_costs_a_session_not_the_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged with its traceback, and the worker is tried again."""
    caplog.set_level(logging.ERROR)
    async with roster_rig(tmp_path) as rig:
        rig.prepare_error = RuntimeError("a bug")
        worker = await rig.worker(1)
        rig.appear(worker)
        await until(lambda: "RuntimeError: a bug" in caplog.text, "the log")
        rig.prepare_error = None
        await rig.joined(worker)


async def test_two_checksums_are_two_sets(tmp_path: Path) -> None:
    """Side by side under one model name, each with its own text side (facts 19)."""
    async with roster_rig(tmp_path) as rig:
        first = await rig.serving(1)
        second = await rig.serving(2, card=make_roster_card(block_size=32))
        assert len(rig.directory.sets) == 2
        assert rig.prepared == 2
        assert rig.link(first).workers is not rig.link(second).workers


async def test_a_worker_that_sends_garbage_loses_its_connection(tmp_path: Path) -> None:
    """Its streams go on elsewhere, and it may come again."""
    async with roster_rig(tmp_path) as rig:
        first = await rig.serving(1)
        flight, _ = rig.ask("s1", first)
        await until(lambda: first.generates, "the request")
        second = await rig.serving(2)
        for peer in first.peers:
            if peer.purpose == "data":
                peer.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await until(lambda: second.generates, "the stream to move")
        assert flight.slot is rig.link(second).slot
        await until(lambda: first.connects["data"] == 2, "it to be connected again")
