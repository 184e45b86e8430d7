"""The fleet's loop with a real store's process and agents: killed at every write, two at once, without its store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.control import fleet_feed
from holdfast.control.fleet_loop import loads_of
from holdfast.control.metrics import ControlMetrics
from holdfast.control.status_page import ControlView
from holdfast.control.worker_probe import WorkerProbe
from holdfast.core.tasks import first
from holdfast.discovery.keys import REPORTS
from holdfast.fleet.desired import Cordon, Model
from holdfast.fleet.planner import FORGET_S, GRACE_S, WAITED_FOR, ModelLoad
from holdfast.fleet.records import FleetRecord, cordon_key, desired_key, fleet_key, node_key, orders_key
from holdfast.fleet.scaling import Scaling
from holdfast.health.records import Demand, ReportRecord
from holdfast.testing.waiting import BOUND_S, until
from holdfast.wire.messages import Beat
from tests.rigs.fleet.processes import Site, StoreProcess, site
from tests.rigs.worlds.fleet_controllers import desired_model

LIFE_WRITES_MAX = 60  # of a whole life, as `live` has it: about half as many


@pytest.fixture
def process(tmp_path: Path) -> Iterator[StoreProcess]:
    started = StoreProcess(tmp_path)
    started.start()
    try:
        yield started
    finally:
        started.kill()


def model(key: str = "m", wanted: int = 2, **said: object) -> Model:
    sizes = {"device_bytes": 60, "host_bytes": 60, "replicas_max": 4, "version": "v1", "drain_s": 5.0}
    return Model(key=key, wanted=wanted, **{**sizes, **said})


async def live(here: Site) -> None:
    """Two replicas come, fall to WARM, and go."""
    await here.want(model())
    await until(lambda: here.serving() == 2, "two that serve")
    await here.want(model(wanted=0))
    await until(lambda: not here.serving(), "none that serves")
    await here.rests()
    await here.unwant("m")
    await until(lambda: not list(here.bodies()), "everybody's end")
    await here.rests()


async def led(here: Site, story: asyncio.Task[None], dies_at: int, *, after: bool) -> bool:
    """One leads until it dies or the story is over; whether it died."""
    async with here.leading(dies_at=dies_at, after=after) as (_, died):
        await first((died.wait(),), (story,))
        return died.is_set()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_controller_may_die_at_any_write(process: StoreProcess, after: bool) -> None:
    """The next one goes on from what stands: every desired model comes to be, and nobody is started twice or in
    vain."""
    for at in range(1, LIFE_WRITES_MAX):
        async with site(process, f"d{at}") as here, asyncio.TaskGroup() as tasks:
            story = tasks.create_task(live(here))
            died = await led(here, story, at, after=after)
            if died:
                await led(here, story, 0, after=after)
            await story
            assert len(here.placed()) == 2, (at, here.placed())
            assert len(here.leaders) == 1 + died
        if not died:
            return
    pytest.fail(f"a life of more than {LIFE_WRITES_MAX} writes")


async def test_controllers_may_die_again_and_again(process: StoreProcess) -> None:
    """Each after a few more writes than the last one: at some time one is done."""
    async with site(process, "d") as here, asyncio.TaskGroup() as tasks:
        story = tasks.create_task(live(here))
        for at in range(1, LIFE_WRITES_MAX):
            if not await led(here, story, at, after=bool(at % 2)):
                break
        await story
        assert len(here.placed()) == 2


async def test_two_that_lead_at_once_start_nobody_twice(process: StoreProcess) -> None:
    """One of them writes, and the other begins anew from that, whoever it is at the time."""
    async with site(process, "d") as here, here.leading(), here.leading():
        await live(here)
        assert len(here.placed()) == 2


async def test_a_store_that_is_killed_stops_nobody(process: StoreProcess) -> None:
    """It is away for longer than a node's grace, and forgets what was leased: the same replicas serve, nobody is lost
    or started; then desired_models are carried out again."""
    async with site(process, "d") as here, here.leading() as (loop, _):
        await here.want(model())
        await until(lambda: here.serving() == 2, "two that serve")
        await here.rests()
        process.kill()
        await until(lambda: loop._mirror.away == set(loop._feed.prefixes), "its absence to be heard of")
        here.clock.ahead_s += 30.0
        process.start()
        await until(lambda: not loop._mirror.away, "its return")
        await here.want(model(wanted=0))
        await until(lambda: here.asleep() == 2, "both to fall to WARM")
        await here.want(model(wanted=2))
        await until(lambda: here.serving() == 2, "both again")
        assert len(here.placed()) == 2


async def test_a_store_that_dies_amid_a_write_has_what_was_asked(process: StoreProcess) -> None:
    """Killed again and again while a life goes on: it ends as any other."""
    async with site(process, "d") as here, here.leading() as (loop, _), asyncio.TaskGroup() as tasks:
        story = tasks.create_task(live_on(here))
        for _ in range(4):
            await until(lambda: story.done() or loop._feed.controller._actions is not None, "a write", every_s=0.001)
            process.kill()
            process.start()
            await until(lambda: not loop._mirror.away, "its return")
        await story


async def live_on(here: Site) -> None:
    """What a person asks for while the store comes and goes."""
    for wanted in (1, 0, 2, 0):
        await here.want(model(wanted=wanted))
        await until(lambda wanted=wanted: here.serving() == wanted, f"{wanted} that serve")
    await here.unwant("m")
    await until(lambda: not list(here.bodies()), "everybody's end")


async def test_a_node_that_is_lost_is_replaced_and_may_come_back(process: StoreProcess) -> None:
    """After its grace its replica is started elsewhere, once; when it is back there is one too many, and one goes."""
    async with site(process, "d") as here, here.leading() as (loop, _):
        await here.want(model(wanted=1))
        await until(lambda: here.serving() == 1, "one that serves")
        await here.rests()
        (there,) = [one for one in here.agents if one.machine.bodies]
        there.away = True
        await until(lambda: loop._feed.controller._heartbeats.is_any_missing, "its absence to be seen")
        assert len(here.placed()) == 1
        here.clock.ahead_s += GRACE_S
        await here.want(model(wanted=1, drain_s=4.0))  # it is looked at the time
        await until(lambda: here.serving() == 2, "another in its place")
        there.away = False
        await until(lambda: here.serving() == 1, "one of both to go")
        await here.rests()
        assert len(here.placed()) == 2


async def test_nothing_is_written_without_desired_models(process: StoreProcess) -> None:
    """Nodes alone are nothing to be done."""
    async with site(process, "d") as here, here.leading() as (loop, _):
        await until(lambda: len(loop._feed.controller._view.nodes) == 2, "both nodes to be seen")
        await until(lambda: sum(here.metrics.fleet._passes), "a pass")
        for key in (fleet_key("d"), orders_key("d", "n0"), orders_key("d", "n1")):
            assert await here.store.get(key, BOUND_S) is None


async def test_a_node_that_does_not_come_back_is_forgotten(process: StoreProcess) -> None:
    """Its orders are removed from the store, by one who goes on then; if it comes back all the same, it is one more."""
    async with site(process, "d") as here, here.leading() as (loop, _):
        await here.want(model(wanted=1))
        await until(lambda: here.serving() == 1, "one that serves")
        await here.rests()
        (there,) = [one for one in here.agents if one.machine.bodies]
        there.away, where = True, orders_key("d", there.machine.name)
        await until(lambda: loop._feed.controller._heartbeats.is_any_missing, "its absence to be seen")
        here.clock.ahead_s += FORGET_S
        await here.want(model(wanted=1, drain_s=4.0))  # it is looked at the time
        await until(lambda: where not in loop._mirror.values, "its orders to be removed")
        await until(lambda: here.serving() == 2, "another one")
        there.away = False
        await here.want(model(wanted=2, drain_s=4.0))
        await until(lambda: there.machine.name in loop._feed.controller._view.nodes, "it to be heard")
        await here.rests()
        assert here.serving() == 2
        assert loop._begun == 1


async def test_another_deployments_words_are_not_taken(process: StoreProcess) -> None:
    """The store's prefixes are strings': `d` is not `d-more`, whose record another writes."""
    async with site(process, "d") as here, site(process, "d-more") as other, here.leading() as (loop, _):
        async with other.leading():
            await other.want(model())
            await here.want(model())
            await until(lambda: here.serving() == other.serving() == 2, "two that serve of each")
        assert loop._begun == 1


async def test_what_cannot_be_read_changes_nothing(process: StoreProcess, caplog: pytest.LogCaptureFixture) -> None:
    """A desired model or a record of a newer version: both stay as they were, and the log says so."""
    async with site(process, "d") as here, here.leading() as (loop, _):
        await here.want(model())
        await until(lambda: here.serving() == 2, "two that serve")
        await here.rests()
        for key in (desired_key("d", "m"), node_key("d", "n0"), desired_key("d", "new")):
            await here.store.put(key, b'{"newer": 1}', BOUND_S)
        told = "taken for unchanged"

        async def looked_at() -> bool:
            await here.store.put(node_key("d", "n0"), b'{"newer": 1}', BOUND_S)  # its agent may have told anew
            return sum(told in record.message for record in caplog.records) >= 3

        await until(looked_at, "all to be looked at", every_s=0.1)
        await here.store.delete(desired_key("d", "new"), BOUND_S)
        await until(lambda: not loop._feed.controller._unread, "that to be seen")
        assert here.serving() == 2
        assert loop._begun == 1


async def test_a_book_that_cannot_be_read_stops_everything_where_it_is(
    process: StoreProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever wrote it knows what it means."""
    async with site(process, "d") as here:
        await here.store.put(fleet_key("d"), b"[]", BOUND_S)
        await here.want(model())
        async with here.leading():
            await until(lambda: any("everything stays" in one.message for one in caplog.records), "a word in the log")
        assert await here.store.get(fleet_key("d"), BOUND_S) == b"[]"
        assert here.placed() == []


async def test_a_held_request_brings_one_up(process: StoreProcess) -> None:
    """Where the number is scaling's: one is wanted, and written into the desired model. Where a person said none, the
    record says why nobody comes."""
    async with site(process, "d") as here, here.leading():
        await here.want(model(wanted=0), Scaling())
        await here.want(model("said", wanted=0))
        now_s = here.clock.unix_s()
        demand = {f"served-{key}": Demand(1, now_s) for key in ("m", "said")}
        report = ReportRecord(name="f", at_unix_s=now_s, demand=demand)
        here.store.register(f"{REPORTS}d/f", msgspec.json.encode(report))
        await until(lambda: here.serving() == 1, "one that serves")
        assert (await here.wanted("m"), await here.wanted("said")) == (1, 0)

        async def told() -> bool:
            return (await here.record()).unmet == {"said": WAITED_FOR}

        await until(told, "a word on the other")


def test_requests_that_waited_before_the_model_was_desired_count() -> None:
    """A report is not said again while nothing in it changes."""
    feed = fleet_feed.FleetFeed("d", "k")
    report = ReportRecord(name="f", at_unix_s=1.0, demand={"served-m": Demand(2, 1.0)})
    values = {f"{REPORTS}d/f": msgspec.json.encode(report)}
    feed.begin({}, 10.0)
    feed.feed(values, 10.0)
    assert feed.controller.is_idle
    values[desired_key("d", "m")] = msgspec.json.encode(desired_model(model(wanted=0), Scaling()))
    feed.feed(values, 11.0)
    assert feed.controller._view.demand == {"m": Demand(2, 1.0)}
    feed.feed({desired_key("d", "m"): values[desired_key("d", "m")]}, 12.0)
    assert feed.controller._view.demand == {}


def test_a_cordon_that_cannot_be_read_changes_nothing_or_lets_replicas_stay() -> None:
    """One that was known stays as it was; for a control that begins, the node takes nothing new and nothing leaves."""
    key, other = cordon_key("d", "n0"), cordon_key("dd", "n0")
    feed = fleet_feed.FleetFeed("d", "k")
    feed.begin({key: b"{}", other: b"{}"}, 10.0)
    assert feed.controller._view.cordons == {"n0": Cordon()}
    feed.feed({key: b"{", other: b"{}"}, 11.0)
    assert feed.controller._view.cordons == {"n0": Cordon()}
    feed.feed({}, 12.0)
    assert feed.controller._view.cordons == {}
    again = fleet_feed.FleetFeed("d", "k")
    again.begin({key: b"{"}, 10.0)
    assert again.controller._view.cordons == {"n0": Cordon(drain=False)}


async def test_what_a_fleet_does_is_counted_and_told(process: StoreProcess, caplog: pytest.LogCaptureFixture) -> None:
    """On the page: who is there, what was asked for, what failed; in the log a line for each action, and why."""
    caplog.set_level("INFO", "holdfast.control")
    async with site(process, "d", nodes=1) as here, here.leading() as (loop, _):
        shown = here.metrics
        here.agents[0].fails = True
        await here.want(model(wanted=1))

        async def failed() -> bool:
            return bool((await here.record()).tries)

        await until(failed, "a failure")
        here.agents[0].fails = False
        await until(lambda: here.serving() == 1, "one that serves")
        await here.rests()
        await until(lambda: any(loop._feed.controller.replicas()), "it to be seen")
        found = scraped(shown)
        assert found["holdfast_fleet_replicas", ("m", "HOT", "ready")] == 1
        assert found["holdfast_fleet_actions_total", ("place",)] >= 2
        assert found["holdfast_fleet_failures_total", ("failed",)] >= 1
        assert found["holdfast_fleet_failures_total", ("lost",)] == 0
        assert found["holdfast_fleet_pass_seconds_count", ()] > 0
    lines = [record.message for record in caplog.records]
    assert "fleet: place ModelActor:m:r1 HOT on n0 gpu0: it is wanted" in lines
    assert "fleet: place ModelActor:m:r1 HOT on n0 gpu0: it failed: failed" in lines


def scraped(metrics: ControlMetrics) -> dict[tuple[str, tuple[str, ...]], float]:
    view = ControlView(name="c", leads=True)
    return {
        (sample.name, tuple(sample.labels[label] for label in family_labels(sample.labels))): sample.value
        for family in text_string_to_metric_families(metrics.page(view).decode())
        for sample in family.samples
    }


def family_labels(labels: dict[str, str]) -> list[str]:
    return [label for label in ("model", "level", "phase", "verb", "what", "le") if label in labels]


async def test_who_lost_the_lock_writes_nothing_more(process: StoreProcess) -> None:
    """It ends by itself, and the next one does what is desired."""
    lost = asyncio.Event()
    async with site(process, "d") as here, here.leading(lost=lost) as (loop, _):
        await until(lambda: len(loop._feed.controller._view.nodes) == 2, "both nodes to be seen")
        lost.set()
        await here.want(model())
        await until(lambda: here.leaders[0].done(), "its end")
        assert await here.record() == FleetRecord()
        async with here.leading():
            await until(lambda: here.serving() == 2, "two that serve")
            assert (await here.record()).by.startswith("control-2/")


def test_what_workers_carry_is_summed_by_model() -> None:
    """Of those that are active and have said something; the KV of all of them is one."""

    def worker(name: str, beat: Beat | None, *, active: bool = True) -> WorkerProbe:
        instance = SimpleNamespace(card=SimpleNamespace(name=name))
        facts, beats = SimpleNamespace(active=active), SimpleNamespace(last=beat)
        return cast(WorkerProbe, SimpleNamespace(instance=instance, facts=facts, beats=beats))

    def beat(running: int, waiting: int, blocks: int, free: int) -> Beat:
        return Beat(1, 1, 0.0, 0.0, 0.0, running, waiting, blocks=blocks, blocks_free=free)

    found = loads_of(
        [
            worker("a", beat(2, 1, 100, 10)),
            worker("a", beat(1, 0, 100, 90)),
            worker("a", beat(9, 9, 100, 0), active=False),
            worker("b", beat(1, 0, 0, 0)),
            worker("c", None),
        ]
    )
    assert found == {"a": ModelLoad(4, 0.5), "b": ModelLoad(1, 0.0)}
