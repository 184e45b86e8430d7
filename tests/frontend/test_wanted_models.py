"""Which models are wanted, as the store says it, and what a frontend reads of a fleet's record: which replicas leave,
and why a model does not come."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.core.tasks import beside
from holdfast.discovery.keys import ROLLOUTS, TRAFFIC
from holdfast.fleet.records import FleetRecord, fleet_key
from holdfast.frontend.pages import StatusPages
from holdfast.frontend.process import _follow_fleet, _follow_rollout
from holdfast.frontend.wanted_models import WANTED_MAX, WantedModels, models_of
from holdfast.rollout import machine
from holdfast.rollout.machine import DesiredState, ReplicaState, RolloutState
from holdfast.rollout.records import StateWriter
from holdfast.rollout.revision import Revision
from holdfast.rollout.traffic import encode_traffic
from holdfast.spec.launch import FrontendLaunch
from holdfast.store.contract import Deleted, Put, Snapshot
from holdfast.streams.directory import NOT_KNOWN, MissingWorkers, ModelDirectory
from holdfast.streams.roster import Roster
from holdfast.testing.waiting import BOUND_S, until
from tests.rigs.store.served import served_store


def record(name: Any, **more: Any) -> bytes:
    return msgspec.json.encode({"name": name, **more})


class Wanted:
    """The wanted models of deployment `d`, by events of the store."""

    def __init__(self) -> None:
        self.directory = ModelDirectory(random.Random(1), 1)
        self.models = WantedModels("d", self.directory, lambda: None)

    def snapshot(self, **items: bytes) -> frozenset[str]:
        self.models.on_store_event(Snapshot({models_of("d") + key: value for key, value in items.items()}))
        return self.directory.wanted("d")

    def put(self, key: str, value: bytes) -> frozenset[str]:
        self.models.on_store_event(Put(models_of("d") + key, value))
        return self.directory.wanted("d")

    def delete(self, key: str) -> frozenset[str]:
        self.models.on_store_event(Deleted(models_of("d") + key))
        return self.directory.wanted("d")


UNREADABLE = [b"", b"no JSON", b"{}", b"[" * 100_000, record(""), record(None), record("x" * 513)]


@pytest.mark.parametrize("value", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_cannot_be_read_changes_nothing(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """What its key said before holds on, and the log names the key."""
    wanted = Wanted()
    wanted.put("key", record("one"))
    for key in ("key", "other"):
        assert wanted.put(key, value) == {"one"}
        assert f"cannot be read: {models_of('d')}{key}: " in caplog.records[-1].getMessage()


def test_a_snapshot_is_all_there_is() -> None:
    """What it does not have is wanted no more; a name is wanted while one key says so; other fields are not read."""
    wanted = Wanted()
    assert wanted.snapshot(a=record("one", level="COLD", generation=3), b=record("two")) == {"one", "two"}
    assert wanted.snapshot(b=record("two"), c=record("two")) == {"two"}
    assert wanted.delete("b") == {"two"}, "another key wants it still"
    assert wanted.delete("c") == wanted.delete("c") == frozenset()


def test_one_deployments_models_are_no_others() -> None:
    """Watching `foo` never returns keys of `foo-bar`."""
    assert not models_of("foo-bar").startswith(models_of("foo"))


def test_there_is_a_bound() -> None:
    """Those that were there first stay, and may change."""
    wanted = Wanted()
    wanted.snapshot(**{str(number): record(f"m{number}") for number in range(WANTED_MAX)})
    assert "more" not in wanted.put("more", record("more"))
    assert "renamed" in wanted.put("1", record("renamed"))


async def test_who_leaves_is_heard_of_and_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    """By the whole record of its own deployment, each time it is written; none, once it is gone."""
    heard: list[tuple[str, tuple[str, ...], str]] = []
    weights = SimpleNamespace(set_idle=lambda deployment, names, by: heard.append((deployment, tuple(names), by)))
    roster = cast(Roster, SimpleNamespace(weights=weights))
    wanted = Wanted().models
    async with served_store(tmp_path) as (store,), beside(_follow_fleet(store, "d", roster, wanted), "fleet"):
        await until(lambda: heard, "the first word")
        for key, value in (
            (fleet_key("d-more"), msgspec.json.encode(FleetRecord(idle=("d-more-m-1",)))),
            (fleet_key("d"), b"[]"),
            (fleet_key("d"), msgspec.json.encode(FleetRecord(idle=("d-m-1", "d-m-2")))),
        ):
            await store.put(key, value, BOUND_S)
        await until(lambda: len(heard) == 2, "the record")
        await store.delete(fleet_key("d"), BOUND_S)
        await until(lambda: len(heard) == 3, "its end")
    assert heard == [("d", (), "fleet"), ("d", ("d-m-1", "d-m-2"), "fleet"), ("d", (), "fleet")]


async def test_a_rollout_is_followed_by_both_of_its_records(tmp_path: Path) -> None:
    """Nothing is applied before both were read; an older supervisor's state counts, a newer one's record does, and what
    cannot be read changes nothing."""
    heard: list[tuple[str, ...]] = []
    weights = SimpleNamespace(set_idle=lambda deployment, names: heard.append(tuple(names)))
    roster = cast(Roster, SimpleNamespace(weights=weights))
    directory = cast(ModelDirectory, SimpleNamespace(apply_policy=lambda deployment, policy: None))
    pages = cast(StatusPages, SimpleNamespace(replaced=False))
    settings = cast(FrontendLaunch, SimpleNamespace(deployment="d", name="d-w-0123abcd-2"))

    def state(number: int) -> RolloutState:
        part = ReplicaState(service="W", set_id="0123abcd", pair=(("W", "0123abcd"),), desired=DesiredState.DRAIN)
        target = Revision(number=1, parts={})
        return RolloutState(target=target, desired_number=1, began_s=1.0, replicas={f"W-{number}": part})

    async with served_store(tmp_path) as (store,):
        await StateWriter(store, "d").write(state(1))
        async with beside(_follow_rollout(store, "d", roster, directory, pages, settings), "rollout"):
            await until(lambda: heard == [("d-w-0123abcd-1",)], "the first word, which is whole")
            await store.put(ROLLOUTS + "d", machine.encode(state(2)), BOUND_S)  # of an older supervisor
            await until(lambda: heard[-1] == ("d-w-0123abcd-2",), "the older one's state")
            assert pages.replaced
            newer = machine.encode(state(3))[:-1] + b',"news":1}'
            await store.put(ROLLOUTS + "d", newer, BOUND_S)
            await store.put(TRAFFIC + "d", encode_traffic("d", state(3), newer), BOUND_S)
            await until(lambda: heard[-1] == ("d-w-0123abcd-3",), "the newer one's record")
            assert not pages.replaced
            await store.delete(TRAFFIC + "d", BOUND_S)
            await store.put(ROLLOUTS + "d", machine.encode(state(4)), BOUND_S)
            await until(lambda: heard[-1] == ("d-w-0123abcd-4",), "the older one's again")


def test_why_a_model_does_not_come_is_known_by_its_name_whatever_is_heard_first() -> None:
    """Waiting requests look again when it is news, and only then; another deployment may yet bring the model."""
    directory, news = ModelDirectory(random.Random(1), 1), list[str]()
    first, second = (WantedModels(one, directory, lambda one=one: news.append(one)) for one in ("d", "e"))
    missing = FleetRecord(unmet={"k": "no room", "other": "failed"}, hopeless=("k",))
    first.on_fleet_record(missing)
    assert (directory.missing("m"), news) == (NOT_KNOWN, [])
    first.on_store_event(Put(models_of("d") + "k", record("m")))
    assert (directory.missing("m"), news) == (MissingWorkers("no room", True), ["d"])
    first.on_fleet_record(missing)
    assert news == ["d"]
    second.on_store_event(Put(models_of("e") + "k", record("m")))
    assert not directory.missing("m").unplaceable
    second.on_store_event(Deleted(models_of("e") + "k"))
    first.on_fleet_record(FleetRecord())
    assert directory.missing("m") == NOT_KNOWN
