"""A deployment whose name begins with another's is another: in keys, watches, locks, sockets, folders and processes.

A prefix of the store is a string's, and names have dashes in them: `foo` and `foo-bar` differ only for who looks at the
whole name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from holdfast.control.store_view import StoreView
from holdfast.core.tasks import beside
from holdfast.discovery.card import ModelCard, WeightsIdentity
from holdfast.discovery.keys import (
    CARDS,
    CONTROLS,
    EXPECTED,
    FAULTS,
    HEALTH,
    HISTORY,
    INSTANCES,
    LEVELS,
    REPORTS,
    ROLLOUTS,
    InstanceKey,
    InstanceRecord,
    admits,
)
from holdfast.discovery.registry import Registry
from holdfast.frontend.shedding import DeploymentLevel
from holdfast.health.records import ControlRecord, HealthRecord, ReportRecord
from holdfast.rollout.records import history_key
from holdfast.rollout.traffic import RolloutRouting, read_routing
from holdfast.routing.degradation import LevelRecord
from holdfast.spec.jobs import Job
from holdfast.spec.launch import FrontendLaunch, VaultLaunch, WorkerLaunch
from holdfast.spec.manifest.checking import check
from holdfast.spec.manifest.local import Machine
from holdfast.spec.manifest.types import Manifest
from holdfast.spec.manifest.whole import whole
from holdfast.spec.names import control_lock
from holdfast.store.contract import Store
from holdfast.streams.directory import ModelDirectory
from holdfast.streams.stats import DispatchStats
from holdfast.supervise.observe import observe_store, prefixes
from holdfast.supervise.records import journals_dir
from holdfast.testing.waiting import until
from tests.rigs.store.served import served_store

# The other's name is longer, shorter, or looks like a set of this one's.
PAIRS = [("foo", "foo-bar"), ("foo-bar", "foo"), ("foo", "foo-0123abcd"), ("foo-0123abcd", "foo"), ("foo", "foobar")]
CARD = ModelCard("m", WeightsIdentity("r1"), "tt", "hi", 4096, 16, [0])
EXAMPLE = Path(__file__).parents[2] / "examples" / "failover.yaml"


def key_of(deployment: str, number: int = 1) -> InstanceKey:
    return InstanceKey(f"{deployment}-0123abcd", "worker", "generate", number)


def written_by(deployment: str) -> dict[str, bytes]:
    """What a deployment has in the store, of every kind."""
    path = key_of(deployment).path
    record = InstanceRecord("unix:///a", "unix:///b", CARD.checksum(), name=f"{deployment}-worker-0123abcd-1")
    level = msgspec.json.encode(LevelRecord(2, "short"))
    return {
        INSTANCES + path: msgspec.json.encode(record),
        CARDS + path: msgspec.json.encode(CARD),
        HEALTH + path: msgspec.json.encode(HealthRecord(name="w")),
        LEVELS + deployment: level,
        f"{EXPECTED}{deployment}/a": b"x",
        f"{FAULTS}{deployment}/b/c": b"x",
        f"{REPORTS}{deployment}/f": msgspec.json.encode(ReportRecord(name="f", at_unix_s=1.0, admitted=("1",))),
        f"{CONTROLS}{deployment}/c": msgspec.json.encode(ControlRecord(name="c", leads=True)),
        history_key(deployment, 1): b"x",
    }


@pytest.mark.parametrize(("own", "other"), PAIRS)
def test_keys(own: str, other: str) -> None:
    """Namespaces, and what the keys of one say to a reader of the other: nothing."""
    assert not admits(own, key_of(other).namespace)
    registry = Registry(own)
    changes = [change for key, value in written_by(other).items() for change in registry.put(key, value)]
    assert (changes, registry.instances) == ([], {})
    assert not set(written_by(own)) & set(written_by(other))
    assert not any(key.startswith(f"{HISTORY}{own}/") for key in written_by(other))


@pytest.mark.parametrize(("own", "other"), PAIRS)
def test_what_a_rollout_is_told(own: str, other: str) -> None:
    """Of the other's workers, reports and controls nothing; all of its own."""
    told = {key: value for key, value in written_by(other).items() if key.startswith(prefixes(own))}
    said = observe_store(told, own)
    assert (said.leading, said.verdicts, said.reports, said.is_led) == ({}, {}, (), False)
    said = observe_store({key: value for key, value in written_by(own).items() if key.startswith(prefixes(own))}, own)
    assert (len(said.leading), len(said.verdicts), len(said.reports), said.is_led) == (1, 1, 1, True)
    assert read_routing(own, b"") == RolloutRouting()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with served_store(tmp_path) as (client,):
        yield client


@pytest.mark.parametrize(("own", "other"), PAIRS)
async def test_levels(store: Store, own: str, other: str, caplog: pytest.LogCaptureFixture) -> None:
    """A frontend does not heed the other's level, whether it stands there already or comes later."""
    level = DeploymentLevel(own, ModelDirectory(random.Random(1), 8), DispatchStats(), 30.0, lambda: 0.0)

    async def write(deployment: str, number: int) -> None:
        await store.put(LEVELS + deployment, msgspec.json.encode(LevelRecord(number, "")), 10.0)

    await write(other, 3)
    await write(own, 1)
    async with beside(level.follow(store), "level"):
        await until(lambda: level.level == 1, "the level that stands there")
        await write(other, 2)
        await write(own, 0)
        await until(lambda: level.level == 0, "the next level")
    assert [line for line in caplog.messages if "level" in line] == [
        f"{own}: degradation level 0 -> 1: no record",
        f"{own}: degradation level 1 -> 0: no record",
    ]


@pytest.mark.parametrize(("own", "other"), PAIRS)
async def test_watches(store: Store, own: str, other: str) -> None:
    """A control's book, over a real store in which both have written, has its own alone; what comes later as well."""
    for key, value in (written_by(own) | written_by(other)).items():
        await store.put(key, value, 10.0)
    book = StoreView(store, own)
    book.open()
    try:
        await asyncio.wait_for(book.whole.wait(), 60.0)
        kinds = (HEALTH, LEVELS, EXPECTED, FAULTS, REPORTS)
        assert set(book.values) == {key for key in written_by(own) if key.startswith(kinds)}
        assert set(book.registry.instances) == {key_of(own)}
        for deployment in (other, own):  # in this order: when the second is heard, the first was
            await store.put(LEVELS + deployment, msgspec.json.encode(LevelRecord(1, "later")), 10.0)
        await until(lambda: b"later" in book.values[LEVELS + own], "its own level")
        assert LEVELS + other not in book.values
        assert ROLLOUTS + other not in book.values
    finally:
        await book.close()


def named(name: str) -> Manifest:
    manifest = check(EXAMPLE.read_text().replace("name: failover", f"name: {name}").encode()).manifest
    assert manifest is not None
    return manifest


@pytest.mark.parametrize(("own", "other"), PAIRS)
def test_sockets_locks_folders_and_processes(own: str, other: str) -> None:
    """The same manifest under both names, in one directory: no process, socket, lock, page, journal or job of one is
    the other's. (Seats in memory are handed out once on a machine, whoever asks.)"""
    machine = Machine(Path("/tmp/hf"), {"HOME": "/"})
    taken: dict[str, set[str]] = {}
    for name in (own, other):
        launches = whole(named(name), machine, (), lambda _engine, source, model: (source, model))
        places = {control_lock("/tmp/hf", "", name), *(launch.name for launch in launches if launch.name != "store")}
        for launch in launches:
            if isinstance(launch, WorkerLaunch):
                places |= {launch.address, launch.beat_address, launch.lock, launch.namespace(), launch.group}
                places.add(str(journals_dir(machine.state_dir, launch.group)))
            if isinstance(launch, FrontendLaunch):
                places.add(launch.status_address)
            if isinstance(launch, WorkerLaunch | FrontendLaunch | VaultLaunch):
                assert Job.of(launch).deployment == name
        taken[name] = places
    assert not taken[own] & taken[other]
