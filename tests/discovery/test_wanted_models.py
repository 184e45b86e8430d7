"""Which models are wanted, as the store says it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.discovery.models import WANTED_MAX, WantedModels, models_of


def record(name: Any, **more: Any) -> bytes:
    return msgspec.json.encode({"name": name, **more})


def test_a_name_is_read_and_all_else_is_not_ours() -> None:
    """Whoever wants a model says far more of it than frontends know about."""
    models = WantedModels()
    assert models.snapshot({"a": record("one", level="COLD", nodes=["x"], generation=3), "b": record("two")}) == []
    assert models.names == {"one", "two"}


UNREADABLE = [b"", b"no JSON", b"{}", b"[" * 100_000, record(""), record(None), record("x" * 513)]


@pytest.mark.parametrize("value", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_cannot_be_read_changes_nothing(value: bytes) -> None:
    """What its key said before holds on, and it is told which one it is."""
    models = WantedModels()
    models.put("key", record("one"))
    assert [words.partition(":")[0] for words in models.put("key", value)] == ["key"]
    assert models.names == {"one"}
    assert models.put("other", value)
    assert models.names == {"one"}


def test_a_snapshot_is_all_there_is() -> None:
    """What it does not have is wanted no more; a name is wanted while one key says so."""
    models = WantedModels()
    models.snapshot({"a": record("one"), "b": record("two")})
    models.snapshot({"b": record("two"), "c": record("two")})
    assert models.names == {"two"}
    models.deleted("b")
    assert models.names == {"two"}, "another key wants it still"
    models.deleted("c")
    models.deleted("c")
    assert models.names == frozenset()


def test_there_is_a_bound() -> None:
    """Those that were there first stay, and may change."""
    models = WantedModels()
    assert models.snapshot({str(number): record(f"m{number}") for number in range(WANTED_MAX)}) == []
    assert models.put("more", record("more"))
    assert models.put("1", record("renamed")) == []
    assert "renamed" in models.names
    assert "more" not in models.names


def test_one_deployments_models_are_no_others() -> None:
    """Watching `foo` never hears of `foo-bar`."""
    assert not models_of("foo-bar").startswith(models_of("foo"))
