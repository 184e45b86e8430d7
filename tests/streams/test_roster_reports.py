"""Whom a frontend's report names as admitted: whoever gets requests as soon as control lets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.core.tasks import beside
from holdfast.discovery.keys import HEALTH
from holdfast.frontend.metrics import FrontendMetrics
from holdfast.frontend.report import FrontendReport
from holdfast.frontend.request_tracker import RequestTracker
from holdfast.health.liveness import Liveness
from holdfast.health.records import HealthRecord, ReportRecord
from holdfast.health.standing import HealthStatus, WorkerStanding
from holdfast.store.contract import Put
from holdfast.wire.messages import Active, Draining
from tests.rigs.roster import RosterRig, roster_rig, until


class Told:
    """A store that keeps what was last registered in it."""

    def __init__(self) -> None:
        self.value = b""
        self.writes = 0

    def register(self, _key: str, value: bytes) -> Told:
        self.update(value)
        return self

    def update(self, value: bytes) -> None:
        self.value = value
        self.writes += 1

    @property
    def report(self) -> ReportRecord:
        return msgspec.json.decode(self.value, type=ReportRecord)


def reporting(rig: RosterRig, store: Any, deployment: str = "d") -> FrontendReport:
    tracker = RequestTracker(rig.directory, FrontendMetrics(rig.dispatcher.stats))
    return FrontendReport(store, deployment, rig.roster, rig.directory, tracker, lambda: 1.0)


async def test_who_has_joined_is_admitted_before_it_was_sent_anything(tmp_path: Path) -> None:
    """A report names it at once, and is written again only when it changes; who left is named no more."""
    async with roster_rig(tmp_path) as rig:
        store = Told()
        telling = reporting(rig, store)
        telling.write_if_changed()
        assert store.report.admitted == ()
        worker = await rig.serving(0x2A)
        telling.write_if_changed()
        telling.write_if_changed()
        assert (store.report.admitted, store.report.workers, store.writes) == (("2a",), {}, 2)
        rig.withdraw(worker)
        await worker.stop()
        await until(lambda: not rig.links(worker), "it to be forgotten")
        telling.write_if_changed()
        assert store.report.admitted == ()


async def test_who_is_starved_is_told_before_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that nobody serves is a reason to report at once: a fleet fetches its model then."""
    monkeypatch.setattr("holdfast.frontend.report.PERIOD_S", 600.0)
    async with roster_rig(tmp_path) as rig:
        store = Told()
        telling = reporting(rig, store)
        async with beside(telling.run(), "reports"):
            telling.write_soon()
            await until(lambda: store.writes == 1, "the first report")
            await rig.serving(0x2A)
            telling.write_soon()
            await until(lambda: store.report.admitted == ("2a",), "what has changed")


async def test_controls_verdict_takes_nobody_out_of_it(tmp_path: Path) -> None:
    """Who waits for its canary is admitted: else nobody could ever count as new."""
    async with roster_rig(tmp_path) as rig:
        worker = await rig.serving(1)
        unfit = WorkerStanding(status=HealthStatus.UNHEALTHY, weight=0.0, reason="as decided", causes={})
        record = msgspec.json.encode(HealthRecord(name="w", standing=unfit))
        rig.roster.weights.on_store_event(HEALTH, Put(HEALTH + worker.key.path, record))
        assert not rig.is_routable(worker)
        assert rig.roster.admitted("d") == ("1",)


async def test_who_stands_by_leaves_or_is_silent_is_not_admitted(tmp_path: Path) -> None:
    """By their own word the first two, by the liveness that this frontend sees the third."""
    async with roster_rig(tmp_path) as rig:
        standby = await rig.worker(1)
        standby.welcome = msgspec.structs.replace(standby.welcome, active=False, group="g")
        rig.appear(standby)
        await until(lambda: rig.link(standby).workers is not None, "the standby to be connected")
        assert rig.roster.admitted("d") == ()
        standby.send(Active(7))
        await until(lambda: rig.roster.admitted("d") == ("1",), "it to lead")
        silent, leaver = await rig.serving(2), await rig.serving(3)
        assert rig.roster.admitted("d") == ("1", "2", "3")
        leaver.send(Draining("bye"))
        silent.beating = False
        liveness = rig.roster.watchers[rig.link(silent)].liveness
        await until(lambda: liveness.state is not Liveness.ALIVE, "the doubt")
        await until(lambda: rig.link(leaver).draining, "the word of leaving")
        assert rig.roster.admitted("d") == ("1",)


async def test_a_card_whose_text_cannot_be_made_is_not_admitted(tmp_path: Path) -> None:
    """It is told why it gets nothing, and so is whoever reads the report; once it can be used, neither is."""
    async with roster_rig(tmp_path) as rig:
        rig.prepare_error = ValueError("no such tokenizer")
        worker = await rig.worker(1)
        rig.appear(worker)
        store = Told()
        await until(lambda: worker.not_taken, "the word")
        reporting(rig, store).write_if_changed()
        assert (store.report.admitted, store.report.refused) == ((), {"1": "no such tokenizer"})
        rig.prepare_error = None
        await rig.joined(worker)
        assert (rig.roster.admitted("d"), rig.roster.refused("d")) == (("1",), {})
