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
from holdfast.fleet.records import FleetRecord, fleet_key
from holdfast.frontend.process import _follow_fleet
from holdfast.frontend.wanted_models import WANTED_MAX, WantedModels, models_of
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
