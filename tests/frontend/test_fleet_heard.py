"""What a frontend reads of a fleet's book: who leaves, and why a model does not come."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec

from holdfast.core.tasks import beside
from holdfast.discovery.models import WantedModel, models_of
from holdfast.fleet.records import Book, book_key
from holdfast.frontend.process import _hear_fleet
from holdfast.frontend.wanted import Wanted
from holdfast.store.contract import Deleted, Put
from holdfast.streams.directory import NOT_SAID, Missing, ModelDirectory
from holdfast.streams.roster import Roster
from holdfast.testing.waiting import BOUND_S, until
from served_store import served_store


async def test_who_leaves_is_heard_of_and_what_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    """By the whole book of its own deployment, each time it is written; none, once it is gone."""
    heard: list[tuple[str, tuple[str, ...], str]] = []
    weighing = SimpleNamespace(idle=lambda deployment, names, by: heard.append((deployment, tuple(names), by)))
    roster = cast(Roster, SimpleNamespace(weighing=weighing))
    wanted = Wanted("d", ModelDirectory(random.Random(1), 1), lambda: None)
    async with served_store(tmp_path) as (store,), beside(_hear_fleet(store, "d", roster, wanted), "fleet"):
        await until(lambda: heard, "the first word")
        for key, value in (
            (book_key("d-more"), msgspec.json.encode(Book(idle=("d-more-m-1",)))),
            (book_key("d"), b"[]"),
            (book_key("d"), msgspec.json.encode(Book(idle=("d-m-1", "d-m-2")))),
        ):
            await store.put(key, value, BOUND_S)
        await until(lambda: len(heard) == 2, "the book")
        await store.delete(book_key("d"), BOUND_S)
        await until(lambda: len(heard) == 3, "its end")
    assert heard == [("d", (), "fleet"), ("d", ("d-m-1", "d-m-2"), "fleet"), ("d", (), "fleet")]


def test_why_a_model_does_not_come_is_known_by_its_name_whatever_is_heard_first() -> None:
    """Who waits looks again when it is news, and only then; a model that another deployment may yet bring has hope."""
    directory, news = ModelDirectory(random.Random(1), 1), list[str]()
    first, second = (Wanted(one, directory, lambda one=one: news.append(one)) for one in ("d", "e"))
    book = Book(unmet={"k": "no room", "other": "failed"}, hopeless=("k",))
    first.lacks(book)
    assert (directory.missing("m"), news) == (NOT_SAID, [])
    wish = msgspec.json.encode(WantedModel("m"))
    first.hear(Put(models_of("d") + "k", wish))
    assert (directory.missing("m"), news) == (Missing("no room", True), ["d"])
    first.lacks(book)
    assert news == ["d"]
    second.hear(Put(models_of("e") + "k", wish))
    assert not directory.missing("m").hopeless
    second.hear(Deleted(models_of("e") + "k"))
    first.lacks(Book())
    assert directory.missing("m") == NOT_SAID
